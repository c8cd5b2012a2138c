"""Fast operators against their naive twins: shapes, dtypes, gradients, extreme statistics."""

import pytest
import torch

from inline_mm import ops
from inline_mm.ops import inline as inline_module
from inline_mm.ops import tiles as tiles_module

# (B, C, heads, H, W, prefix tokens)
SHAPES = [
    (2, 8, 2, 5, 7, 0),
    (1, 12, 3, 1, 3, 0),
    (3, 6, 1, 4, 1, 0),
    (2, 8, 4, 3, 4, 1),
]


def make_inputs(shape, dtype=torch.float64, mean=1.0, grad=True):
    batch, channels, _, height, width, prefix = shape
    rng = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=rng, dtype=torch.float64)

    x = normal(batch, height * width + prefix, channels) + mean * normal(channels)
    tensors = (
        x,
        normal(3 * channels, channels) * channels**-0.5,
        normal(3 * channels),
        normal(batch, channels, 3, 3) / 3,
        normal(channels),
    )
    return [t.to(dtype).requires_grad_(grad) for t in tensors]


def relative_error(value, reference):
    return ((value.double() - reference).abs().max() / reference.abs().max()).item()


@pytest.fixture(params=['whole', 'tiles', 'at-once', 'plain'])
def form(request, monkeypatch):
    """The folded form on a CPU in one or several tiles, as on other devices, and the plain form."""
    monkeypatch.setattr(inline_module, 'SMALL', 1000 if request.param == 'plain' else 0)
    if request.param == 'tiles':
        monkeypatch.setattr(inline_module, 'CHUNK_NUMEL', 40)
        monkeypatch.setattr(tiles_module, 'TILE_NUMEL', 1)
        monkeypatch.setattr(tiles_module, 'MIN_ROWS', 2)
    if request.param == 'at-once':
        monkeypatch.setattr(inline_module, 'runs_in_tiles', lambda x: False)
    return request.param


@pytest.mark.parametrize('with_local', [True, False], ids=['local', 'global-only'])
@pytest.mark.parametrize('shape', SHAPES)
def test_operator_equals_the_formula(shape, with_local, form):
    x, weight, bias, kernel, kernel_bias = make_inputs(shape)
    extra = (kernel, kernel_bias, shape[3:5]) if with_local else ()
    inputs = [x, weight, bias] + ([kernel, kernel_bias] if with_local else [])
    value = ops.inline_attention_tokens(x, weight, bias, shape[2], *extra)
    reference = ops.inline_attention_tokens_naive(x, weight, bias, shape[2], *extra)
    torch.testing.assert_close(value, reference)
    cotangent = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view_as(value)
    torch.testing.assert_close(
        torch.autograd.grad(value, inputs, cotangent),
        torch.autograd.grad(reference, inputs, cotangent),
    )


@pytest.mark.parametrize('shape', SHAPES)
def test_operator_passes_gradcheck(shape, form):
    inputs = make_inputs(shape)
    hw = shape[3:5]
    torch.autograd.gradcheck(
        lambda *t: ops.inline_attention_tokens(*t[:3], shape[2], *t[3:], hw), inputs, fast_mode=True
    )
    torch.autograd.gradcheck(
        lambda x, w: ops.inline_attention_tokens(x, w, None, shape[2]), inputs[:2], fast_mode=True
    )


def test_graph_form_equals_eager_form(form):
    shape = SHAPES[3]
    inputs = make_inputs(shape, torch.float32, grad=False)

    def run(x, weight, bias, kernel, kernel_bias):
        return ops.inline_attention_tokens(
            x, weight, bias, shape[2], kernel, kernel_bias, shape[3:5]
        )

    traced = torch.jit.trace(run, tuple(inputs), check_trace=False)
    torch.testing.assert_close(traced(*inputs), run(*inputs))


def test_statistics_of_tiles_merge_to_those_of_the_whole():
    x = make_inputs((2, 8, 2, 6, 7, 0), mean=10.0, grad=False)[0]
    whole = ops.gather_statistics(x)
    parts = [ops.gather_statistics(tile) for tile in x.split([5, 20, 17], dim=1)]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert merged.count == whole.count == 42
    torch.testing.assert_close(merged[1:], whole[1:])


def test_an_image_in_tiles_equals_the_whole_image(form):
    """Two tiles of rows exchange statistics and one row of tokens, and nothing else."""
    x, weight, bias, kernel, _ = make_inputs((1, 8, 2, 6, 5, 0), grad=False)
    whole = ops.inline_attention_tokens(x, weight, bias, 2, kernel, None, (6, 5))
    rows = x.view(1, 6, 5, 8)
    upper, lower = (ops.gather_statistics(tile.flatten(1, 2)) for tile in rows.split(3, dim=1))
    statistics = upper.merge(lower)
    m, out_bias = ops.fold(statistics, weight, bias, 2)
    for i, window in enumerate((slice(0, 4), slice(2, 6))):
        tokens = rows[:, window].flatten(1, 2)
        v = torch.nn.functional.linear(tokens, weight[16:], bias[16:])
        tile = ops.apply_folded(tokens, statistics.mean, m, out_bias, v, kernel, hw=(4, 5))
        own_rows = tile.view(1, 4, 5, 8)[:, i : i + 3]
        torch.testing.assert_close(own_rows, whole.view(1, 6, 5, 8)[:, 3 * i : 3 * i + 3])


