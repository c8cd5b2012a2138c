_base_ = [
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py',
    'mmpretrain::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm'], allow_failed_imports=False)

model = dict(
    type='TimmClassifier',
    model_name='inline_cswin_tiny',
    drop_path_rate=0.2,
    loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)

# 8 GPUs with 128 images each.
train_dataloader = dict(batch_size=128)
optim_wrapper = dict(clip_grad=dict(max_norm=5.0))
custom_hooks = [dict(type='EMAHook', momentum=1.6e-4, priority='ABOVE_NORMAL')]
