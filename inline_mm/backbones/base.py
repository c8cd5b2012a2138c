"""What the backbone families share: arguments, stages, freezing, checkpoints."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from mmengine.model import BaseModule
from timm.layers import to_2tuple, trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..checkpoint import load_backbone
from ..layers import Block

__all__ = ['InLineBackbone', 'PyramidBackbone', 'parse_arch', 'parse_attention']

#: Kinds of attention, and the arguments of their layers that ``arch['attention']`` may set.
ATTENTIONS = {'inline': ('local', 'feature_map'), 'softmax': (), 'linear': ('feature_map',)}


def parse_arch(
    arch: str | Mapping[str, Any], presets: Mapping[str, dict], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of an architecture given by name or as a dict.

    Args:
        arch: A key of ``presets``, or a dict.
        presets: The family's architectures by name.
        defaults: Values of optional keys; ``depths``, ``embed_dims``, ``num_heads`` are required.

    Returns:
        dict: Every setting of the architecture.

    Raises:
        ValueError: For an unknown name, a missing or an unknown key.
        TypeError: If ``arch`` is neither a name nor a dict.
    """
    if isinstance(arch, str):
        if arch not in presets:
            raise ValueError(f'arch must be one of {list(presets)} or a dict, got {arch!r}')
        arch = presets[arch]
    elif not isinstance(arch, Mapping):
        raise TypeError(f'arch must be one of {list(presets)} or a dict, got {arch!r}')
    required = ['depths', 'embed_dims', 'num_heads']
    missing = [key for key in required if key not in arch]
    unknown = [key for key in arch if key not in required and key not in defaults]
    if missing or unknown:
        problem = f'lacks {missing}' if missing else f'has unknown {unknown}'
        raise ValueError(
            f'arch {problem}: required keys are {required}, optional {list(defaults)}, '
            f'got {dict(arch)}'
        )
    return {**defaults, **arch}


def parse_attention(
    attention: Sequence[str | Mapping | Sequence[str | Mapping]], depths: Sequence[int]
) -> list[list[dict[str, Any]]]:
    """The attention of every block.

    Args:
        attention: One entry per stage, each a name, a dict with the name as ``type`` and settings
            of that attention, or a list of one name or dict per block.
        depths: Blocks per stage.

    Returns:
        list[list[dict]]: ``dict(type=name, **settings)`` per stage and block; a name alone has
        no settings.

    Raises:
        ValueError: For a wrong number of entries, an unknown name or an unknown setting.
    """
    if not isinstance(attention, list | tuple) or len(attention) != len(depths):
        raise ValueError(
            f"arch['attention'] needs one entry per stage, {len(depths)}, got {attention!r}"
        )
    parsed = []
    for stage, (entry, depth) in enumerate(zip(attention, depths, strict=True)):
        where = f"arch['attention'][{stage}]"
        entry = entry if isinstance(entry, list | tuple) else [entry] * depth
        if len(entry) != depth:
            raise ValueError(
                f'{where} needs a name or dict, or one per block of the stage, {depth}, '
                f'got {len(entry)}: {entry!r}'
            )
        parsed.append([_parse_block_attention(block, where) for block in entry])
    return parsed


def _parse_block_attention(block: str | Mapping, where: str) -> dict[str, Any]:
    settings = dict(block) if isinstance(block, Mapping) else dict(type=block)
    name = settings.get('type')
    if not isinstance(name, str) or name not in ATTENTIONS:
        raise ValueError(f'{where} must hold names of {tuple(ATTENTIONS)}, got {name!r}')
    unknown = [key for key in settings if key != 'type' and key not in ATTENTIONS[name]]
    if unknown:
        raise ValueError(
            f'{where} has unknown {unknown} for {name!r}, which takes '
            f'{list(ATTENTIONS[name]) or "no settings"}, got {settings}'
        )
    if not isinstance(settings.get('local', True), bool):
        raise ValueError(f'{where}: local must be True or False, got {settings["local"]!r}')
    return settings


def check_rate(name: str, rate: float) -> float:
    """A probability below 1, or a ValueError naming the argument."""
    if not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ValueError(f'{name} must be a number in [0, 1), got {rate!r}')
    return float(rate)


