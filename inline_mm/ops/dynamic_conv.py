"""Depthwise 3x3 convolution whose kernel differs per image and channel."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .mode import is_graph_mode

__all__ = ['dynamic_depthwise_conv']


def dynamic_depthwise_conv(
    v: Tensor, kernel: Tensor, hw: tuple[int, int], bias: Tensor | None = None
) -> Tensor:
    """Depthwise 3x3 convolution of token maps with one kernel per image and channel.

    The local part of InLine attention. On a CPU each image is one channels-last convolution over
    the memory its tokens already have; on other devices the batch is one grouped convolution; in
    a compiled or exported graph it is nine shifted products, so that no group count depends on
    the batch.

    Args:
        v: Tokens of an H x W map, (B, H*W, C), any float dtype.
        kernel: (B, C, 3, 3), the dtype of ``v``.
        hw: ``(H, W)``.
        bias: Optional, (C,) or (B, C), the dtype of ``v``.

    Returns:
        Tensor: (B, H*W, C), zero padding of one pixel, the dtype of ``v``.
    """
    if bias is not None:
        bias = bias.expand(v.shape[0], -1)
    if is_graph_mode():
        return shifted_products(v, kernel, hw, bias)
    return _DynamicDepthwiseConv.apply(v, kernel, hw, bias)


def shifted_products(v: Tensor, kernel: Tensor, hw: tuple[int, int], bias: Tensor | None) -> Tensor:
    """The convolution as nine shifted products: fusible, exportable, any batch size."""
    batch, num_tokens, channels = v.shape
    padded = F.pad(v.reshape(batch, *hw, channels), (0, 0, 1, 1, 1, 1))
    # Bounds that do not name the size keep symbolic shapes simple.
    sides = (slice(0, -2), slice(1, -1), slice(2, None))
    out = None
    for i, rows in enumerate(sides):
        for j, columns in enumerate(sides):
            tap = kernel[:, :, i, j].reshape(batch, 1, 1, channels)
            product = padded[:, rows, columns] * tap
            out = product if out is None else out + product
    if bias is not None:
        out = out + bias.reshape(batch, 1, 1, channels)
    return out.reshape(batch, num_tokens, channels)


def conv_forward(v: Tensor, kernel: Tensor, hw: tuple[int, int], bias: Tensor | None) -> Tensor:
    """The convolution without autograd; ``bias`` is None or (B, C)."""
    batch, num_tokens, channels = v.shape
    if v.device.type == 'cpu':
        outs = [
            F.conv2d(
                _as_image(v[b], hw),
                kernel[b].unsqueeze(1),
                None if bias is None else bias[b],
                padding=1,
                groups=channels,
            )
            for b in range(batch)
        ]
        out = outs[0] if batch == 1 else torch.cat(outs)
        return out.permute(0, 2, 3, 1).reshape(batch, num_tokens, channels)
    out = F.conv2d(
        _as_grouped(v, hw),
        kernel.reshape(-1, 1, 3, 3),
        None if bias is None else bias.reshape(-1),
        padding=1,
        groups=batch * channels,
    )
    return out.view(batch, channels, num_tokens).transpose(1, 2)


def conv_kernel_grad(grad: Tensor, v: Tensor, kernel: Tensor, hw: tuple[int, int]) -> Tensor:
    """Gradient of the convolution for ``kernel`` (B, C, 3, 3); ``grad`` and ``v`` (B, H*W, C)."""
    if v.device.type == 'cpu':
        return torch.stack(
            [
                _weight_grad(_as_image(grad[b], hw), _as_image(v[b], hw), kernel[b].unsqueeze(1))
                for b in range(v.shape[0])
            ]
        ).view_as(kernel)
    flat = kernel.reshape(-1, 1, 3, 3)
    return _weight_grad(_as_grouped(grad, hw), _as_grouped(v, hw), flat).view_as(kernel)


def _as_image(tokens: Tensor, hw: tuple[int, int]) -> Tensor:
    """(H*W, C) tokens seen as a channels-last (1, C, H, W) image, without a copy."""
    return tokens.view(1, *hw, tokens.shape[-1]).permute(0, 3, 1, 2)


def _as_grouped(tokens: Tensor, hw: tuple[int, int]) -> Tensor:
    """(B, H*W, C) tokens as one (1, B*C, H, W) image."""
    return tokens.transpose(1, 2).reshape(1, -1, *hw)


def _weight_grad(grad: Tensor, image: Tensor, weight: Tensor) -> Tensor:
    weight_grad = torch.ops.aten.convolution_backward(
        grad,
        image,
        weight.to(image.dtype),
        bias_sizes=None,
        stride=[1, 1],
        padding=[1, 1],
        dilation=[1, 1],
        transposed=False,
        output_padding=[0, 0],
        groups=weight.shape[0],
        output_mask=[False, True, False],
    )[1]
    return weight_grad.to(weight.dtype)


class _DynamicDepthwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, kernel, hw, bias):
        v = v.contiguous()
        ctx.save_for_backward(v, kernel)
        ctx.hw, ctx.has_bias = hw, bias is not None
        return conv_forward(v, kernel, hw, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        v, kernel = ctx.saved_tensors
        grad = grad.contiguous()
        # The transposed convolution of zero padding 1 is the convolution with the flipped kernel.
        grad_v = conv_forward(grad, kernel.flip(2, 3), ctx.hw, None)
        grad_kernel = conv_kernel_grad(grad, v, kernel, ctx.hw)
        return grad_v, grad_kernel, None, grad.sum(1) if ctx.has_bias else None
