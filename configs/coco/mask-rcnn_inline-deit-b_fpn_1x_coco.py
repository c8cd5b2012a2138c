_base_ = './mask-rcnn_inline-deit-s_fpn_1x_coco.py'
model = dict(
    backbone=dict(arch='base'),
    neck=[
        dict(type='mmseg.Feature2Pyramid', embed_dim=384, rescales=[4, 2, 1, 0.5]),
        dict(type='FPN', in_channels=[384, 384, 384, 384], out_channels=256, num_outs=5),
    ],
)
