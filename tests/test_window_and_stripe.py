"""Window and stripe attention against slow, explicit forms; caches of derived tensors."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from inline_mm import InLineSwin
from inline_mm.layers import (
    LinearAttention,
    PatchEmbed,
    PositionEmbedding,
    StripeAttention,
    WindowAttention,
)
from inline_mm.layers.window import shift_mask


def near(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def attend_one_by_one(layer, x, hw, window, shift):
    """Shifted windows token by token: who sees whom is decided from coordinates alone."""
    height, width = hw
    padded = [-(-side // window) * window for side in hw]
    image = F.pad(x.view(*hw, -1), (0, 0, 0, padded[1] - width, 0, padded[0] - height))
    q, k, v = layer.qkv(image).unflatten(-1, (3, layer.num_heads, -1)).unbind(2)
    table = layer.rel_pos.relative_position_bias_table.view(2 * window - 1, 2 * window - 1, -1)

    def piece(axis, position):
        """The window of a position, and on which side of the map's border it was shifted to."""
        return (position - shift) % padded[axis] // window, position < shift

    out = torch.zeros(*hw, layer.num_heads, v.shape[-1])
    for i in range(height):
        for j in range(width):
            mates = [
                (a, b)
                for a in range(padded[0])
                for b in range(padded[1])
                if piece(0, a) == piece(0, i) and piece(1, b) == piece(1, j)
            ]
            rows, columns = torch.tensor(mates).unbind(1)
            bias = table[i - rows + window - 1, j - columns + window - 1]
            scores = (q[i, j] * k[rows, columns]).sum(-1) * layer.scale + bias
            out[i, j] = (scores.softmax(0).unsqueeze(-1) * v[rows, columns]).sum(0)
    return layer.proj(out.reshape(1, height * width, -1))


@pytest.mark.parametrize('shift', [False, True])
@pytest.mark.parametrize('hw', [(8, 12), (7, 10), (3, 9), (4, 4), (2, 3)])
@torch.no_grad()
def test_windows_agree_with_attention_token_by_token(hw, shift):
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, window_size=4, shift=shift).eval()
    torch.nn.init.normal_(layer.rel_pos.relative_position_bias_table)
    x = torch.randn(2, hw[0] * hw[1], 8)
    out = layer(x, hw)
    moved = 2 if shift and max(hw) > 4 else 0
    for image, ours in zip(x, out, strict=True):
        near(ours[None], attend_one_by_one(layer, image, hw, 4, moved))


@torch.no_grad()
def test_softmax_swin_agrees_with_mmdets_at_an_odd_size():
    models = pytest.importorskip('mmdet.models')
    torch.manual_seed(0)
    theirs = models.SwinTransformer(
        embed_dims=8, depths=[2, 2, 2, 2], num_heads=[1, 2, 2, 4], window_size=3, drop_path_rate=0.0
    )
    theirs.eval()
    for key, parameter in theirs.named_parameters():
        if key.endswith('relative_position_bias_table'):
            parameter.normal_()
    arch = dict(depths=[2, 2, 2, 2], embed_dims=8, num_heads=[1, 2, 2, 4], window_size=3)
    ours = InLineSwin(dict(arch, attention=['softmax'] * 4)).eval()
    names = {
        'patch_embed.projection.': 'patch_embeds.0.projection.',
        'patch_embed.norm.': 'patch_embeds.0.norm.',
        **{f'stages.{i}.blocks.': f'stages.{i}.' for i in range(4)},
        **{f'stages.{i}.downsample.': f'patch_embeds.{i + 1}.' for i in range(3)},
        '.attn.w_msa.relative': '.attn.rel_pos.relative',
        '.attn.w_msa.': '.attn.',
        '.ffn.layers.0.0.': '.mlp.fc1.',
        '.ffn.layers.1.': '.mlp.fc2.',
    }
    renamed = {}
    for key, value in theirs.state_dict().items():
        if key.endswith('relative_position_index'):
            continue
        if '.downsample.' in key:
            # mmdet merges patches channel by channel; we, like timm, patch by patch.
            value = value.unflatten(-1, (-1, 2, 2)).mT.movedim(-3, -1).flatten(-3)
        for name, own in names.items():
            key = key.replace(name, own)
        renamed[key] = value
    ours.load_state_dict(renamed)
    image = torch.randn(2, 3, 139, 157)
    for a, b in zip(ours(image), theirs(image), strict=True):
        near(a, b, 1e-4)


