# Small enough for two CPU cores. Make the data set with tools/make_shapes.py.
_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    '../_base_/datasets/shapes_instance.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm'], allow_failed_imports=False)

# Normalised features and one box and mask for all classes: much is to be learned in few steps.
norm_cfg = dict(type='GN', num_groups=8, requires_grad=True)
model = dict(
    backbone=dict(
        _delete_=True,
        type='InLinePVT',
        arch=dict(depths=[1, 1, 2, 1], embed_dims=[32, 64, 160, 256], num_heads=[1, 2, 5, 8]),
        img_size=128,
        drop_path_rate=0.0,
    ),
    neck=dict(in_channels=[32, 64, 160, 256], out_channels=64, norm_cfg=norm_cfg),
    rpn_head=dict(in_channels=64, feat_channels=64, anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64, roi_layer=dict(sampling_ratio=1)),
        bbox_head=dict(in_channels=64, fc_out_channels=256, num_classes=3, reg_class_agnostic=True),
        mask_roi_extractor=dict(out_channels=64, roi_layer=dict(sampling_ratio=1)),
        mask_head=dict(
            num_convs=2,
            in_channels=64,
            conv_out_channels=32,
            num_classes=3,
            class_agnostic=True,
            norm_cfg=norm_cfg,
        ),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=300, max_per_img=200),
        rcnn=dict(sampler=dict(num=64, pos_fraction=0.5)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=100)),
)

optim_wrapper = dict(
    clip_grad=dict(max_norm=1.0),
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05, fused=True),
    paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys=dict(pos_embed=dict(decay_mult=0.0))),
)

# Many small steps: a box is learned by their number.
train_dataloader = dict(batch_size=2, num_workers=1)
max_epochs = 10
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=max_epochs, val_interval=max_epochs)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
param_scheduler = [
    dict(type='LinearLR', start_factor=0.02, begin=0, end=50, by_epoch=False),
    dict(
        type='CosineAnnealingLR',
        T_max=max_epochs,
        eta_min=1e-5,
        begin=0,
        end=max_epochs,
        by_epoch=True,
        convert_to_iter_based=True,
    ),
]

default_hooks = dict(logger=dict(interval=32), checkpoint=dict(max_keep_ckpts=1))
randomness = dict(seed=0)
