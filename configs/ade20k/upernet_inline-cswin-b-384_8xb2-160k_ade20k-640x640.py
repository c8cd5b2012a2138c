_base_ = './upernet_inline-swin-b-384_8xb2-160k_ade20k-640x640.py'
model = dict(
    backbone=dict(type='InLineCSwin'),
    decode_head=dict(in_channels=[96, 192, 384, 768]),
    auxiliary_head=dict(in_channels=384),
)
