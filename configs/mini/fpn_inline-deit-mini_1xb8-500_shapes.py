_base_ = './fpn_inline-pvt-mini_1xb8-500_shapes.py'
norm_cfg = dict(type='BN', requires_grad=True)
model = dict(
    backbone=dict(
        _delete_=True,
        type='InLineDeiT',
        arch=dict(depths=4, embed_dims=128, num_heads=4, patch_size=8),
        img_size=128,
        out_indices=(0, 1, 2, 3),
        drop_path_rate=0.0,
    ),
    neck=[
        dict(type='Feature2Pyramid', embed_dim=128, rescales=[4, 2, 1, 0.5], norm_cfg=norm_cfg),
        dict(type='FPN', in_channels=[128, 128, 128, 128], out_channels=64, num_outs=4),
    ],
)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys=dict(cls_token=dict(decay_mult=0.0))))
