"""The optimiser settings the field uses for these backbones, fitted to a config's batch size."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmengine.config import Config
from torch import nn

from .config import Recorder, type_name

__all__ = ['DROP_PATH', 'apply_recipe', 'keep_optimizer']


@dataclass(frozen=True)
class Recipe:
    """AdamW settings: learning rate at a number of images a step, and weight decay."""

    lr: float
    batch_size: int
    weight_decay: float


_HIERARCHICAL = {'mmdet': Recipe(1e-4, 16, 0.05), 'mmseg': Recipe(6e-5, 16, 0.01)}

#: By family and library: those of PVT (mmdet's RetinaNet and Mask R-CNN, Semantic FPN) and of
#: Swin (Mask R-CNN, UperNet), which CSwin and DeiT share.
RECIPES: dict[str, dict[str, Recipe]] = {
    'pvt': {'mmdet': Recipe(2e-4, 16, 1e-4), 'mmseg': Recipe(2e-4, 32, 1e-4)},
    'swin': _HIERARCHICAL,
    'cswin': _HIERARCHICAL,
    'deit': _HIERARCHICAL,
}

#: PVT's one-stage detectors take half the rate.
_PVT_ONE_STAGE = Recipe(1e-4, 16, 1e-4)

_SWIN_DET = {'tiny': 0.2, 'small': 0.3, 'base': 0.5, 'base-384': 0.5}
_SWIN_SEG = {'tiny': 0.3, 'small': 0.3, 'base': 0.5, 'base-384': 0.5}
_PVT_DET = dict.fromkeys(('tiny', 'small', 'medium', 'large'), 0.2)

#: Stochastic depth by library, family and architecture, where the field departs from the default.
DROP_PATH: dict[tuple[str, str], dict[str, float]] = {
    ('mmdet', 'pvt'): _PVT_DET,
    ('mmdet', 'swin'): _SWIN_DET,
    ('mmdet', 'cswin'): _SWIN_DET,
    ('mmseg', 'swin'): _SWIN_SEG,
    ('mmseg', 'cswin'): _SWIN_SEG,
}

_LAYER_WISE = ('LayerDecayOptimizerConstructor', 'LearningRateDecayOptimizerConstructor')

_NO_DECAY = 'no weight decay on position embeddings and bias tables'


def _images_per_step(cfg: Config, scope: str | None) -> tuple[int, str]:
    """Images a step over all GPUs, and how that is known."""
    base = (cfg.get('auto_scale_lr') or {}).get('base_batch_size')
    named = re.search(r'_(\d+)xb(\d+)', Path(cfg.filename or '').name)
    if named:
        return int(named[1]) * int(named[2]), 'of the file name'
    if base:
        return int(base), 'of auto_scale_lr.base_batch_size'
    own = (cfg.get('train_dataloader') or {}).get('batch_size') or 2
    gpus = 4 if scope == 'mmseg' else 8
    return own * gpus, f'of train_dataloader.batch_size on {gpus} GPUs, the usual number'


def _custom_keys(paramwise: Mapping, backbone: nn.Module) -> dict:
    """Settings by parameter name: the config's own that still apply, and the backbone's.

    mmengine applies the longest key that is part of a parameter's name, and nothing else. So where
    a config sets the whole backbone's rate, exclusions from decay have to repeat it.
    """
    kept = {
        key: dict(value)
        for key, value in (paramwise.get('custom_keys') or {}).items()
        if not key.startswith('backbone.')  # names parts of the old backbone
    }
    names = [name for name, _ in backbone.named_parameters()]
    if 'backbone' in kept:
        tables = {f'backbone.{name}' for name in names if _is_table(name)}
        # One key for norm1 and norm2, weight and bias, of a block.
        norms = (re.match(r'.*norm', name) for name in names)
        tables |= {f'backbone.{found[0]}' for found in norms if found}
        exclusion = {**kept['backbone'], 'decay_mult': 0.0}
    else:
        parts = ('backbone.pos_embed', 'backbone.cls_token', 'relative_position_bias_table')
        tables = {part for part in parts if any(part in f'backbone.{name}' for name in names)}
        exclusion = {'decay_mult': 0.0}
    return {**kept, **{key: dict(exclusion) for key in sorted(tables)}}


def _is_table(name: str) -> bool:
    return name.startswith(('pos_embed', 'cls_token')) or 'relative_position_bias_table' in name


def apply_recipe(
    cfg: Config, family: str, scope: str | None, two_stage: bool, backbone: nn.Module, rec: Recorder
) -> None:
    """Put the family's AdamW recipe into a config; its schedule, AMP and clipping stay.

    A config that already uses AdamW is tuned for its heads (DETR's kin, Mask2Former, SegFormer)
    and keeps its rate and decay; only the exclusions from weight decay are fitted to the backbone.

    Args:
        cfg: The config, which is changed.
        family: Key of :data:`RECIPES`.
        scope: ``'mmdet'`` or ``'mmseg'``.
        two_stage: Whether the detector has a RoI head.
        backbone: The new backbone; the names of its parameters are read.
        rec: Makes and records the changes.
    """
    wrapper = cfg.get('optim_wrapper')
    if not isinstance(wrapper, dict) or not isinstance(wrapper.get('optimizer'), dict):
        rec.note('optim_wrapper', None, None, 'the config does not train: no recipe is put in')
        return
    paramwise = wrapper.get('paramwise_cfg') or {}
    new = {'custom_keys': _custom_keys(paramwise, backbone)}
    if type_name(wrapper['optimizer']) == 'AdamW' and not _layer_wise(wrapper):
        old = {key: value for key, value in paramwise.items() if key != 'custom_keys'}
        new = {**old, 'norm_decay_mult': 0.0, **new}
        rec.set(wrapper, 'optim_wrapper', 'paramwise_cfg', new, f'{_NO_DECAY}, nor on norms')
        rec.note('optim_wrapper.optimizer', 'AdamW', 'AdamW', 'kept: it is tuned for the heads')
        return

    images, source = _images_per_step(cfg, scope)
    recipe = RECIPES[family]['mmseg' if scope == 'mmseg' else 'mmdet']
    if family == 'pvt' and scope != 'mmseg' and not two_stage:
        recipe = _PVT_ONE_STAGE
    lr = float(f'{recipe.lr * images / recipe.batch_size:.4g}')
    optimizer = dict(type='AdamW', lr=lr, betas=(0.9, 0.999), weight_decay=recipe.weight_decay)
    old_lr = wrapper['optimizer'].get('lr')
    why = f'{recipe.lr:g} at {recipe.batch_size} images a step, scaled to {images} ({source})'
    rec.set(wrapper, 'optim_wrapper', 'optimizer', optimizer, why)
    new = {'norm_decay_mult': 0.0, 'bias_decay_mult': 0.0, **new}
    if paramwise.get('bypass_duplicate'):
        new['bypass_duplicate'] = True
    rec.set(wrapper, 'optim_wrapper', 'paramwise_cfg', new, f'{_NO_DECAY}, nor on norms and biases')
    _drop_layer_wise(cfg, rec)
    _scale_floor(cfg, lr, old_lr, rec)


def keep_optimizer(cfg: Config, family: str | None, rec: Recorder) -> None:
    """Leave the optimiser, but for a constructor that only knows the old backbone's layers.

    An InLine backbone gets the one of this package, with the same decay by layer.
    """
    wrapper = cfg.get('optim_wrapper')
    if not isinstance(wrapper, dict) or not _layer_wise(wrapper):
        return
    if family is None:
        _drop_layer_wise(cfg, rec)
        return
    old = wrapper.get('paramwise_cfg') or {}
    rate = old.get('decay_rate', old.get('layer_decay_rate'))
    why = 'its decay by layer, for the layers of the new backbone'
    name = 'inline_mm.LearningRateDecayOptimizerConstructor'
    rec.set(wrapper, 'optim_wrapper', 'constructor', name, why)
    new = dict(decay_rate=rate, decay_type=old.get('decay_type', 'layer_wise'))
    rec.set(wrapper, 'optim_wrapper', 'paramwise_cfg', new, why)


def _layer_wise(wrapper: Mapping) -> bool:
    return type_name({'type': wrapper.get('constructor')}) in _LAYER_WISE


def _drop_layer_wise(cfg: Config, rec: Recorder) -> None:
    wrapper = cfg.optim_wrapper
    if _layer_wise(wrapper):
        old = wrapper.pop('constructor')
        why = 'its decay by layer knows the layers of ConvNeXt, BEiT and MAE alone'
        rec.note('optim_wrapper.constructor', old, None, why)
        for key in ('num_layers', 'layer_decay_rate', 'decay_rate', 'decay_type'):
            if key in (wrapper.get('paramwise_cfg') or {}):
                old = wrapper.paramwise_cfg.pop(key)
                rec.note(f'optim_wrapper.paramwise_cfg.{key}', old, None, why)


def _scale_floor(cfg: Config, lr: float, old_lr: float | None, rec: Recorder) -> None:
    """Scale the schedule's lowest rates, which were chosen for the old rate."""
    schedulers = cfg.get('param_scheduler')
    if not old_lr or not schedulers:
        return
    single = isinstance(schedulers, Mapping)
    new = [dict(scheduler) for scheduler in ([schedulers] if single else schedulers)]
    for scheduler in new:
        if scheduler.get('eta_min'):
            scheduler['eta_min'] = float(f'{scheduler["eta_min"] * lr / old_lr:.4g}')
    rec.set(
        cfg,
        '',
        'param_scheduler',
        new[0] if single else type(schedulers)(new),
        f'eta_min follows the learning rate, {old_lr:g} -> {lr:g}',
    )
