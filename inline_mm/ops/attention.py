"""The attentions InLine is compared with, and InLine with any feature map, on q, k and v."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .mode import without_autocast

__all__ = ['FEATURE_MAPS', 'inline_attention', 'linear_attention', 'softmax_attention']

#: The feature maps of the paper's ablation, by name.
FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    'identity': lambda x: x,
    'relu': F.relu,
    'leaky_relu': F.leaky_relu,
    'exp': lambda x: torch.exp(0.2 * x),
}


def inline_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """InLine attention in its covariance form, exact for any feature map.

    ``o_i = q_i A + mean(v)`` with ``A = s Cov(k, v)``: the mean score of the formula is what
    centring the keys takes away. Statistics are centred before they are multiplied and kept in
    fp32 (fp64 for fp64 input).

    Args:
        q, k, v: (B, heads, N, head_dim), the feature map already applied to ``q`` and ``k``.
        scale: The factor ``s``, ``head_dim ** -0.5`` in every model.

    Returns:
        Tensor: (B, heads, N, head_dim), the dtype of ``v``.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    with without_autocast(v.device.type):
        v_mean = v.mean(dim=-2, keepdim=True, dtype=wide)
        k_centred = k.to(wide) - k.mean(dim=-2, keepdim=True, dtype=wide)
        a = k_centred.transpose(-2, -1) @ v.to(wide) * (scale / v.shape[-2])
        return q.to(v.dtype) @ a.to(v.dtype) + v_mean.to(v.dtype)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float = 1e-6) -> Tensor:
    """Linear attention: ``o_i = q_i (sum_j k_j v_j^T) / (q_i . sum_j k_j)``; not injective.

    Args:
        q, k, v: (B, heads, N, head_dim), a non-negative feature map applied to ``q`` and ``k``.
        eps: Added to the denominator, so that a query that matches no key gives 0.

    Returns:
        Tensor: (B, heads, N, head_dim), the dtype of ``v``.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    with without_autocast(v.device.type):
        # The quotient does not change when both sums become means, which cannot overflow.
        k_mean = k.mean(dim=-2, keepdim=True, dtype=wide)
        kv = k.to(wide).transpose(-2, -1) @ (v.to(wide) / v.shape[-2])
        q = q.to(wide)
        return (q @ kv / (q @ k_mean.transpose(-2, -1) + eps)).to(v.dtype)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention by ``scaled_dot_product_attention`` (flash kernels where there are any).

    Args:
        q, k, v: (B, heads, N, head_dim); ``k`` and ``v`` may have another token count.
        scale: The factor on the scores.
        bias: Added to the scores, broadcast to (B, heads, N, N): position bias and masks.
        dropout: Probability of dropping an attention weight; 0 outside training.

    Returns:
        Tensor: (B, heads, N, head_dim).
    """
    if bias is not None:
        bias = bias.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
