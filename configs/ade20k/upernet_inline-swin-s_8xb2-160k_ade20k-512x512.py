_base_ = './upernet_inline-swin-t_8xb2-160k_ade20k-512x512.py'
model = dict(backbone=dict(arch='small'))
