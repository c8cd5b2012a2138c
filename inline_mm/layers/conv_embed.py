"""Overlapping patch embedding and merging of CSwin."""

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ['ConvEmbed']


class ConvEmbed(nn.Module):
    """A strided convolution whose patches overlap, and a LayerNorm.

    Args:
        in_channels: Channels of the map.
        embed_dims: Channels C of the tokens.
        kernel_size: Side of a patch.
        stride: Step from patch to patch; maps are padded at the right and bottom to a multiple.
        padding: Zeros around the map.
    """

    def __init__(
        self, in_channels: int, embed_dims: int, kernel_size: int, stride: int, padding: int
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, embed_dims, kernel_size, stride, padding)
        self.norm = nn.LayerNorm(embed_dims)

    def forward(self, x: Tensor) -> Tensor:
        """A map (B, in_channels, H, W) to (B, ceil(H / stride), ceil(W / stride), C)."""
        stride = self.conv.stride[0]
        height, width = x.shape[2:]
        x = F.pad(x, (0, -width % stride, 0, -height % stride))
        return self.norm(self.conv(x).permute(0, 2, 3, 1))
