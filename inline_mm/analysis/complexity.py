"""Multiply-accumulates of models, counted without running them."""

import copy
import types
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..layers import InLineAttention
from ..ops import FEATURE_MAPS, dynamic_depthwise_conv_naive, inline_attention_naive

__all__ = ['count_macs', 'plain_inline']


def plain_forward(
    self: InLineAttention, x: Tensor, hw: tuple[int, int], mean_token: Tensor | None = None
) -> Tensor:
    """InLine attention as the paper writes it: q, k and v in full, each convolution by itself."""
    phi = FEATURE_MAPS[self.feature_map]
    q, k, v = self.split_heads(x)
    out = inline_attention_naive(phi(q), phi(k), v, self.scale).transpose(1, 2).flatten(2)
    v = v.transpose(1, 2).flatten(2)
    prefix = v.shape[1] - hw[0] * hw[1]
    head, patches, v = out[:, :prefix], out[:, prefix:], v[:, prefix:]
    if self.local is not None:
        mean_token = x.mean(dim=1) if mean_token is None else mean_token
        kernel = self.local(mean_token.unsqueeze(-1)).view(-1, self.embed_dims, 3, 3)
        patches = patches + dynamic_depthwise_conv_naive(v, kernel, hw)
    if self.lepe is not None:
        image = v.transpose(1, 2).unflatten(2, hw)
        patches = patches + self.lepe(image).flatten(2).transpose(1, 2)
    return self.project(torch.cat([head, patches], dim=1))


@contextmanager
def plain_inline(model: nn.Module) -> Iterator[nn.Module]:
    """Run every InLine attention of a model in its plain form, which is slower and as exact."""
    layers = [layer for layer in model.modules() if isinstance(layer, InLineAttention)]
    for layer in layers:
        layer.forward = types.MethodType(plain_forward, layer)
    try:
        yield model
    finally:
        for layer in layers:
            del layer.forward


def count_macs(model: nn.Module, size: tuple[int, int]) -> int:
    """Multiply-accumulates of the matrix products and convolutions for one image.

    InLine attention is counted in its plain form, with q and k in full, as publications count it;
    the folded form, which runs, needs fewer. Nothing is computed: a copy of the model goes to the
    ``meta`` device.

    Args:
        model: Takes images (B, in_channels, H, W).
        size: ``(H, W)`` of the image.

    Returns:
        int: Multiply-accumulates.
    """
    model = copy.deepcopy(model).to('meta').eval()
    image = torch.empty(1, getattr(model, 'in_channels', 3), *size, device='meta')
    with torch.no_grad(), plain_inline(model), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_total_flops() // 2
