"""Count parameters, multiply-accumulates and activations of a config or a backbone."""

import argparse

import timm
import torch
from mmengine.config import DictAction
from mmengine.registry import MODELS, init_default_scope
from torch import nn

import inline_mm  # noqa: F401 (registers the backbones)
from inline_mm.analysis.complexity import measure
from inline_mm.launch import load_config

#: (H, W) at which publications count, by library.
SIZES = dict(mmdet=(800, 1280), mmseg=(512, 2048))


def parse_args() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        'model', help='config file, inline_mm::PATH, or a classifier such as inline_pvt_small'
    )
    parser.add_argument(
        '--shape',
        type=int,
        nargs='+',
        metavar='SIDE',
        help='image size, H W or one side; by default 800 1280 for detectors, 512 2048 for '
        'segmentors and the pre-training size for classifiers',
    )
    parser.add_argument('--backbone', action='store_true', help='count the backbone alone')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        metavar='KEY=VALUE',
        help='settings that replace those of the config',
    )
    return parser, parser.parse_args()


def build(name: str, options: dict | None = None) -> tuple[nn.Module, tuple[int, int]]:
    """A model on the ``meta`` device, and the image size at which it is counted by default.

    Args:
        name: See ``--help``.
        options: Settings that replace those of a config.

    Raises:
        FileNotFoundError: If there is neither such a classifier nor such a config.
    """
    with torch.device('meta'):
        if timm.is_model(name):
            model = timm.create_model(name, **(options or {}))
            return model, model.default_cfg['input_size'][1:]
        cfg = load_config(name, options)
        init_default_scope(cfg.get('default_scope', 'mmengine'))
        return MODELS.build(cfg.model), SIZES.get(cfg.get('default_scope'), (224, 224))


def main() -> None:
    parser, args = parse_args()
    if args.shape and (len(args.shape) > 2 or min(args.shape) < 1):
        parser.error(f'--shape takes H W or one side, positive numbers, got {args.shape}')
    try:
        model, size = build(args.model, args.cfg_options)
    except FileNotFoundError as error:
        parser.error(str(error))
    if args.shape:
        size = (args.shape[0], args.shape[-1])
    if args.backbone:
        model = model.backbone
    counts = measure(model, size)
    print(f'Model:        {type(model).__name__}')
    print(f'Input:        {size[0]} x {size[1]}')
    print(f'Parameters:   {counts.parameters / 1e6:.2f} M')
    print(f'MACs:         {counts.macs / 1e9:.2f} G')
    print(f'MACs, plain:  {counts.plain_macs / 1e9:.2f} G (q and k in full, as papers count)')
    print(f'Activations:  {counts.activations / 1e6:.2f} M')


if __name__ == '__main__':
    main()
