_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
    '../_base_/schedules/swin_1x_coco.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm'], allow_failed_imports=False)

# The neck takes the last three stages, so the first has no output norm, which would not train.
model = dict(
    backbone=dict(
        _delete_=True, type='InLineSwin', arch='tiny', drop_path_rate=0.2, out_indices=(1, 2, 3)
    ),
    neck=dict(in_channels=[192, 384, 768], start_level=0),
)
