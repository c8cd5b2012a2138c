_base_ = './mask-rcnn_inline-deit-s_fpn_1x_coco.py'
model = dict(
    backbone=dict(arch='tiny'),
    neck=[
        dict(type='mmseg.Feature2Pyramid', embed_dim=192, rescales=[4, 2, 1, 0.5]),
        dict(type='FPN', in_channels=[192, 192, 192, 192], out_channels=256, num_outs=5),
    ],
)
