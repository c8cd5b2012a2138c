"""Measurements of attention: on constructed cases, and against what the layers compute."""

import importlib.util
import json
import re
from pathlib import Path

import cv2
import pytest
import torch

from inline_mm import InLinePVT
from inline_mm.analysis.attention import (
    AttentionRows,
    confused_pairs,
    local_attention,
    points,
    random_positions,
    trace_attention,
)
from inline_mm.layers import (
    InLineAttention,
    LinearAttention,
    SoftmaxAttention,
    SpatialReductionAttention,
    StripeAttention,
    WindowAttention,
)
from inline_mm.ops import (
    inline_attention_weights,
    linear_attention_weights,
    softmax_attention_weights,
)

REPO = Path(__file__).parent.parent
ARCH = dict(depths=[1, 1, 1, 1], embed_dims=[16, 16, 32, 32], num_heads=[1, 2, 2, 2])
SCALE = 0.25


@pytest.fixture
def doubled():
    """Queries q and 2q of one direction, keys (1 head, dimension 16), all positive."""
    torch.manual_seed(0)
    q = torch.rand(1, 1, 16) + 0.1
    return torch.cat([q, 2 * q], dim=1), torch.rand(1, 40, 16)


def test_linear_attention_confuses_a_query_with_its_double(doubled):
    q, k = doubled
    assert confused_pairs(q, linear_attention_weights(q, k)) == (1, 1)


def test_softmax_and_inline_tell_a_query_from_its_double(doubled):
    q, k = doubled
    assert confused_pairs(q, softmax_attention_weights(q, k, SCALE)) == (0, 1)
    assert confused_pairs(q, inline_attention_weights(q, k, SCALE)) == (0, 1)


def test_equal_queries_are_no_confusion_and_relu_confuses_what_it_hides():
    q = torch.tensor([[[1.0, -1.0], [1.0, -1.0], [1.0, -3.0]]])
    k = torch.rand(1, 8, 2)
    assert confused_pairs(q, linear_attention_weights(q.relu(), k)) == (2, 2)


def test_confusion_does_not_depend_on_the_number_of_tokens(doubled):
    # Weights shrink with the number of keys; their relative difference does not.
    q, k = doubled
    k = k.repeat(1, 100, 1)
    assert confused_pairs(q, softmax_attention_weights(q, k, SCALE)) == (0, 1)


@pytest.mark.parametrize('feature_map', ['identity', 'relu', 'leaky_relu', 'exp'])
def test_inline_weights_sum_to_one(feature_map):
    torch.manual_seed(0)
    model = InLinePVT(
        dict(ARCH, attention=[dict(type='inline', feature_map=feature_map)] * 4), img_size=32
    ).eval()
    seen = []
    trace_attention(model, torch.randn(1, 3, 32, 64), seen.append, random_positions(50))
    assert [rows.name for rows in seen] == [f'stages.{i}.0.attn' for i in range(4)]
    for rows in seen:
        assert rows.kind == 'inline' and rows.weights.min() < rows.weights.max()
        torch.testing.assert_close(rows.weights.sum(-1), torch.ones(rows.weights.shape[:2]))


class Holder(torch.nn.Module):
    """One attention layer as a model."""

    def __init__(self, layer, hw):
        super().__init__()
        self.layer, self.hw = layer, hw

    def forward(self, image):
        return self.layer(image.flatten(2).transpose(1, 2), self.hw)


LAYERS = {
    'inline': lambda: InLineAttention(16, 2),
    'inline-not-local': lambda: InLineAttention(16, 2, local=False),
    'inline-leaky': lambda: InLineAttention(16, 2, local=False, feature_map='leaky_relu'),
    'linear': lambda: LinearAttention(16, 2),
    'softmax': lambda: SoftmaxAttention(16, 2),
    'window': lambda: WindowAttention(16, 2, window_size=4),
    'shifted': lambda: WindowAttention(16, 2, window_size=4, shift=True),
    'stripes': lambda: StripeAttention(16, 2, split_size=3),
    'one-stripe': lambda: StripeAttention(16, 2, split_size=None),
    'not-reduced': lambda: SpatialReductionAttention(16, 2, sr_ratio=1),
}


def trace(layer, hw, choose):
    seen = []
    image = torch.randn(1, 16, *hw)
    trace_attention(Holder(layer, hw).eval(), image, seen.append, choose)
    (rows,) = seen
    return image.flatten(2).transpose(1, 2), rows


def weighted_output(layer, v, rows):
    """The output of the layer by its weights, plus its local part if it has one, (1, N, C)."""
    out = rows.weights @ v
    if rows.kernel is not None:
        image = v.transpose(1, 2).unflatten(-1, rows.hw).flatten(0, 1).unsqueeze(0)
        kernel = rows.kernel.flatten(0, 1).unsqueeze(1)
        local = torch.nn.functional.conv2d(image, kernel, padding=1, groups=len(kernel))
        out = out + local[0].flatten(1).unflatten(0, v[..., 0, :].shape).transpose(1, 2)
    return layer.project(out.transpose(0, 1).flatten(1))


