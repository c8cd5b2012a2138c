"""InLine-PVT: the pyramid vision transformer with InLine attention."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from ..layers import (
    Block,
    InLineAttention,
    LinearAttention,
    PatchEmbed,
    PositionEmbedding,
    SpatialReductionAttention,
)
from .base import InLineBackbone, check_rate, drop_path_rates, parse_attention, tokens_to_map

__all__ = ['InLinePVT']

_WIDTHS = dict(embed_dims=[64, 128, 320, 512], num_heads=[2, 4, 10, 16])


@MODELS.register_module()
class InLinePVT(InLineBackbone):
    """PVT whose stages attend over the whole map in linear time.

    Source: arXiv:2412.06590 (InLine attention), arXiv:2102.12122 (PVT). Takes images
    (B, in_channels, H, W) of any size from one patch on and returns one map per index of
    ``out_indices``, of stride 4, 8, 16, 32 and shape (B, C, ceil(H / stride), ceil(W / stride)).

    Args:
        arch: ``'tiny'``, ``'small'``, ``'medium'``, ``'large'``, or a dict with

            - depths (list[int]): Blocks of each of the four stages.
            - embed_dims (list[int]): Channels of each stage.
            - num_heads (list[int]): Heads of each stage.
            - attention (list, optional): One entry per stage, each ``'inline'``, ``'softmax'``,
              ``'linear'``, or a list of one name per block. Default all ``'inline'``. A dict in
              place of a name sets more: ``dict(type='inline', local=False, feature_map='relu')``,
              see :class:`InLineAttention` and :class:`LinearAttention`.
            - mlp_ratios (list, optional): Default [8, 8, 4, 4].
            - sr_ratios (list[int], optional): Spatial reduction of ``'softmax'`` blocks.
              Default [8, 4, 2, 1].
        img_size: Pre-training image size, an int or (H, W): the size of the position embeddings,
            which are resized to the map at hand.
        in_channels: Channels of the images.
        out_indices: Stages to return, increasing; those after the last are not built.
        qkv_bias: Whether q, k and v have a bias.
        drop_rate: Dropout probability after embeddings, projections and in MLPs.
        attn_drop_rate: Dropout probability of the attention weights of ``'softmax'`` blocks.
        drop_path_rate: Stochastic depth of the last block; it grows linearly from 0.
        frozen_stages: -1 freezes nothing, 0 the first patch and position embedding, n also the
            first n stages.
        with_cp: Recompute blocks in the backward pass instead of keeping their activations.
        out_norm: Whether every output has a LayerNorm of its own.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` takes the authors' classification
            checkpoints as they are, or any of mmengine's initialisations.

    Raises:
        ValueError: For a setting out of range; the message names it and what is allowed.

    Example:
        >>> model = InLinePVT('tiny').eval()
        >>> [tuple(x.shape) for x in model(torch.rand(1, 3, 64, 96))]
        [(1, 64, 16, 24), (1, 128, 8, 12), (1, 320, 4, 6), (1, 512, 2, 3)]
    """

    family = 'pvt'
    presets = {
        'tiny': dict(depths=[2, 2, 2, 2], **_WIDTHS),
        'small': dict(depths=[3, 4, 6, 3], **_WIDTHS),
        'medium': dict(depths=[3, 4, 18, 3], **_WIDTHS),
        'large': dict(depths=[3, 8, 27, 3], **_WIDTHS),
    }
    arch_defaults = dict(attention=['inline'] * 4, mlp_ratios=[8, 8, 4, 4], sr_ratios=[8, 4, 2, 1])

    def __init__(
        self,
        arch: str | Mapping[str, Any] = 'tiny',
        img_size: int | tuple[int, int] = 224,
        in_channels: int = 3,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        frozen_stages: int = -1,
        with_cp: bool = False,
        out_norm: bool = False,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(arch, out_indices, in_channels, frozen_stages, with_cp, init_cfg)
        depths, dims, heads, mlp_ratios, sr_ratios = (
            self.per_stage(key)
            for key in ('depths', 'embed_dims', 'num_heads', 'mlp_ratios', 'sr_ratios')
        )
        attention = parse_attention(self.arch['attention'], depths)
        drop_rate = check_rate('drop_rate', drop_rate)
        attn_drop_rate = check_rate('attn_drop_rate', attn_drop_rate)
        drop_paths = drop_path_rates(drop_path_rate, depths)

        def attention_layer(stage: int, type: str, **settings: Any) -> nn.Module:
            args = (dims[stage], heads[stage], qkv_bias)
            if type == 'inline':
                return InLineAttention(*args, proj_drop=drop_rate, **settings)
            if type == 'linear':
                return LinearAttention(*args, proj_drop=drop_rate, **settings)
            return SpatialReductionAttention(*args, attn_drop_rate, drop_rate, sr_ratios[stage])

        self.patch_embeds = nn.ModuleList()
        self.pos_embeds = nn.ModuleList()
        self.stages = nn.ModuleList()
        self.drop_after_pos = nn.Dropout(drop_rate)
        grid = self.pretraining_size(img_size)
        for i in range(max(self.out_indices) + 1):
            patch = 4 if i == 0 else 2
            grid = tuple(math.ceil(side / patch) for side in grid)
            self.patch_embeds.append(
                PatchEmbed(dims[i - 1] if i else in_channels, dims[i], patch, stride=patch)
            )
            self.pos_embeds.append(PositionEmbedding(grid, dims[i]))
            self.stages.append(
                nn.ModuleList(
                    Block(
                        attention_layer(i, **settings),
                        dims[i],
                        mlp_ratios[i],
                        drop=drop_rate,
                        drop_path=drop_path,
                        norm_eps=1e-6,
                    )
                    for settings, drop_path in zip(attention[i], drop_paths[i], strict=True)
                )
            )
        if out_norm:
            self.add_out_norms(dims)
        self.reset_parameters()
        self.freeze()

    def levels(self) -> list[list[nn.Module]]:
        """The stem, then the stages with the embeddings before them."""
        stem = [self.patch_embeds[0], self.pos_embeds[0]]
        later = zip(self.patch_embeds[1:], self.pos_embeds[1:], self.stages[1:], strict=True)
        return [stem, [self.stages[0]], *map(list, later)]

    def fit_parameter(self, key: str, value: Tensor) -> Tensor | None:
        """Resize a position embedding of another (square) grid."""
        if not key.startswith('pos_embeds.'):
            return None
        return self.pos_embeds[int(key.split('.')[1])].fit(value)

    def forward_levels(self, x: Tensor) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        # Tokens are channels-last; so is every map between stages, and nothing is transposed.
        x = x.contiguous(memory_format=torch.channels_last)
        for i, blocks in enumerate(self.stages):
            x = self.patch_embeds[i](x)
            hw = tuple(x.shape[1:3])
            x = self.drop_after_pos(self.pos_embeds[i](x.flatten(1, 2), hw))
            for block in blocks:
                x = self.run_block(block, x, hw)
            yield x, hw
            x = tokens_to_map(x, hw)
