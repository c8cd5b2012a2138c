#!/usr/bin/env python
"""Put an InLine backbone, or any registered one, into an existing mmdet or mmseg config.

    python tools/plug_backbone.py mmdet::retinanet/retinanet_r50_fpn_1x_coco.py \
        --backbone inline-pvt-tiny --out configs/my_retinanet.py --check
"""

import argparse
import sys

from mmengine.config import Config, DictAction

from inline_mm.plug import PlugError, backbone_names, check_model, plug_backbone


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='a path, or mmdet::... or mmseg::...')
    parser.add_argument(
        '--backbone',
        required=True,
        metavar='NAME',
        help=f'{", ".join(backbone_names())}; or, with --backbone-options, a registered class',
    )
    parser.add_argument(
        '--backbone-options',
        nargs='+',
        action=DictAction,
        metavar='KEY=VALUE',
        help='arguments of the class --backbone names: arch=small, or arch.depths=[2,2,2,2] ...',
    )
    parser.add_argument('--out', metavar='FILE', help='where to write the new config (.py)')
    parser.add_argument('--checkpoint', help='pre-trained weights of the new backbone')
    parser.add_argument(
        '--optimizer',
        choices=['recipe', 'keep'],
        default='recipe',
        help="the family's AdamW settings, or those of the config",
    )
    parser.add_argument('--img-size', type=int, help='size at which the weights were pre-trained')
    parser.add_argument(
        '--check',
        action='store_true',
        help='build the model, compute a loss, its gradients and a prediction on noise (CPU)',
    )
    parser.add_argument(
        '--check-size',
        type=int,
        nargs=2,
        default=(256, 256),
        metavar=('H', 'W'),
        help='size of the images of --check',
    )
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    backbone = args.backbone
    if args.backbone_options is not None:
        backbone = Config(dict(type=args.backbone))
        backbone.merge_from_dict(args.backbone_options)
        backbone = backbone.to_dict()
    try:
        cfg = plug_backbone(
            args.config,
            backbone,
            checkpoint=args.checkpoint,
            optimizer=args.optimizer,
            img_size=args.img_size,
        )
    except PlugError as error:
        print(f'{args.config}: {error}', file=sys.stderr)
        return 1
    for change in cfg.changes:
        print(change)
    if args.out:
        cfg.dump(args.out)
        print(f'written to {args.out}')
    if args.check:
        try:
            result = check_model(cfg, tuple(args.check_size))
        except Exception as error:
            print(f'check failed: {type(error).__name__}: {error}', file=sys.stderr)
            return 2
        print(f'check passed: loss {result.loss:.4g}, backward, prediction')
        if result.untrained:
            print(
                f'{len(result.untrained)} parameters of the backbone got no gradient, such as '
                f'{result.untrained[0]}: distributed training needs find_unused_parameters=True'
            )
    return 0


if __name__ == '__main__':
    sys.exit(main())
