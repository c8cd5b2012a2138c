"""``custom_imports = dict(imports=['inline_mm'])`` alone makes the backbones usable everywhere.

Everything runs in fresh interpreters whose working directory has nothing to do with the project.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from inline_mm.datasets import make_shapes

ARCH = {'depths': [1, 1, 1, 1], 'embed_dims': [16, 24, 32, 48], 'num_heads': [1, 2, 2, 4]}

DETECTOR = f"""
custom_imports = dict(imports=['inline_mm'])
model = dict(
    backbone=dict(_delete_=True, type='InLinePVT', arch={ARCH}, img_size=64),
    neck=dict(in_channels={ARCH['embed_dims']}, out_channels=32),
    bbox_head=dict(in_channels=32, feat_channels=32, stacked_convs=1, num_classes=3),
    test_cfg=dict(score_thr=0.0))
metainfo = dict(classes=('circle', 'square', 'triangle'))
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='CocoDataset', metainfo=metainfo, data_root=DATA_ROOT,
        ann_file='annotations/instances_train.json', data_prefix=dict(img='images/train/'),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True),
            dict(type='PackDetInputs')]))
val_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CocoDataset', metainfo=metainfo, data_root=DATA_ROOT, test_mode=True,
        ann_file='annotations/instances_val.json', data_prefix=dict(img='images/val/'),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='Resize', scale=(64, 64), keep_ratio=True),
            dict(type='LoadAnnotations', with_bbox=True),
            dict(
                type='PackDetInputs',
                meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))]))
test_dataloader = val_dataloader
val_evaluator = dict(
    type='CocoMetric', metric='bbox', ann_file=DATA_ROOT + '/annotations/instances_val.json')
test_evaluator = val_evaluator
"""

SEGMENTOR = f"""
custom_imports = dict(imports=['inline_mm'])
norm_cfg = dict(type='BN')
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    pretrained=None,
    backbone=dict(_delete_=True, type='InLinePVT', arch={ARCH}, img_size=64),
    neck=dict(in_channels={ARCH['embed_dims']}, out_channels=32),
    decode_head=dict(in_channels=[32] * 4, channels=32, num_classes=4, norm_cfg=norm_cfg))
dataset = dict(
    type='BaseSegDataset', metainfo=dict(classes=('ground', 'circle', 'square', 'triangle')),
    data_root=DATA_ROOT, img_suffix='.png', reduce_zero_label=True,
    pipeline=[
        dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')])
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        **dataset, data_prefix=dict(img_path='images/train', seg_map_path='labels/train')))
val_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(**dataset, data_prefix=dict(img_path='images/val', seg_map_path='labels/val')))
test_dataloader = val_dataloader
test_pipeline = dataset['pipeline']
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator
"""

RUN = """
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-4))
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=1, val_interval=1)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
default_hooks = dict(checkpoint=dict(type='CheckpointHook', by_epoch=True, interval=1))
"""

DETECT = """
import sys
from mmdet.apis import DetInferencer
config, weights, image = sys.argv[1:]
result = DetInferencer(config, weights, device='cpu')(image, no_save_vis=True)
print('answer:', sorted(result['predictions'][0]))
"""

SEGMENT = """
import sys
from mmseg.apis import MMSegInferencer
config, weights, image = sys.argv[1:]
result = MMSegInferencer(config, weights, device='cpu')(image)
print('answer:', result['predictions'].shape)
"""

CASES = {
    'mmdet': (
        'retinanet_r50_fpn.py',
        DETECTOR,
        DETECT,
        "answer: ['bboxes', 'labels', 'scores']",
        'coco/bbox_mAP',
    ),
    'mmseg': ('fpn_r50.py', SEGMENTOR, SEGMENT, 'answer: (64, 64)', 'mIoU'),
}

LIBRARIES = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f'no {name}'))
    for name in ('mmdet', 'mmseg', 'mmpretrain')
]


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    root = tmp_path_factory.mktemp('data') / 'shapes'
    make_shapes(root, num_train=4, num_val=2, image_size=64)
    return root


def run(arguments, cwd):
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize('library', LIBRARIES)
def test_every_backbone_is_in_the_registry_of(library, tmp_path):
    code = f"""
from mmengine.utils import import_modules_from_strings
import_modules_from_strings(['inline_mm'])
from inline_mm import backbones
from {library}.registry import MODELS
missing = [name for name in backbones.__all__ if name not in MODELS]
assert not missing, missing
for prefix in ('', 'inline_mm.'):
    model = MODELS.build(dict(type=prefix + 'InLinePVT', arch={ARCH}))
    assert type(model) is backbones.InLinePVT
"""
    run(['-c', code], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('library', LIBRARIES[:2])
def test_the_own_tools_and_inferencer_of_a_library_run_a_backbone(library, shapes, tmp_path):
    base_model, config_text, inference, answer, metric = CASES[library]
    mim = Path(find_spec(library).origin).parent / '.mim'
    # By path, as in a user's own copy of the library's configs.
    bases = [
        str(mim / 'configs' / '_base_' / base)
        for base in (f'models/{base_model}', 'default_runtime.py')
    ]
    config = tmp_path / 'my_config.py'
    config.write_text(f'_base_ = {bases}\nDATA_ROOT = {str(shapes)!r}\n{config_text}{RUN}')
    work_dir = tmp_path / 'run'

    run([mim / 'tools' / 'train.py', config, '--work-dir', work_dir], tmp_path)
    checkpoint = work_dir / 'epoch_1.pth'
    assert checkpoint.is_file()
    scalars = next(work_dir.glob('*/vis_data/scalars.json')).read_text().splitlines()
    assert any(metric in json.loads(line) for line in scalars)

    image = next((shapes / 'images' / 'val').iterdir())
    printed = run(['-c', inference, config, checkpoint, image], tmp_path)
    assert answer in printed
