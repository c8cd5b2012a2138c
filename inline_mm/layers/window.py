"""Softmax attention of Swin: shifted windows with a relative position bias."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from timm.layers import RelPosBias
from timm.models.swin_transformer import window_partition, window_reverse
from torch import Tensor

from ..ops import softmax_attention
from ..ops.mode import is_graph_mode, is_less
from .attention import QKVAttention
from .cache import DerivedCache

__all__ = ['WindowAttention']


@lru_cache(maxsize=32)
def shift_mask(hw: tuple[int, int], window_size: int, device: torch.device) -> Tensor:
    """What keeps apart, in a shifted window, tokens that are no neighbours in the map.

    Args:
        hw: ``(H, W)`` of the padded map, multiples of ``window_size``.
        window_size: Side of the windows, shifted by half of it.
        device: Where the mask is wanted.

    Returns:
        Tensor: (num_windows, n, n) with n = window_size ** 2, fp32: 0 between tokens of one
        region, -100 between others, which softmax takes to 0 in every dtype.
    """
    # A mask made at inference may serve training later, so it must not be an inference tensor.
    with torch.inference_mode(False), torch.no_grad():
        # Before the last window, in its first half, in its second.
        rows, columns = (
            (place >= side - window_size).long() + (place >= side - window_size // 2).long()
            for side, place in ((side, torch.arange(side, device=device)) for side in hw)
        )
        regions = (3 * rows.unsqueeze(1) + columns).view(1, *hw, 1)
        regions = window_partition(regions, (window_size, window_size)).flatten(1)
        apart = regions.unsqueeze(1) != regions.unsqueeze(2)
        return apart.float() * -100


class WindowAttention(QKVAttention):
    """Softmax attention within windows of the map, shifted by half a window or not.

    Source: Swin Transformer, arXiv:2103.14030. Any map size: like mmdet's and timm's, the layer
    pads the map with zeros at the right and bottom to whole windows.

    Args:
        embed_dims: Channels C.
        num_heads: Heads; divides ``embed_dims``.
        window_size: Side of the windows.
        shift: Whether windows are shifted by half of their side. There is no shift where the
            whole map is one window.
        qkv_bias: Whether q, k and v have a bias.
        attn_drop: Dropout probability of attention weights.
        proj_drop: Dropout probability of the output.

    Raises:
        ValueError: If ``num_heads`` does not divide ``embed_dims``.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        window_size: int,
        shift: bool = False,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__(embed_dims, num_heads, qkv_bias, proj_drop)
        self.window_size = window_size
        self.shift = window_size // 2 if shift else 0
        self.attn_drop = attn_drop
        self.rel_pos = RelPosBias((window_size, window_size), num_heads)
        self._bias_cache = DerivedCache(max_entries=1)

    def extra_repr(self) -> str:
        return f'window_size={self.window_size}, shift={self.shift}'

    def position_bias(self) -> Tensor:
        """(1, heads, n, n), what relative positions add to the scores."""
        table = self.rel_pos.relative_position_bias_table
        return self._bias_cache.get(table, None, self.rel_pos.get_bias)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Attend from all tokens x (B, H*W, C) of a map of size ``hw`` within their windows."""
        batch, num_tokens, channels = x.shape
        window = (self.window_size, self.window_size)
        padded = tuple(
            (side + self.window_size - 1) // self.window_size * self.window_size for side in hw
        )
        padding = (padded[0] - hw[0], padded[1] - hw[1])
        # A graph of open size is one for maps larger than a window.
        shift = 0 if all(is_less(side, self.window_size + 1) for side in hw) else self.shift

        x = F.pad(x.reshape(batch, *hw, channels), (0, 0, 0, padding[1], 0, padding[0]))
        if shift:
            x = x.roll((-shift, -shift), (1, 2))
        q, k, v = self.split_heads(window_partition(x, window).flatten(1, 2))
        bias = self.position_bias()
        if shift:
            make_mask = shift_mask.__wrapped__ if is_graph_mode() else shift_mask
            mask = make_mask(padded, self.window_size, x.device)
            # Windows join the heads of their image, so that one mask serves every image.
            bias = (bias + mask.unsqueeze(1)).flatten(0, 1).unsqueeze(0)
            q, k, v = (t.reshape(batch, -1, *t.shape[2:]) for t in (q, k, v))
        dropout = self.attn_drop if self.training else 0.0
        out = softmax_attention(q, k, v, self.scale, bias, dropout)
        out = out.reshape(-1, self.num_heads, *out.shape[2:])

        out = window_reverse(out.transpose(1, 2).reshape(-1, *window, channels), window, *padded)
        if shift:
            out = out.roll((shift, shift), (1, 2))
        out = out[:, : hw[0], : hw[1]].reshape(batch, num_tokens, channels)
        return self.project(out)
