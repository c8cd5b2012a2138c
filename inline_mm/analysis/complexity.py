"""Multiply-accumulates of models, counted without running them."""

import copy
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ..layers import InLineAttention
from ..ops import FEATURE_MAPS, dynamic_depthwise_conv_naive, inline_attention_naive

__all__ = ['Complexity', 'count_macs', 'dense_forward', 'measure', 'plain_inline']


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


class Complexity(NamedTuple):
    """What a model costs for one image.

    Attributes:
        parameters: Their number.
        macs: Multiply-accumulates of matrix products and convolutions, as they run.
        plain_macs: The same with InLine attention in its plain form, as publications count it.
        activations: Numbers that matrix products and convolutions put out, as they run.
    """

    parameters: int
    macs: int
    plain_macs: int
    activations: int


class ActivationCounter(TorchDispatchMode):
    """Counts the numbers that the operators with multiply-accumulates put out."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            first = out[0] if isinstance(out, tuple | list) else out
            self.total += first.numel()
        return out


def dense_forward(model: nn.Module, image: Tensor) -> None:
    """Run a model on images up to what its heads put out, without decoding, NMS or losses.

    Detectors of two stages get 1000 boxes for their box heads and 100 for their mask heads, as
    mmdet counts them; an auxiliary head of a segmentor, used in training alone, does not run.

    Args:
        model: A backbone, a classifier, or a detector or segmentor of mmdet or mmseg.
        image: (B, C, H, W).

    Raises:
        TypeError: For a detector that is neither of one stage nor of two.
    """
    if hasattr(model, 'roi_head'):
        features = model.extract_feat(image)
        model.rpn_head(features)
        roi_head = model.roi_head
        for kind, boxes in (('bbox', 1000), ('mask', 100)):
            if not getattr(roi_head, f'with_{kind}', False):
                continue
            heads = getattr(roi_head, f'{kind}_head')
            extractors = getattr(roi_head, f'{kind}_roi_extractor')
            heads = heads if isinstance(heads, nn.ModuleList) else [heads]
            if not isinstance(extractors, nn.ModuleList):
                extractors = [extractors] * len(heads)
            for head, extractor in zip(heads, extractors, strict=True):
                size = extractor.roi_layers[0].output_size
                head(image.new_empty(boxes, extractor.out_channels, *size))
    elif hasattr(model, 'decode_head'):
        model.decode_head(model.extract_feat(image))
    elif hasattr(model, 'bbox_head'):
        model.bbox_head(model.extract_feat(image))
    elif hasattr(model, 'extract_feat') and not hasattr(model, 'forward_head'):
        raise TypeError(
            f'{type(model).__name__} is no detector of one or two stages and no segmentor'
        )
    else:
        model(image)


def _counted(model: nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    """Multiply-accumulates and activations of a model on the ``meta`` device."""
    backbone = getattr(model, 'backbone', model)
    image = torch.empty(1, getattr(backbone, 'in_channels', 3), *size, device='meta')
    with torch.no_grad(), FlopCounterMode(display=False) as flops, ActivationCounter() as outputs:
        dense_forward(model, image)
    return flops.get_total_flops() // 2, outputs.total


def measure(model: nn.Module, size: tuple[int, int]) -> Complexity:
    """Count what a model costs for one image.

    Nothing is computed: a copy of the model goes to the ``meta`` device.

    Args:
        model: See :func:`dense_forward`.
        size: ``(H, W)`` of the image.
    """
    model = copy.deepcopy(model).to('meta')
    model.eval()  # mmdet's Swin returns None from it.
    macs, activations = _counted(model, size)
    with plain_inline(model):
        plain_macs, _ = _counted(model, size)
    parameters = sum(p.numel() for p in model.parameters())
    return Complexity(parameters, macs, plain_macs, activations)


def count_macs(model: nn.Module, size: tuple[int, int]) -> int:
    """Multiply-accumulates of the matrix products and convolutions for one image.

    InLine attention is counted in its plain form, with q and k in full, as publications count it;
    the folded form, which runs, needs fewer. Nothing is computed: a copy of the model goes to the
    ``meta`` device.

    Args:
        model: See :func:`dense_forward`.
        size: ``(H, W)`` of the image.

    Returns:
        int: Multiply-accumulates.
    """
    model = copy.deepcopy(model).to('meta')
    model.eval()  # mmdet's Swin returns None from it.
    with plain_inline(model):
        return _counted(model, size)[0]
