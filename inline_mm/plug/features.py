"""What a backbone gives: the channels and stride of every output, learned without memory.

The network is built with its parameters on the meta device and run on a meta image, so that any
backbone registered in OpenMMLab can be asked, whatever its size, and no table has to be kept.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .config import PlugError, type_name

__all__ = [
    'Level',
    'backbone_class',
    'build_backbone',
    'measure',
    'pyramid_of',
    'quiet',
    'skeleton',
    'use_library',
]

_LIBRARIES = ('mmdet', 'mmseg', 'mmpretrain')

#: Arguments that change neither channels nor strides, but may need a download or a compiled op.
_IMMATERIAL = (
    'init_cfg',
    'pretrained',
    'norm_cfg',
    'dcn',
    'stage_with_dcn',
    'sac',
    'stage_with_sac',
)


@dataclass(frozen=True)
class Level:
    """An output of a backbone. ``index`` is its entry in ``out_indices``."""

    index: int
    channels: int
    stride: int


class _ParametersOnMeta(TorchFunctionMode):
    """Makes new parameters on the meta device, and leaves computed numbers on the CPU.

    ``torch.device('meta')`` alone would not do: backbones compute their drop-path rates with
    ``torch.linspace`` and read them with ``item()``.
    """

    factories = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.factories:
            kwargs['device'] = 'meta'
        return func(*args, **kwargs)


def use_library(scope: str | None) -> None:
    """Import a library's models so that their names are known.

    Raises:
        PlugError: If the library is not installed.
    """
    if scope not in _LIBRARIES:
        return
    try:
        importlib.import_module(f'{scope}.models')
    except ModuleNotFoundError as error:
        raise PlugError(
            f'the config is one for {scope}, and {error.name!r} is not installed'
        ) from error


def backbone_class(cfg: Mapping, scope: str | None) -> type:
    """The registered class of a backbone's config.

    Raises:
        PlugError: If there is no such class; names that come near are suggested.
    """
    kind = cfg.get('type')
    if isinstance(kind, type):
        return kind
    if not isinstance(kind, str):
        raise PlugError(f"a backbone dict needs a 'type', got {dict(cfg)}")
    with (
        DefaultScope.overwrite_default_scope(scope),
        MODELS.switch_scope_and_registry(scope) as registry,
    ):
        found = registry.get(kind)
        known = {*registry.module_dict, *MODELS.module_dict}
    if found is not None:
        return found
    near = difflib.get_close_matches(kind, known, n=3)
    hint = f': did you mean {" or ".join(near)}?' if near else ''
    raise PlugError(f'no backbone {kind!r} is registered for {scope or "mmengine"}{hint}')


def _check_arguments(cls: type, cfg: Mapping) -> None:
    parameters = inspect.signature(cls.__init__).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    allowed = [name for name in parameters if name != 'self']
    for name in cfg:
        if name not in ('type', '_scope_', *allowed):
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f' (did you mean {near[0]!r}?)' if near else ''
            raise PlugError(
                f'{cls.__name__} takes no argument {name!r}{hint}; it takes {", ".join(allowed)}'
            )


def build_backbone(cfg: Mapping, scope: str | None, meta: bool = True) -> nn.Module:
    """Build a backbone, with its parameters on the meta device or with memory.

    Raises:
        PlugError: If its class is unknown or refuses its arguments.
    """
    cls = backbone_class(cfg, scope)
    _check_arguments(cls, cfg)
    try:
        with (
            quiet(),
            DefaultScope.overwrite_default_scope(scope),
            _ParametersOnMeta() if meta else nullcontext(),
        ):
            model = MODELS.build(dict(cfg))
    except Exception as error:
        raise PlugError(f'{cls.__name__} cannot be built from {dict(cfg)}: {error}') from error
    return model.to('meta') if meta else model


@contextmanager
def quiet() -> Iterator[None]:
    """Errors alone are logged: models that are only looked at are no news to the user."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel('ERROR')
    try:
        yield
    finally:
        logger.setLevel(level)


def _outputs(model: nn.Module, size: tuple[int, int], device: str) -> list[Any]:
    model.eval()
    with torch.no_grad(), torch.device(device):
        out = model(torch.empty(1, 3, *size) if device == 'meta' else torch.zeros(1, 3, *size))
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _sizes(cfg: Mapping) -> list[tuple[int, int]]:
    """Image sizes to try: the one the backbone is made for, then some that fit most."""
    own = cfg.get('img_size', cfg.get('pretrain_img_size'))
    own = (own, own) if isinstance(own, int) else own
    sizes = [tuple(own)] if isinstance(own, Sequence) else []
    return [*sizes, (256, 256), (224, 224), (512, 512)]


_skeletons: dict[str, nn.Module] = {}
_measured: dict[str, list[Level]] = {}


def _without(cfg: Mapping) -> dict:
    return {key: value for key, value in cfg.items() if key not in _IMMATERIAL}


def skeleton(cfg: Mapping, scope: str | None) -> nn.Module:
    """A backbone on the meta device, to be looked at only: the same config gives the same one."""
    cfg = _without(cfg)
    key = repr((scope, cfg))
    if key not in _skeletons:
        _skeletons[key] = build_backbone(cfg, scope)
    return _skeletons[key]


def measure(cfg: Mapping, scope: str | None) -> list[Level]:
    """The outputs of a backbone, in their order. What was measured once is remembered.

    Raises:
        PlugError: If it cannot be built, or gives anything but a list of maps (B, C, H, W).
    """
    cfg = _without(cfg)
    key = repr((scope, cfg))
    if key not in _measured:
        _measured[key] = _measure(cfg, scope)
    return _measured[key]


def _measure(cfg: dict, scope: str | None) -> list[Level]:
    name = type_name(cfg)
    error: Exception | None = None
    for device in ('meta', 'cpu'):  # an op of its own may know no meta tensors
        try:
            on_meta = device == 'meta'
            model = skeleton(cfg, scope) if on_meta else build_backbone(cfg, scope, meta=False)
        except PlugError:
            if device == 'cpu':
                raise
            continue
        for size in _sizes(cfg)[: None if device == 'meta' else 1]:
            try:
                maps = _outputs(model, size, device)
            except Exception as failure:
                error = failure
                continue
            if not all(isinstance(x, Tensor) and x.ndim == 4 for x in maps):
                raise PlugError(
                    f'{name} does not give feature maps alone, but class tokens or more'
                )
            indices = cfg.get('out_indices')
            if not isinstance(indices, (list, tuple)) or len(indices) != len(maps):
                indices = range(len(maps))
            return [
                Level(i, x.shape[1], round(size[0] / x.shape[2]))
                for i, x in zip(indices, maps, strict=True)
            ]
    raise PlugError(f'{name} does not run on an image: {error}') from error


def pyramid_of(cfg: Mapping, scope: str | None) -> list[Level]:
    """Every level a backbone can give, or those its ``out_indices`` name."""
    cls = backbone_class(cfg, scope)
    default = inspect.signature(cls.__init__).parameters.get('out_indices')
    if 'out_indices' in cfg or default is None:
        return measure(cfg, scope)
    if isinstance(default.default, (tuple, list)):
        count = max(default.default) + 1
    else:  # as in ViT, where -1 is the last block
        lists = (m for m in skeleton(cfg, scope).children() if isinstance(m, nn.ModuleList))
        count = max(map(len, lists), default=0)
    try:
        return measure({**cfg, 'out_indices': tuple(range(count))}, scope)
    except PlugError:
        return measure(cfg, scope)
