"""Patch embedding and merging by a strided convolution, for maps of any size."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.mode import is_graph_mode

__all__ = ['PatchEmbed']


class PatchEmbed(nn.Module):
    """A strided convolution and a LayerNorm, with a patch for every started stride.

    timm's and mmcv's patch embeddings pad by an amount computed from the size, which a graph of
    dynamic size carries along in every later shape; here the padding of such a graph is constant.

    Args:
        in_channels: Channels of the map.
        embed_dims: Channels C of the tokens.
        kernel_size: Side of a patch.
        stride: Step from patch to patch.
        padding: Zeros around the map.
        norm: Whether a LayerNorm follows.
    """

    def __init__(
        self,
        in_channels: int,
        embed_dims: int,
        kernel_size: int,
        stride: int,
        padding: int = 0,
        norm: bool = True,
    ) -> None:
        super().__init__()
        self.projection = nn.Conv2d(in_channels, embed_dims, kernel_size, stride, padding)
        self.norm = nn.LayerNorm(embed_dims) if norm else nn.Identity()
        self.stride = stride
        # Zeros at the right and bottom with which the convolution gives ceil(side / stride); it
        # leaves out what makes no whole patch.
        self.extra = max(kernel_size - 1 - 2 * padding, 0)

    def forward(self, x: Tensor) -> Tensor:
        """A map (B, in_channels, H, W) to (B, ceil(H / stride), ceil(W / stride), C)."""
        if self.extra and (is_graph_mode() or any(side % self.stride for side in x.shape[2:])):
            x = F.pad(x, (0, self.extra, 0, self.extra))
        return self.norm(self.projection(x).permute(0, 2, 3, 1))
