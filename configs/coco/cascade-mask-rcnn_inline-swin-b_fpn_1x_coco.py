_base_ = './cascade-mask-rcnn_inline-swin-t_fpn_1x_coco.py'
model = dict(
    backbone=dict(arch='base', drop_path_rate=0.5),
    neck=dict(in_channels=[128, 256, 512, 1024]),
)
