"""Which form of an operator the moment asks for."""

import torch


def is_graph_mode() -> bool:
    """Whether a graph is being recorded: ``torch.compile``, ``torch.export`` or ``torch.jit``.

    Operators then use plain differentiable tensor code that holds for any batch and map size;
    otherwise they may loop over images and use hand-written backward passes.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
