_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    '../_base_/schedules/swin_1x_coco.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm', 'mmseg.models'], allow_failed_imports=False)

# Four blocks at stride 16 become maps of stride 4, 8, 16, 32.
model = dict(
    backbone=dict(
        _delete_=True,
        type='InLineDeiT',
        arch='small',
        out_indices=(2, 5, 8, 11),
        drop_path_rate=0.1,
    ),
    neck=[
        dict(type='mmseg.Feature2Pyramid', embed_dim=320, rescales=[4, 2, 1, 0.5]),
        dict(type='FPN', in_channels=[320, 320, 320, 320], out_channels=256, num_outs=5),
    ],
)
