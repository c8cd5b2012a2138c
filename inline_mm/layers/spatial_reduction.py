"""Softmax attention of PVT: keys and values from a spatially reduced map."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import softmax_attention
from .attention import MultiHeadAttention

__all__ = ['SpatialReductionAttention']


class SpatialReductionAttention(MultiHeadAttention):
    """Softmax attention whose keys and values come from a map reduced by ``sr_ratio``.

    Source: Pyramid Vision Transformer, arXiv:2102.12122.

    Args:
        embed_dims: Channels C.
        num_heads: Heads; divides ``embed_dims``.
        qkv_bias: Whether q, k and v have a bias.
        attn_drop: Dropout probability of attention weights.
        proj_drop: Dropout probability of the output.
        sr_ratio: Side of the squares of tokens that become one key; 1 keeps all tokens.

    Raises:
        ValueError: If ``num_heads`` does not divide ``embed_dims``.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        sr_ratio: int = 1,
    ) -> None:
        super().__init__(embed_dims, num_heads, proj_drop)
        self.attn_drop = attn_drop
        self.sr_ratio = sr_ratio
        self.q = nn.Linear(embed_dims, embed_dims, bias=qkv_bias)
        self.kv = nn.Linear(embed_dims, 2 * embed_dims, bias=qkv_bias)
        if sr_ratio > 1:
            self.sr = nn.Conv2d(embed_dims, embed_dims, sr_ratio, stride=sr_ratio)
            self.norm = nn.LayerNorm(embed_dims)

    def reduce(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """The tokens that keys and values are made from."""
        if self.sr_ratio == 1:
            return x
        image = x.view(x.shape[0], *hw, -1).permute(0, 3, 1, 2)
        # Like the published models, the convolution leaves out an incomplete last row or column,
        # unless there is no other.
        missing = [max(self.sr_ratio - side, 0) for side in hw]
        if any(missing):
            image = F.pad(image, (0, missing[1], 0, missing[0]))
        return self.norm(self.sr(image).flatten(2).transpose(1, 2))

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Attend from all tokens x (B, H*W, C) of a map of size ``hw`` to the reduced map."""
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        kv = self.kv(self.reduce(x, hw)).unflatten(-1, (2, self.num_heads, -1))
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.attn_drop if self.training else 0.0
        out = softmax_attention(q, k, v, self.scale, dropout=dropout)
        return self.project(out.transpose(1, 2).flatten(2))
