_base_ = './upernet_inline-cswin-t_8xb2-160k_ade20k-512x512.py'
model = dict(
    backbone=dict(arch='base', drop_path_rate=0.5),
    decode_head=dict(in_channels=[96, 192, 384, 768]),
    auxiliary_head=dict(in_channels=384),
)
