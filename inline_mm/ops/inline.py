"""InLine attention on tokens, with queries and keys folded away.

For the identity feature map the global part is linear in the token (arXiv:2412.06590, rewritten).
With the covariance of the tokens ``G = Cov(x, x)``, over heads h,

    A_h = s W_k,h G W_v,h^T        M_h = W_q,h^T A_h
    o   = x M + (mean(v) + b_q A)

so neither q nor k exists, and an image costs four N x C x C products: G, v for the local part,
x M, and the output projection.

The work falls in two halves. *Gather*: :func:`gather_statistics` of the tokens, which add up over
tiles or processes (:meth:`TokenStatistics.merge`). *Apply*: :func:`fold` turns statistics into one
C x C matrix and a bias per image, :func:`apply_folded` applies them token by token, plus a
one-pixel neighbourhood for the local part.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dynamic_conv import conv_forward, conv_kernel_grad, dynamic_depthwise_conv, shifted_products
from .mode import has_autocast, is_graph_mode, is_less, without_autocast
from .tiles import apply_in_tiles, backward_in_tiles

__all__ = [
    'TokenStatistics',
    'apply_folded',
    'fold',
    'gather_statistics',
    'inline_attention_tokens',
    'token_mean',
]

#: Numbers in one chunk of tokens on a CPU: its centred fp32 copy stays in the cache.
CHUNK_NUMEL = 2**19

#: With fewer tokens than this times the channels, a C x C x C product is worth sparing.
SMALL = 4


class TokenStatistics(NamedTuple):
    """What InLine attention knows of a set of tokens, in fp32 (fp64 for fp64 tokens).

    Attributes:
        count: Number of tokens.
        mean: (B, C), mean of the tokens.
        scatter: (B, C, C), ``sum_j (x_j - mean) (x_j - mean)^T``; over ``count`` it is
            ``Cov(x, x)``.
    """

    count: int
    mean: Tensor
    scatter: Tensor

    def merge(self, other: 'TokenStatistics') -> 'TokenStatistics':
        """Statistics of the union of two disjoint sets of tokens; exact and well conditioned."""
        count = self.count + other.count
        step = other.mean - self.mean
        between = step.unsqueeze(2) * step.unsqueeze(1) * (self.count * other.count / count)
        return TokenStatistics(
            count,
            self.mean + step * (other.count / count),
            self.scatter + other.scatter + between,
        )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype statistics are kept in: fp32, or fp64 for fp64 tokens."""
    return torch.promote_types(dtype, torch.float32)


def token_mean(x: Tensor) -> Tensor:
    """Mean of tokens x (B, N, C), (B, C) in the statistics' dtype; differentiable."""
    wide = wide_dtype(x.dtype)
    if is_graph_mode() or x.device.type != 'cpu' or x.dtype != wide:
        return x.mean(dim=1, dtype=wide)
    return _TokenMean.apply(x) if torch.is_grad_enabled() else _mean(x)


class _TokenMean(torch.autograd.Function):
    """The mean as a product with ones: a CPU multiplies matrices faster than it sums columns."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return _mean(x)

    @staticmethod
    def backward(ctx, grad):
        return (grad / ctx.shape[1]).unsqueeze(1).expand(ctx.shape)


def _mean(x: Tensor) -> Tensor:
    weight = x.new_full((1, 1, x.shape[1]), 1 / x.shape[1])
    return torch.bmm(weight.expand(x.shape[0], -1, -1), x).squeeze(1)


def token_sum(x: Tensor) -> Tensor:
    """Sum of tokens x (..., N, C) in the statistics' dtype."""
    wide = wide_dtype(x.dtype)
    if x.device.type != 'cpu' or x.dtype != wide:
        return x.sum(dim=-2, dtype=wide)
    return (x.new_ones(1, x.shape[-2]) @ x).squeeze(-2)


