"""Time the InLine attention layer against its naive form, linear and softmax attention.

All sides run in one process and take turns; figures are medians. Writes attention.json,
attention.md and attention.png.
"""

import argparse
import json
from pathlib import Path
from statistics import geometric_mean

import torch
from mmengine.utils import track_iter_progress
from torch import Tensor, nn

from inline_mm.analysis.complexity import plain_forward
from inline_mm.analysis.timing import (
    describe_machine,
    interleaved_seconds,
    saved_bytes,
)
from inline_mm.layers import InLineAttention, LinearAttention, QKVAttention
from inline_mm.ops import softmax_attention

# C, heads, H, W, B
SHAPES = [
    (64, 2, 56, 56, 1),
    (64, 2, 200, 304, 1),
    (128, 4, 100, 152, 1),
    (320, 10, 50, 76, 1),
    (512, 16, 25, 38, 1),
    (96, 3, 56, 56, 4),
    (64, 2, 56, 56, 8),
]
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}


class NaiveInLineAttention(InLineAttention):
    """The layer with the operator in its plain form."""

    forward = plain_forward


class SoftmaxAttention(QKVAttention):
    """Softmax attention over all tokens."""

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        out = softmax_attention(*self.split_heads(x), self.scale)
        return self.project(out.transpose(1, 2).flatten(2))


class FourProducts(nn.Module):
    """Four N x C x C products and nothing else: what the layer cannot do without."""

    def __init__(self, embed_dims: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(embed_dims, embed_dims) * embed_dims**-0.5)

    def forward(self, x: Tensor, hw: tuple[int, int]) -> Tensor:
        for _ in range(4):
            x = x @ self.weight
        return x


SIDES = {
    'naive': NaiveInLineAttention,
    'inline': InLineAttention,
    'linear': LinearAttention,
    'softmax': SoftmaxAttention,
    'products': FourProducts,
}


def parse_shape(text: str) -> tuple[int, ...]:
    shape = tuple(int(part) for part in text.split(','))
    if len(shape) != 5 or min(shape) < 1:
        raise argparse.ArgumentTypeError(f'wants C,heads,H,W,B, five positive numbers, got {text}')
    return shape


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--shapes', type=parse_shape, nargs='+', default=SHAPES, metavar='C,heads,H,W,B'
    )
    parser.add_argument('--sides', nargs='+', choices=SIDES, default=list(SIDES))
    parser.add_argument('--dtype', choices=DTYPES, default='fp32', help='of tokens and weights')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--rounds', type=int, default=15, help='most turns of each side')
    parser.add_argument('--budget', type=float, default=4.0, help='seconds for the turns of a side')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/benchmark'))
    return parser.parse_args()


