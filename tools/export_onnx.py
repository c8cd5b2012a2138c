"""Export a backbone or a segmentor to ONNX or torch.export, and check it at several sizes."""

import argparse
from pathlib import Path

import timm
import torch
from mmengine.config import DictAction
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint
from torch import nn

import inline_mm  # noqa: F401 (registers the backbones)
from inline_mm.checkpoint import CheckpointError
from inline_mm.export import (
    example_image,
    export_onnx,
    export_program,
    largest_difference,
    run_onnx,
)
from inline_mm.launch import load_config


def parse_args() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        'model',
        help='config file or inline_mm::PATH: the logits of a segmentor, the backbone of a '
        'detector; or a classifier such as inline_pvt_small',
    )
    parser.add_argument('checkpoint', nargs='?', help='weights; random ones without it')
    parser.add_argument(
        '--out', required=True, help='file to write: .onnx, or .pt2 for torch.export'
    )
    parser.add_argument(
        '--size',
        type=int,
        nargs=2,
        default=(512, 512),
        metavar=('H', 'W'),
        help='size to record the graph with; it takes others too',
    )
    parser.add_argument('--opset', type=int, default=18, help="version of ONNX's operators")
    parser.add_argument(
        '--tolerance',
        type=float,
        default=1e-4,
        help='largest difference that passes, relative to the largest output',
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        metavar='KEY=VALUE',
        help='settings that replace those of the config',
    )
    return parser, parser.parse_args()


def build(args: argparse.Namespace) -> nn.Module:
    """The model in evaluation mode, with its weights."""
    if timm.is_model(args.model):
        return timm.create_model(args.model, checkpoint_path=args.checkpoint).eval()
    cfg = load_config(args.model, args.cfg_options)
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    model = MODELS.build(cfg.model)
    if args.checkpoint:
        load_checkpoint(model, args.checkpoint, map_location='cpu', strict=True)
    return revert_sync_batchnorm(model).eval()


def main() -> None:
    parser, args = parse_args()
    suffix = Path(args.out).suffix
    if suffix not in ('.onnx', '.pt2'):
        parser.error(f'--out must end in .onnx or .pt2, got {args.out!r}')
    try:
        model = build(args)
    except (FileNotFoundError, CheckpointError) as error:
        parser.error(str(error))
    height, width = args.size
    if suffix == '.onnx':
        export_onnx(model, args.out, (height, width), args.opset)
    else:
        program = export_program(model, (height, width))
        torch.export.save(program, args.out)
        run = torch.export.load(args.out).module()

    failed = False
    for size in ((height, width), (height + 96, width + 32), (height + 37, width + 61)):
        for batch in (1, 3):
            image = example_image(model, size)[[0, 1, 0][:batch]]
            outputs = run_onnx(args.out, image) if suffix == '.onnx' else run(image)
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            difference = largest_difference(model, image, outputs)
            passed = difference <= args.tolerance
            failed |= not passed
            print(
                f'{batch} x {size[0]} x {size[1]}: difference {difference:.1e}'
                f'{"" if passed else f", more than {args.tolerance:.0e}"}'
            )
    if failed:
        raise SystemExit(f'{args.out} differs from the model')
    print(f'wrote {args.out}')


if __name__ == '__main__':
    main()
