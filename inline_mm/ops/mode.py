"""Which form of an operator the moment asks for."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

#: Whether ``statically_known_true`` may be called in a function that is compiled.
_CAN_ASK = torch.__version__ >= (2, 8)


def is_graph_mode() -> bool:
    """Whether a graph is being recorded: ``torch.compile``, ``torch.export`` or ``torch.jit``.

    Operators then use plain differentiable tensor code that holds for any batch and map size;
    otherwise they may loop over images and use hand-written backward passes.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_less(a: int, b: int) -> bool:
    """``a < b``, and False where a graph of dynamic size leaves it open.

    A traced graph leaves everything open. ``torch.compile`` before PyTorch 2.8 cannot tell: the
    answer holds for the size at hand and fixes it.
    """
    if torch.jit.is_tracing():
        return False
    if torch.compiler.is_compiling() and _CAN_ASK:
        return statically_known_true(a < b)
    return a < b


def has_autocast(device_type: str) -> bool:
    """Whether a device type knows autocast; ``meta``, where models are counted, does not."""
    return device_type != 'meta'


def without_autocast(device_type: str) -> AbstractContextManager:
    """A context in which autocast is off."""
    if has_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
