"""The MLP of a block, in chunks of tokens at inference."""

import torch
from timm.layers import Mlp
from torch import Tensor

from ..ops.mode import is_graph_mode

__all__ = ['ChunkedMlp']


class ChunkedMlp(Mlp):
    """timm's Mlp that never holds more than some number of hidden numbers at inference.

    An MLP works token by token, so chunks of tokens give the same result. With gradients, or in
    a recorded graph, all tokens go through at once.
    """

    #: Hidden numbers held at once on a CPU: they stay in the cache. A PVT-S at 1024 x 1024 takes
    #: two thirds of the time it takes with ``2**23``.
    chunk_numel = 2**20
    #: On other devices, where they would set the peak memory.
    device_chunk_numel = 2**25

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) to tokens (B, N, C)."""
        numel = self.chunk_numel if x.device.type == 'cpu' else self.device_chunk_numel
        tokens_per_chunk = max(numel // self.fc1.out_features, 1)
        if is_graph_mode() or torch.is_grad_enabled() or x[..., 0].numel() <= tokens_per_chunk:
            return super().forward(x)
        flat = x.reshape(-1, x.shape[-1])
        out = None
        for start in range(0, len(flat), tokens_per_chunk):
            part = super().forward(flat[start : start + tokens_per_chunk])
            if out is None:  # The first part tells the dtype, which autocast may have changed.
                out = part.new_empty(len(flat), part.shape[-1])
            out[start : start + len(part)] = part
        return out.view(*x.shape[:-1], -1)
