"""Train a detector or a segmentor; the config decides which."""

import argparse

import torch

from inline_mm.checkpoint import CheckpointError
from inline_mm.hooks import latest_checkpoint
from inline_mm.launch import (
    add_common_arguments,
    add_hook,
    build_datasets,
    build_runner,
    prepare_config,
)


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
    parser.add_argument(
        '--amp',
        action='store_true',
        help='train in automatic mixed precision: optim_wrapper.dtype, or by default float16 on a '
        'GPU and bfloat16 on a CPU',
    )
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
        cfg.optim_wrapper.type = (
            'AmpOptimWrapper' if torch.cuda.is_available() else 'CPUAmpOptimWrapper'
        )
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    if args.auto_scale_lr:
        if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
            parser.error(
                '--auto-scale-lr needs auto_scale_lr.base_batch_size in the config, '
                'the total batch size its learning rate is meant for'
            )
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        try:
            found = latest_checkpoint(cfg.work_dir) if args.resume == 'auto' else args.resume
        except CheckpointError as error:
            parser.error(str(error))
        # Without a checkpoint there is nothing to go on from, and pre-trained weights stay.
        if found is not None:
            cfg.resume, cfg.load_from = True, found
            add_hook(cfg, dict(type='StrictLoadHook'))
    add_hook(cfg, dict(type='CheckTargetsHook'))

    runner = build_runner(cfg, args.local_rank)
    build_datasets(runner, ('train_dataloader', 'val_dataloader'))
    runner.train()


if __name__ == '__main__':
    main()
