"""InLine attention on tokens, with queries and keys folded away.

For the identity feature map the global part is linear in the token (arXiv:2412.06590, rewritten):
with ``S = Cov(x, v)``, ``A_h = s W_k,h S[:, h]`` and ``M_h = W_q,h^T A_h``, over heads h,

    o = x M + (mean(v) + b_q A)

so neither q nor k exists, and an image costs four N x C x C products with the output projection.

The work falls in two halves. *Gather*: :func:`project_and_gather` forms v and the statistics of the
tokens, which add up over tiles or processes (:meth:`TokenStatistics.merge`). *Apply*:
:func:`fold` turns statistics into one C x C matrix and a bias per image, :func:`apply_folded`
applies them token by token, plus a one-pixel neighbourhood for the local part.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dynamic_conv import conv_forward, conv_kernel_grad, shifted_products
from .mode import is_graph_mode

__all__ = [
    'TokenStatistics',
    'apply_folded',
    'fold',
    'inline_attention_tokens',
    'project_and_gather',
]

#: Numbers in one chunk of tokens on a CPU: its centred fp32 copy stays in the cache.
CHUNK_NUMEL = 2**19


class TokenStatistics(NamedTuple):
    """What InLine attention knows of a set of tokens, in fp32 (fp64 for fp64 tokens).

    Attributes:
        count: Number of tokens.
        x_mean: (B, C), mean of the tokens.
        v_mean: (B, C), mean of their values.
        comoment: (B, C, C), ``sum_j (x_j - x_mean) (v_j - v_mean)^T``; over ``count`` it is
            ``Cov(x, v)``.
    """

    count: int
    x_mean: Tensor
    v_mean: Tensor
    comoment: Tensor

    def merge(self, other: 'TokenStatistics') -> 'TokenStatistics':
        """Statistics of the union of two disjoint sets of tokens; exact and well conditioned."""
        count = self.count + other.count
        x_step = other.x_mean - self.x_mean
        v_step = other.v_mean - self.v_mean
        weight = self.count * (other.count / count)
        between = x_step.unsqueeze(2) * v_step.unsqueeze(1)
        return TokenStatistics(
            count,
            self.x_mean + x_step * (other.count / count),
            self.v_mean + v_step * (other.count / count),
            self.comoment + other.comoment + between * weight,
        )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype statistics are kept in: fp32, or fp64 for fp64 tokens."""
    return torch.promote_types(dtype, torch.float32)


