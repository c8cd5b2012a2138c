"""What parameters turn into, kept at inference until they change."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ..ops.mode import is_graph_mode

__all__ = ['DerivedCache']


class DerivedCache:
    """Tensors computed from a parameter, each kept until the parameter changes.

    Only where no gradient is wanted and no graph is recorded; otherwise everything is computed
    anew. Copies of a cache, pickled ones too, are empty.

    Args:
        max_entries: Tensors kept at once.
    """

    def __init__(self, max_entries: int = 8) -> None:
        self.max_entries = max_entries
        self._source: tuple | None = None
        self._entries: dict[Hashable, Tensor] = {}

    def __reduce__(self) -> tuple:
        return type(self), (self.max_entries,)

    def get(self, parameter: Tensor, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The tensor that ``make()`` computes from ``parameter`` for ``key``."""
        if torch.is_grad_enabled() or is_graph_mode() or parameter.is_inference():
            return make()
        # The in-place version counter tells whether the parameter has changed since.
        source = (parameter.device, parameter.dtype, parameter.data_ptr(), parameter._version)
        if source != self._source or len(self._entries) >= self.max_entries:
            if source != self._source or key not in self._entries:
                self._entries.clear()
            self._source = source
        if key not in self._entries:
            self._entries[key] = make()
        return self._entries[key]
