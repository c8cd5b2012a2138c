"""The mathematics in its plainest form: what every fast operator is tested against."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    'dynamic_depthwise_conv_naive',
    'inline_attention_naive',
    'inline_attention_tokens_naive',
    'inline_attention_weights',
    'linear_attention_weights',
    'softmax_attention_weights',
]


def inline_attention_naive(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """InLine attention by its formula (arXiv:2412.06590, subtraction normalisation).

    ``o_i = (s / N) sum_j (q_i . k_j) v_j + (1 - s q_i . mean(k)) mean(v)``

    Args:
        q, k, v: Queries, keys and values, (B, heads, N, head_dim), the feature map already applied.
        scale: The factor ``s`` on the dot products, ``head_dim ** -0.5`` in every model.

    Returns:
        Tensor: (B, heads, N, head_dim).
    """
    num_tokens = q.shape[-2]
    attended = q @ (k.transpose(-2, -1) @ v) * (scale / num_tokens)
    mean_score = scale * (q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1))
    return attended + (1 - mean_score) * v.mean(dim=-2, keepdim=True)


def inline_attention_weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The N x N weights of InLine attention: rows sum to 1, entries may be negative.

    Args:
        q, k: (B, heads, N, head_dim), the feature map already applied.
        scale: ``head_dim ** -0.5``.

    Returns:
        Tensor: (B, heads, N, N).
    """
    num_tokens = k.shape[-2]
    scores = q @ k.transpose(-2, -1) * (scale / num_tokens)
    return scores - scores.mean(dim=-1, keepdim=True) + 1 / num_tokens


def linear_attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """The N x N weights of linear attention; ``q`` and ``k`` (B, heads, N, head_dim) are mapped."""
    scores = q @ k.transpose(-2, -1)
    return scores / scores.sum(dim=-1, keepdim=True)


def softmax_attention_weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The N x N weights of softmax attention; ``q`` and ``k`` are (B, heads, N, head_dim)."""
    return torch.softmax(q @ k.transpose(-2, -1) * scale, dim=-1)


def dynamic_depthwise_conv_naive(
    v: Tensor, kernel: Tensor, hw: tuple[int, int], bias: Tensor | None = None
) -> Tensor:
    """Depthwise 3x3 convolution with one kernel per image and channel, as one grouped convolution.

    Args:
        v: Tokens of an H x W map, (B, H*W, C).
        kernel: (B, C, 3, 3).
        hw: ``(H, W)``.
        bias: Optional (C,) or (B, C).

    Returns:
        Tensor: (B, H*W, C), zero padding of one pixel.
    """
    batch, num_tokens, channels = v.shape
    image = v.transpose(1, 2).reshape(1, batch * channels, *hw)
    out = F.conv2d(image, kernel.reshape(-1, 1, 3, 3), padding=1, groups=batch * channels)
    out = out.reshape(batch, channels, num_tokens).transpose(1, 2)
    return out if bias is None else out + bias.view(-1, 1, channels)


def inline_attention_tokens_naive(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    num_heads: int,
    kernel: Tensor | None = None,
    kernel_bias: Tensor | None = None,
    hw: tuple[int, int] | None = None,
) -> Tensor:
    """The plain form of :func:`inline_mm.ops.inline_attention_tokens`, with the same arguments.

    Queries, keys and values of every token, the formula, and one grouped convolution.
    """
    batch, num_tokens, channels = x.shape
    head_dim = channels // num_heads
    qkv = F.linear(x, qkv_weight, qkv_bias).view(batch, num_tokens, 3, num_heads, head_dim)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    out = inline_attention_naive(q, k, v, head_dim**-0.5)
    out = out.transpose(1, 2).reshape(batch, num_tokens, channels)
    if kernel is None:
        return out
    prefix = num_tokens - hw[0] * hw[1]
    v = v.transpose(1, 2).reshape(batch, num_tokens, channels)
    local = dynamic_depthwise_conv_naive(v[:, prefix:], kernel, hw, kernel_bias)
    if not prefix:
        return out + local
    return out + F.pad(local, (0, 0, prefix, 0))
