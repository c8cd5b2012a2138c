"""Every config builds its model and optimiser and reads its own data pipelines."""

import copy
import functools
import json
import shutil
from pathlib import Path

import cv2
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, MODELS, init_default_scope

from inline_mm.datasets import CLASSES, PALETTE, make_shapes

ROOT = Path(__file__).parent.parent / 'configs'
# Those of imagenet need mmpretrain: test_imagenet_configs.py.
CONFIGS = sorted(
    str(path.relative_to(ROOT))
    for path in ROOT.rglob('*.py')
    if path.relative_to(ROOT).parts[0] not in ('_base_', 'imagenet')
)


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """A working directory with small data sets in the layouts of COCO, ADE20K and shapes."""
    root = tmp_path_factory.mktemp('work')
    shapes = make_shapes(root / 'data/shapes', num_train=4, num_val=2, image_size=64)
    coco, ade = root / 'data/coco', root / 'data/ade/ADEChallengeData2016'
    (coco / 'annotations').mkdir(parents=True)
    for split, ade_split in (('train', 'training'), ('val', 'validation')):
        shutil.copytree(shapes / 'images' / split, coco / f'{split}2017')
        annotations = json.loads((shapes / f'annotations/instances_{split}.json').read_text())
        names = ('person', 'car', 'dog')
        for category, name in zip(annotations['categories'], names, strict=True):
            category['name'] = name
        (coco / f'annotations/instances_{split}2017.json').write_text(json.dumps(annotations))
        shutil.copytree(shapes / 'labels' / split, ade / 'annotations' / ade_split)
        (ade / 'images' / ade_split).mkdir(parents=True)
        for image in (shapes / 'images' / split).iterdir():
            target = ade / 'images' / ade_split / f'{image.stem}.jpg'
            cv2.imwrite(str(target), cv2.imread(str(image)))
    return root


@pytest.fixture(scope='module', autouse=True)
def read_metafiles_once():
    """mmengine reads a hundred metafiles for each base that is named by package: a second each."""
    from mmengine.config import utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, 'load', functools.cache(utils.load))
        yield


@functools.cache
def read_config(name):
    return Config.fromfile(ROOT / name)


def load(name):
    cfg = copy.deepcopy(read_config(name))
    init_default_scope(cfg.default_scope)
    return cfg


def test_there_are_configs_for_every_task_and_size():
    for size in 'tsml':
        for pattern in (
            'coco/retinanet_inline-pvt-{}_fpn_1x_coco.py',
            'coco/mask-rcnn_inline-pvt-{}_fpn_1x_coco.py',
            'ade20k/fpn_inline-pvt-{}_8xb4-40k_ade20k-512x512.py',
        ):
            assert pattern.format(size) in CONFIGS


@pytest.mark.parametrize('name', CONFIGS)
def test_config_builds_its_model_and_optimiser(name):
    cfg = load(name)
    # Without memory or initial values: the large models would take seconds.
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
        optimizer = build_optim_wrapper(model, cfg.optim_wrapper).optimizer
    assert type(model.backbone).__name__.startswith('InLine')
    assert isinstance(optimizer, torch.optim.AdamW)
    trained = sum(p.numel() for group in optimizer.param_groups for p in group['params'])
    assert trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize('name', CONFIGS)
def test_config_reads_its_pipelines(name, data, monkeypatch):
    monkeypatch.chdir(data)
    cfg = load(name)
    sizes = dict(train=4, val=2, test=2)
    for split, size in sizes.items():
        if split == 'test' and cfg.test_dataloader == cfg.val_dataloader:
            continue
        dataset = DATASETS.build(cfg[f'{split}_dataloader'].dataset)
        assert len(dataset) == size
        sample = dataset[0]
        assert sample['inputs'].dtype == torch.uint8
        assert sample['inputs'].shape[0] == 3
        truth = sample['data_samples']
        if cfg.default_scope == 'mmdet':
            assert len(truth.gt_instances) > 0
            assert ('masks' in truth.gt_instances) == ('mask-rcnn' in name)
        else:
            labels = truth.gt_sem_seg.data
            inside = labels[labels != 255]
            assert set(inside.tolist()) <= set(range(cfg.model.decode_head.num_classes))


def test_shapes_configs_name_the_classes_of_the_data_set():
    base = ROOT / '_base_/datasets'
    instance = Config.fromfile(base / 'shapes_instance.py').metainfo
    semantic = Config.fromfile(base / 'shapes_semantic.py').metainfo
    assert tuple(instance.classes) == CLASSES
    assert tuple(semantic.classes) == ('ground', *CLASSES)
    assert tuple(map(tuple, semantic.palette)) == PALETTE
    assert tuple(map(tuple, instance.palette)) == PALETTE[1:]


@pytest.mark.parametrize(
    'name',
    [
        'coco/mask-rcnn_inline-pvt-t_fpn_1x_coco.py',
        'coco/retinanet_inline-pvt-t_fpn_1x_coco.py',
        'ade20k/fpn_inline-pvt-t_8xb4-40k_ade20k-512x512.py',
    ],
)
def test_weights_are_named_by_cfg_options_alone(name):
    cfg = load(name)
    cfg.merge_from_dict(
        {
            'model.backbone.init_cfg.type': 'Pretrained',
            'model.backbone.init_cfg.checkpoint': 'inline_pvt_tiny.pth',
        }
    )
    assert cfg.model.backbone.init_cfg == dict(type='Pretrained', checkpoint='inline_pvt_tiny.pth')
