"""InLine-CSwin: the CSWin transformer with InLine attention."""

from typing import Any

from mmengine.registry import MODELS
from torch import Tensor, nn

from ..layers import Block, InLineAttention, LinearAttention, PatchEmbed, StripeAttention
from .base import PyramidBackbone

__all__ = ['InLineCSwin']

_SHARED = dict(attention=['inline', 'inline', 'softmax', 'softmax'])
_BASE = dict(depths=[3, 6, 29, 2], embed_dims=96, num_heads=[4, 8, 16, 32], **_SHARED)


class CSwinBlock(Block):
    """A block whose local kernels are made from the mean token before the norm."""

    def attend(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        if isinstance(self.attn, InLineAttention):
            return self.attn(self.norm1(x), hw, mean_token=x.mean(dim=1))
        return super().attend(x, hw)


@MODELS.register_module()
class InLineCSwin(PyramidBackbone):
    """CSWin with InLine attention over the whole map in its first stages.

    Source: arXiv:2412.06590 (InLine attention), arXiv:2107.00652 (CSWin). Takes images
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
            - split_sizes (list[int], optional): Widths of the stripes of ``'softmax'`` blocks.
              Default [1, 2, 7, 7].
        img_size: Pre-training image size, an int or (H, W). A stage whose map was as large as a
            stripe was wide attends over the whole map with all heads, as the last one always
            does. Default None: the preset's, 224 or 384.
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
        >>> model = InLineCSwin('tiny').eval()
        >>> [tuple(x.shape) for x in model(torch.rand(1, 3, 64, 96))]
        [(1, 64, 16, 24), (1, 128, 8, 12), (1, 256, 4, 6), (1, 512, 2, 3)]
    """

    family = 'cswin'
    presets = {
        'tiny': dict(depths=[2, 4, 18, 1], embed_dims=64, num_heads=[2, 4, 8, 16], **_SHARED),
        'small': dict(depths=[3, 6, 29, 2], embed_dims=64, num_heads=[2, 4, 8, 16], **_SHARED),
        'base': _BASE,
        'base-384': dict(_BASE, split_sizes=[1, 2, 12, 12]),
    }
    img_sizes = {'base-384': 384}
    arch_defaults = dict(attention=['inline'] * 4, mlp_ratio=4, split_sizes=[1, 2, 7, 7])
    block_type = CSwinBlock

    def make_patch_embed(self, stage: int) -> nn.Module:
        if stage:
            return PatchEmbed(self.embed_dims[stage - 1], self.embed_dims[stage], 3, 2, padding=1)
        return PatchEmbed(self.in_channels, self.embed_dims[0], 7, self.patch_size, padding=2)

    def make_attention(self, stage: int, block: int, type: str, **settings: Any) -> nn.Module:
        args = (self.embed_dims[stage], self.num_heads[stage])
        if type == 'inline':
            return InLineAttention(*args, self.qkv_bias, self.drop_rate, lepe=True, **settings)
        if type == 'linear':
            return LinearAttention(*args, self.qkv_bias, self.drop_rate, lepe=True, **settings)
        split_size = self.per_stage('split_sizes')[stage]
        whole = stage == 3 or self.grids[stage] == (split_size, split_size)
        return StripeAttention(
            *args,
            split_size=None if whole else split_size,
            qkv_bias=self.qkv_bias,
            attn_drop=self.attn_drop_rate,
            proj_drop=self.drop_rate,
        )
