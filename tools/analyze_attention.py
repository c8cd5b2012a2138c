"""Measure what the attention layers of a backbone attend to, as arXiv:2412.06590 does.

Per layer: how many pairs of different queries get the same attention ("confusion"), how much
attention falls on the 3x3 tokens around a query, and attention maps over the images. The exact
definitions are those of inline_mm/analysis/attention.py. Several models are measured side by side.
"""

from __future__ import annotations

import argparse
import ast
import json
import tempfile
from collections import defaultdict
from pathlib import Path

import matplotlib
import mmcv
import numpy as np
import torch
from mmengine.config import DictAction
from mmengine.registry import MODELS
from rich.progress import track
from torch import Tensor, nn
from torchvision.datasets.folder import IMG_EXTENSIONS

from inline_mm.analysis.attention import (
    AttentionRows,
    confused_pairs,
    local_attention,
    points,
    random_positions,
    trace_attention,
)
from inline_mm.backbones.base import InLineBackbone
from inline_mm.checkpoint import load_backbone
from inline_mm.datasets import make_shapes
from inline_mm.launch import load_config

matplotlib.use('Agg')
from matplotlib import pyplot as plt

# Normalisation where a config has none of its own: ImageNet's, for RGB images.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def parse_args(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        'models', nargs='+', metavar='MODEL',
        help='config file, inline_mm::PATH for one of the package, or a backbone as a Python '
        """dict: "{'type': 'InLinePVT', 'arch': 'tiny'}\"""",
    )  # fmt: skip
    parser.add_argument(
        '--checkpoints', nargs='+', metavar='FILE', default=[],
        help="one per model, or '-' for a model without; without any, models are untrained",
    )  # fmt: skip
    parser.add_argument('--labels', nargs='+', metavar='NAME', default=[], help='one per model')
    parser.add_argument(
        '--images', nargs='+', type=Path, metavar='PATH', default=[],
        help='files or folders; without any, images of the built-in data set',
    )  # fmt: skip
    parser.add_argument('--max-images', type=int, default=8, help='images to measure on')
    parser.add_argument('--max-maps', type=int, default=2, help='images to draw maps over')
    parser.add_argument(
        '--size', type=int, nargs=2, metavar=('H', 'W'), default=(224, 224),
        help='what images are resized to',
    )  # fmt: skip
    parser.add_argument('--queries', type=int, default=256, help='queries per layer and image')
    parser.add_argument(
        '--tolerance', type=float, default=1e-3, help='relative difference that counts as none'
    )
    parser.add_argument(
        '--points', type=float, nargs='+', metavar='Y X', default=[0.5, 0.5, 0.25, 0.75],
        help='queries to draw maps of, as fractions of the image',
    )  # fmt: skip
    parser.add_argument('--out', type=Path, default=Path('work_dirs/analyze_attention'))
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--seed', type=int, default=0, help='of weights and of the queries')
    parser.add_argument(
        '--cfg-options', nargs='+', action=DictAction, metavar='KEY=VALUE',
        help='settings that replace those of every config',
    )  # fmt: skip
    args = parser.parse_args(argv)
    for name in ('checkpoints', 'labels'):
        given = getattr(args, name)
        if given and len(given) != len(args.models):
            parser.error(f'--{name} needs one per model, {len(args.models)}, got {len(given)}')
    for name in ('max_images', 'queries'):
        if getattr(args, name) < 1:
            parser.error(f'--{name.replace("_", "-")} must be positive, got {getattr(args, name)}')
    if not args.tolerance > 0:
        parser.error(f'--tolerance must be positive, got {args.tolerance}')
    if len(args.points) % 2 or not all(0 <= part <= 1 for part in args.points):
        parser.error(f'--points must be pairs of numbers from 0 to 1, got {args.points}')
    return parser, args


