"""Time and memory of backbones as images grow, beside those of mmdet and mmseg.

At each size all backbones run in one process and take turns; figures are medians of the forward
pass (or of a training step with --train). A backbone that would not fit in memory, or would take
too long, going by the sizes before, is left out there and said to be. Writes scaling.json,
scaling.md and scaling.png.
"""

import argparse
import importlib
import json
import math
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.registry import MODELS, DefaultScope
from mmengine.utils import ProgressBar
from torch import nn

from inline_mm.analysis.complexity import count_macs
from inline_mm.analysis.timing import describe_machine, interleaved_seconds, peak_bytes
from inline_mm.plug.core import parse_backbone

#: Peers: the library they are in and their configuration.
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f'pvt-{name}': ('mmdet', dict(type='PyramidVisionTransformer', num_layers=depths))
        for name, depths in {
            'tiny': [2, 2, 2, 2],
            'small': [3, 4, 6, 3],
            'medium': [3, 4, 18, 3],
            'large': [3, 8, 27, 3],
        }.items()
    },
    'swin-tiny': ('mmdet', dict(type='SwinTransformer')),
    'swin-small': ('mmdet', dict(type='SwinTransformer', depths=[2, 2, 18, 2])),
    **{
        f'mit-b{i}': (
            'mmseg',
            dict(
                type='MixVisionTransformer',
                embed_dims=32 if i == 0 else 64,
                num_heads=[1, 2, 5, 8],
                num_layers=depths,
            ),
        )
        for i, depths in enumerate(
            ([2, 2, 2, 2], [2, 2, 2, 2], [3, 4, 6, 3], [3, 4, 18, 3], [3, 8, 27, 3], [3, 6, 40, 3])
        )
    },
}


def build(name: str) -> nn.Module:
    """A backbone of ours, ``inline-pvt-small`` or ``inline-pvt-small:softmax``, or a peer."""
    if name in PEERS:
        library, cfg = PEERS[name]
        importlib.import_module(f'{library}.models')
        with DefaultScope.overwrite_default_scope(library):
            return MODELS.build(cfg)
    name, _, attention = name.partition(':')
    cfg = parse_backbone(name)
    if attention:
        preset = MODELS.get(cfg['type']).presets[cfg['arch']]
        depths = preset['depths']
        entries = [attention] * (len(depths) if isinstance(depths, list) else 1)
        cfg['arch'] = {**preset, 'attention': entries}
    return MODELS.build(cfg)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f'peers: {", ".join(PEERS)}; ours: inline-pvt-small and the like, with :softmax, '
        ':linear or :inline to set the attention of every stage',
    )
    parser.add_argument(
        '--backbones', nargs='+', default=['inline-pvt-small', 'pvt-small', 'swin-tiny', 'mit-b2']
    )
    parser.add_argument('--sizes', type=int, nargs='+', default=[512, 768, 1024, 1536, 2048])
    parser.add_argument('--batch', type=int, default=1)
    parser.add_argument('--train', action='store_true', help='time forward and backward')
    parser.add_argument('--dtype', choices=['fp32', 'bf16', 'fp16'], default='fp32')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--rounds', type=int, default=5, help='most turns of each backbone')
    parser.add_argument('--budget', type=float, default=30, help='seconds for a backbone and size')
    parser.add_argument('--max-seconds', type=float, default=120, help='longest a call may take')
    parser.add_argument(
        '--max-gib', type=float, help='memory a call may take; default what is free'
    )
    parser.add_argument('--out', type=Path, default=Path('work_dirs/benchmark'))
    args = parser.parse_args()
    args.sizes = sorted(set(args.sizes))
    return args


