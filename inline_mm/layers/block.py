"""The transformer block all families share."""

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from ..ops.mode import is_graph_mode
from .mlp import ChunkedMlp

__all__ = ['Block']


class Block(nn.Module):
    """Pre-norm transformer block: attention and MLP, each with a residual.

    Args:
        attn: Attention layer, called as ``attn(x, (H, W))`` with tokens x (B, N, C).
        embed_dims: Channels C.
        mlp_ratio: Hidden channels of the MLP over C.
        drop: Dropout probability in the MLP.
        drop_path: Probability of dropping a branch for an image.
        norm_eps: Of both norms.
    """

    def __init__(
        self,
        attn: nn.Module,
        embed_dims: int,
        mlp_ratio: float,
        drop: float = 0.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(embed_dims, eps=norm_eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(embed_dims, eps=norm_eps)
        self.mlp = ChunkedMlp(embed_dims, int(embed_dims * mlp_ratio), drop=drop)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def attend(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """The attention branch of tokens x (B, N, C)."""
        return self.attn(self.norm1(x), hw)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens x (B, N, C) of a map of size ``hw`` (H, W) to tokens (B, N, C)."""
        x = add_branch(x, self.drop_path(self.attend(x, hw)))
        return add_branch(x, self.drop_path(self.mlp(self.norm2(x))))


def add_branch(x: Tensor, branch: Tensor) -> Tensor:
    """``x + branch``, into the branch's own memory where neither gradient nor graph needs it."""
    if torch.is_grad_enabled() or branch.dtype != x.dtype or is_graph_mode():
        return x + branch
    return branch.add_(x)
