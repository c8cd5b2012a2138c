"""Attention layers over all tokens of a map: InLine, linear and softmax."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import (
    FEATURE_MAPS,
    dynamic_depthwise_conv,
    inline_attention,
    inline_attention_tokens,
    linear_attention,
    softmax_attention,
    token_mean,
)

__all__ = [
    'InLineAttention',
    'LinearAttention',
    'MultiHeadAttention',
    'QKVAttention',
    'SoftmaxAttention',
]


def check_choice(name: str, value: object, allowed) -> None:
    """Raise a ValueError naming the argument unless ``value`` is one of ``allowed``."""
    if value not in tuple(allowed):
        raise ValueError(f'{name} must be one of {", ".join(map(repr, allowed))}, got {value!r}')


class MultiHeadAttention(nn.Module):
    """What every attention layer has: heads that divide the channels, an output projection.

    Args:
        embed_dims: Channels C.
        num_heads: Heads; divides ``embed_dims``.
        proj_drop: Dropout probability of the output.

    Raises:
        ValueError: If ``num_heads`` does not divide ``embed_dims``.
    """

    def __init__(self, embed_dims: int, num_heads: int, proj_drop: float = 0.0) -> None:
        super().__init__()
        if num_heads < 1 or embed_dims % num_heads:
            raise ValueError(
                f'num_heads must be positive and divide embed_dims, '
                f'got num_heads={num_heads} and embed_dims={embed_dims}'
            )
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.scale = (embed_dims // num_heads) ** -0.5
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(proj_drop)

    def project(self, x: Tensor) -> Tensor:
        """The output projection of merged heads (B, N, C)."""
        return self.proj_drop(self.proj(x))


class QKVAttention(MultiHeadAttention):
    """Attention with one projection for q, k and v.

    Args:
        embed_dims: Channels C.
        num_heads: Heads; divides ``embed_dims``.
        qkv_bias: Whether q, k and v have a bias.
        proj_drop: Dropout probability of the output.
    """

    def __init__(
        self, embed_dims: int, num_heads: int, qkv_bias: bool = True, proj_drop: float = 0.0
    ) -> None:
        super().__init__(embed_dims, num_heads, proj_drop)
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims, bias=qkv_bias)

    def split_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of tokens (B, N, C), each (B, heads, N, head_dim)."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)


class InLineAttention(QKVAttention):
    """InLine attention: injective linear attention with a dynamic local part.

    Source: arXiv:2412.06590. Time and memory are linear in the number of tokens.

    Args:
        embed_dims: Channels C.
        num_heads: Heads; divides ``embed_dims``.
        qkv_bias: Whether q, k and v have a bias.
        proj_drop: Dropout probability of the output.
        local: Whether an MLP on the mean token makes each image its own depthwise 3x3
            convolution of v, added to the output.
        lepe: Whether a learned depthwise 3x3 convolution of v is added as well (CSwin).
        feature_map: ``'identity'`` (the fast form), or one of the paper's ablation:
            ``'relu'``, ``'leaky_relu'``, ``'exp'``.

    Raises:
        ValueError: If ``num_heads`` does not divide ``embed_dims``, or for an unknown
            ``feature_map``.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        local: bool = True,
        lepe: bool = False,
        feature_map: str = 'identity',
    ) -> None:
        super().__init__(embed_dims, num_heads, qkv_bias, proj_drop)
        check_choice('feature_map', feature_map, FEATURE_MAPS)
        self.feature_map = feature_map
        self.local = None
        if local:
            self.local = nn.Sequential(
                nn.Conv1d(embed_dims, embed_dims, 1, groups=num_heads),
                nn.GELU(),
                nn.Conv1d(embed_dims, 9 * embed_dims, 1, groups=num_heads),
            )
        self.lepe = None
        if lepe:
            self.lepe = nn.Conv2d(embed_dims, embed_dims, 3, padding=1, groups=embed_dims)

    def make_kernel(self, mean_token: Tensor) -> Tensor | None:
        """The 3x3 kernels of the local part and of LePE together.

        Args:
            mean_token: (B, C).

        Returns:
            Tensor or None: (B, C, 3, 3); None where the layer has neither part.
        """
        kernel = None
        if self.local is not None:
            first, _, second = self.local
            kernel = at_one_position(second, gelu(at_one_position(first, mean_token)))
            kernel = kernel.view(-1, self.embed_dims, 3, 3)
        if self.lepe is not None:
            static = self.lepe.weight.view(1, self.embed_dims, 3, 3)
            kernel = (
                static.expand(mean_token.shape[0], -1, -1, -1)
                if kernel is None
                else (kernel + static)
            )
        return kernel

    def forward(self, x: Tensor, hw: tuple[int, int], mean_token: Tensor | None = None) -> Tensor:
        """Attend over all tokens.

        Args:
            x: (B, N, C), the last H * W of the N tokens in row-major order; those before them
                (a class token) take part in the global half only.
            hw: ``(H, W)``.
            mean_token: (B, C), what the local kernels are made from; the mean of ``x`` if None.

        Returns:
            Tensor: (B, N, C).
        """
        kernel = kernel_bias = mean = None
        if self.local is not None or self.lepe is not None:
            if mean_token is None:
                mean = token_mean(x)
                mean_token = mean.to(x.dtype)
            kernel = self.make_kernel(mean_token)
            kernel_bias = None if self.lepe is None else self.lepe.bias
        if self.feature_map == 'identity':
            out = inline_attention_tokens(
                x,
                self.qkv.weight,
                self.qkv.bias,
                self.num_heads,
                kernel,
                kernel_bias,
                hw,
                mean,
                self.proj.weight,
                self.proj.bias,
            )
            return self.proj_drop(out)
        phi = FEATURE_MAPS[self.feature_map]
        q, k, v = self.split_heads(x)
        out = inline_attention(phi(q), phi(k), v, self.scale)
        out = out.transpose(1, 2).flatten(2)
        if kernel is not None:
            v = v.transpose(1, 2).flatten(2)
            out = add_local(out, v, kernel, kernel_bias, hw)
        return self.project(out)


