"""Softmax attention of CSwin: cross-shaped stripes with locally enhanced positions."""

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import window_partition, window_reverse
from torch import Tensor, nn

from ..ops import softmax_attention
from ..ops.mode import is_graph_mode
from .attention import QKVAttention

__all__ = ['StripeAttention']


class StripeAttention(QKVAttention):
    """Softmax attention within stripes: half the heads in vertical ones, half in horizontal ones.

    Source: CSWin Transformer, arXiv:2107.00652. Each stripe adds a learned depthwise 3x3
    convolution of its values (LePE), which like the attention does not look beyond the stripe.
    Any map size: the last stripe is as narrow as the map leaves it.

    Args:
        embed_dims: Channels C.
        num_heads: Heads; divides ``embed_dims``, and is even unless ``split_size`` is None.
        split_size: Width of the stripes; None makes the whole map one, for all heads.
        qkv_bias: Whether q, k and v have a bias.
        attn_drop: Dropout probability of attention weights.
        proj_drop: Dropout probability of the output.

    Raises:
        ValueError: If ``num_heads`` does not divide ``embed_dims`` or cannot be halved.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        split_size: int | None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__(embed_dims, num_heads, qkv_bias, proj_drop)
        if split_size is not None and num_heads % 2:
            raise ValueError(
                'num_heads must be even where heads are halved between vertical and horizontal '
                f'stripes, got {num_heads}'
            )
        self.split_size = split_size
        self.attn_drop = attn_drop
        width = embed_dims if split_size is None else embed_dims // 2
        self.lepe = nn.Conv2d(width, width, 3, padding=1, groups=width)
        if split_size is not None:
            self.lepe_horizontal = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def extra_repr(self) -> str:
        return f'split_size={self.split_size}'

    def attend(self, qkv: Tensor, stripe: tuple[int, int], lepe: nn.Module) -> Tensor:
        """Attention within stripes of a map, plus LePE.

        Args:
            qkv: (B, H, W, 3, D), D the channels of this branch.
            stripe: ``(H, width)`` or ``(width, W)``.
            lepe: Depthwise convolution of D channels.

        Returns:
            Tensor: (B, H, W, D).
        """
        axis = 1 if stripe[0] < qkv.shape[1] else 2
        side, width = qkv.shape[axis], stripe[axis - 1]
        rest = side % width
        if rest and side > width:
            parts = qkv.split([side - rest, rest], dim=axis)
            last = tuple(rest if i == axis - 1 else length for i, length in enumerate(stripe))
            outs = [self.attend(parts[0], stripe, lepe), self.attend(parts[1], last, lepe)]
            return torch.cat(outs, dim=axis)
        return self.attend_within(qkv, stripe, lepe)

    def attend_padded(self, qkv: Tensor, axis: int, lepe: nn.Module) -> Tensor:
        """As :meth:`attend`, for a graph of any size: the last stripe is padded and masked.

        Args:
            qkv: (B, H, W, 3, D).
            axis: The dimension that is cut into stripes, 1 or 2.
            lepe: Depthwise convolution of D channels.

        Returns:
            Tensor: (B, H, W, D).
        """
        width = self.split_size
        hw = qkv.shape[1:3]
        side, length = hw[axis - 1], hw[2 - axis]
        stripes = (side + width - 1) // width
        extra = stripes * width - side
        qkv = F.pad(qkv, (0, 0, 0, 0, *((0, 0, 0, extra) if axis == 1 else (0, extra))))
        inside = torch.arange(stripes * width, device=qkv.device).reshape(stripes, width) < side
        if axis == 1:
            inside = inside.unsqueeze(2).expand(-1, -1, length)
        else:
            inside = inside.unsqueeze(1).expand(-1, length, -1)
        bias = torch.zeros_like(inside, dtype=qkv.dtype).masked_fill(~inside, float('-inf'))
        stripe = (width, length) if axis == 1 else (length, width)
        out = self.attend_within(qkv, stripe, lepe, bias.flatten(1))
        return out[:, : hw[0], : hw[1]]

    def attend_within(
        self,
        qkv: Tensor,
        stripe: tuple[int, int],
        lepe: nn.Module,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attention within whole stripes of a map, plus LePE.

        Args:
            qkv: (B, H, W, 3, D), H and W multiples of the stripe's.
            stripe: ``(height, width)``.
            lepe: Depthwise convolution of D channels.
            bias: (stripes, n), added to the scores of the n keys of each stripe.

        Returns:
            Tensor: (B, H, W, D).
        """
        batch, *hw = qkv.shape[:3]
        channels = qkv.shape[-1]
        windows = window_partition(qkv.flatten(3), stripe).unflatten(-1, (3, channels))
        heads = channels * self.num_heads // self.embed_dims
        tokens = windows.flatten(1, 2).unflatten(-1, (heads, -1))
        q, k, v = tokens.permute(2, 0, 3, 1, 4).unbind(0)
        if bias is not None:
            # Stripes join the heads of their image, so that one bias serves every image.
            bias = bias.unsqueeze(1).expand(-1, heads, -1).flatten(0, 1).unsqueeze(1).unsqueeze(0)
            q, k, v = (t.reshape(batch, -1, *t.shape[2:]) for t in (q, k, v))
        dropout = self.attn_drop if self.training else 0.0
        out = softmax_attention(q, k, v, self.scale, bias, dropout)
        out = out.reshape(-1, heads, *out.shape[2:]).transpose(1, 2)
        out = out.reshape(-1, *stripe, channels)
        out = out + lepe(windows[..., 2, :].permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return window_reverse(out, stripe, *hw)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Attend from all tokens x (B, H*W, C) of a map of size ``hw`` within their stripes."""
        qkv = self.qkv(x).reshape(x.shape[0], *hw, 3, self.embed_dims)
        if self.split_size is None:
            out = self.attend_within(qkv, hw, self.lepe)
        else:
            vertical, horizontal = qkv.chunk(2, dim=-1)
            if is_graph_mode():
                out_vertical = self.attend_padded(vertical, 2, self.lepe)
                out_horizontal = self.attend_padded(horizontal, 1, self.lepe_horizontal)
            else:
                stripe = (hw[0], min(self.split_size, hw[1]))
                out_vertical = self.attend(vertical, stripe, self.lepe)
                stripe = (min(self.split_size, hw[0]), hw[1])
                out_horizontal = self.attend(horizontal, stripe, self.lepe_horizontal)
            out = torch.cat([out_vertical, out_horizontal], dim=-1)
        return self.project(out.flatten(1, 2))
