# Fine-tunes the 224 px model: give its checkpoint as load_from.
_base_ = [
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_384.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py',
    'mmpretrain::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm'], allow_failed_imports=False)

model = dict(
    type='TimmClassifier',
    model_name='inline_swin_base_384',
    drop_path_rate=0.5,
    loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)

# 8 GPUs with 64 images each.
optim_wrapper = dict(optimizer=dict(lr=2e-5, weight_decay=1e-8), clip_grad=dict(max_norm=5.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=2e-7, by_epoch=True, begin=5),
]
train_cfg = dict(max_epochs=30)
auto_scale_lr = dict(base_batch_size=512)
