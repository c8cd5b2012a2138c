_base_ = [
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py',
    'mmpretrain::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm'], allow_failed_imports=False)

model = dict(
    type='TimmClassifier',
    model_name='inline_pvt_tiny',
    drop_path_rate=0.1,
    loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)

# 8 GPUs with 128 images each.
train_dataloader = dict(batch_size=128)
optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys={'pos_embed': dict(decay_mult=0.0)}),
    clip_grad=dict(max_norm=5.0),
)