@pytest.mark.parametrize('name', list(ops.FEATURE_MAPS))
def test_covariance_form_equals_the_formula_for_any_feature_map(name):
    phi = ops.FEATURE_MAPS[name]
    q, k, v = torch.randn(3, 2, 3, 11, 4, dtype=torch.float64, generator=torch.manual_seed(0))
    torch.testing.assert_close(
        ops.inline_attention(phi(q), phi(k), v, 0.5),
        ops.inline_attention_naive(phi(q), phi(k), v, 0.5),
    )


def test_inline_weights_sum_to_one_and_give_the_formula():
    q, k, v = torch.randn(3, 2, 3, 11, 4, dtype=torch.float64, generator=torch.manual_seed(0))
    weights = ops.inline_attention_weights(q, k, 0.5)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert weights.min() < 0
    torch.testing.assert_close(weights @ v, ops.inline_attention_naive(q, k, v, 0.5))


def test_linear_and_softmax_attention_equal_their_weights_times_values():
    q, k, v = torch.randn(3, 2, 3, 11, 4, dtype=torch.float64, generator=torch.manual_seed(0))
    torch.testing.assert_close(
        ops.softmax_attention(q, k, v, 0.5), ops.softmax_attention_weights(q, k, 0.5) @ v
    )
    q, k = q.exp(), k.exp()
    torch.testing.assert_close(
        ops.linear_attention(q, k, v, eps=0.0), ops.linear_attention_weights(q, k) @ v
    )


def test_linear_attention_of_a_query_that_matches_no_key_is_finite():
    zeros = torch.zeros(1, 1, 4, 2)
    assert ops.linear_attention(zeros, zeros, torch.ones_like(zeros)).isfinite().all()


@pytest.mark.parametrize('bias_ndim', [None, 1, 2])
def test_dynamic_convolution_equals_its_naive_form(bias_ndim):
    x, _, _, kernel, channel_bias = make_inputs((3, 6, 1, 4, 5, 0))
    bias = {None: None, 1: channel_bias, 2: kernel[:, :, 0, 0]}[bias_ndim]
    value = ops.dynamic_depthwise_conv(x, kernel, (4, 5), bias)
    reference = ops.dynamic_depthwise_conv_naive(x, kernel, (4, 5), bias)
    torch.testing.assert_close(value, reference)
    cotangent = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view_as(value)
    inputs = [x, kernel] + ([channel_bias] if bias_ndim == 1 else [])
    torch.testing.assert_close(
        torch.autograd.grad(value, inputs, cotangent),
        torch.autograd.grad(reference, inputs, cotangent),
    )


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_precision_with_channel_means_ten_times_the_deviation(dtype):
    shape = (1, 16, 2, 40, 50, 0)
    exact = make_inputs(shape, mean=10.0, grad=False)
    inputs = [t.to(dtype) for t in exact]
    reference = ops.inline_attention_tokens_naive(*(t.double() for t in inputs[:3]), 2, *(
        t.double() for t in inputs[3:]), hw=(40, 50))  # fmt: skip
    value = ops.inline_attention_tokens(*inputs[:3], 2, *inputs[3:], (40, 50))
    naive = ops.inline_attention_tokens_naive(*inputs[:3], 2, *inputs[3:], hw=(40, 50))
    assert value.dtype == dtype
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}[dtype]
    error = relative_error(value, reference)
    assert error <= bound
    if dtype != torch.float32 and naive.isfinite().all():
        assert error <= relative_error(naive, reference)


def test_autocast_runs_the_tokens_in_its_dtype_and_returns_full_precision_gradients():
    shape = SHAPES[0]
    inputs = make_inputs(shape, torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        value = ops.inline_attention_tokens(*inputs[:3], shape[2], *inputs[3:], shape[3:5])
    assert value.dtype == torch.bfloat16
    reference = ops.inline_attention_tokens_naive(*inputs[:3], shape[2], *inputs[3:], hw=shape[3:5])
    assert relative_error(value, reference.double()) < 2e-2
    grads = torch.autograd.grad(value.float().square().sum(), inputs)
    expected = torch.autograd.grad(reference.square().sum(), inputs)
    for grad, other in zip(grads, expected, strict=True):
        assert grad.dtype == torch.float32
        assert relative_error(grad, other.double()) < 5e-2


@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_a_million_tokens_are_finite_and_close_in_half_precision(dtype):
    """1024 x 1024 tokens: sums that fp16 cannot hold and bf16 cannot resolve."""
    shape = (1, 4, 2, 1024, 1024, 0)
    inputs = [t.to(dtype) for t in make_inputs(shape, mean=10.0, grad=False)]
    value = ops.inline_attention_tokens(*inputs[:3], 2, *inputs[3:], (1024, 1024))
    assert value.isfinite().all()
    reference = ops.inline_attention_tokens_naive(
        *(t.double() for t in inputs[:3]), 2, *(t.double() for t in inputs[3:]), hw=(1024, 1024)
    )
    assert relative_error(value, reference) <= 2e-2


def test_backward_saves_nothing_token_sized_but_the_tokens():
    x, weight, bias, kernel, kernel_bias = make_inputs((2, 8, 2, 30, 40, 0), torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.inline_attention_tokens(x, weight, bias, 2, kernel, kernel_bias, (30, 40))
    assert sum(t.numel() >= x.numel() for t in saved) == 1
