"""The ImageNet configs build their classifier, optimiser and pipelines with mmpretrain."""

import copy
import functools
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, MODELS, init_default_scope

pytest.importorskip('mmpretrain')

ROOT = Path(__file__).parent.parent / 'configs/imagenet'
CONFIGS = sorted(path.name for path in ROOT.glob('*.py'))


@functools.cache
def read_config(name):
    return Config.fromfile(ROOT / name)


def load(name):
    cfg = copy.deepcopy(read_config(name))
    init_default_scope(cfg.default_scope)
    return cfg


@pytest.mark.parametrize('name', CONFIGS)
def test_config_builds_its_model_and_optimiser(name):
    cfg = load(name)
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
        optimizer = build_optim_wrapper(model, cfg.optim_wrapper).optimizer
    decay = {
        id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']
    }
    decay = {n: decay[id(p)] for n, p in model.named_parameters()}
    tables = [n for n in decay if 'pos_embed' in n or 'cls_token' in n or 'bias_table' in n]
    assert tables or 'cswin' in name
    assert all(decay[n] == 0 for n in tables)
    assert decay['model.head.weight'] == cfg.optim_wrapper.optimizer.weight_decay > 0
    assert cfg.train_cfg.max_epochs == (30 if '384px' in name else 300)


@pytest.mark.parametrize('name', CONFIGS)
def test_pipelines_give_the_size_the_model_was_made_for(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8)
    for split in ('train', 'val'):
        folder = tmp_path / 'data/imagenet' / split / 'n01440764'
        folder.mkdir(parents=True)
        cv2.imwrite(str(folder / 'a.JPEG'), noise)
    cfg = load(name)
    with torch.device('meta'):
        size = MODELS.build(cfg.model).model.default_cfg['input_size']
    for split in ('train', 'val'):
        dataset = cfg[f'{split}_dataloader'].dataset
        dataset.update(split='', data_prefix=split, type='CustomDataset', with_label=True)
        dataset.pop('split')
        sample = DATASETS.build(dataset)[0]
        assert tuple(sample['inputs'].shape) == size
