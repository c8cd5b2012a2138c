_base_ = './fpn_inline-pvt-mini_1xb8-500_shapes.py'
model = dict(
    backbone=dict(
        _delete_=True,
        type='InLineCSwin',
        arch=dict(
            depths=[1, 1, 2, 1],
            embed_dims=32,
            num_heads=[1, 2, 4, 8],
            attention=['inline', 'inline', 'softmax', 'softmax'],
            split_sizes=[1, 2, 4, 4],
        ),
        img_size=128,
        drop_path_rate=0.0,
    ),
    neck=dict(in_channels=[32, 64, 128, 256]),
)
