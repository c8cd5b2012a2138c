"""What attention layers attend to: the measurements of arXiv:2412.06590 on real models.

The weights are those of the layers at work. Hooks see what goes into each attention layer of a
model that runs on an image; InLine and linear weights come from the layer's queries and keys, and
softmax weights from the very arguments of ``scaled_dot_product_attention``, whatever windows or
stripes the layer has cut the map into. Only the rows of some queries are formed, so that large
maps can be measured.

Definitions, for the weights ``w_ij`` of query i over the tokens j of one head:

- *Confusion*: two different queries get the same attention. Queries differ where
  ``max |q_i - q_j| > t max(max |q_i|, max |q_j|)``, and their attention is the same where
  ``max |w_i - w_j| <= t max(max |w_i|, max |w_j|)``, with one tolerance t. The paper counts such
  pairs per image; their share of all pairs does not depend on how many queries are looked at.
- *Local sum*: the sum of ``w_ij`` over the 3 x 3 tokens around i (fewer at the border), which is
  how the paper measures locality. Rows sum to 1 in all three attentions, but InLine weights may be
  negative, and so may the sum.
- *Local share*: the sum of ``|w_ij|`` over the same tokens, over that of all tokens: between 0
  and 1 always.

InLine's local part adds a 3x3 kernel per channel to the weights. With it, both are means over the
channels of a head, each with its own kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..layers import InLineAttention, LinearAttention, QKVAttention, SpatialReductionAttention
from ..ops import FEATURE_MAPS, inline_attention_weights, linear_attention_weights

__all__ = [
    'AttentionRows',
    'attention_layers',
    'confused_pairs',
    'local_attention',
    'points',
    'random_positions',
    'trace_attention',
]

#: Chooses the queries of a map: its (H, W) to row-major positions, (n,) int64.
ChoosePositions = Callable[[tuple[int, int]], Tensor]


@dataclass(frozen=True)
class AttentionRows:
    """Attention of n queries of one image in one layer.

    Attributes:
        name: The layer's name in the model.
        kind: ``'inline'``, ``'linear'`` or ``'softmax'``.
        hw: (H, W) of the map.
        positions: (n,), where the queries are in the map, row-major.
        queries: (heads, n, head_dim), before any feature map.
        weights: (heads, n, P + H*W), each query's weights over all tokens, without the local part;
            what a padded window spends on padding is left out.
        num_prefix_tokens: P, tokens before the map's (a class token).
        kernel: (heads, head_dim, 3, 3), what the local part adds, where there is one.
    """

    name: str
    kind: str
    hw: tuple[int, int]
    positions: Tensor
    queries: Tensor
    weights: Tensor
    num_prefix_tokens: int = 0
    kernel: Tensor | None = None

    def maps(self) -> Tensor:
        """The weights over the map, averaged over heads, (n, H, W)."""
        return self.weights[..., self.num_prefix_tokens :].mean(0).unflatten(-1, self.hw)


# Measuring


def confused_pairs(queries: Tensor, weights: Tensor, tolerance: float = 1e-3) -> tuple[int, int]:
    """Count the pairs of different queries that get the same attention.

    Args:
        queries: (heads, n, head_dim), before any feature map.
        weights: (heads, n, N), a row per query.
        tolerance: Largest difference, relative to the largest entry, that counts as none.

    Returns:
        tuple[int, int]: The pairs with the same attention, and all pairs of different queries,
        both summed over heads.

    Raises:
        ValueError: If the shapes do not belong together or ``tolerance`` is not positive.
    """
    if queries.ndim != 3 or weights.ndim != 3 or queries.shape[:2] != weights.shape[:2]:
        raise ValueError(
            'queries (heads, n, head_dim) and weights (heads, n, N) must agree in heads and n, '
            f'got shapes {tuple(queries.shape)} and {tuple(weights.shape)}'
        )
    if not tolerance > 0:
        raise ValueError(f'tolerance must be positive, got {tolerance!r}')
    different = (~_same(queries, tolerance)).triu(1)
    confused = different & _same(weights, tolerance)
    return int(confused.sum()), int(different.sum())


def _same(vectors: Tensor, tolerance: float) -> Tensor:
    """Which of n vectors are the same, (heads, n, n), for ``vectors`` (heads, n, d)."""
    size = vectors.abs().amax(-1)
    largest = torch.maximum(size.unsqueeze(-1), size.unsqueeze(-2))
    return torch.cdist(vectors, vectors, p=float('inf')) <= tolerance * largest


def local_attention(rows: AttentionRows) -> dict[str, float]:
    """How much attention falls on the 3 x 3 tokens around a query, on average.

    Args:
        rows: Attention of some queries.

    Returns:
        dict[str, float]: ``sum`` and ``share`` as the module defines them; ``uniform``, their
        value for equal weights; with a local part also ``sum_with_local`` and
        ``share_with_local``.
    """
    height, width = rows.hw
    steps = torch.tensor([-1, 0, 1], device=rows.positions.device)
    y = (rows.positions // width).unsqueeze(-1) + steps.repeat_interleave(3)
    x = (rows.positions % width).unsqueeze(-1) + steps.repeat(3)
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    index = torch.where(inside, y * width + x, 0) + rows.num_prefix_tokens
    around = rows.weights.gather(-1, index.expand(len(rows.weights), -1, -1)) * inside
    total = rows.weights.abs().sum(-1)
    result = dict(
        sum=around.sum(-1).mean().item(),
        share=(around.abs().sum(-1) / total.clamp_min(1e-12)).mean().item(),
        uniform=inside.sum(-1).float().mean().item() / rows.weights.shape[-1],
    )
    if rows.kernel is not None:
        elsewhere = (total - around.abs().sum(-1)).clamp_min(0).unsqueeze(1)
        # (heads, head_dim, n, 9): each channel has weights of its own there.
        around = around.unsqueeze(1) + rows.kernel.flatten(2).unsqueeze(2) * inside
        size = around.abs().sum(-1)
        result['sum_with_local'] = around.sum(-1).mean().item()
        result['share_with_local'] = (size / (size + elsewhere).clamp_min(1e-12)).mean().item()
    return result


# Choosing queries


def random_positions(count: int, seed: int = 0) -> ChoosePositions:
    """Up to ``count`` different positions at random, the same for every map of one size."""

    def choose(hw: tuple[int, int]) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(hw[0] * hw[1], generator=generator)[:count].sort().values

    return choose


def points(where: Sequence[tuple[float, float]]) -> ChoosePositions:
    """The positions at points (y, x) of the image, 0 its top or left and 1 its other end."""

    def choose(hw: tuple[int, int]) -> Tensor:
        cells = [
            [min(int(part * side), side - 1) for part, side in zip(point, hw, strict=True)]
            for point in where
        ]
        return torch.tensor([y * hw[1] + x for y, x in cells])

    return choose


# Tracing


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers of a model by name, in order."""
    kinds = (QKVAttention, SpatialReductionAttention)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


