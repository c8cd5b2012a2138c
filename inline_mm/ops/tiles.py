"""The second half of InLine attention on a CPU, in tiles of rows that stay in the cache.

Given the statistics of the whole image, a tile needs its own tokens and one row on either side.
What lies between tokens and output (v, the local part) then never exists for a whole image: memory
is spared, and with it the time of touching it for the first time.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['apply_in_tiles', 'backward_in_tiles']

#: Numbers in one tile of tokens.
TILE_NUMEL = 2**18

#: Fewest rows in a tile: two more are computed and dropped.
MIN_ROWS = 8


def row_tiles(hw: tuple[int, int], channels: int) -> list[tuple[int, int]]:
    """First and past-the-end row of each tile of a map."""
    rows = max(TILE_NUMEL // (hw[1] * channels), MIN_ROWS)
    return [(start, min(start + rows, hw[0])) for start in range(0, hw[0], rows)]


class _Values:
    """v of a tile and of the row on either side, zero outside of the map."""

    def __init__(self, x: Tensor, hw: tuple[int, int], weight: Tensor, bias: Tensor | None):
        self.hw = hw
        self.weight, self.bias = weight.t(), bias
        most = max(end - start for start, end in row_tiles(hw, x.shape[-1])) + 2
        self.scratch = x.new_empty(most, hw[1], x.shape[-1])

    def of_tile(self, rows: Tensor, start: int, end: int) -> Tensor:
        """(1, C, end - start + 2, W), channels last, valid until the next call."""
        v = self.scratch[: end - start + 2]
        first, last = max(start - 1, 0), min(end + 1, self.hw[0])
        if start == 0:
            v[0].zero_()
        if end == self.hw[0]:
            v[-1].zero_()
        inside = v[first - start + 1 : last - start + 1].flatten(0, 1)
        tokens = rows[first:last].flatten(0, 1)
        if self.bias is None:
            torch.mm(tokens, self.weight, out=inside)
        else:
            torch.addmm(self.bias, tokens, self.weight, out=inside)
        return as_image(v)


def as_image(rows: Tensor) -> Tensor:
    """Rows of a map (H, W, C) seen as a channels-last (1, C, H, W) image."""
    return rows.unsqueeze(0).permute(0, 3, 1, 2)


def as_tokens(image: Tensor) -> Tensor:
    """A channels-last (1, C, H, W) image seen as tokens (H * W, C)."""
    return image.permute(0, 2, 3, 1).reshape(-1, image.shape[1])


def tiles_of(x: Tensor, hw: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
    """Each image's number and the map that its last H * W tokens form, (H, W, C)."""
    for b, tokens in enumerate(x[:, x.shape[1] - hw[0] * hw[1] :]):
        yield b, tokens.unflatten(0, hw)


def apply_in_tiles(
    x: Tensor,
    m: Tensor,
    bias: Tensor,
    v_weight: Tensor,
    v_bias: Tensor | None,
    kernel: Tensor,
    kernel_bias: Tensor | None,
    hw: tuple[int, int],
    proj_weight: Tensor | None = None,
    proj_bias: Tensor | None = None,
) -> Tensor:
    """``x @ m + bias``, the local part for the last H * W tokens, and an output projection.

    Args:
        x: (B, N, C). All tensors have its dtype.
        m: (B, C, C).
        bias: (B, C).
        v_weight, v_bias: (C, C) and (C,) or None, as in ``torch.nn.Linear``.
        kernel: (B, C, 3, 3).
        kernel_bias: (C,) added with the local part, or None.
        hw: ``(H, W)``.
        proj_weight, proj_bias: (C, C) and (C,) of the output projection, or None for none.

    Returns:
        Tensor: (B, N, C).
    """
    out = torch.empty_like(x)
    prefix = x.shape[1] - hw[0] * hw[1]
    if prefix:
        head = torch.baddbmm(bias.unsqueeze(1), x[:, :prefix], m)
        out[:, :prefix] = head if proj_weight is None else F.linear(head, proj_weight, proj_bias)
    local_bias = bias if kernel_bias is None else bias + kernel_bias
    values = _Values(x, hw, v_weight, v_bias)
    for (b, rows), (_, out_rows) in zip(tiles_of(x, hw), tiles_of(out, hw), strict=True):
        weight = kernel[b].unsqueeze(1)
        for start, end in row_tiles(hw, x.shape[-1]):
            v = values.of_tile(rows, start, end)
            local = F.conv2d(v, weight, local_bias[b], padding=(0, 1), groups=len(weight))
            local = as_tokens(local)
            tokens = rows[start:end].flatten(0, 1)
            target = out_rows[start:end].flatten(0, 1)
            if proj_weight is None:
                torch.addmm(local, tokens, m[b], out=target)
                continue
            local.addmm_(tokens, m[b])
            if proj_bias is None:
                torch.mm(local, proj_weight.t(), out=target)
            else:
                torch.addmm(proj_bias, local, proj_weight.t(), out=target)
    return out


