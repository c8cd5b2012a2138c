_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    '../_base_/schedules/swin_1x_coco.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm'], allow_failed_imports=False)

model = dict(
    backbone=dict(_delete_=True, type='InLineSwin', arch='tiny', drop_path_rate=0.2),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