def measure(shape: tuple[int, ...], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Forward and training seconds, saved bytes and error of every side at one shape."""
    channels, heads, height, width, batch = shape
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    torch.manual_seed(0)
    reference = NaiveInLineAttention(channels, heads)
    layers = {}
    for name in args.sides:
        layers[name] = SIDES[name](channels, heads)
        if name in ('naive', 'inline'):
            layers[name].load_state_dict(reference.state_dict())
        layers[name].to(device, dtype)
    exact = torch.randn(batch, height * width, channels, dtype=torch.float64)
    x = exact.to(device, dtype)
    hw = (height, width)
    cotangent = torch.ones_like(x)

    def forward(layer: nn.Module) -> Tensor:
        with torch.inference_mode():
            return layer(x, hw)

    def train(layer: nn.Module) -> None:
        layer.zero_grad(set_to_none=True)
        layer(x.detach().requires_grad_(), hw).backward(cotangent)

    def calls(step):
        return {name: (lambda layer=layer: step(layer)) for name, layer in layers.items()}

    rows = {name: {} for name in layers}
    for key, step in (('forward', forward), ('train', train)):
        seconds = interleaved_seconds(calls(step), device, args.rounds, args.budget)
        for name, value in seconds.items():
            rows[name][key] = value
    for name, layer in layers.items():
        tokens = x.detach().requires_grad_()
        rows[name]['saved'] = saved_bytes(lambda layer=layer, t=tokens: layer(t, hw), layer)
    with torch.inference_mode():
        expected = reference.double()(x.double().cpu(), hw)
        for name in set(layers) & {'naive', 'inline'}:
            error = (layers[name](x, hw).double().cpu() - expected).abs().max()
            rows[name]['error'] = (error / expected.abs().max()).item()
    return rows


def table(results: list[dict], sides: list[str]) -> str:
    """Milliseconds by side, and the ratios that matter."""
    head = ['C, heads, H x W, B']
    head += [f'{side} {key} ms' for side in sides for key in ('forward', 'train')]
    ratios = {}
    if {'naive', 'inline'} <= set(sides):
        ratios |= {
            'naive / inline, forward': ('forward', 'naive', 'inline'),
            'naive / inline, train': ('train', 'naive', 'inline'),
            'inline / naive, saved': ('saved', 'inline', 'naive'),
        }
    if {'products', 'inline'} <= set(sides):
        ratios['inline / products, forward'] = ('forward', 'inline', 'products')
    lines = ['| ' + ' | '.join([*head, *ratios]) + ' |']
    lines.append('|---' + '|---:' * (len(head) - 1 + len(ratios)) + '|')
    for result in results:
        c, heads, height, width, batch = result['shape']
        rows = result['sides']
        cells = [f'{c}, {heads}, {height} x {width}, {batch}']
        cells += [f'{rows[s][k] * 1e3:.2f}' for s in sides for k in ('forward', 'train')]
        cells += [f'{rows[a][k] / rows[b][k]:.2f}' for k, a, b in ratios.values()]
        lines.append('| ' + ' | '.join(cells) + ' |')
    means = [
        f'{geometric_mean([r["sides"][a][k] / r["sides"][b][k] for r in results]):.2f}'
        for k, a, b in ratios.values()
    ]
    lines.append('| geometric mean |' + ' |' * (len(head) - 1) + ' ' + ' | '.join(means) + ' |')
    return '\n'.join(lines) + '\n'


def plot(results: list[dict], sides: list[str], machine: str, path: Path) -> None:
    """Forward and training time per shape as grouped bars."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(10, 7), sharex=True, layout='constrained')
    labels = ['{}, {}\n{} x {}, B={}'.format(*r['shape']) for r in results]
    for axis, key in zip(axes, ('forward', 'train'), strict=True):
        for i, side in enumerate(sides):
            places = [n + (i - len(sides) / 2 + 0.5) * 0.8 / len(sides) for n in range(len(labels))]
            heights = [r['sides'][side][key] * 1e3 for r in results]
            axis.bar(places, heights, 0.8 / len(sides), label=side)
        axis.set_yscale('log')
        axis.set_ylabel(f'{key}, ms')
    axes[0].legend(ncols=len(sides), loc='upper left', fontsize='small')
    axes[0].set_title(f'Attention layer, {machine}', fontsize='small')
    axes[1].set_xticks(range(len(labels)), labels, fontsize='small')
    axes[1].set_xlabel('C, heads, H x W, batch')
    figure.savefig(path, dpi=110)


def main() -> None:
    args = parse_args()
    machine = f'{describe_machine(torch.device(args.device))}, {args.dtype}'
    results = []
    for shape in track_iter_progress((args.shapes, len(args.shapes))):
        results.append({'shape': shape, 'sides': measure(shape, args)})
    args.out.mkdir(parents=True, exist_ok=True)
    content = {'machine': machine, 'results': results}
    (args.out / 'attention.json').write_text(json.dumps(content, indent=2))
    markdown = f'{machine}; medians, all sides in turns.\n\n{table(results, args.sides)}'
    (args.out / 'attention.md').write_text(markdown)
    plot(results, args.sides, machine, args.out / 'attention.png')
    print(f'\n{markdown}')
    for name in set(args.sides) & {'naive', 'inline'}:
        worst = max(result['sides'][name]['error'] for result in results)
        print(f'largest relative error of {name} against fp64: {worst:.1e}')
    print(f'written to {args.out}')


if __name__ == '__main__':
    main()
