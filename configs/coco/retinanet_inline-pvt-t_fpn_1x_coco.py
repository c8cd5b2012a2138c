_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
    'mmdet::_base_/schedules/schedule_1x.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm'], allow_failed_imports=False)

model = dict(
    backbone=dict(_delete_=True, type='InLinePVT', arch='tiny', drop_path_rate=0.2),
    neck=dict(in_channels=[64, 128, 320, 512]),
)

optim_wrapper = dict(optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, weight_decay=1e-4))
