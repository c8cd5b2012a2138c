"""Train a detector or a segmentor; the config decides which."""

import argparse

from inline_mm.launch import add_common_arguments, build_runner, prepare_config


def parse_args() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file, or inline_mm::PATH for one of the package')
    add_common_arguments(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='go on from a checkpoint; without a value, from the latest in the '
        'work dir, if there is any',
    )
    parser.add_argument('--amp', action='store_true', help='train in automatic mixed precision')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate with the total batch size',
    )
    return parser, parser.parse_args()


def main() -> None:
    parser, args = parse_args()
    try:
        cfg = prepare_config(args, ('train_dataloader', 'val_dataloader'))
    except FileNotFoundError as error:
        parser.error(str(error))

    if args.amp:
        wrapper = cfg.optim_wrapper.get('type', 'OptimWrapper')
        if wrapper not in ('OptimWrapper', 'AmpOptimWrapper'):
            parser.error(
                f"--amp needs optim_wrapper.type 'OptimWrapper', the config has {wrapper!r}"
            )
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    if args.auto_scale_lr:
        if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
            parser.error(
                '--auto-scale-lr needs auto_scale_lr.base_batch_size in the config, '
                'the total batch size its learning rate is meant for'
            )
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else args.resume

    build_runner(cfg, args.local_rank).train()


if __name__ == '__main__':
    main()
