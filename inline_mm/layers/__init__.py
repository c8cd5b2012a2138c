"""Layers over the operators of :mod:`inline_mm.ops`."""

from .attention import (
    InLineAttention,
    LinearAttention,
    MultiHeadAttention,
    QKVAttention,
    SoftmaxAttention,
)
from .block import Block
from .cache import DerivedCache
from .mlp import ChunkedMlp
from .patch_embed import PatchEmbed
from .position import PositionEmbedding
from .spatial_reduction import SpatialReductionAttention
from .stripe import StripeAttention
from .window import WindowAttention

__all__ = [
    'Block',
    'ChunkedMlp',
    'DerivedCache',
    'InLineAttention',
    'LinearAttention',
    'MultiHeadAttention',
    'PatchEmbed',
    'PositionEmbedding',
    'QKVAttention',
    'SoftmaxAttention',
    'SpatialReductionAttention',
    'StripeAttention',
    'WindowAttention',
]
