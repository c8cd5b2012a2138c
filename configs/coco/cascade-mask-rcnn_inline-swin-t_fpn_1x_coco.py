_base_ = [
    '../_base_/models/cascade-mask-rcnn_inline-swin_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    '../_base_/schedules/swin_1x_coco.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm'], allow_failed_imports=False)
