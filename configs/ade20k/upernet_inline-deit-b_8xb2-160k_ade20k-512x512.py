_base_ = './upernet_inline-deit-s_8xb2-160k_ade20k-512x512.py'
model = dict(
    backbone=dict(arch='base'),
    neck=dict(embed_dim=384),
    decode_head=dict(in_channels=[384, 384, 384, 384]),
    auxiliary_head=dict(in_channels=384),
)