@pytest.mark.parametrize('kind', LAYERS)
def test_traced_weights_give_the_layers_own_output(kind):
    torch.manual_seed(0)
    hw = (8, 12)
    layer = LAYERS[kind]()
    for name, parameter in layer.named_parameters():
        # Scores that matter, and no convolution beside softmax attention.
        parameter.data.mul_(0 if 'lepe' in name else 2)
    if kind in ('window', 'shifted'):
        torch.nn.init.normal_(layer.rel_pos.relative_position_bias_table)
    x, rows = trace(layer, hw, lambda hw: torch.arange(hw[0] * hw[1]))
    with torch.no_grad():
        v = layer.kv(x)[..., 16:] if kind == 'not-reduced' else layer.qkv(x)[..., 32:]
        v = v[0].unflatten(-1, (2, 8)).transpose(0, 1)
        expected = layer(x, hw)[0]
        torch.testing.assert_close(weighted_output(layer, v, rows), expected, rtol=0, atol=1e-4)
    # Not by weights that say nothing.
    assert rows.weights.std(-1).mean() > 0.05 / rows.weights.shape[-1]


@pytest.mark.parametrize('kind', ['window', 'shifted', 'stripes'])
def test_queries_of_maps_that_do_not_fit_the_windows_attend_to_tokens_of_theirs(kind):
    torch.manual_seed(0)
    hw = (7, 9)
    _, rows = trace(LAYERS[kind](), hw, points([(0.0, 0.0), (0.99, 0.99)]))
    assert rows.positions.tolist() == [0, 62]
    total = rows.weights.sum(-1)
    # Windows at the border also attend to padding.
    assert (total > 0.1).all() and (total < 1 + 1e-5).all()
    first = rows.maps()[0]
    assert first[0, 0] > 0 and first[6, 8] == 0


def test_reduced_keys_share_their_weight_among_the_tokens_they_are_made_from():
    torch.manual_seed(0)
    _, rows = trace(SpatialReductionAttention(16, 2, sr_ratio=4), (8, 13), random_positions(5))
    torch.testing.assert_close(rows.weights.sum(-1), torch.ones(2, 5))
    blocks = rows.weights.unflatten(-1, rows.hw)
    assert (blocks[..., :4, 4:8] == blocks[..., :1, 4:5]).all()
    # The incomplete column of blocks is left out by the layer.
    assert (blocks[..., 12:] == 0).all()


def test_tokens_before_the_map_count_but_are_no_neighbours():
    torch.manual_seed(0)
    layer = InLineAttention(16, 2)
    seen = []

    class WithClassToken(Holder):
        def forward(self, image):
            x = image.flatten(2).transpose(1, 2)
            return self.layer(torch.cat([x.mean(1, keepdim=True), x], 1), self.hw)

    model = WithClassToken(layer, (4, 4)).eval()
    trace_attention(model, torch.randn(1, 16, 4, 4), seen.append, random_positions(16))
    assert seen[0].num_prefix_tokens == 1 and seen[0].weights.shape == (2, 16, 17)
    assert local_attention(seen[0])['uniform'] == pytest.approx(100 / 16 / 17)


def rows_of(weights, hw, positions, kernel=None):
    weights = torch.as_tensor(weights, dtype=torch.float32)
    return AttentionRows(
        name='',
        kind='inline',
        hw=hw,
        positions=torch.tensor(positions),
        queries=torch.zeros(*weights.shape[:2], 1),
        weights=weights,
        kernel=kernel,
    )


def test_local_attention_of_known_weights():
    # A query in the middle of a 3 x 5 map, and one in its corner.
    uniform = torch.full((1, 2, 15), 1 / 15)
    result = local_attention(rows_of(uniform, (3, 5), [7, 0]))
    assert result['sum'] == pytest.approx((9 + 4) / 2 / 15)
    assert result['share'] == pytest.approx(result['sum'])
    assert result['uniform'] == pytest.approx(result['sum'])

    # Weights may be negative: the far end takes -1, so the share is 2 of 3.
    signed = torch.zeros(1, 1, 15)
    signed[0, 0, 7], signed[0, 0, 0] = 2, -1
    result = local_attention(rows_of(signed, (3, 5), [7]))
    assert result['sum'] == pytest.approx(2) and result['share'] == pytest.approx(2 / 3)