class InLineBackbone(BaseModule):
    """Base of the families: subclasses build ``stages`` and write ``forward_levels``.

    Class attributes:
        family: Key of the family's table of checkpoint names.
        presets: Architectures by name.
        arch_defaults: Optional keys of an ``arch`` dict and their values.
        patch_size: Smallest side of an image.
        img_sizes: Pre-training image sizes of presets for which it is not 224.

    Args:
        arch: A key of ``presets``, or a dict.
        out_indices: Levels to return, increasing. Levels after the last are not built, so that
            every parameter takes part in training.
        in_channels: Channels of the images.
        frozen_stages: -1 freezes nothing, 0 the stem, n the stem and the first n levels.
        with_cp: Recompute blocks in the backward pass instead of keeping their activations.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)``, or any of mmengine's.
    """

    family: str
    presets: dict[str, dict]
    arch_defaults: dict[str, Any]
    patch_size = 4
    img_sizes: dict[str, int] = {}

    def __init__(
        self,
        arch: str | Mapping[str, Any],
        out_indices: Sequence[int],
        in_channels: int,
        frozen_stages: int,
        with_cp: bool,
        init_cfg: dict | list[dict] | None,
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        self.arch_name = arch if isinstance(arch, str) else 'dict'
        self.arch = parse_arch(arch, self.presets, self.arch_defaults)
        depths = self.arch['depths']
        num_levels = len(depths) if isinstance(depths, list | tuple) else self.number('depths')
        if num_levels == 0:
            raise ValueError(
                f"arch['depths'] must hold a positive number per stage, got {depths!r}"
            )
        indices = (out_indices,) if isinstance(out_indices, int) else tuple(out_indices)
        in_range = all(isinstance(i, int) and 0 <= i < num_levels for i in indices)
        if not indices or not in_range or list(indices) != sorted(set(indices)):
            raise ValueError(
                f'out_indices must be increasing numbers from 0 to {num_levels - 1} '
                f'(arch has depths {depths!r}), got {out_indices!r}'
            )
        if not isinstance(frozen_stages, int) or not -1 <= frozen_stages <= num_levels:
            raise ValueError(
                f'frozen_stages must be from -1 (none) to {num_levels}, got {frozen_stages!r}'
            )
        if not isinstance(in_channels, int) or in_channels < 1:
            raise ValueError(f'in_channels must be a positive number, got {in_channels!r}')
        self.out_indices = indices
        self.in_channels = in_channels
        self.frozen_stages = frozen_stages
        self.with_cp = with_cp

    # Construction

    def number(self, key: str) -> int:
        """An architecture setting that is one positive number, whole unless it is a ratio."""
        return self._positive(self.arch[key], key, f'arch[{key!r}] must be a positive {{}}')

    def per_stage(self, key: str, num_stages: int = 4) -> list[int]:
        """An architecture setting that is a positive number per stage, whole unless a ratio."""
        value = self.arch[key]
        problem = f'arch[{key!r}] must hold {num_stages} positive {{}}s, one per stage'
        numbers = value if isinstance(value, list | tuple) else []
        if len(numbers) != num_stages:
            numbers = [None]
        return [self._positive(number, key, problem) for number in numbers]

    def _positive(self, number: object, key: str, problem: str) -> int:
        kind, what = (int | float, 'number') if 'mlp_ratio' in key else (int, 'whole number')
        if not isinstance(number, kind) or isinstance(number, bool) or not 0 < number < math.inf:
            raise ValueError(f'{problem.format(what)}, got {self.arch[key]!r}')
        return number

    def pretraining_size(self, img_size: int | tuple[int, int] | None) -> tuple[int, int]:
        """``img_size`` as (H, W); None is the size the preset was trained with."""
        if img_size is None:
            img_size = self.img_sizes.get(self.arch_name, 224)
        size = to_2tuple(img_size)
        if len(size) != 2 or not all(isinstance(s, int) and s >= self.patch_size for s in size):
            raise ValueError(
                f'img_size must be a number of pixels or (H, W), at least one patch of '
                f'{self.patch_size}, got {img_size!r}'
            )
        return tuple(size)

    def add_out_norms(self, channels: Sequence[int]) -> None:
        """A LayerNorm per output, ``norm{i}``."""
        for i in self.out_indices:
            self.add_module(f'norm{i}', nn.LayerNorm(channels[i]))

    def reset_parameters(self) -> None:
        """Initialise as the published models were: truncated normal, std 0.02."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def init_weights(self) -> None:
        """Load a ``Pretrained`` checkpoint with :func:`inline_mm.checkpoint.load_backbone`."""
        cfg = self.init_cfg
        if isinstance(cfg, dict) and cfg.get('type') in ('Pretrained', 'PretrainedInit'):
            unknown = set(cfg) - {'type', 'checkpoint', 'prefix', 'map_location'}
            if unknown or 'checkpoint' not in cfg:
                raise ValueError(
                    "init_cfg of type 'Pretrained' takes checkpoint (required), prefix and "
                    f'map_location, got {dict(cfg)}'
                )
            load_backbone(self, cfg['checkpoint'], cfg.get('prefix'))
            self._is_init = True
        else:
            super().init_weights()

    # Running

    def forward_levels(self, x: Tensor) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """Run the network level by level.

        Args:
            x: Images (B, in_channels, H, W).

        Yields:
            tuple: Each level's tokens (B, N, C), before any output norm, and ``(H, W)`` of the map
            that the last H * W of them form.
        """
        raise NotImplementedError

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Images (B, in_channels, H, W) to one map (B, C, H / stride, W / stride) per output."""
        self.check_image(x)
        return tuple(
            self.output(tokens, hw, i)
            for i, (tokens, hw) in enumerate(self.forward_levels(x))
            if i in self.out_indices
        )

    def check_image(self, x: Tensor) -> None:
        """Raise a ValueError for a batch of images the backbone cannot take."""
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f'{type(self).__name__} takes images (B, {self.in_channels}, H, W) '
                f'(in_channels={self.in_channels}), got shape {tuple(x.shape)}'
            )
        if min(x.shape[2:]) < self.patch_size:
            raise ValueError(
                f'{type(self).__name__} takes images of at least {self.patch_size} x '
                f'{self.patch_size} pixels, one patch, got {tuple(x.shape[2:])}'
            )

    def run_block(self, block: nn.Module, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """A block, checkpointed where ``with_cp`` asks for it."""
        if self.with_cp and torch.is_grad_enabled() and x.requires_grad:
            return checkpoint(block, x, hw, use_reentrant=False)
        return block(x, hw)

    def output(self, x: Tensor, hw: tuple[int, int], index: int) -> Tensor:
        """Tokens (B, H*W, C) of level ``index`` as a map (B, C, H, W), normed if it has a norm."""
        norm = getattr(self, f'norm{index}', None)
        return tokens_to_map(x if norm is None else norm(x), hw).contiguous()

    # Freezing

    def levels(self) -> list[list[nn.Module]]:
        """Modules that ``frozen_stages`` freezes: the stem's, then each level's."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Put frozen levels into eval mode and take their parameters out of training."""
        for i, modules in enumerate(self.levels()[: self.frozen_stages + 1]):
            norm = getattr(self, f'norm{i - 1}', None) if i else None
            for module in [*modules, *([] if norm is None else [norm])]:
                module.eval()
                module.requires_grad_(False)

    def train(self, mode: bool = True) -> 'InLineBackbone':
        """Set the mode, keep frozen levels frozen, and return self."""
        super().train(mode)
        self.freeze()
        return self

    # Checkpoints

    def why_not_used(self, key: str) -> str | None:
        """Why a checkpoint's entry, under our name, may be left out; None if it may not."""
        stage = re.match(r'(?:stages|patch_embeds|pos_embeds|downsamples)\.(\d+)\.', key)
        if stage and len(self.stages) <= int(stage[1]) < len(self.arch['depths']):
            return 'level after the last of out_indices'
        if re.fullmatch(r'norm\d\.(weight|bias)', key):
            return 'norm of an output that is not used'
        return None

    def may_be_missing(self, key: str) -> bool:
        """Whether a checkpoint may lack an entry: output norms are not part of classifiers."""
        return re.fullmatch(r'norm\d\.(weight|bias)', key) is not None

    def fit_parameter(self, key: str, value: Tensor) -> Tensor | None:
        """A checkpoint's entry of another shape made to fit, or None where that makes no sense."""
        return None


class PyramidBackbone(InLineBackbone):
    """Base of Swin and CSwin: four stages at strides 4, 8, 16, 32, each twice as wide.

    Subclasses make the embedding and the attention layers, and may choose another block. Their
    arguments are documented there.
    """

    block_type = Block

    def __init__(
        self,
        arch: str | Mapping[str, Any] = 'tiny',
        img_size: int | tuple[int, int] | None = None,
        in_channels: int = 3,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        frozen_stages: int = -1,
        with_cp: bool = False,
        out_norm: bool = True,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(arch, out_indices, in_channels, frozen_stages, with_cp, init_cfg)
        depths, self.num_heads = self.per_stage('depths'), self.per_stage('num_heads')
        self.embed_dims = [self.number('embed_dims') * 2**i for i in range(4)]
        self.qkv_bias = qkv_bias
        self.drop_rate = check_rate('drop_rate', drop_rate)
        self.attn_drop_rate = check_rate('attn_drop_rate', attn_drop_rate)
        mlp_ratio = self.number('mlp_ratio')
        attention = parse_attention(self.arch['attention'], depths)
        drop_paths = drop_path_rates(drop_path_rate, depths)
        # Sides of the maps in pre-training, where small ones had smaller windows and stripes.
        self.grids = [
            tuple(-(-side // (4 * 2**i)) for side in self.pretraining_size(img_size))
            for i in range(4)
        ]
        self.drop_after_embed = nn.Dropout(self.drop_rate)
        self.patch_embeds = nn.ModuleList()
        self.stages = nn.ModuleList()
        for i in range(max(self.out_indices) + 1):
            self.patch_embeds.append(self.make_patch_embed(i))
            blocks = zip(attention[i], drop_paths[i], strict=True)
            self.stages.append(
                nn.ModuleList(
                    self.block_type(
                        self.make_attention(i, j, **settings),
                        self.embed_dims[i],
                        mlp_ratio,
                        drop=self.drop_rate,
                        drop_path=drop_path,
                    )
                    for j, (settings, drop_path) in enumerate(blocks)
                )
            )
        if out_norm:
            self.add_out_norms(self.embed_dims)
        self.reset_parameters()
        self.freeze()

    def make_patch_embed(self, stage: int) -> nn.Module:
        """What makes tokens (B, H, W, C) of the image, or halves the map before a later stage."""
        raise NotImplementedError

    def make_attention(self, stage: int, block: int, type: str, **settings: Any) -> nn.Module:
        """The attention layer of a block."""
        raise NotImplementedError

    def embed(self, x: Tensor, stage: int) -> Tensor:
        """The image or the map (B, C, H, W) before a stage to that stage's map (B, H, W, C)."""
        return self.patch_embeds[stage](x)

    def levels(self) -> list[list[nn.Module]]:
        """The stem, then the stages with the embeddings before them."""
        later = zip(self.patch_embeds[1:], self.stages[1:], strict=True)
        return [[self.patch_embeds[0]], [self.stages[0]], *map(list, later)]

    def forward_levels(self, x: Tensor) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        # Tokens are channels-last; so is every map between stages, and nothing is transposed.
        x = x.contiguous(memory_format=torch.channels_last)
        for i, blocks in enumerate(self.stages):
            x = self.drop_after_embed(self.embed(x, i)) if i == 0 else self.embed(x, i)
            hw = tuple(x.shape[1:3])
            x = x.flatten(1, 2)
            for block in blocks:
                x = self.run_block(block, x, hw)
            yield x, hw
            x = tokens_to_map(x, hw)


def tokens_to_map(x: Tensor, hw: tuple[int, int]) -> Tensor:
    """Tokens (B, H*W, C) seen as a channels-last map (B, C, H, W), without a copy."""
    return x.reshape(x.shape[0], *hw, -1).permute(0, 3, 1, 2)


def drop_path_rates(rate: float, depths: Sequence[int]) -> list[list[float]]:
    """Stochastic depth, from 0 for the first block up to ``rate`` for the last, per stage."""
    rates = torch.linspace(
        0, check_rate('drop_path_rate', rate), sum(depths), device='cpu'
    ).tolist()
    return [[rates.pop(0) for _ in range(depth)] for depth in depths]
