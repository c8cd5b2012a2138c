_base_ = './fpn_inline-pvt-t_8xb4-40k_ade20k-512x512.py'
model = dict(backbone=dict(arch='large'))