def test_local_part_is_counted_per_channel():
    # Two channels whose kernels cancel in the mean: the share must not.
    kernel = torch.zeros(1, 2, 3, 3)
    kernel[0, 0, 1, 1], kernel[0, 1, 1, 1] = 1, -1
    weights = torch.full((1, 1, 25), 1 / 25)
    result = local_attention(rows_of(weights, (5, 5), [12], kernel))
    assert result['sum_with_local'] == pytest.approx(9 / 25)
    own, other = 8 / 25 + 26 / 25, 8 / 25 + 24 / 25
    share = (own / (own + 16 / 25) + other / (other + 16 / 25)) / 2
    assert result['share_with_local'] == pytest.approx(share)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r'agree in heads and n, got shapes \(1, 2, 4\)'):
        confused_pairs(torch.zeros(1, 2, 4), torch.zeros(1, 3, 9))
    with pytest.raises(ValueError, match='tolerance must be positive, got 0'):
        confused_pairs(torch.zeros(1, 2, 4), torch.zeros(1, 2, 9), 0)
    model = Holder(InLineAttention(16, 2), (4, 4))
    with pytest.raises(ValueError, match='eval mode'):
        trace_attention(model, torch.zeros(1, 16, 4, 4), print, random_positions(2))
    with pytest.raises(ValueError, match=r'one image .* got \(2, 16, 4, 4\)'):
        trace_attention(model.eval(), torch.zeros(2, 16, 4, 4), print, random_positions(2))
    with pytest.raises(ValueError, match='no attention layer'):
        trace_attention(torch.nn.ReLU().eval(), torch.zeros(1, 3, 4, 4), print, points([(0, 0)]))


spec = importlib.util.spec_from_file_location('tool', REPO / 'tools/analyze_attention.py')
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)
SMALL = ['--size', '32', '48', '--max-images', '2', '--max-maps', '1', '--queries', '20']


@pytest.mark.slow
def test_the_tool_measures_models_side_by_side_and_draws(tmp_path, capsys):
    models = [
        str(dict(type='InLinePVT', arch=dict(ARCH, attention=[name] * 4), img_size=32))
        for name in ('softmax', 'linear', 'inline')
    ]
    config = str(REPO / 'configs/mini/fpn_inline-pvt-mini_1xb8-500_shapes.py')
    labels = ['softmax', 'linear', 'inline', 'mini']
    tool.main([*models, config, '--labels', *labels, '--out', str(tmp_path), *SMALL])
    result = json.loads((tmp_path / 'attention.json').read_text())
    assert list(result['models']) == labels
    for label, layers in result['models'].items():
        assert len(layers) == (5 if label == 'mini' else 4)
        assert layers[0]['kind'] == label.replace('mini', 'inline')
        assert layers[0]['map'] == [8, 12]
        # Two images, 20 queries, one head; no two of them are equal.
        assert layers[0]['pairs'] == 2 * 190
        assert ('local_share_with_local' in layers[0]) == (label in ('inline', 'mini'))
    assert cv2.imread(str(tmp_path / 'measures.png')) is not None
    assert [p.name for p in tmp_path.glob('maps_*')] == ['maps_000000.png']
    assert '| linear | stages.0.0.attn |' in capsys.readouterr().out


@pytest.mark.slow
def test_the_tool_loads_a_checkpoint_and_reads_images(tmp_path):
    torch.manual_seed(1)
    arch = dict(type='InLinePVT', arch=ARCH, img_size=32)
    torch.save(dict(state_dict=InLinePVT(ARCH, img_size=32).state_dict()), tmp_path / 'a.pth')
    cv2.imwrite(str(tmp_path / 'x.png'), torch.randint(0, 255, (40, 40, 3)).byte().numpy())
    options = ['--images', str(tmp_path / 'x.png'), *SMALL]
    for out, checkpoint in (('loaded', tmp_path / 'a.pth'), ('untrained', '-')):
        tool.main([str(arch), '--checkpoints', str(checkpoint), '--out', str(tmp_path / out),
                   *options])  # fmt: skip
    loaded, untrained = (
        json.loads((tmp_path / out / 'attention.json').read_text())
        for out in ('loaded', 'untrained')
    )
    assert loaded['settings']['images'] == ['x']
    assert loaded['models'] != untrained['models']


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['nowhere.py'], "config 'nowhere.py' does not exist"),
        (["{'type': 'InLinePVT'"], 'is no Python dict'),
        (["{'type': 'InLinePVT', 'arch': 'huge'}"], "arch must be one of .*got 'huge'"),
        (['{}', '--checkpoints', 'a', 'b'], 'needs one per model, 1, got 2'),
        (['{}', '--points', '0.5'], 'pairs of numbers from 0 to 1'),
        (['{}', '--images', 'nowhere.png'], "'nowhere.png' does not exist"),
    ],
)
def test_what_the_tool_cannot_use_is_named(arguments, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        tool.main([*arguments, '--out', str(tmp_path / 'out'), '--max-images', '1'])
    assert re.search(message, capsys.readouterr().err)
