_base_ = [
    'mmseg::_base_/models/fpn_r50.py',
    'mmseg::_base_/datasets/ade20k.py',
    'mmseg::_base_/schedules/schedule_40k.py',
    'mmseg::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm'], allow_failed_imports=False)

model = dict(
    data_preprocessor=dict(size=(512, 512)),
    pretrained=None,
    backbone=dict(_delete_=True, type='InLinePVT', arch='tiny', drop_path_rate=0.1),
    neck=dict(in_channels=[64, 128, 320, 512]),
    decode_head=dict(num_classes=150),
)

optim_wrapper = dict(optimizer=dict(_delete_=True, type='AdamW', lr=2e-4, weight_decay=1e-4))
param_scheduler = [dict(type='PolyLR', power=0.9, eta_min=0.0, begin=0, end=40000, by_epoch=False)]
# 8 GPUs with 4 images each.
auto_scale_lr = dict(enable=False, base_batch_size=32)
