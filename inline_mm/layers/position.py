"""Learned absolute position embeddings for any map size."""

import math

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed, trunc_normal_
from torch import Tensor, nn

from ..ops.mode import is_graph_mode
from .cache import DerivedCache

__all__ = ['PositionEmbedding']


class PositionEmbedding(nn.Module):
    """A learned embedding per position of a grid, resized to the map at hand.

    Args:
        grid_size: ``(H, W)`` of the pre-training map.
        embed_dims: Channels C.
        num_prefix_tokens: Tokens before the map's, whose embeddings are not resized.
        interpolation: ``'bilinear'`` or ``'bicubic'``.
    """

    def __init__(
        self,
        grid_size: tuple[int, int],
        embed_dims: int,
        num_prefix_tokens: int = 0,
        interpolation: str = 'bilinear',
    ) -> None:
        super().__init__()
        self.grid_size = tuple(grid_size)
        self.num_prefix_tokens = num_prefix_tokens
        self.interpolation = interpolation
        num_tokens = num_prefix_tokens + grid_size[0] * grid_size[1]
        self.weight = nn.Parameter(torch.zeros(1, num_tokens, embed_dims))
        trunc_normal_(self.weight, std=0.02)
        self._cache = DerivedCache(max_entries=8)

    def extra_repr(self) -> str:
        return f'{self.grid_size}, {self.weight.shape[-1]}, interpolation={self.interpolation!r}'

    def resized(self, hw: tuple[int, int]) -> Tensor:
        """The embedding for a map of size ``hw``, (1, num_prefix_tokens + H*W, C)."""
        if is_graph_mode():
            return self._interpolated(hw)
        if tuple(hw) == self.grid_size:
            return self.weight
        return self._cache.get(
            self.weight,
            tuple(hw),
            lambda: self._resample(self.weight, self.grid_size, hw),
        )

    def fit(self, value: Tensor) -> Tensor | None:
        """An embedding of another square grid resized to this one; None if it is not one."""
        num_positions = max(value.shape[1] - self.num_prefix_tokens, 0) if value.ndim == 3 else 0
        side = math.isqrt(num_positions)
        if not side or side**2 != num_positions or value.shape[2] != self.weight.shape[2]:
            return None
        return self._resample(value, (side, side), self.grid_size)

    def _resample(self, weight: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
        return resample_abs_pos_embed(
            weight,
            new_size=list(new),
            old_size=list(old),
            num_prefix_tokens=self.num_prefix_tokens,
            interpolation=self.interpolation,
            antialias=False,
        )

    def _interpolated(self, hw: tuple[int, int]) -> Tensor:
        """As :meth:`_resample`, without a branch on the size: the same size is left as it is."""
        prefix = self.weight[:, : self.num_prefix_tokens]
        grid = self.weight[:, self.num_prefix_tokens :].unflatten(1, self.grid_size)
        grid = F.interpolate(
            grid.permute(0, 3, 1, 2).float(),
            size=hw,
            mode=self.interpolation,
            align_corners=False,
        )
        return torch.cat([prefix, grid.flatten(2).transpose(1, 2).to(prefix.dtype)], dim=1)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Add the embedding to tokens x (B, num_prefix_tokens + H*W, C)."""
        return x + self.resized(hw).to(x.dtype)
