_base_ = [
    'mmseg::_base_/models/upernet_beit.py',
    'mmseg::_base_/datasets/ade20k.py',
    '../_base_/schedules/swin_160k_ade20k.py',
    'mmseg::_base_/default_runtime.py',
]
custom_imports = dict(imports=['inline_mm'], allow_failed_imports=False)

# Four blocks at stride 16 become maps of stride 4, 8, 16, 32.
model = dict(
    data_preprocessor=dict(size=(512, 512)),
    backbone=dict(
        _delete_=True,
        type='InLineDeiT',
        arch='small',
        out_indices=(2, 5, 8, 11),
        drop_path_rate=0.1,
    ),
    neck=dict(embed_dim=320),
    decode_head=dict(in_channels=[320, 320, 320, 320], channels=512),
    auxiliary_head=dict(in_channels=320),
)

train_dataloader = dict(batch_size=2)
# 8 GPUs with 2 images each.
auto_scale_lr = dict(enable=False, base_batch_size=16)
