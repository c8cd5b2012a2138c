"""Layers: what they add to the operators."""

import copy
import pickle

import pytest
import torch

from inline_mm.analysis.complexity import plain_inline
from inline_mm.layers import (
    Block,
    ChunkedMlp,
    InLineAttention,
    LinearAttention,
    PositionEmbedding,
    SpatialReductionAttention,
)
from inline_mm.ops import FEATURE_MAPS


def tokens(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize('feature_map', list(FEATURE_MAPS))
@pytest.mark.parametrize(
    'local, lepe', [(True, False), (False, True), (True, True), (False, False)]
)
def test_inline_attention_equals_its_plain_form(local, lepe, feature_map):
    torch.manual_seed(0)
    layer = InLineAttention(12, 3, local=local, lepe=lepe, feature_map=feature_map)
    x, hw = tokens(2, 31, 12), (5, 6)  # The first token is a class token.
    value = layer(x, hw)
    with plain_inline(layer):
        torch.testing.assert_close(value, layer(x, hw), rtol=1e-4, atol=1e-5)


def test_inline_attention_makes_its_kernels_from_the_token_it_is_given():
    torch.manual_seed(0)
    layer = InLineAttention(8, 2)
    x, other = tokens(2, 12, 8), tokens(2, 8)
    assert not torch.allclose(layer(x, (3, 4)), layer(x, (3, 4), other), atol=1e-4)
    torch.testing.assert_close(layer(x, (3, 4)), layer(x, (3, 4), x.mean(dim=1)))


@pytest.mark.parametrize('layer', [InLineAttention, LinearAttention, SpatialReductionAttention])
def test_attention_refuses_heads_that_do_not_divide_the_channels(layer):
    with pytest.raises(ValueError, match='num_heads=3 and embed_dims=16'):
        layer(16, 3)


def test_inline_attention_refuses_an_unknown_feature_map():
    with pytest.raises(ValueError, match=r"feature_map must be one of 'identity'.*'sigmoid'"):
        InLineAttention(8, 2, feature_map='sigmoid')


@pytest.mark.parametrize('hw', [(4, 4), (5, 7), (1, 3)])
def test_spatial_reduction_takes_any_map(hw):
    out = SpatialReductionAttention(8, 2, sr_ratio=4)(tokens(2, hw[0] * hw[1], 8), hw)
    assert out.shape == (2, hw[0] * hw[1], 8)


def test_mlp_in_chunks_equals_the_mlp_at_once(monkeypatch):
    torch.manual_seed(0)
    mlp, x = ChunkedMlp(6, 24).eval(), tokens(2, 50, 6)
    expected = mlp(x)  # With gradients, all at once.
    monkeypatch.setattr(ChunkedMlp, 'chunk_numel', 24 * 7)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected)
        with torch.autocast('cpu', torch.bfloat16):
            assert mlp(x).dtype == torch.bfloat16


def test_block_does_not_write_into_its_input():
    torch.manual_seed(0)
    block, x = Block(InLineAttention(8, 2), 8, 2).eval(), tokens(2, 12, 8)
    before = x.clone()
    with torch.inference_mode():
        out = block(x, (3, 4))
    torch.testing.assert_close(x, before)
    torch.testing.assert_close(out, block(x, (3, 4)))


def test_position_embedding_is_kept_per_size_until_the_weight_changes():
    layer = PositionEmbedding((4, 4), 8)
    with torch.no_grad():
        first = layer.resized((6, 5))
        assert layer.resized((6, 5)) is first
        assert layer.resized((5, 5)).shape == (1, 25, 8)
        assert layer.resized((4, 4)) is layer.weight
        layer.weight.mul_(2)
        torch.testing.assert_close(layer.resized((6, 5)), first * 2)


def test_position_embedding_copies_without_what_it_keeps():
    layer = PositionEmbedding((4, 4), 8)
    with torch.no_grad():
        expected = layer.resized((6, 5))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not other._cache._entries
        torch.testing.assert_close(other.resized((6, 5)), expected)


def test_position_embedding_trains_at_another_size():
    layer = PositionEmbedding((4, 4), 8)
    layer(tokens(1, 30, 8), (6, 5)).sum().backward()
    assert layer.weight.grad.abs().sum() > 0