def backward_in_tiles(
    grad: Tensor,
    x: Tensor,
    m: Tensor,
    q: Tensor,
    row: Tensor,
    v_weight: Tensor,
    v_bias: Tensor | None,
    kernel: Tensor,
    hw: tuple[int, int],
    wide: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the backward pass does token by token.

    Args:
        grad, x: (B, N, C), of the output and the tokens. All tensors have their dtype.
        m: (B, C, C).
        q: (B, C, C), N times the gradient of the statistics for ``x``, symmetric.
        row: (B, C), the part of the gradient that all tokens of an image share.
        v_weight, v_bias: As in the forward pass.
        kernel: (B, C, 3, 3).
        hw: ``(H, W)``.
        wide: Dtype of the parameters' gradients.

    Returns:
        tuple: Gradients for ``x`` (B, N, C) and, in ``wide``, for ``v_weight`` (C, C), ``v_bias``
        (C,) and ``kernel`` (B, C, 3, 3).
    """
    channels, alpha = x.shape[-1], 1 / x.shape[1]
    m_t = m.transpose(1, 2)
    grad_x = torch.empty_like(x)
    prefix = x.shape[1] - hw[0] * hw[1]
    if prefix:
        head = torch.baddbmm(row.unsqueeze(1), grad[:, :prefix], m_t)
        grad_x[:, :prefix] = head.baddbmm_(x[:, :prefix], q, alpha=alpha)
    grad_weight = x.new_zeros((channels, channels), dtype=wide)
    grad_bias = x.new_zeros((1, channels), dtype=wide)
    grad_kernel = torch.zeros_like(kernel, dtype=wide)
    values = _Values(x, hw, v_weight, v_bias)
    border = torch.zeros_like(values.scratch)
    flipped = kernel.flip(2, 3)
    maps = zip(tiles_of(x, hw), tiles_of(grad, hw), tiles_of(grad_x, hw), strict=True)
    for (b, x_rows), (_, grad_rows), (_, target_rows) in maps:
        for start, end in row_tiles(hw, channels):
            v = values.of_tile(x_rows, start, end)
            grad_kernel[b] += _kernel_grad(as_image(grad_rows[start:end]), v, kernel[b])
            around = grad_rows[max(start - 1, 0) : end + 1]
            if len(around) < end - start + 2:  # Zero outside of the map.
                padded = border[: end - start + 2]
                padded[0 if start else 1 :][: len(around)] = around
                if start == 0:
                    padded[0] = 0
                if end == hw[0]:
                    padded[-1] = 0
                around = padded
            grad_v = F.conv2d(
                as_image(around), flipped[b].unsqueeze(1), padding=(0, 1), groups=channels
            )
            grad_v = as_tokens(grad_v)
            tokens = x_rows[start:end].flatten(0, 1)
            target = target_rows[start:end].flatten(0, 1)
            torch.addmm(row[b], grad_rows[start:end].flatten(0, 1), m_t[b], out=target)
            target.addmm_(tokens, q[b], alpha=alpha)
            target.addmm_(grad_v, v_weight)
            wide_grad_v = grad_v.to(wide)
            grad_weight.addmm_(wide_grad_v.t(), tokens.to(wide))
            grad_bias.addmm_(wide_grad_v.new_ones(1, len(grad_v)), wide_grad_v)
    return grad_x, grad_weight, grad_bias.squeeze(0), grad_kernel


def _kernel_grad(grad: Tensor, v: Tensor, kernel: Tensor) -> Tensor:
    """Gradient of one image's kernels (C, 3, 3); ``v`` has one row more on either side."""
    channels = len(kernel)
    return torch.ops.aten.convolution_backward(
        grad,
        v,
        kernel.unsqueeze(1),
        bias_sizes=None,
        stride=[1, 1],
        padding=[0, 1],
        dilation=[1, 1],
        transposed=False,
        output_padding=[0, 0],
        groups=channels,
        output_mask=[False, True, False],
    )[1].squeeze(1)