@torch.no_grad()
def trace_attention(
    model: nn.Module,
    image: Tensor,
    visit: Callable[[AttentionRows], None],
    choose: ChoosePositions,
) -> None:
    """Run a model on an image and hand every attention layer's rows over, one layer at a time.

    Args:
        model: A backbone of this package, or a model with one inside, in eval mode.
        image: (1, in_channels, H, W).
        visit: Called with the rows of each layer in the order in which the layers run.
        choose: The queries to look at, :func:`random_positions` or :func:`points`.

    Raises:
        ValueError: If the model is in training mode, has no attention layer of this package, or
            if ``image`` holds more than one image.
    """
    layers = attention_layers(model)
    if model.training:
        raise ValueError('model must be in eval mode: dropout would change its attention')
    if not layers:
        raise ValueError(f'{type(model).__name__} has no attention layer of inline_mm')
    if image.ndim != 4 or len(image) != 1:
        raise ValueError(f'image must be one image (1, C, H, W), got {tuple(image.shape)}')

    def look(name: str) -> Callable:
        def hook(layer: nn.Module, args: tuple, kwargs: dict) -> None:
            visit(_attention_rows(name, layer, args, kwargs, choose))

        return hook

    handles = [
        layer.register_forward_pre_hook(look(name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        model(image)
    finally:
        for handle in handles:
            handle.remove()


def _attention_rows(
    name: str, layer: nn.Module, args: tuple, kwargs: dict, choose: ChoosePositions
) -> AttentionRows:
    x, hw = args[0], tuple(args[1])
    prefix = x.shape[1] - hw[0] * hw[1]
    positions = choose(hw).to(x.device)
    common = dict(name=name, hw=hw, positions=positions, num_prefix_tokens=prefix)
    if isinstance(layer, InLineAttention | LinearAttention):
        phi = FEATURE_MAPS[layer.feature_map]
        q, k = (t[0].float() for t in layer.split_heads(x)[:2])
        q = q[:, positions + prefix]
        if isinstance(layer, LinearAttention):
            # A query that matches no key gets nothing, which the layer's eps sees to.
            weights = linear_attention_weights(phi(q), phi(k)).nan_to_num(0.0)
            return AttentionRows(kind='linear', queries=q, weights=weights, **common)
        weights = inline_attention_weights(phi(q), phi(k), layer.scale)
        mean_token = args[2] if len(args) > 2 else kwargs.get('mean_token')
        kernel = layer.make_kernel(x.mean(dim=1) if mean_token is None else mean_token)
        if kernel is not None:
            kernel = kernel[0].float().unflatten(0, (layer.num_heads, -1))
        return AttentionRows(kind='inline', queries=q, weights=weights, kernel=kernel, **common)

    with _AttentionCalls() as real:
        layer.forward(*args, **kwargs)
    with _AttentionCalls() as coded, _position_codes(layer):
        code = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=torch.float32)
        layer.forward(code.view(1, -1, 1).expand_as(x), *args[1:], **kwargs)
    queries, weights = _softmax_rows(layer, x, hw, positions + prefix, real.calls, coded.calls)
    return AttentionRows(kind='softmax', queries=queries, weights=weights, **common)


class _AttentionCalls(TorchFunctionMode):
    """Notes q, k, bias and scale of every call of ``scaled_dot_product_attention``.

    Each is (groups, n, ...): images or windows times heads, whatever the layer makes of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor | None, float]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, k = args[0], args[1]
            bias = kwargs.get('attn_mask')
            if bias is not None:
                bias = bias.expand(*q.shape[:-1], k.shape[-2]).flatten(0, 1)
            self.calls.append((q.flatten(0, 1), k.flatten(0, 1), bias, kwargs['scale']))
        return func(*args, **kwargs)


@contextmanager
def _position_codes(layer: nn.Module) -> Iterator[None]:
    """Make a layer's projections pass on codes in place of queries and keys.

    The first entry of every query and key is that of its token, a number from 1 on where the
    tokens count themselves (0 is padding); the second is its head. So the layer's own cutting
    and shifting tells where in the map a query or key comes from.
    """

    def encode(module: nn.Linear, args: tuple, out: Tensor) -> Tensor:
        head_dim = layer.embed_dims // layer.num_heads
        parts = out.shape[-1] // layer.embed_dims
        code = torch.zeros(*out.shape[:-1], parts, layer.num_heads, head_dim, device=out.device)
        code[..., 0] = args[0][..., :1].unsqueeze(-1)
        code[..., 1] = torch.arange(layer.num_heads, device=out.device)
        return code.flatten(-3)

    projections = [layer.qkv] if hasattr(layer, 'qkv') else [layer.q, layer.kv]
    handles = [projection.register_forward_hook(encode) for projection in projections]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _softmax_rows(
    layer: nn.Module,
    x: Tensor,
    hw: tuple[int, int],
    tokens: Tensor,
    real: list[tuple],
    coded: list[tuple],
) -> tuple[Tensor, Tensor]:
    """Queries (heads, n, head_dim) and weights (heads, n, N) of the given tokens."""
    num_tokens, heads = x.shape[1], layer.num_heads
    row_of = torch.full((num_tokens + 1,), -1, device=x.device)
    row_of[tokens + 1] = torch.arange(len(tokens), device=x.device)
    queries = x.new_zeros(heads, len(tokens), layer.embed_dims // heads, dtype=torch.float32)
    weights = x.new_zeros(heads, len(tokens), num_tokens, dtype=torch.float32)
    for (q, k, bias, scale), (q_code, k_code, _, _) in zip(real, coded, strict=True):
        q_token, k_token = q_code[..., 0].round().long(), k_code[..., 0].round().long()
        rows = row_of[q_token]
        for group in (rows >= 0).any(-1).nonzero().flatten().tolist():
            wanted = rows[group] >= 0
            head, row = int(q_code[group, 0, 1].round()), rows[group, wanted]
            scores = q[group, wanted].float() @ k[group].float().T * scale
            if bias is not None:
                scores = scores + bias[group, wanted].float()
            found = scores.softmax(-1)
            if isinstance(layer, SpatialReductionAttention):
                found = _spread(found, layer.sr_ratio, hw)
            else:
                # Column 0 takes what falls on padding.
                padded = found.new_zeros(len(found), num_tokens + 1)
                found = padded.index_add(1, k_token[group], found)[:, 1:]
            queries[head, row] = q[group, wanted].float()
            weights[head, row] = found
    return queries, weights


def _spread(weights: Tensor, ratio: int, hw: tuple[int, int]) -> Tensor:
    """Weights of a reduced map's tokens shared out among the tokens each was made from.

    Args:
        weights: (n, h*w).
        ratio: Side of the squares of tokens.
        hw: (H, W) of the map; rows and columns that were left out get nothing.

    Returns:
        Tensor: (n, H*W).
    """
    reduced = [max(side // ratio, 1) for side in hw]
    image = weights.unflatten(-1, reduced)
    image = image.repeat_interleave(ratio, -2).repeat_interleave(ratio, -1)
    image = image[..., : hw[0], : hw[1]]
    missing = [side - covered for side, covered in zip(hw, image.shape[-2:], strict=True)]
    image = F.pad(image, (0, missing[1], 0, missing[0])).flatten(-2)
    return image / image.sum(-1, keepdim=True)