def build_model(
    model: str, checkpoint: str | None, args: argparse.Namespace
) -> tuple[InLineBackbone, dict]:
    """A backbone in eval mode and how its images are normalised.

    Raises:
        FileNotFoundError, ValueError: For what cannot be built or loaded.
    """
    preprocessor = {}
    if model.lstrip().startswith('{'):
        try:
            backbone = ast.literal_eval(model)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f'model {model!r} is no Python dict: {error}') from error
    else:
        cfg = load_config(model, args.cfg_options)
        backbone = cfg.model.backbone
        preprocessor = cfg.model.get('data_preprocessor') or {}
    torch.manual_seed(args.seed)
    built = MODELS.build(dict(backbone, init_cfg=None) if checkpoint else backbone)
    if not isinstance(built, InLineBackbone):
        raise ValueError(f'{type(built).__name__} is no backbone of inline_mm')
    if checkpoint:
        load_backbone(built, checkpoint)
    else:
        built.init_weights()
    return built.to(args.device).eval(), dict(
        mean=np.array(preprocessor.get('mean', MEAN), np.float32),
        std=np.array(preprocessor.get('std', STD), np.float32),
        to_rgb=preprocessor.get('bgr_to_rgb', True),
    )


def read_images(args: argparse.Namespace) -> list[tuple[str, np.ndarray]]:
    """Names and pixels (H, W, 3), uint8 BGR, of the size to measure at.

    Raises:
        FileNotFoundError, ValueError: For what is no image.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = args.images
        if not paths:
            root = make_shapes(
                Path(folder) / 'shapes', num_train=1, num_val=args.max_images,
                image_size=tuple(args.size), seed=args.seed,
            )  # fmt: skip
            paths = [root / 'images/val']
        files = []
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(f'--images {str(path)!r} does not exist')
            inside = sorted(path.iterdir()) if path.is_dir() else [path]
            files += [f for f in inside if f == path or f.suffix.lower() in IMG_EXTENSIONS]
        images = []
        for file in files[: args.max_images]:
            pixels = mmcv.imread(str(file))
            if pixels is None:
                raise ValueError(f'--images {str(file)!r} is damaged, or no image')
            images.append((file.stem, mmcv.imresize(pixels, tuple(args.size)[::-1])))
    if not images:
        raise ValueError(f'--images has no images: {", ".join(map(str, paths))}')
    return images


def to_input(pixels: np.ndarray, normalisation: dict, device: str) -> Tensor:
    """A batch of one image, (1, 3, H, W)."""
    image = mmcv.imnormalize(pixels, **normalisation)
    return torch.from_numpy(image.transpose(2, 0, 1)[None].copy()).to(device)


def measure(
    model: nn.Module, images: list[tuple[str, np.ndarray]], normalisation: dict, label: str,
    args: argparse.Namespace,
) -> list[dict]:  # fmt: skip
    """Measurements per layer, over all images."""
    layers: dict[str, dict] = {}
    values: dict[str, list[dict]] = defaultdict(list)

    def visit(rows: AttentionRows) -> None:
        layer = layers.setdefault(
            rows.name,
            dict(
                name=rows.name, kind=rows.kind, map=list(rows.hw), heads=len(rows.weights),
                queries=len(rows.positions), confused_pairs=0, pairs=0,
            ),
        )  # fmt: skip
        confused, pairs = confused_pairs(rows.queries, rows.weights, args.tolerance)
        layer['confused_pairs'] += confused
        layer['pairs'] += pairs
        values[rows.name].append(local_attention(rows))

    choose = random_positions(args.queries, args.seed)
    for _, pixels in track(images, label):
        trace_attention(model, to_input(pixels, normalisation, args.device), visit, choose)
    for name, layer in layers.items():
        layer['confusion'] = layer['confused_pairs'] / max(layer['pairs'], 1)
        for key in values[name][0]:
            layer[f'local_{key}'] = float(np.mean([value[key] for value in values[name]]))
    return list(layers.values())


def draw_measures(results: dict[str, list[dict]], path: Path) -> None:
    """Confusion and local attention by layer, a line per model."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout='constrained')
    for (label, layers), colour in zip(results.items(), plt.cm.tab10.colors * 99, strict=False):
        x = range(len(layers))
        left.plot(x, [layer['confusion'] for layer in layers], 'o-', color=colour, label=label)
        right.plot(x, [layer['local_share'] for layer in layers], 'o-', color=colour, label=label)
        with_local = [layer.get('local_share_with_local') for layer in layers]
        if any(value is not None for value in with_local):
            right.plot(x, with_local, 's--', color=colour, label=f'{label}, with local part')
    layers = next(iter(results.values()))
    right.plot([layer['local_uniform'] for layer in layers], ':', color='grey', label='uniform')
    left.set(title='pairs of queries with the same attention', ylabel='share of pairs')
    right.set(title='attention on the 3x3 neighbourhood', ylabel='share of attention')
    for axis in (left, right):
        axis.set_xlabel('layer')
        axis.set_xticks(range(max(map(len, results.values()))))
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_maps(
    traces: dict[str, list[AttentionRows]], pixels: np.ndarray, where: list[tuple], path: Path
) -> None:
    """The maps of each query: a row per model and query, a column per layer."""
    columns = max(map(len, traces.values()))
    rows = len(traces) * len(where)
    figure, axes = plt.subplots(
        rows, columns + 1, figsize=(1.5 * (columns + 1), 1.6 * rows), squeeze=False,
        layout='constrained',
    )  # fmt: skip
    image = mmcv.bgr2rgb(pixels)
    for axis in axes.flat:
        axis.set_axis_off()
    for m, (label, layers) in enumerate(traces.items()):
        for p, (y, x) in enumerate(where):
            row = axes[m * len(where) + p]
            row[0].imshow(image)
            row[0].plot(x * image.shape[1], y * image.shape[0], 'w+', markersize=10, mew=2)
            row[0].set_title(label, fontsize=7)
            for axis, layer in zip(row[1:], layers, strict=False):
                # Weights may be negative: red above zero, blue below.
                attention = layer.maps()[p].cpu().numpy()
                limit = np.abs(attention).max() or 1
                axis.imshow(attention, cmap='RdBu_r', vmin=-limit, vmax=limit)
                axis.set_title(layer.name.removesuffix('.attn'), fontsize=7)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser, args = parse_args(argv)
    labels = args.labels or [
        'backbone' if model.lstrip().startswith('{') else Path(model.split('::')[-1]).stem
        for model in args.models
    ]
    labels = [
        label if labels.count(label) == 1 else f'{label} {i + 1}' for i, label in enumerate(labels)
    ]
    checkpoints = [None if c == '-' else c for c in args.checkpoints] or [None] * len(labels)
    try:
        images = read_images(args)
        models = {
            label: build_model(model, checkpoint, args)
            for label, model, checkpoint in zip(labels, args.models, checkpoints, strict=True)
        }
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)

    results = {
        label: measure(model, images, normalisation, label, args)
        for label, (model, normalisation) in models.items()
    }
    draw_measures(results, args.out / 'measures.png')
    where = list(zip(args.points[::2], args.points[1::2], strict=True))
    for name, pixels in images[: args.max_maps] if where else []:
        traces: dict[str, list[AttentionRows]] = {}
        for label, (model, normalisation) in models.items():
            image = to_input(pixels, normalisation, args.device)
            traces[label] = []
            trace_attention(model, image, traces[label].append, points(where))
        draw_maps(traces, pixels, where, args.out / f'maps_{name}.png')

    settings = dict(
        images=[name for name, _ in images], size=list(args.size), queries=args.queries,
        tolerance=args.tolerance, seed=args.seed,
        checkpoints=dict(zip(labels, checkpoints, strict=True)),
    )  # fmt: skip
    (args.out / 'attention.json').write_text(
        json.dumps(dict(settings=settings, models=results), indent=2)
    )
    print('| model | layer | confusion | local share | with local part | uniform |')
    print('| --- ' * 6 + '|')
    for label, layers in results.items():
        for layer in layers:
            both = layer.get('local_share_with_local')
            print(
                f'| {label} | {layer["name"]} | {100 * layer["confusion"]:.3f} % | '
                f'{100 * layer["local_share"]:.1f} % | '
                f'{"" if both is None else f"{100 * both:.1f} %"} | '
                f'{100 * layer["local_uniform"]:.1f} % |'
            )
    print(f'attention.json and pictures are in {args.out}')


if __name__ == '__main__':
    main()
