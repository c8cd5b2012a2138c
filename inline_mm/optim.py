"""Training options: layer-wise learning rates, mixed precision on CPUs, units to shard by."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.optim import AmpOptimWrapper, DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import FUNCTIONS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS
from torch import nn

from .backbones.base import InLineBackbone
from .layers import Block

__all__ = ['CPUAmpOptimWrapper', 'LearningRateDecayOptimizerConstructor', 'wrap_blocks']

#: Options of mmengine's default constructor, which this one takes too.
_DEFAULT_OPTIONS = {
    'custom_keys', 'bias_lr_mult', 'bias_decay_mult', 'norm_decay_mult', 'flat_decay_mult',
    'dwconv_decay_mult', 'dcn_offset_lr_mult', 'bypass_duplicate',
}  # fmt: skip
_OWN_OPTIONS = ('decay_rate', 'decay_type', 'num_layers')
#: Parameters of more than one dimension that are never decayed.
_TABLES = ('pos_embed', 'cls_token', 'relative_position_bias_table')


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LearningRateDecayOptimizerConstructor(DefaultOptimWrapperConstructor):
    """Learning rates that fall from the head down to the stem, for every family here.

    It has the name and arguments of mmdet's and mmseg's constructor, which know ConvNeXt and BEiT
    only; a bare name would find theirs, so name it with the package::

        optim_wrapper = dict(
            constructor='inline_mm.LearningRateDecayOptimizerConstructor',
            paramwise_cfg=dict(decay_rate=0.9, decay_type='layer_wise', num_layers=12))

    A parameter in layer ``i`` learns at ``lr * decay_rate ** (num_layers + 1 - i)``: the stem is
    layer 0; heads, necks and the backbone's output norms are layer ``num_layers + 1``. As there,
    biases, norms, position embeddings and class tokens get no weight decay, unless options of
    mmengine's default constructor (``custom_keys``, ``norm_decay_mult``, ...) say otherwise; they
    are understood too.

    Args:
        optim_wrapper_cfg: As of mmengine's DefaultOptimWrapperConstructor.
        paramwise_cfg: ``decay_rate`` in (0, 1]; ``decay_type``, ``'layer_wise'`` (default: layers
            are blocks) or ``'stage_wise'`` (layers are stages); ``num_layers``, by default the
            number of blocks or stages. Blocks are spread evenly over fewer layers; stages may be
            counted as more.

    Raises:
        ValueError: For an option that is unknown or out of range, or a model without a backbone
            of this package.
    """

    def _validate_cfg(self) -> None:
        super()._validate_cfg()
        cfg = self.paramwise_cfg
        unknown = set(cfg) - _DEFAULT_OPTIONS - set(_OWN_OPTIONS)
        if unknown:
            raise ValueError(
                f'paramwise_cfg has unknown {sorted(unknown)}; allowed are {list(_OWN_OPTIONS)} '
                f'and {sorted(_DEFAULT_OPTIONS)}'
            )
        rate = cfg.get('decay_rate')
        if not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise ValueError(f'paramwise_cfg.decay_rate must be a number in (0, 1], got {rate!r}')
        if self.base_lr is None:
            raise ValueError('optimizer.lr must be given for the learning rate to decay')
        kind = cfg.get('decay_type', 'layer_wise')
        if kind not in ('layer_wise', 'stage_wise'):
            raise ValueError(
                f"paramwise_cfg.decay_type must be 'layer_wise' or 'stage_wise', got {kind!r}"
            )

    def add_params(
        self, params: list[dict], module: nn.Module, prefix: str = '', **kwargs: Any
    ) -> None:
        """Add the parameters of a module, as the base class does, with decayed rates."""
        if prefix:  # The base class calls this for every submodule.
            super().add_params(params, module, prefix, **kwargs)
            return
        scales = self._scales(module)
        names = {param: name for name, param in module.named_parameters()}
        own = []
        super().add_params(own, module, prefix, **kwargs)
        groups = {}
        for group in own:
            (param,) = group.pop('params')
            name = names[param]
            if 'weight_decay' not in group and self.base_wd is not None:
                flat = param.ndim == 1 or name.endswith('.bias')
                undecayed = flat or any(table in name for table in _TABLES)
                group['weight_decay'] = 0.0 if undecayed else self.base_wd
            scale = scales.get(param, 1.0)
            group['lr'] = group.get('lr', self.base_lr) * scale
            group['lr_scale'] = scale
            merged = groups.setdefault(
                tuple(sorted((key, str(value)) for key, value in group.items())),
                {**group, 'params': [], 'param_names': []},
            )
            merged['params'].append(param)
            merged['param_names'].append(name)
        params.extend(groups.values())
        for group in groups.values():
            print_log(
                f'lr {group["lr"]:.3g}, weight_decay {group.get("weight_decay")}: '
                f'{", ".join(group["param_names"])}',
                logger='current',
            )

    def _scales(self, model: nn.Module) -> dict[nn.Parameter, float]:
        """Factors of the learning rate of the backbones' parameters."""
        backbones = [m for m in model.modules() if isinstance(m, InLineBackbone)]
        if not backbones:
            raise ValueError(
                'inline_mm.LearningRateDecayOptimizerConstructor needs a backbone of inline_mm, '
                f'and {type(model).__name__} has none; use the constructor of mmdet or mmseg for '
                'theirs'
            )
        rate = self.paramwise_cfg['decay_rate']
        scales = {}
        for backbone in backbones:
            layers, count = self._layers(backbone)
            scales.update({param: rate ** (count + 1 - layer) for param, layer in layers.items()})
        return scales

    def _layers(self, backbone: InLineBackbone) -> tuple[dict[nn.Parameter, int], int]:
        """The layer of every parameter but the output norms', and the number of layers."""
        _, *levels = backbone.levels()
        count = self.paramwise_cfg.get('num_layers')
        stage_wise = self.paramwise_cfg.get('decay_type') == 'stage_wise'
        # A level of DeiT is one block, and has no stage about it.
        blocks = [list(stage) for stage in getattr(backbone, 'stages', levels)]
        depth = len(levels) if stage_wise else sum(map(len, blocks))
        lowest, highest = (depth, float('inf')) if stage_wise else (1, depth)
        if count is None:
            count = depth
        elif not isinstance(count, int) or not lowest <= count <= highest:
            allowed = f'at least {depth}, its stages' if stage_wise else f'1 to {depth}, its blocks'
            raise ValueError(
                f'paramwise_cfg.num_layers must be {allowed}, for {type(backbone).__name__} '
                f'(arch {backbone.arch_name}), got {count!r}'
            )
        # What is in no level, such as a class token, belongs to the stem.
        layers = {
            param: 0
            for name, param in backbone.named_parameters()
            if not re.match(r'norm\d*\.', name)
        }
        first = 0
        for stage, (level, stage_blocks) in enumerate(zip(levels, blocks, strict=True)):
            # What leads to a stage goes with its first block.
            layer = stage + 1 if stage_wise else 1 + first * count // depth
            layers.update((param, layer) for module in level for param in module.parameters())
            for index, block in enumerate(() if stage_wise else stage_blocks, first):
                layers.update((param, 1 + index * count // depth) for param in block.parameters())
            first += len(stage_blocks)
        return layers, count


@OPTIM_WRAPPERS.register_module()
class CPUAmpOptimWrapper(AmpOptimWrapper):
    """mmengine's AmpOptimWrapper on the CPU, where that refuses to work.

    ``tools/train.py --amp`` uses it where there is no GPU. The CPU computes in bfloat16 and in
    float16; the latter is slow where the processor has no instructions for it.

    Args:
        loss_scale: ``'dynamic'``, a fixed float, or arguments of ``torch.amp.GradScaler``.
        dtype: ``'bfloat16'`` (default) or ``'float16'``.
        **kwargs: Arguments of mmengine's OptimWrapper.

    Raises:
        ValueError: For another ``dtype`` or ``loss_scale``.
    """

    def __init__(
        self,
        loss_scale: str | float | dict = 'dynamic',
        dtype: str | torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        # The base class' own would raise for want of a GPU.
        OptimWrapper.__init__(self, **kwargs)
        dtypes = {'bfloat16': torch.bfloat16, 'float16': torch.float16}
        self.cast_dtype = dtypes.get(str(dtype or 'bfloat16').removeprefix('torch.'))
        if self.cast_dtype is None:
            raise ValueError(f'dtype must be one of {list(dtypes)}, got {dtype!r}')
        self._scale_update_param = None
        if loss_scale == 'dynamic':
            arguments = {}
        elif isinstance(loss_scale, float):
            arguments = dict(init_scale=loss_scale)
            self._scale_update_param = loss_scale
        elif isinstance(loss_scale, dict):
            arguments = loss_scale
        else:
            raise ValueError(f"loss_scale must be 'dynamic', a float or a dict, got {loss_scale!r}")
        self.loss_scaler = torch.amp.GradScaler('cpu', **arguments)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Compute in ``dtype``; withhold gradient synchronisation while accumulating."""
        # Not the base class': mmengine's autocast takes no float16 on the CPU.
        with OptimWrapper.optim_context(self, model), torch.autocast('cpu', self.cast_dtype):
            yield


@FUNCTIONS.register_module()
def wrap_blocks(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """FSDP's units: the backbones' blocks.

    Attention folds the weights of its layers into one another, so a block has to be gathered as a
    whole; PyTorch's ``size_based_auto_wrap_policy`` may cut through it. In a config::

        strategy = dict(type='FSDPStrategy', model_wrapper=dict(
            type='MMFullyShardedDataParallel', auto_wrap_policy='wrap_blocks'))

    Args:
        module: A part of the model.
        recurse: FSDP asks whether to look inside it, else whether to make it a unit.
        nonwrapped_numel: Its parameters that are in no unit yet.
    """
    return recurse or isinstance(module, Block)
