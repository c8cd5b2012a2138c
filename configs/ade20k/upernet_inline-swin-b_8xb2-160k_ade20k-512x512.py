_base_ = './upernet_inline-swin-t_8xb2-160k_ade20k-512x512.py'
model = dict(
    backbone=dict(arch='base', drop_path_rate=0.5),
    decode_head=dict(in_channels=[128, 256, 512, 1024]),
    auxiliary_head=dict(in_channels=512),
)
