"""InLine-DeiT: the plain vision transformer with InLine attention."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from mmengine.registry import MODELS
from timm.layers import trunc_normal_
from torch import Tensor, nn

from ..layers import (
    Block,
    InLineAttention,
    LinearAttention,
    PatchEmbed,
    PositionEmbedding,
    SoftmaxAttention,
)
from .base import InLineBackbone, check_rate, drop_path_rates, parse_arch, parse_attention

__all__ = ['InLineDeiT']


@MODELS.register_module()
class InLineDeiT(InLineBackbone):
    """DeiT, a vision transformer at one scale, with InLine attention.

    Source: arXiv:2412.06590 (InLine attention), arXiv:2012.12877 (DeiT). Takes images
    (B, in_channels, H, W) of any size from one patch on and returns one map per index of
    ``out_indices``, all of shape (B, C, ceil(H / patch_size), ceil(W / patch_size)), without the
    class token. mmseg's ``Feature2Pyramid`` makes a pyramid of them.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'base'``, or a dict with

            - depths (int): Blocks.
            - embed_dims (int): Channels.
            - num_heads (int): Heads.
            - attention (list, optional): One entry, ``'inline'``, ``'softmax'``, ``'linear'``, or
              a list of one name per block. Default ``['inline']``. A dict in place of a name sets
              more: ``dict(type='inline', local=False, feature_map='relu')``, see
              :class:`InLineAttention` and :class:`LinearAttention`.
            - mlp_ratio (optional): Default 4.
            - patch_size (int, optional): Default 16.
        img_size: Pre-training image size, an int or (H, W): the size of the position embedding,
            which is resized to the map at hand. Default None: the preset's, 224, 288 or 448.
        in_channels: Channels of the images.
        out_indices: Blocks to return, increasing; those after the last are not built. -1 alone
            is the last block.
        qkv_bias: Whether q, k and v have a bias.
        drop_rate: Dropout probability after embeddings, projections and in MLPs.
        attn_drop_rate: Dropout probability of the attention weights of ``'softmax'`` blocks.
        drop_path_rate: Stochastic depth of the last block; it grows linearly from 0.
        frozen_stages: -1 freezes nothing, 0 patch embedding, class token and position embedding,
            n also the first n blocks.
        with_cp: Recompute blocks in the backward pass instead of keeping their activations.
        final_norm: Whether the last block's output goes through the classifier's LayerNorm.
        out_norm: Whether every output has a LayerNorm of its own.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` takes the authors' classification
            checkpoints as they are, or any of mmengine's initialisations.

    Raises:
        ValueError: For a setting out of range; the message names it and what is allowed.

    Example:
        >>> model = InLineDeiT('tiny', out_indices=(5, 11)).eval()
        >>> [tuple(x.shape) for x in model(torch.rand(1, 3, 64, 96))]
        [(1, 192, 4, 6), (1, 192, 4, 6)]
    """

    family = 'deit'
    presets = {
        'tiny': dict(depths=12, embed_dims=192, num_heads=6),
        'small': dict(depths=12, embed_dims=320, num_heads=10),
        'base': dict(depths=12, embed_dims=384, num_heads=12),
    }
    img_sizes = {'small': 288, 'base': 448}
    arch_defaults = dict(attention=['inline'], mlp_ratio=4, patch_size=16)

    def __init__(
        self,
        arch: str | Mapping[str, Any] = 'tiny',
        img_size: int | tuple[int, int] | None = None,
        in_channels: int = 3,
        out_indices: int | Sequence[int] = -1,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        frozen_stages: int = -1,
        with_cp: bool = False,
        final_norm: bool = False,
        out_norm: bool = False,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        depth = parse_arch(arch, self.presets, self.arch_defaults)['depths']
        if out_indices == -1 and isinstance(depth, int):
            out_indices = depth - 1
        super().__init__(arch, out_indices, in_channels, frozen_stages, with_cp, init_cfg)
        depth, dims, heads, mlp_ratio, self.patch_size = (
            self.number(key)
            for key in ('depths', 'embed_dims', 'num_heads', 'mlp_ratio', 'patch_size')
        )
        if final_norm and self.out_indices[-1] != depth - 1:
            raise ValueError(
                f'final_norm=True needs the last block, {depth - 1}, among out_indices, '
                f'got {self.out_indices}'
            )
        attention = self.arch['attention']
        if isinstance(attention, str | Mapping):
            attention = [attention]
        attention = parse_attention(attention, [depth])[0]
        drop_rate = check_rate('drop_rate', drop_rate)
        attn_drop_rate = check_rate('attn_drop_rate', attn_drop_rate)
        drop_paths = drop_path_rates(drop_path_rate, [depth])[0]

        def attention_layer(type: str, **settings: Any) -> nn.Module:
            args = (dims, heads, qkv_bias)
            if type == 'inline':
                return InLineAttention(*args, proj_drop=drop_rate, **settings)
            if type == 'linear':
                return LinearAttention(*args, proj_drop=drop_rate, **settings)
            return SoftmaxAttention(*args, attn_drop_rate, drop_rate)

        self.patch_embed = PatchEmbed(
            in_channels, dims, self.patch_size, stride=self.patch_size, norm=False
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dims))
        trunc_normal_(self.cls_token, std=0.02)
        grid = tuple(-(-side // self.patch_size) for side in self.pretraining_size(img_size))
        self.pos_embed = PositionEmbedding(grid, dims, 1, interpolation='bicubic')
        self.drop_after_pos = nn.Dropout(drop_rate)
        self.blocks = nn.ModuleList(
            Block(
                attention_layer(**settings),
                dims,
                mlp_ratio,
                drop=drop_rate,
                drop_path=drop_path,
                norm_eps=1e-6,
            )
            for settings, drop_path in list(zip(attention, drop_paths, strict=True))[
                : self.out_indices[-1] + 1
            ]
        )
        self.norm = nn.LayerNorm(dims, eps=1e-6) if final_norm else None
        if out_norm:
            self.add_out_norms([dims] * depth)
        self.reset_parameters()
        self.freeze()

    def levels(self) -> list[list[nn.Module]]:
        """The embeddings, then the blocks."""
        return [[self.patch_embed, self.pos_embed], *([block] for block in self.blocks)]

    def freeze(self) -> None:
        super().freeze()
        if self.frozen_stages >= 0:
            self.cls_token.requires_grad_(False)

    def why_not_used(self, key: str) -> str | None:
        block = re.match(r'blocks\.(\d+)\.', key)
        if block and len(self.blocks) <= int(block[1]) < self.arch['depths']:
            return 'block after the last of out_indices'
        return super().why_not_used(key)

    def fit_parameter(self, key: str, value: Tensor) -> Tensor | None:
        """Resize a position embedding of another (square) grid."""
        return self.pos_embed.fit(value) if key == 'pos_embed.weight' else None

    def output(self, x: Tensor, hw: tuple[int, int], index: int) -> Tensor:
        """Tokens of block ``index`` as a map (B, C, H, W), without the class token."""
        if self.norm is not None and index == self.out_indices[-1]:
            x = self.norm(x)
        return super().output(x[:, 1:], hw, index)

    def forward_levels(self, x: Tensor) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        x = self.patch_embed(x.contiguous(memory_format=torch.channels_last))
        hw = tuple(x.shape[1:3])
        x = x.flatten(1, 2)
        x = torch.cat([self.cls_token.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
        x = self.drop_after_pos(self.pos_embed(x, hw))
        for block in self.blocks:
            x = self.run_block(block, x, hw)
            yield x, hw
