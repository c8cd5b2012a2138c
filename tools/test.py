"""Test a detector or a segmentor, draw or write out its predictions; the config decides which."""

import argparse
import os
from copy import deepcopy

from mmengine.config import Config, ConfigDict

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
    parser.add_argument('checkpoint', help='checkpoint file')
    add_common_arguments(parser)
    parser.add_argument(
        '--out',
        metavar='PATH',
        help='write the predictions: a .pkl file of a '
        "detector's, a folder for a segmentor's label images",
    )
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument(
        '--wait-time',
        type=float,
        default=2,
        metavar='SECONDS',
        help='how long --show shows an image',
    )
    parser.add_argument(
        '--show-dir', metavar='DIR', help='folder to draw predictions in, beside the ground truth'
    )
    parser.add_argument('--tta', action='store_true', help='test with augmentation')
    return parser, parser.parse_args()


def draw_predictions(cfg: Config, args: argparse.Namespace) -> None:
    if 'visualization' not in cfg.get('default_hooks', {}):
        raise ValueError('--show and --show-dir need default_hooks.visualization in the config')
    hook = cfg.default_hooks.visualization
    hook.draw = True
    hook.interval = 1  # mmseg's default leaves most images out.
    if args.show:
        hook.show = True
        hook.wait_time = args.wait_time
    if args.show_dir:
        # Absolute: mmdet's hook joins a relative one to itself, image after image.
        show_dir = os.path.abspath(args.show_dir)
        if cfg.default_scope == 'mmdet':
            hook.test_out_dir = show_dir
        else:
            cfg.visualizer.save_dir = show_dir


def augment(cfg: Config) -> None:
    if cfg.default_scope == 'mmdet':
        if cfg.model.get('roi_head', {}).get('mask_head'):
            raise ValueError('--tta merges boxes only, and this config predicts masks')
        cfg.setdefault(
            'tta_model',
            dict(
                type='DetTTAModel',
                tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100),
            ),
        )
        if 'tta_pipeline' not in cfg:
            pipeline = deepcopy(cfg.test_dataloader.dataset.pipeline)
            pack = pipeline.pop()
            if 'meta_keys' in pack:
                pack.meta_keys = (*pack.meta_keys, 'flip', 'flip_direction')
            flips = [dict(type='RandomFlip', prob=p) for p in (0.0, 1.0)]
            cfg.tta_pipeline = [*pipeline, dict(type='TestTimeAug', transforms=[flips, [pack]])]
    elif 'tta_pipeline' not in cfg or 'tta_model' not in cfg:
        raise ValueError('--tta needs tta_model and tta_pipeline in the config')
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline


def main() -> None:
    parser, args = parse_args()
    try:
        cfg = prepare_config(args, ('test_dataloader',))
        if '://' not in args.checkpoint and not os.path.isfile(args.checkpoint):
            raise FileNotFoundError(f'checkpoint {args.checkpoint!r} does not exist')
        cfg.load_from = args.checkpoint
        add_hook(cfg, dict(type='StrictLoadHook'))
        if args.show or args.show_dir:
            draw_predictions(cfg, args)
        if args.tta:
            augment(cfg)
        if args.out is not None and cfg.default_scope == 'mmseg':
            cfg.test_evaluator.update(output_dir=args.out, keep_results=True)
        elif args.out is not None and not args.out.endswith(('.pkl', '.pickle')):
            raise ValueError(f'--out {args.out!r} must be a .pkl or .pickle file for a detector')
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))

    runner = build_runner(cfg, args.local_rank)
    build_datasets(runner, ('test_dataloader',))
    if args.out is not None and cfg.default_scope == 'mmdet':
        from mmdet.evaluation import DumpDetResults

        runner.test_evaluator.metrics.append(DumpDetResults(out_file_path=args.out))
    runner.test()


if __name__ == '__main__':
    main()
