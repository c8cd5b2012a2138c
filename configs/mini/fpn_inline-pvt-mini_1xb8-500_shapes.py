# Small enough for two CPU cores. Make the data set with tools/make_shapes.py.
_base_ = [
    'mmseg::_base_/models/fpn_r50.py',
    '../_base_/datasets/shapes_semantic.py',
    'mmseg::_base_/schedules/schedule_40k.py',
    'mmseg::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm'], allow_failed_imports=False)

norm_cfg = dict(type='BN', requires_grad=True)
model = dict(
    data_preprocessor=dict(size=(128, 128)),
    pretrained=None,
    backbone=dict(
        _delete_=True,
        type='InLinePVT',
        arch=dict(depths=[1, 1, 2, 1], embed_dims=[32, 64, 160, 256], num_heads=[1, 2, 5, 8]),
        img_size=128,
        drop_path_rate=0.0,
    ),
    neck=dict(in_channels=[32, 64, 160, 256], out_channels=64),
    decode_head=dict(in_channels=[64, 64, 64, 64], channels=64, num_classes=4, norm_cfg=norm_cfg),
)

optim_wrapper = dict(
    clip_grad=dict(_delete_=True, max_norm=1.0),
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-3, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys=dict(pos_embed=dict(decay_mult=0.0))),
)

max_iters = 500
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.02, begin=0, end=50, by_epoch=False),
    dict(
        type='CosineAnnealingLR',
        T_max=max_iters,
        eta_min=1e-5,
        begin=0,
        end=max_iters,
        by_epoch=False,
    ),
]

default_hooks = dict(logger=dict(interval=25), checkpoint=dict(interval=100, max_keep_ckpts=1))
randomness = dict(seed=0)
