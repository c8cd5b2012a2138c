"""Layers over the operators of :mod:`inline_mm.ops`."""

from .attention import InLineAttention, LinearAttention, MultiHeadAttention, QKVAttention
from .block import Block
from .mlp import ChunkedMlp
from .position import PositionEmbedding
from .spatial_reduction import SpatialReductionAttention

__all__ = [
    'Block',
    'ChunkedMlp',
    'InLineAttention',
    'LinearAttention',
    'MultiHeadAttention',
    'PositionEmbedding',
    'QKVAttention',
    'SpatialReductionAttention',
]
