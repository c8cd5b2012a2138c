"""Convert a backbone's checkpoint from the authors' names to ours, or back.

Neither is needed to use one: `init_cfg` takes both as they are.
"""

import argparse
import ast
import sys
from pathlib import Path

import torch
from mmengine.registry import MODELS

import inline_mm  # noqa: F401 (registers the backbones)
from inline_mm.checkpoint import CheckpointError, fit_checkpoint, to_authors

BACKBONES = {
    'pvt': 'InLinePVT',
    'swin': 'InLineSwin',
    'cswin': 'InLineCSwin',
    'deit': 'InLineDeiT',
}


def arch(text: str) -> str | dict:
    """A preset's name, or a dict as it is written in a config."""
    if not text.lstrip().startswith('{'):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise argparse.ArgumentTypeError(f'no dict of plain values: {error}') from error


def parse_args() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('source', help="checkpoint: the authors', ours, or a trained detector's")
    parser.add_argument('target', help='.pth file to write')
    parser.add_argument('--family', choices=list(BACKBONES), required=True)
    parser.add_argument('--arch', type=arch, required=True, help="'tiny' or the like, or a dict")
    parser.add_argument('--to', choices=['ours', 'authors'], default='ours', help='names to write')
    parser.add_argument(
        '--img-size',
        type=int,
        nargs='+',
        metavar='PIXELS',
        help='size the position embeddings and windows are for (default: as pre-trained)',
    )
    return parser, parser.parse_args()


def main() -> None:
    parser, args = parse_args()
    cfg = dict(type=BACKBONES[args.family], arch=args.arch, out_norm=False)
    if args.img_size:
        cfg['img_size'] = args.img_size[0] if len(args.img_size) == 1 else args.img_size
    try:
        model = MODELS.build(cfg)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    try:
        fitted = fit_checkpoint(model, args.source)
    except (CheckpointError, OSError) as error:
        sys.exit(f'error: {error}')

    # The classifier belongs to the model, though not to the backbone: it is carried along.
    carried = {
        key: value
        for entries in fitted.not_used.values()
        for key, value in entries.items()
        if key.startswith(('head.', 'norm.'))
    }
    if args.to == 'ours':
        content = dict(state_dict={**fitted.entries, **carried})
    else:
        content = dict(model={**to_authors(fitted.entries, args.family), **carried})
    target = Path(args.target)
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, target)

    print(f'{len(fitted.entries)} entries of the backbone written to {target}')
    for reason, entries in fitted.not_used.items():
        for key in entries:
            what = 'written unchanged' if key in carried else 'left out'
            print(f'  {what}: {key} ({reason})')
    for line in fitted.resized:
        print(f'  resized: {line}')
    if fitted.num_outside:
        print(f'  left out: {fitted.num_outside} entries outside the backbone')
    if args.to == 'authors' and not carried:
        print("  not there: a classifier, which the authors' models have")


if __name__ == '__main__':
    main()
