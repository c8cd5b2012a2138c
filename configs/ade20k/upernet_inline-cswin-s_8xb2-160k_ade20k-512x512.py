_base_ = './upernet_inline-cswin-t_8xb2-160k_ade20k-512x512.py'
model = dict(backbone=dict(arch='small'))
