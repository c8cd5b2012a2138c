"""Puts a backbone into a config: finds the old one, rewires its readers, sets what goes with it."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mmengine.config import Config

from .. import backbones
from ..backbones.base import InLineBackbone
from .config import PlugError, PluggedConfig, Recorder, library_of, read_config, type_name
from .features import (
    Level,
    backbone_class,
    build_backbone,
    measure,
    pyramid_of,
    skeleton,
    use_library,
)
from .recipe import DROP_PATH, apply_recipe, keep_optimizer
from .rewire import Host, find_hosts, refuse_unpluggable, rewire

__all__ = ['backbone_names', 'parse_backbone', 'plug_backbone']

#: The normalisation of the published InLine models: RGB, ImageNet mean and deviation.
_NORMALISATION = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True)

_TEXT_IMAGE = ('GLIP', 'GroundingDINO')


def _families() -> dict[str, type[InLineBackbone]]:
    classes = (getattr(backbones, name) for name in backbones.__all__)
    return {
        cls.family: cls
        for cls in classes
        if isinstance(cls, type) and issubclass(cls, InLineBackbone)
    }


def backbone_names() -> list[str]:
    """The short names of backbones, ``'inline-pvt-tiny'`` and so on."""
    return [
        f'inline-{family}-{arch}' for family, cls in _families().items() for arch in cls.presets
    ]


def parse_backbone(backbone: str | Mapping[str, Any]) -> dict[str, Any]:
    """The config of a backbone given by short name or as a dict.

    Raises:
        PlugError: For an unknown name; those that come near are suggested.
        TypeError: If ``backbone`` is neither a name nor a dict.
    """
    if isinstance(backbone, Mapping):
        if 'type' not in backbone:
            raise PlugError(f"a backbone dict needs a 'type', got {dict(backbone)}")
        return dict(backbone)
    if not isinstance(backbone, str):
        raise TypeError(f'backbone must be a short name or a dict, got {type(backbone).__name__}')
    for family, cls in _families().items():
        prefix = f'inline-{family}-'
        if backbone.startswith(prefix) and backbone.removeprefix(prefix) in cls.presets:
            return dict(type=cls.__name__, arch=backbone.removeprefix(prefix))
    names = backbone_names()
    near = difflib.get_close_matches(backbone, names, n=3)
    raise PlugError(
        f'no backbone is named {backbone!r}: '
        + (f'did you mean {" or ".join(near)}?' if near else f'there are {", ".join(names)}')
    )


def plug_backbone(
    cfg: Config | str | Path,
    backbone: str | Mapping[str, Any],
    *,
    checkpoint: str | None = None,
    optimizer: Literal['recipe', 'keep'] = 'recipe',
    img_size: int | tuple[int, int] | None = None,
) -> PluggedConfig:
    """Put a backbone into a config of mmdet or mmseg, and everything that goes with it.

    The old backbone is built without memory to learn which strides and channels it gives; the new
    one takes its place with the ``out_indices`` of the same strides; necks and heads get the new
    channels and indices. Normalisation, padding, pre-trained weights and the optimiser follow.

    Args:
        cfg: A config, a path, or a name such as ``'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'``.
            It is not modified.
        backbone: A short name (``'inline-pvt-small'``, see :func:`backbone_names`), or a dict of
            any backbone registered in OpenMMLab, such as ``dict(type='InLinePVT', arch='small')``.
        checkpoint: Pre-trained weights of the new backbone: a path or an address.
        optimizer: ``'recipe'``: the AdamW settings the field uses for the family, scaled to the
            config's batch size. ``'keep'``: those of the config. The schedule stays in both.
        img_size: The size the weights were pre-trained at, where it is not the default.

    Returns:
        PluggedConfig: The new config. ``changes`` says what was changed and why; ``dump(file)``
        writes a config that inherits from the old one and states the differences.

    Raises:
        PlugError: If the config cannot be read or cannot take another backbone, if the backbone
            cannot be built, or if the checkpoint does not fit it. The message says why.
    """
    if optimizer not in ('recipe', 'keep'):
        raise PlugError(f"optimizer must be 'recipe' or 'keep', got {optimizer!r}")
    named = isinstance(backbone, str)
    new_backbone = parse_backbone(backbone)
    cfg, base = read_config(cfg)
    scope = library_of(cfg)
    use_library(scope)
    refuse_unpluggable(cfg.model)

    cls = backbone_class(new_backbone, scope)
    family = getattr(cls, 'family', None) if issubclass(cls, InLineBackbone) else None
    if img_size is not None:
        new_backbone['img_size'] = img_size
    library = 'mmseg' if scope == 'mmseg' else 'mmdet'
    if named and optimizer == 'recipe' and (drop := DROP_PATH.get((library, family))):
        new_backbone['drop_path_rate'] = drop[new_backbone['arch']]
    if checkpoint is not None:
        new_backbone['init_cfg'] = dict(type='Pretrained', checkpoint=str(checkpoint))
        _check_weights(new_backbone, scope)
    available = pyramid_of(new_backbone, scope)

    rec = Recorder()
    hosts = find_hosts(cfg.model)
    imports = ['inline_mm'] if family else []
    for host in hosts:
        plugged, more = _plug_host(host, new_backbone, available, cls, scope, rec)
        imports += more
    _set_normalisation(cfg, hosts, max(x.stride for x in available), family, rec)
    _add_imports(cfg, imports, rec)
    _drop_weights(cfg, hosts, rec)
    if optimizer == 'keep':
        keep_optimizer(cfg, family, rec)
    elif family is None:
        keep_optimizer(cfg, family, rec)
        rec.note('optim_wrapper', None, None, f'kept: no recipe is known for {cls.__name__}')
    else:
        model = skeleton(plugged, scope)
        two_stage = any('roi_head' in host.node for host in hosts)
        apply_recipe(cfg, family, scope, two_stage, model, rec)
    return PluggedConfig(cfg, base, rec.changes)


def _plug_host(
    host: Host, backbone: dict, available: list[Level], cls: type, scope: str | None, rec: Recorder
) -> tuple[dict, list[str]]:
    """Change one detector or segmenter; return its new backbone and libraries now needed."""
    old = _measure_old(host.backbone, scope)
    indices, imports = rewire(host, old, available, cls.__name__, scope, rec)
    takes = inspect.signature(cls.__init__).parameters
    plugged = dict(backbone)
    if 'out_indices' in takes:
        plugged['out_indices'] = indices
    if host.backbone.get('with_cp') and 'with_cp' in takes:
        plugged.setdefault('with_cp', True)
    plugged = {key: plugged[key] for key in sorted(plugged, key=lambda k: k != 'type')}
    strides = ', '.join(f'{x.stride}' for x in old)
    rec.set(
        host.node,
        host.path,
        'backbone',
        plugged,
        f'the new backbone; the old one gave strides {strides} '
        f'({", ".join(str(x.channels) for x in old)} channels)',
    )
    if type_name(host.node) in _TEXT_IMAGE or 'language_model' in host.node:
        rec.note(
            host.path,
            type_name(host.node),
            type_name(host.node),
            'what it learned from text and images together is lost with the old backbone: '
            'it has to be pre-trained again',
        )
    for key in host.node:
        if key.startswith('teacher') and host.node[key] is not None:
            rec.note(f'{host.path}.{key}', '', '', 'left: the teacher has weights of its own')
    return plugged, imports


def _measure_old(backbone: dict, scope: str | None) -> list[Level]:
    try:
        return measure(backbone, scope)
    except PlugError as error:
        raise PlugError(f'what the old backbone gives cannot be found out: {error}') from error


def _check_weights(backbone: dict, scope: str | None) -> None:
    """Load a local checkpoint once, so that one that does not fit is known at once."""
    path = backbone['init_cfg']['checkpoint']
    if '://' in path:
        return
    model = build_backbone(backbone, scope, meta=False)
    try:
        model.init_weights()
    except Exception as error:
        raise PlugError(
            f'checkpoint {path!r} does not fit {type(model).__name__}: {error}'
        ) from error


def _preprocessors(cfg: Config, hosts: list[Host]) -> list[tuple[str, dict]]:
    """The data preprocessors that the backbones see through, multi-branch ones opened."""
    nodes: dict[int, tuple[str, dict]] = {}
    owners = [('', cfg)]
    for host in hosts:
        owners += [*host.parents, (host.path, host.node)]
    for path, owner in owners:
        node, at = owner.get('data_preprocessor'), f'{path}.data_preprocessor'.lstrip('.')
        while isinstance(node, dict) and 'data_preprocessor' in node:
            node, at = node['data_preprocessor'], f'{at}.data_preprocessor'
        if isinstance(node, dict):
            nodes.setdefault(id(node), (at, node))
    return list(nodes.values())


def _set_normalisation(
    cfg: Config, hosts: list[Host], stride: int, family: str | None, rec: Recorder
) -> None:
    nodes = _preprocessors(cfg, hosts)
    if family is None:
        rec.note(
            'model.data_preprocessor', '', '', 'left: how the new backbone was trained is not known'
        )
        return
    if not any(path.startswith('model') for path, _ in nodes):
        rec.note('model.data_preprocessor', None, None, 'none: images are not normalised')
    for path, node in nodes:
        for key, value in _NORMALISATION.items():
            rec.set(node, path, key, value, 'RGB and ImageNet statistics, as in pre-training')
        if node.get('rgb_to_bgr'):
            rec.set(node, path, 'rgb_to_bgr', False, 'images are read as BGR and turned to RGB')
        # mmseg pads to a size, mmdet to a divisor.
        divisor = node.get('pad_size_divisor', 1)
        if type_name(node).endswith('DataPreprocessor') and divisor % stride:
            why = f'a multiple of the largest stride, {stride}'
            rec.set(node, path, 'pad_size_divisor', math.lcm(divisor, stride), why)
    shared = [
        key for host in hosts for _, parent in host.parents for key in parent if key == 'reid'
    ]
    if shared:
        rec.note('model.reid', '', '', 'left; it sees the same images, normalised for the detector')


def _add_imports(cfg: Config, imports: list[str], rec: Recorder) -> None:
    old = cfg.get('custom_imports') or dict(imports=[], allow_failed_imports=False)
    listed = old['imports']
    listed = [listed] if isinstance(listed, str) else list(listed)
    new = listed + [name for name in dict.fromkeys(imports) if name not in listed]
    if new != listed:
        value = {**old, 'imports': new}
        rec.set(cfg, '', 'custom_imports', value, 'registers what the config names')


def _drop_weights(cfg: Config, hosts: list[Host], rec: Recorder) -> None:
    why = 'weights that hold the old backbone'
    if cfg.get('load_from'):
        rec.set(cfg, '', 'load_from', None, why)
    for host in hosts:
        for path, node in [*host.parents, (host.path, host.node)]:
            rec.drop(node, path, 'pretrained', why)
            init = node.get('init_cfg')
            if isinstance(init, dict) and init.get('type') == 'Pretrained':
                rec.drop(node, path, 'init_cfg', why)
