_base_ = './mask-rcnn_inline-swin-t_fpn_1x_coco.py'
model = dict(backbone=dict(arch='small', drop_path_rate=0.3))
