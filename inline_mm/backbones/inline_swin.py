"""InLine-Swin: the Swin transformer with InLine attention."""

import math
from typing import Any

from mmengine.registry import MODELS
from timm.layers import resize_rel_pos_bias_table_simple
from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn

from ..layers import InLineAttention, LinearAttention, PatchEmbed, WindowAttention
from .base import PyramidBackbone

__all__ = ['InLineSwin']

_BASE = dict(
    depths=[2, 2, 18, 2],
    embed_dims=128,
    num_heads=[4, 8, 16, 32],
    attention=['inline', 'inline', ['inline'] * 2 + ['softmax'] * 16, 'softmax'],
)


@MODELS.register_module()
class InLineSwin(PyramidBackbone):
    """Swin with InLine attention over the whole map in its first stages.

    Source: arXiv:2412.06590 (InLine attention), arXiv:2103.14030 (Swin). Takes images
    (B, in_channels, H, W) of any size from one patch on and returns one map per index of
    ``out_indices``, of stride 4, 8, 16, 32 and shape (B, C, ceil(H / stride), ceil(W / stride)).

    Args:
        arch: ``'tiny'``, ``'small'``, ``'base'``, ``'base-384'``, or a dict with

            - depths (list[int]): Blocks of each of the four stages.
            - embed_dims (int): Channels of the first stage; they double from stage to stage.
            - num_heads (list[int]): Heads of each stage.
            - attention (list, optional): One entry per stage, each ``'inline'``, ``'softmax'``,
              ``'linear'``, or a list of one name per block. Default all ``'inline'``. A dict in
              place of a name sets more: ``dict(type='inline', local=False, feature_map='relu')``,
              see :class:`InLineAttention` and :class:`LinearAttention`.
            - mlp_ratio (optional): Default 4.
            - window_size (int, optional): Side of the windows of ``'softmax'`` blocks. Default 7.
              The windows of odd blocks of a stage are shifted.
        img_size: Pre-training image size, an int or (H, W). A stage whose map was smaller than a
            window then had windows of the map's size. Default None: the preset's, 224 or 384.
        in_channels: Channels of the images.
        out_indices: Stages to return, increasing; those after the last are not built.
        qkv_bias: Whether q, k and v have a bias.
        drop_rate: Dropout probability after the patch embedding, projections and in MLPs.
        attn_drop_rate: Dropout probability of the attention weights of ``'softmax'`` blocks.
        drop_path_rate: Stochastic depth of the last block; it grows linearly from 0.
        frozen_stages: -1 freezes nothing, 0 the patch embedding, n also the first n stages.
        with_cp: Recompute blocks in the backward pass instead of keeping their activations.
        out_norm: Whether every output has a LayerNorm of its own.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` takes the authors' classification
            checkpoints as they are, or any of mmengine's initialisations.

    Raises:
        ValueError: For a setting out of range; the message names it and what is allowed.

    Example:
        >>> model = InLineSwin('tiny').eval()
        >>> [tuple(x.shape) for x in model(torch.rand(1, 3, 64, 96))]
        [(1, 96, 16, 24), (1, 192, 8, 12), (1, 384, 4, 6), (1, 768, 2, 3)]
    """

    family = 'swin'
    presets = {
        'tiny': dict(
            depths=[2, 2, 6, 2],
            embed_dims=96,
            num_heads=[3, 6, 12, 24],
            attention=['inline', 'inline', 'inline', 'softmax'],
        ),
        'small': dict(
            depths=[2, 2, 18, 2],
            embed_dims=96,
            num_heads=[3, 6, 12, 24],
            attention=['inline', 'inline', 'softmax', 'softmax'],
        ),
        'base': _BASE,
        'base-384': dict(_BASE, window_size=12),
    }
    img_sizes = {'base-384': 384}
    arch_defaults = dict(attention=['inline'] * 4, mlp_ratio=4, window_size=7)

    def make_patch_embed(self, stage: int) -> nn.Module:
        if stage:
            return PatchMerging(self.embed_dims[stage - 1])
        return PatchEmbed(self.in_channels, self.embed_dims[0], self.patch_size, self.patch_size)

    def make_attention(self, stage: int, block: int, type: str, **settings: Any) -> nn.Module:
        args = (self.embed_dims[stage], self.num_heads[stage])
        if type == 'inline':
            return InLineAttention(*args, self.qkv_bias, self.drop_rate, **settings)
        if type == 'linear':
            return LinearAttention(*args, self.qkv_bias, self.drop_rate, **settings)
        return WindowAttention(
            *args,
            window_size=min(self.number('window_size'), *self.grids[stage]),
            shift=block % 2 == 1,
            qkv_bias=self.qkv_bias,
            attn_drop=self.attn_drop_rate,
            proj_drop=self.drop_rate,
        )

    def embed(self, x: Tensor, stage: int) -> Tensor:
        return self.patch_embeds[stage](x.permute(0, 2, 3, 1) if stage else x)

    def fit_parameter(self, key: str, value: Tensor) -> Tensor | None:
        """Resize the relative position bias table of another window size."""
        if not key.endswith('.relative_position_bias_table') or value.ndim != 2:
            return None
        layer = self.get_submodule(key.rpartition('.rel_pos.')[0])
        table = layer.rel_pos.relative_position_bias_table
        side = math.isqrt(len(value))
        if side * side != len(value) or side % 2 == 0 or value.shape[1] != table.shape[1]:
            return None
        return resize_rel_pos_bias_table_simple(value, [layer.window_size] * 2, table.shape)