def gather_statistics(x: Tensor, mean: Tensor | None = None) -> TokenStatistics:
    """Statistics of tokens x (B, N, C); the first half of the operator.

    Tokens are centred before they are multiplied, so that a mean far above the deviation costs no
    digits, and sums are kept in fp32 (fp64 for fp64 tokens).

    Args:
        x: (B, N, C).
        mean: ``token_mean(x)``, where it is at hand.
    """
    wide = wide_dtype(x.dtype)
    batch, num_tokens, channels = x.shape
    chunk = max(CHUNK_NUMEL // channels, 1)
    mean = token_mean(x) if mean is None else mean
    if is_graph_mode() or x.device.type != 'cpu' or batch * num_tokens <= chunk:
        centred = x.to(wide) - mean.unsqueeze(1)
        return TokenStatistics(num_tokens, mean, centred.transpose(1, 2) @ centred)
    # In chunks, so that centred tokens are multiplied while they are in the cache.
    scatter = x.new_zeros((batch, channels, channels), dtype=wide)
    scratch = x.new_empty((min(chunk, num_tokens), channels), dtype=wide)
    for b in range(batch):
        for part in x[b].split(chunk):
            centred = torch.sub(part, mean[b], out=scratch[: len(part)])
            scatter[b].addmm_(centred.t(), centred)
    return TokenStatistics(num_tokens, mean, scatter)


def token_product(a: Tensor, b: Tensor) -> Tensor:
    """``sum_j a_j b_j^T`` over tokens, (..., N, C) each, accumulated in the statistics' dtype."""
    wide = wide_dtype(a.dtype)
    if a.dtype == wide:
        return a.transpose(-2, -1) @ b
    chunk = max(CHUNK_NUMEL // a.shape[-1], 1)
    parts = zip(a.split(chunk, dim=-2), b.split(chunk, dim=-2), strict=True)
    return sum(p.to(wide).transpose(-2, -1) @ q.to(wide) for p, q in parts)


def fold(
    statistics: TokenStatistics,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    num_heads: int,
) -> tuple[Tensor, Tensor]:
    """Fold the projections and the covariance into one matrix and bias per image.

    Args:
        statistics: Of all tokens of each image.
        qkv_weight: (3 C, C), as in ``torch.nn.Linear``.
        qkv_bias: (3 C,) or None.
        num_heads: Heads; ``head_dim ** -0.5`` is the scale.

    Returns:
        tuple: ``m`` (B, C, C) and ``bias`` (B, C), with ``o = x @ m + bias``, in the dtype of the
        statistics.
    """
    count, mean, scatter = statistics
    w_v = qkv_weight[2 * mean.shape[1] :].to(scatter.dtype)
    # One product for both: small ones take longer to start than to run.
    cov, v_mean = (torch.cat([scatter, mean.unsqueeze(1)], 1) @ w_v.t()).tensor_split((-1,), 1)
    return _fold_covariance(count, cov, v_mean.squeeze(1), qkv_weight, qkv_bias, num_heads)


def _fold_covariance(count, cov, v_mean, qkv_weight, qkv_bias, num_heads):
    """:func:`fold` from ``count * Cov(x, v)`` (B, C, C) and ``mean(v)`` (B, C) without its bias."""
    batch, channels = v_mean.shape
    head_dim = channels // num_heads
    wide = cov.dtype
    w_q, w_k, _ = qkv_weight.to(wide).view(3, num_heads, head_dim, channels).unbind(0)
    cov = cov.unflatten(2, (num_heads, head_dim)).transpose(1, 2)
    a = (w_k * (head_dim**-0.5 / count)) @ cov
    w_q = w_q.transpose(1, 2)
    if qkv_bias is None:
        return (w_q @ a).transpose(1, 2).reshape(batch, channels, channels), v_mean
    b_q, _, b_v = qkv_bias.to(wide).view(3, channels).unbind(0)
    rows = torch.cat([w_q, b_q.view(num_heads, 1, head_dim)], 1) @ a
    m, bias = rows.transpose(1, 2).flatten(2).tensor_split((-1,), 1)
    return m, bias.squeeze(1) + v_mean + b_v


def apply_folded(
    x: Tensor,
    x_mean: Tensor,
    m: Tensor,
    bias: Tensor,
    v: Tensor | None = None,
    kernel: Tensor | None = None,
    kernel_bias: Tensor | None = None,
    hw: tuple[int, int] | None = None,
) -> Tensor:
    """``x @ m + bias`` and, given a kernel, the local part; the second half of the operator.

    Args:
        x: (B, N, C).
        x_mean, bias: (B, C), in the dtype of the statistics.
        m: (B, C, C), in the dtype of the statistics.
        v: Values of the last H * W tokens, (B, H * W, C) in the dtype of ``x``; required with a
            kernel.
        kernel: (B, C, 3, 3) for those tokens, or None.
        kernel_bias: (C,) added to those tokens, or None.
        hw: ``(H, W)``; required with a kernel.

    Returns:
        Tensor: (B, N, C) in the dtype of ``x``.
    """
    m, bias = _rounded(m, bias, x_mean, x.dtype)
    if kernel is None:
        return torch.baddbmm(bias.unsqueeze(1), x, m)
    prefix = x.shape[1] - hw[0] * hw[1]
    kernel = kernel.to(x.dtype)
    local_bias = bias if kernel_bias is None else bias + kernel_bias.to(x.dtype)
    if is_graph_mode():
        out = x @ m
        local = shifted_products(v, kernel, hw, local_bias)
        if not prefix:
            return out + local
        head = out[:, :prefix] + bias.unsqueeze(1)
        return torch.cat([head, out[:, prefix:] + local], dim=1)
    local = dynamic_depthwise_conv(v, kernel, hw, local_bias)
    if prefix:
        local = torch.cat([bias.unsqueeze(1).expand(-1, prefix, -1), local], dim=1)
    if torch.is_grad_enabled():
        return torch.baddbmm(local, x, m)
    # The convolution's result is ours alone: accumulate into it, one pass less.
    return local.baddbmm_(x, m)


def inline_attention_tokens(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    num_heads: int,
    kernel: Tensor | None = None,
    kernel_bias: Tensor | None = None,
    hw: tuple[int, int] | None = None,
    mean: Tensor | None = None,
    proj_weight: Tensor | None = None,
    proj_bias: Tensor | None = None,
) -> Tensor:
    """InLine attention of tokens, with the output projection if its weight is given.

    Linear in N in time and memory. Tokens may be fp64, fp32, bf16 or fp16; statistics and the
    folding run in fp32 (fp64 for fp64). Autocast applies as it does to a linear layer. In eager
    mode only ``x`` is saved for the backward pass, but where tokens are few for their channels.

    Args:
        x: Tokens, (B, N, C).
        qkv_weight: (3 C, C), rows for q, k and v, heads in order, as in ``torch.nn.Linear``.
        qkv_bias: (3 C,) or None.
        num_heads: Number of heads; divides C.
        kernel: (B, C, 3, 3), the local part's kernels, or None for none.
        kernel_bias: (C,), added after the local part, or None.
        hw: ``(H, W)`` of the map that the last H * W tokens form; required with a kernel.
        mean: ``token_mean(x)`` where it is at hand; its gradient is part of that of ``x``.
        proj_weight, proj_bias: (C, C) and (C,) of the output projection, as in
            ``torch.nn.Linear``; None leaves it to the caller.

    Returns:
        Tensor: (B, N, C); the autocast dtype where autocast is on, else the dtype of ``x``.
    """
    device = x.device.type
    if has_autocast(device) and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    args = (x, qkv_weight, qkv_bias, num_heads, kernel, kernel_bias, hw)
    with without_autocast(device):
        if is_less(x.shape[1], SMALL * x.shape[2]):
            out = _crossed(*args, None if mean is None else mean.to(wide_dtype(x.dtype)))
        elif is_graph_mode():
            out = _folded(*args)[0]
        else:
            mean = None if mean is None else mean.detach().to(wide_dtype(x.dtype))
            inputs = (x, qkv_weight, qkv_bias, kernel, kernel_bias)
            if not torch.is_grad_enabled() or not any(
                t is not None and t.requires_grad for t in inputs
            ):
                return _folded(*args, mean, proj_weight, proj_bias)[0]
            out = _InLineAttention.apply(*args, mean)
    return out if proj_weight is None else F.linear(out, proj_weight, proj_bias)


def _crossed(
    x,
    qkv_weight,
    qkv_bias,
    num_heads,
    kernel,
    kernel_bias,
    hw,
    mean=None,
):
    """From ``Cov(x, v)`` with v in full: fewer operations where tokens are few for their channels.

    Differentiable, and holds in graphs.
    """
    wide = wide_dtype(x.dtype)
    num_tokens = x.shape[1]
    mean = token_mean(x) if mean is None else mean
    weight, bias = _value_projection(qkv_weight, qkv_bias)
    v = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    cov = (x.to(wide) - mean.unsqueeze(1)).transpose(1, 2) @ v.to(wide)
    v_mean = mean @ weight.to(wide).t()
    m, bias = _fold_covariance(num_tokens, cov, v_mean, qkv_weight, qkv_bias, num_heads)
    if kernel is not None:
        v = v[:, num_tokens - hw[0] * hw[1] :]
    return apply_folded(x, mean, m, bias, v, kernel, kernel_bias, hw)


def _folded(
    x,
    qkv_weight,
    qkv_bias,
    num_heads,
    kernel,
    kernel_bias,
    hw,
    mean=None,
    proj_weight=None,
    proj_bias=None,
):
    """Both halves; the output, projected if there is a weight, and the statistics."""
    x = x.contiguous()
    statistics = gather_statistics(x, mean)
    m, bias = fold(statistics, qkv_weight, qkv_bias, num_heads)
    if kernel is not None and runs_in_tiles(x):
        m, bias = _rounded(m, bias, statistics.mean, x.dtype)
        tensors = (*_value_projection(qkv_weight, qkv_bias), kernel, kernel_bias)
        proj = (proj_weight, proj_bias)
        tensors, proj = (
            [None if t is None else t.to(x.dtype) for t in ts] for ts in (tensors, proj)
        )
        return apply_in_tiles(x, m, bias, *tensors, hw, *proj), statistics
    v = None if kernel is None else _values(x, qkv_weight, qkv_bias, hw)
    out = apply_folded(x, statistics.mean, m, bias, v, kernel, kernel_bias, hw)
    if proj_weight is not None:
        out = F.linear(
            out, proj_weight.to(x.dtype), None if proj_bias is None else proj_bias.to(x.dtype)
        )
    return out, statistics


def runs_in_tiles(x: Tensor) -> bool:
    """Whether the second half goes through the map in tiles, or through the batch at once."""
    return x.device.type == 'cpu' and not is_graph_mode()


def _rounded(m: Tensor, bias: Tensor, mean: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Matrix and bias in the dtype of the tokens."""
    m_rounded = m.to(dtype)
    if dtype != m.dtype:
        # Rounding the matrix must not be multiplied by the mean of the tokens.
        error = m - m_rounded.to(m.dtype)
        bias = bias + (mean.unsqueeze(1) @ error).squeeze(1)
    return m_rounded, bias.to(dtype)


def _value_projection(qkv_weight: Tensor, qkv_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    channels = qkv_weight.shape[1]
    return qkv_weight[2 * channels :], None if qkv_bias is None else qkv_bias[2 * channels :]


def _values(x: Tensor, qkv_weight: Tensor, qkv_bias: Tensor | None, hw: tuple[int, int]) -> Tensor:
    """v of the tokens that form the map."""
    weight, bias = _value_projection(qkv_weight, qkv_bias)
    tokens = x[:, x.shape[1] - hw[0] * hw[1] :]
    return F.linear(tokens, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class _InLineAttention(torch.autograd.Function):
    """The folded form with a backward pass of six token-sized products, saving nothing but x."""

    @staticmethod
    def forward(ctx, x, qkv_weight, qkv_bias, num_heads, kernel, kernel_bias, hw, mean):
        x = x.contiguous()
        out, statistics = _folded(x, qkv_weight, qkv_bias, num_heads, kernel, kernel_bias, hw, mean)
        ctx.save_for_backward(x, qkv_weight, qkv_bias, kernel, kernel_bias, *statistics[1:])
        ctx.num_heads, ctx.hw = num_heads, hw
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, qkv_weight, qkv_bias, kernel, kernel_bias, mean, scatter = ctx.saved_tensors
        num_tokens, channels = x.shape[1:]
        dtype, wide = x.dtype, scatter.dtype
        grad = grad.contiguous()
        grad_sum = token_sum(grad)

        # The folding is C x C work: autograd differentiates it.
        with torch.enable_grad():
            leaves = [
                None if t is None else t.detach().requires_grad_()
                for t in (mean, scatter, qkv_weight, qkv_bias)
            ]
            statistics = TokenStatistics(num_tokens, *leaves[:2])
            m, bias = fold(statistics, *leaves[2:], ctx.num_heads)
            grad_mean, grad_scatter, *grad_params = torch.autograd.grad(
                (m, bias),
                [leaf for leaf in leaves if leaf is not None],
                (token_product(x, grad), grad_sum),
            )
        grad_weight = grad_params[0]
        grad_bias = grad_params[1] if qkv_bias is not None else None

        # Gradients of the scatter are of the order of 1 / N: times N they suit fp16.
        q = (grad_scatter + grad_scatter.transpose(1, 2)).mul_(num_tokens).to(dtype)
        row = (grad_mean - (mean.unsqueeze(1) @ q.to(wide)).squeeze(1)) / num_tokens
        row, m = row.to(dtype), m.detach().to(dtype)
        grad_kernel = grad_kernel_bias = None
        if kernel is None:
            grad_x = torch.baddbmm(row.unsqueeze(1), grad, m.transpose(1, 2))
            grad_x.baddbmm_(x, q, alpha=1 / num_tokens)
            return grad_x, grad_weight, grad_bias, *[None] * 5

        prefix = num_tokens - ctx.hw[0] * ctx.hw[1]
        if kernel_bias is not None:
            patch_sum = grad_sum - token_sum(grad[:, :prefix])
            grad_kernel_bias = patch_sum.sum(0).to(kernel_bias.dtype)
        w_v, b_v = (
            None if t is None else t.to(dtype) for t in _value_projection(qkv_weight, qkv_bias)
        )
        backward = backward_in_tiles if runs_in_tiles(x) else _backward_at_once
        grad_x, grad_w_v, grad_b_v, grad_kernel = backward(
            grad, x, m, q, row, w_v, b_v, kernel.to(dtype), ctx.hw, wide
        )
        grad_weight[2 * channels :] += grad_w_v
        if grad_bias is not None:
            grad_bias[2 * channels :] += grad_b_v
        grad_kernel = grad_kernel.to(kernel.dtype)
        return grad_x, grad_weight, grad_bias, None, grad_kernel, grad_kernel_bias, None, None


def _backward_at_once(grad, x, m, q, row, w_v, b_v, kernel, hw, wide):
    """:func:`backward_in_tiles` for the whole batch, where a device would rather have that."""
    prefix = x.shape[1] - hw[0] * hw[1]
    patch_grad, patches = grad[:, prefix:], x[:, prefix:]
    grad_kernel = conv_kernel_grad(patch_grad, F.linear(patches, w_v, b_v), kernel, hw)
    grad_x = torch.baddbmm(row.unsqueeze(1), grad, m.transpose(1, 2))
    grad_x.baddbmm_(x, q, alpha=1 / x.shape[1])
    grad_v = conv_forward(patch_grad, kernel.flip(2, 3), hw, None)
    grad_x[:, prefix:].baddbmm_(grad_v, w_v.expand(len(x), -1, -1))
    grad_v, patches = grad_v.flatten(0, 1), patches.flatten(0, 1)
    return grad_x, token_product(grad_v, patches), token_sum(grad_v), grad_kernel
