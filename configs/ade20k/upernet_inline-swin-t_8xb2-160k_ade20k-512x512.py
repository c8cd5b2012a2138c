_base_ = [
    'mmseg::_base_/models/upernet_swin.py',
    'mmseg::_base_/datasets/ade20k.py',
    '../_base_/schedules/swin_160k_ade20k.py',
    'mmseg::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm'], allow_failed_imports=False)

model = dict(
    data_preprocessor=dict(size=(512, 512)),
    backbone=dict(_delete_=True, type='InLineSwin', arch='tiny', drop_path_rate=0.3),
    decode_head=dict(in_channels=[96, 192, 384, 768], num_classes=150),
    auxiliary_head=dict(in_channels=384, num_classes=150),
)

train_dataloader = dict(batch_size=2)
# 8 GPUs with 2 images each.
auto_scale_lr = dict(enable=False, base_batch_size=16)