def free_bytes(device: torch.device) -> int:
    """Memory that a call may take."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path('/proc/meminfo').read_text().split('MemAvailable:')[1]
    return int(meminfo.split()[0]) * 1024


def predict(rows: Mapping[int, Mapping[str, float]], key: str, size: int) -> float | None:
    """A power law in pixels through the last two sizes measured, at another size."""
    measured = [(s, row[key]) for s, row in rows.items() if row.get(key)]
    if not measured:
        return None
    (last, value), exponent = measured[-1], 1.0
    if len(measured) > 1:
        before, value_before = measured[-2]
        exponent = math.log(value / value_before) / math.log((last / before) ** 2)
    # At most quadratic; the law through two noisy points may be anything.
    return value * (size / last) ** (2 * min(max(exponent, 1.0), 2.0))


def exponent(rows: Mapping[int, Mapping[str, float]], key: str) -> float | None:
    """Least-squares exponent in pixels over the sizes measured."""
    points = [(math.log(s * s), math.log(row[key])) for s, row in rows.items() if row.get(key)]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return covariance / sum((x - mean_x) ** 2 for x, _ in points)


def macs(model: nn.Module, size: int) -> int | None:
    """Multiply-accumulates, where the model runs on the meta device."""
    try:
        return count_macs(model, (size, size))
    except (RuntimeError, NotImplementedError):
        return None


def measure_size(
    models: dict[str, nn.Module],
    results: dict[str, dict[int, dict]],
    size: int,
    args: argparse.Namespace,
) -> None:
    """Add the row of one size to the results of every backbone."""
    device = torch.device(args.device)
    dtype = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}[args.dtype]
    image = torch.rand(args.batch, 3, size, size, device=device, dtype=dtype)

    def step(model: nn.Module) -> None:
        if args.train:
            model.zero_grad(set_to_none=True)
            sum(out.float().mean() for out in model(image)).backward()
        else:
            with torch.inference_mode():
                model(image)

    calls = {}
    for name, model in models.items():
        row = results[name][size] = {'macs': macs(model, size)}
        limit = free_bytes(device) if args.max_gib is None else args.max_gib * 2**30
        memory, seconds = (predict(results[name], key, size) for key in ('bytes', 'seconds'))
        if memory and memory > limit:
            row['left_out'] = f'would need {memory / 2**30:.0f} GiB, {limit / 2**30:.0f} free'
        elif seconds and seconds > args.max_seconds:
            row['left_out'] = f'would take {seconds:.0f} s'
        else:
            try:
                row['bytes'] = peak_bytes(lambda model=model: step(model), device)
                calls[name] = lambda model=model: step(model)
            except (RuntimeError, MemoryError) as error:
                row['left_out'] = f'does not fit: {str(error).splitlines()[0]}'
    bar = ProgressBar(0)
    for name, seconds in interleaved_seconds(
        calls, device, args.rounds, args.budget, on_call=lambda name: bar.update()
    ).items():
        results[name][size]['seconds'] = seconds


def table(results: dict[str, dict[int, dict]], sizes: list[int]) -> str:
    """Seconds, memory and GMACs per backbone and size, with the exponents."""
    first = next(iter(results))
    lines = []
    for key, title, scale in (
        ('seconds', 'seconds', 1),
        ('bytes', 'peak memory, GiB', 2**30),
        ('macs', 'GMACs, plain form', 10**9),
    ):
        head = [title, *(f'{s} px' for s in sizes), 'exponent in pixels']
        lines += ['| ' + ' | '.join(head) + ' |', '|---' + '|---:' * (len(sizes) + 1) + '|']
        for name, rows in results.items():
            cells = []
            for size in sizes:
                value, base = rows[size].get(key), results[first][size].get(key)
                if value is None:
                    cells.append(rows[size].get('left_out', 'not counted'))
                    continue
                ratio = f' ({value / base:.2f}x)' if base and name != first else ''
                cells.append(f'{value / scale:.3g}{ratio}')
            fitted = exponent(rows, key)
            cells.append('' if fitted is None else f'{fitted:.2f}')
            lines.append('| ' + ' | '.join([name, *cells]) + ' |')
        lines.append('')
    return '\n'.join(lines)


def plot(results: dict[str, dict[int, dict]], title: str, path: Path) -> None:
    """Time and memory over pixels, both axes logarithmic."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout='constrained')
    for axis, key, scale, label in (
        (axes[0], 'seconds', 1, 'time, s'),
        (axes[1], 'bytes', 2**30, 'peak memory, GiB'),
    ):
        for name, rows in results.items():
            points = [(s * s / 1e6, row[key] / scale) for s, row in rows.items() if row.get(key)]
            fitted = exponent(rows, key)
            label_text = name if fitted is None else f'{name} (pixels$^{{{fitted:.2f}}}$)'
            if points:
                axis.plot(*zip(*points, strict=True), marker='o', label=label_text)
        axis.set(xscale='log', yscale='log', xlabel='megapixels', ylabel=label)
        axis.grid(True, which='both', alpha=0.25)
        axis.legend(fontsize='small')
    figure.suptitle(title, fontsize='small')
    figure.savefig(path, dpi=110)


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    if device.type == 'cpu':
        # A request for more than the machine has then fails here, and only here.
        limit = free_bytes(device) + resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    models = {}
    for name in args.backbones:
        models[name] = build(name)
        models[name].train(args.train)
        dtype = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}[args.dtype]
        models[name].to(device, dtype)
    results: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in models}
    args.out.mkdir(parents=True, exist_ok=True)
    what = 'training step' if args.train else 'forward pass'
    machine = describe_machine(device)
    title = f'{what}, batch {args.batch}, {args.dtype}; {machine}'
    for i, size in enumerate(args.sizes, start=1):
        print(f'{size} x {size} pixels ({i} of {len(args.sizes)})', flush=True)
        measure_size(models, results, size, args)
        print(flush=True)
        # Written after every size: a long run that is interrupted keeps what it has.
        content = {'machine': machine, 'what': what, 'batch': args.batch, 'results': results}
        (args.out / 'scaling.json').write_text(json.dumps(content, indent=2))
    markdown = f'{title}; medians, all in turns.\n\n{table(results, args.sizes)}'
    (args.out / 'scaling.md').write_text(markdown)
    plot(results, title, args.out / 'scaling.png')
    print(markdown)
    print(f'written to {args.out}')


if __name__ == '__main__':
    main()