def project_and_gather(
    x: Tensor, v_weight: Tensor, v_bias: Tensor | None
) -> tuple[Tensor, TokenStatistics]:
    """Values of the tokens and the statistics of both; the first half of the operator.

    Args:
        x: (B, N, C).
        v_weight: (C, C), as in ``torch.nn.Linear``, any float dtype.
        v_bias: (C,) or None.

    Returns:
        tuple: ``v`` (B, N, C) in the dtype of ``x``, and the :class:`TokenStatistics`.
    """
    wide = wide_dtype(x.dtype)
    num_tokens, channels = x.shape[1:]
    weight = v_weight.to(x.dtype)
    bias = None if v_bias is None else v_bias.to(x.dtype)
    chunk = max(CHUNK_NUMEL // channels, 1)
    if is_graph_mode() or x.device.type != 'cpu' or x.shape[0] * num_tokens <= chunk:
        # Centring one side is enough: it also takes the mean of the other out of the product.
        x_mean = x.mean(dim=1, dtype=wide)
        v = F.linear(x, weight, bias)
        comoment = (x.to(wide) - x_mean.unsqueeze(1)).transpose(1, 2) @ v.to(wide)
    else:
        v, x_mean, comoment = _gather_in_chunks(x, weight, bias, chunk)
    v_mean = F.linear(x_mean, v_weight.to(wide), None if v_bias is None else v_bias.to(wide))
    return v, TokenStatistics(num_tokens, x_mean, v_mean, comoment)


def token_product(a: Tensor, b: Tensor) -> Tensor:
    """``sum_j a_j b_j^T`` over tokens, (..., N, C) each, accumulated in the statistics' dtype."""
    wide = wide_dtype(a.dtype)
    if a.dtype == wide:
        return a.transpose(-2, -1) @ b
    chunk = max(CHUNK_NUMEL // a.shape[-1], 1)
    parts = zip(a.split(chunk, dim=-2), b.split(chunk, dim=-2), strict=True)
    return sum(p.to(wide).transpose(-2, -1) @ q.to(wide) for p, q in parts)


def _gather_in_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over memory: each chunk is centred on its own mean while it is in the cache."""
    batch, num_tokens, channels = x.shape
    wide = wide_dtype(x.dtype)
    v = torch.empty_like(x)
    comoment = x.new_zeros((batch, channels, channels), dtype=wide)
    sizes = [len(part) for part in x[0].split(chunk)]
    means = x.new_empty((batch, len(sizes), channels), dtype=wide)
    scratch = x.new_empty((max(sizes), channels), dtype=wide)
    for b in range(batch):
        parts = zip(x[b].split(chunk), v[b].split(chunk), means[b], strict=True)
        for x_part, v_part, mean in parts:
            torch.mean(x_part, dim=0, dtype=wide, out=mean)
            centred = torch.sub(x_part, mean, out=scratch[: len(x_part)])
            if bias is None:
                torch.mm(x_part, weight.t(), out=v_part)
            else:
                torch.addmm(bias, x_part, weight.t(), out=v_part)
            comoment[b].addmm_(centred.t(), v_part.to(wide))
    # The chunks' means spread around the mean of all: the between-chunk part of the comoment.
    counts = means.new_tensor(sizes).unsqueeze(1)
    x_mean = (means * (counts / num_tokens)).sum(dim=1)
    if len(sizes) > 1:
        spread = means - x_mean.unsqueeze(1)
        comoment.baddbmm_((spread * counts).transpose(1, 2), spread @ weight.t().to(wide))
    return v, x_mean, comoment


def fold(
    statistics: TokenStatistics,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    num_heads: int,
) -> tuple[Tensor, Tensor]:
    """Fold query and key projections and the covariance into one matrix and bias per image.

    Args:
        statistics: Of all tokens of each image.
        qkv_weight: (3 C, C), as in ``torch.nn.Linear``.
        qkv_bias: (3 C,) or None.
        num_heads: Heads; ``head_dim ** -0.5`` is the scale.

    Returns:
        tuple: ``m`` (B, C, C) and ``bias`` (B, C), with ``o = x @ m + bias``, in the dtype of the
        statistics.
    """
    count, _, v_mean, comoment = statistics
    batch, channels = v_mean.shape
    head_dim = channels // num_heads
    wide = comoment.dtype
    w_q, w_k = qkv_weight[: 2 * channels].to(wide).view(2, num_heads, head_dim, channels)
    cov = comoment.view(batch, channels, num_heads, head_dim).transpose(1, 2)
    a = (w_k * (head_dim**-0.5 / count)) @ cov
    m = (w_q.transpose(1, 2) @ a).transpose(1, 2).reshape(batch, channels, channels)
    if qkv_bias is None:
        return m, v_mean
    b_q = qkv_bias[:channels].to(wide).view(num_heads, 1, head_dim)
    return m, v_mean + (b_q @ a).reshape(batch, channels)


def apply_folded(
    x: Tensor,
    v: Tensor,
    x_mean: Tensor,
    m: Tensor,
    bias: Tensor,
    kernel: Tensor | None = None,
    kernel_bias: Tensor | None = None,
    hw: tuple[int, int] | None = None,
) -> Tensor:
    """``x @ m + bias`` and, given a kernel, the local part; the second half of the operator.

    Args:
        x, v: (B, N, C), tokens and values of one dtype.
        x_mean, bias: (B, C), in the dtype of the statistics.
        m: (B, C, C), in the dtype of the statistics.
        kernel: (B, C, 3, 3) for the last H * W tokens, or None.
        kernel_bias: (C,) added to those tokens, or None.
        hw: ``(H, W)``; required with a kernel.

    Returns:
        Tensor: (B, N, C) in the dtype of ``x``.
    """
    dtype = x.dtype
    m_rounded = m.to(dtype)
    if dtype != m.dtype:
        # Rounding the matrix must not be multiplied by the mean of the tokens.
        error = m - m_rounded.to(m.dtype)
        bias = bias + (x_mean.unsqueeze(1) @ error).squeeze(1)
    if kernel is None:
        return torch.baddbmm(bias.to(dtype).unsqueeze(1), x, m_rounded)
    prefix = x.shape[1] - hw[0] * hw[1]
    kernel = kernel.to(dtype)
    local_bias = bias if kernel_bias is None else bias + kernel_bias.to(bias.dtype)
    if is_graph_mode():
        out = x @ m_rounded
        local = shifted_products(v[:, prefix:], kernel, hw, local_bias.to(dtype))
        if not prefix:
            return out + local
        head = out[:, :prefix] + bias.to(dtype).unsqueeze(1)
        return torch.cat([head, out[:, prefix:] + local], dim=1)
    local = conv_forward(v[:, prefix:], kernel, hw, local_bias.to(dtype))
    if prefix:
        head = bias.to(dtype).unsqueeze(1).expand(-1, prefix, -1)
        local = torch.cat([head, local], dim=1)
    # The convolution's result is ours alone: accumulate into it, one pass less.
    return local.baddbmm_(x, m_rounded)


def inline_attention_tokens(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    num_heads: int,
    kernel: Tensor | None = None,
    kernel_bias: Tensor | None = None,
    hw: tuple[int, int] | None = None,
) -> Tensor:
    """InLine attention of tokens up to, not including, the output projection.

    Linear in N in time and memory. Tokens may be fp64, fp32, bf16 or fp16; statistics and the
    folding run in fp32 (fp64 for fp64). Autocast applies as it does to a linear layer. In eager
    mode only ``x`` and ``v`` are saved for the backward pass.

    Args:
        x: Tokens, (B, N, C).
        qkv_weight: (3 C, C), rows for q, k and v, heads in order, as in ``torch.nn.Linear``.
        qkv_bias: (3 C,) or None.
        num_heads: Number of heads; divides C.
        kernel: (B, C, 3, 3), the local part's kernels, or None for none.
        kernel_bias: (C,), added after the local part, or None.
        hw: ``(H, W)`` of the map that the last H * W tokens form; required with a kernel.

    Returns:
        Tensor: (B, N, C); the autocast dtype where autocast is on, else the dtype of ``x``.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        if not is_graph_mode():
            return _InLineAttention.apply(
                x, qkv_weight, qkv_bias, num_heads, kernel, kernel_bias, hw
            )
        channels = x.shape[-1]
        v_bias = None if qkv_bias is None else qkv_bias[2 * channels :]
        v, statistics = project_and_gather(x, qkv_weight[2 * channels :], v_bias)
        m, bias = fold(statistics, qkv_weight, qkv_bias, num_heads)
        return apply_folded(x, v, statistics.x_mean, m, bias, kernel, kernel_bias, hw)


class _InLineAttention(torch.autograd.Function):
    """The operator with a backward pass of six token-sized products, saving x and v."""

    @staticmethod
    def forward(ctx, x, qkv_weight, qkv_bias, num_heads, kernel, kernel_bias, hw):
        channels = x.shape[-1]
        x = x.contiguous()
        v_bias = None if qkv_bias is None else qkv_bias[2 * channels :]
        v, statistics = project_and_gather(x, qkv_weight[2 * channels :], v_bias)
        m, bias = fold(statistics, qkv_weight, qkv_bias, num_heads)
        out = apply_folded(x, v, statistics.x_mean, m, bias, kernel, kernel_bias, hw)
        ctx.save_for_backward(x, v, qkv_weight, qkv_bias, kernel, kernel_bias, *statistics[1:])
        ctx.num_heads, ctx.hw = num_heads, hw
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, v, qkv_weight, qkv_bias, kernel, kernel_bias, x_mean, v_mean, comoment = (
            ctx.saved_tensors
        )
        num_tokens, channels = x.shape[1:]
        dtype, wide = x.dtype, comoment.dtype
        grad = grad.contiguous()
        grad_sum = grad.sum(dim=1, dtype=wide)

        # The folding is C x C work: autograd differentiates it.
        with torch.enable_grad():
            leaves = [
                None if t is None else t.detach().requires_grad_()
                for t in (v_mean, comoment, qkv_weight, qkv_bias)
            ]
            statistics = TokenStatistics(num_tokens, x_mean, *leaves[:2])
            m, bias = fold(statistics, *leaves[2:], ctx.num_heads)
            grads = torch.autograd.grad(
                (m, bias),
                [leaf for leaf in leaves if leaf is not None],
                (token_product(x, grad), grad_sum),
            )
        grad_v_mean, grad_comoment, grad_weight = grads[:3]
        grad_bias = grads[3] if qkv_bias is not None else None

        # v reaches the output through its mean, the comoment and the convolution.
        # Its gradients are of the order of 1 / N: scaled by N they stay within fp16's range.
        s, alpha = (grad_comoment * num_tokens).to(dtype), 1 / num_tokens
        constant = grad_v_mean - (x_mean.unsqueeze(1) @ s.to(wide)).squeeze(1)
        constant = (constant * alpha).to(dtype)
        grad_kernel = grad_kernel_bias = None
        if kernel is None:
            grad_v = torch.baddbmm(constant.unsqueeze(1), x, s, alpha=alpha)
        else:
            prefix = num_tokens - ctx.hw[0] * ctx.hw[1]
            patch_grad = grad[:, prefix:]
            flipped = kernel.to(dtype).flip(2, 3)
            grad_v = conv_forward(patch_grad, flipped, ctx.hw, constant)
            if prefix:
                head = constant.unsqueeze(1).expand(-1, prefix, -1)
                grad_v = torch.cat([head, grad_v], dim=1)
            grad_v.baddbmm_(x, s, alpha=alpha)
            if ctx.needs_input_grad[4]:
                grad_kernel = conv_kernel_grad(patch_grad, v[:, prefix:], kernel, ctx.hw)
            if kernel_bias is not None and ctx.needs_input_grad[5]:
                patch_sum = grad_sum - grad[:, :prefix].sum(dim=1, dtype=wide)
                grad_kernel_bias = patch_sum.sum(0).to(kernel_bias.dtype)

        grad_x = None
        if ctx.needs_input_grad[0]:
            s_t = s.transpose(1, 2)
            row = (v_mean.unsqueeze(1) @ s_t.to(wide) * -alpha).to(dtype)
            grad_x = torch.baddbmm(row, grad, m.detach().to(dtype).transpose(1, 2))
            grad_x.baddbmm_(v, s_t, alpha=alpha)
            weight = qkv_weight[2 * channels :].to(dtype)
            grad_x.flatten(0, 1).addmm_(grad_v.flatten(0, 1), weight)
        if ctx.needs_input_grad[1]:
            grad_weight[2 * channels :] += token_product(grad_v.flatten(0, 1), x.flatten(0, 1))
        if grad_bias is not None:
            grad_bias[2 * channels :] += grad_v.sum(dim=(0, 1), dtype=wide)
        return grad_x, grad_weight, grad_bias, None, grad_kernel, grad_kernel_bias, None
