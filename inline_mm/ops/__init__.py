"""Attention operators as functions on tensors, each fast form beside its naive twin."""

from .attention import FEATURE_MAPS, inline_attention, linear_attention, softmax_attention
from .dynamic_conv import dynamic_depthwise_conv
from .inline import (
    TokenStatistics,
    apply_folded,
    fold,
    gather_statistics,
    inline_attention_tokens,
    token_mean,
)
from .naive import (
    dynamic_depthwise_conv_naive,
    inline_attention_naive,
    inline_attention_tokens_naive,
    inline_attention_weights,
    linear_attention_weights,
    softmax_attention_weights,
)

__all__ = [
    'FEATURE_MAPS',
    'TokenStatistics',
    'apply_folded',
    'dynamic_depthwise_conv',
    'dynamic_depthwise_conv_naive',
    'fold',
    'gather_statistics',
    'inline_attention',
    'inline_attention_naive',
    'inline_attention_tokens',
    'inline_attention_tokens_naive',
    'inline_attention_weights',
    'linear_attention',
    'linear_attention_weights',
    'softmax_attention',
    'softmax_attention_weights',
    'token_mean',
]