class LinearAttention(QKVAttention):
    """Linear attention, the non-injective one: the baseline that InLine repairs.

    Args:
        embed_dims: Channels C.
        num_heads: Heads; divides ``embed_dims``.
        qkv_bias: Whether q, k and v have a bias.
        proj_drop: Dropout probability of the output.
        lepe: Whether a learned depthwise 3x3 convolution of v is added (CSwin).
        feature_map: Non-negative: ``'relu'`` or ``'exp'``.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        lepe: bool = False,
        feature_map: str = 'relu',
    ) -> None:
        super().__init__(embed_dims, num_heads, qkv_bias, proj_drop)
        check_choice('feature_map', feature_map, ('relu', 'exp'))
        self.feature_map = feature_map
        self.lepe = None
        if lepe:
            self.lepe = nn.Conv2d(embed_dims, embed_dims, 3, padding=1, groups=embed_dims)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Attend over all tokens x (B, N, C), with LePE on the last H * W of them."""
        phi = FEATURE_MAPS[self.feature_map]
        q, k, v = self.split_heads(x)
        out = linear_attention(phi(q), phi(k), v).transpose(1, 2).flatten(2)
        if self.lepe is not None:
            v = v.transpose(1, 2).flatten(2)
            kernel = self.lepe.weight.squeeze(1).expand(v.shape[0], -1, -1, -1)
            out = add_local(out, v, kernel, self.lepe.bias, hw)
        return self.project(out)


class SoftmaxAttention(QKVAttention):
    """Softmax attention, quadratic in the number of tokens.

    Args:
        embed_dims: Channels C.
        num_heads: Heads; divides ``embed_dims``.
        qkv_bias: Whether q, k and v have a bias.
        attn_drop: Dropout probability of attention weights.
        proj_drop: Dropout probability of the output.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__(embed_dims, num_heads, qkv_bias, proj_drop)
        self.attn_drop = attn_drop

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        """Attend over all tokens x (B, N, C); ``hw`` is not used."""
        q, k, v = self.split_heads(x)
        dropout = self.attn_drop if self.training else 0.0
        out = softmax_attention(q, k, v, self.scale, dropout=dropout)
        return self.project(out.transpose(1, 2).flatten(2))


def add_local(
    out: Tensor, v: Tensor, kernel: Tensor, bias: Tensor | None, hw: tuple[int, int]
) -> Tensor:
    """Add the 3x3 convolution of the last H * W values to the output tokens, (B, N, C) each."""
    prefix = v.shape[1] - hw[0] * hw[1]
    bias = None if bias is None else bias.to(v.dtype)
    local = dynamic_depthwise_conv(v[:, prefix:], kernel.to(v.dtype), hw, bias)
    return out + F.pad(local, (0, 0, prefix, 0))


def gelu(x: Tensor) -> Tensor:
    """GELU by its formula: for a few numbers PyTorch's takes longer to set up than to run."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # As PyTorch's does inside.
    return (0.5 * wide * (1 + torch.erf(wide * 0.5**0.5))).to(x.dtype)


def at_one_position(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """A grouped 1x1 convolution at one position, (B, in_channels) to (B, out_channels).

    As a product per group, for which there is less to set up than for a convolution.
    """
    weight = conv.weight.view(conv.groups, -1, conv.weight.shape[1])
    groups = x.reshape(x.shape[0], conv.groups, -1).transpose(0, 1)
    out = torch.baddbmm(conv.bias.view(conv.groups, 1, -1), groups, weight.transpose(1, 2))
    return out.transpose(0, 1).reshape(x.shape[0], -1)