def test_one_mask_serves_calls_of_a_size_and_training_after_inference():
    shift_mask.cache_clear()
    layer = WindowAttention(8, 2, window_size=4, shift=True)
    x = torch.randn(2, 48, 8)
    with torch.inference_mode():
        layer(x, (6, 8))
    layer(x, (6, 8)).sum().backward()
    assert shift_mask.cache_info().misses == 1
    assert layer.rel_pos.relative_position_bias_table.grad is not None


def bias_of_window():
    layer = WindowAttention(8, 2, window_size=2)
    return layer, layer.rel_pos.relative_position_bias_table, layer.position_bias


def resized_embedding():
    layer = PositionEmbedding((2, 2), 8)
    return layer, layer.weight, lambda: layer.resized((3, 5))


@pytest.mark.parametrize('make', [bias_of_window, resized_embedding])
def test_cached_tensors_follow_their_parameter(make):
    layer, parameter, derive = make()
    with torch.no_grad():
        before = derive()
        assert derive() is before
        parameter.add_(1)
        near(derive(), before + 1)
        size = len(pickle.dumps(make()[0]))
        assert len(pickle.dumps(layer)) == size
        assert set(copy.deepcopy(layer).state_dict()) == set(layer.state_dict())
    assert derive().requires_grad


@pytest.mark.parametrize('hw', [(6, 9), (7, 5), (2, 3), (1, 1)])
@torch.no_grad()
def test_stripes_agree_with_attention_stripe_by_stripe(hw):
    torch.manual_seed(0)
    layer = StripeAttention(16, 4, split_size=3).eval()
    x = torch.randn(2, hw[0] * hw[1], 16)
    qkv = layer.qkv(x).view(2, *hw, 3, 4, 4)
    expected = torch.zeros(2, *hw, 16)

    def attend(part, heads, conv):
        q, k, v = (part[:, :, :, i, heads].flatten(1, 2).transpose(1, 2) for i in range(3))
        out = ((q @ k.mT) * layer.scale).softmax(-1) @ v
        image = part[:, :, :, 2, heads].flatten(3).permute(0, 3, 1, 2)
        lepe = conv(image).permute(0, 2, 3, 1)
        return out.transpose(1, 2).reshape(lepe.shape) + lepe

    for start in range(0, hw[1], 3):
        stripe = slice(start, start + 3)
        expected[:, :, stripe, :8] = attend(qkv[:, :, stripe], slice(0, 2), layer.lepe)
    for start in range(0, hw[0], 3):
        stripe = slice(start, start + 3)
        expected[:, stripe, :, 8:] = attend(qkv[:, stripe], slice(2, 4), layer.lepe_horizontal)
    near(layer(x, hw), layer.proj(expected.flatten(1, 2)))


@torch.no_grad()
def test_whole_map_stripe_has_one_branch_for_all_heads():
    torch.manual_seed(0)
    layer = StripeAttention(12, 3, split_size=None).eval()
    x = torch.randn(2, 20, 12)
    q, k, v = layer.split_heads(x)
    out = ((q @ k.mT) * layer.scale).softmax(-1) @ v
    image = v.transpose(1, 2).reshape(2, 4, 5, 12).permute(0, 3, 1, 2)
    lepe = layer.lepe(image).flatten(2).transpose(1, 2)
    near(layer(x, (4, 5)), layer.proj(out.transpose(1, 2).flatten(2) + lepe))


def test_stripes_ask_for_heads_that_can_be_halved():
    with pytest.raises(ValueError, match=r'num_heads must be even .* got 3'):
        StripeAttention(12, 3, split_size=2)


@torch.no_grad()
def test_linear_attention_adds_lepe_where_asked():
    torch.manual_seed(0)
    layer = LinearAttention(8, 2, lepe=True).eval()
    x = torch.randn(2, 12, 8)
    v = layer.split_heads(x)[2].transpose(1, 2).reshape(2, 3, 4, 8).permute(0, 3, 1, 2)
    lepe = layer.lepe(v).flatten(2).transpose(1, 2)
    with_lepe = layer(x, (3, 4))
    layer.lepe = None
    near(with_lepe, layer(x, (3, 4)) + lepe @ layer.proj.weight.T)


@pytest.mark.parametrize('hw', [(4, 4), (5, 7), (9, 6)])
def test_patch_embedding_pads_to_whole_steps(hw):
    layer = PatchEmbed(3, 8, 7, 4, padding=2)
    assert layer(torch.randn(1, 3, *hw)).shape == (1, -(-hw[0] // 4), -(-hw[1] // 4), 8)
