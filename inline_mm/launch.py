"""What the training and testing tools do before they hand a config to mmengine's Runner."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.dataset import Compose
from mmengine.fileio import load
from mmengine.hooks import CheckpointHook
from mmengine.hub import get_config
from mmengine.logging import print_log
from mmengine.registry import DATASETS, RUNNERS
from mmengine.runner import Runner

from .checkpoint import trusts_checkpoints
from .hooks import check_categories, leaf_datasets


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that training and testing share, as mmdet and mmseg name them."""
    parser.add_argument(
        '--work-dir',
        help='folder for logs, checkpoints and results; defaults '
        'to the work_dir of the config, or else work_dirs/CONFIG_NAME',
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        metavar='KEY=VALUE',
        help='settings that replace those of the config, such as '
        'train_cfg.max_epochs=24 or key="[a,b]" (no spaces inside)',
    )
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='what starts the processes of a distributed run',
    )
    # Passed by `torch.distributed.launch`.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def load_config(config: str, options: dict | None = None) -> Config:
    """Read a config by its path, or by ``package::path`` from an installed package.

    Args:
        config: ``configs/mini/x.py`` or ``inline_mm::mini/x.py``.
        options: Settings that replace the config's, keyed ``'a.b.c'``.

    Raises:
        FileNotFoundError: If there is no such file, or no such package.
    """
    package, separator, _ = config.partition('::')
    if separator:
        # mmengine would try to install a package it does not find.
        if importlib.util.find_spec(package) is None:
            raise FileNotFoundError(
                f'config {config!r} names the package {package!r}, which is not installed'
            )
        cfg = get_config(config)
    elif Path(config).is_file():
        cfg = Config.fromfile(config)
    else:
        raise FileNotFoundError(
            f'config {config!r} does not exist (looked for {os.path.abspath(config)}); give the '
            "path of a config file, or 'inline_mm::coco/NAME.py' for one of the package"
        )
    if options is not None:
        cfg.merge_from_dict(options)
    return cfg


def _datasets(cfg: dict) -> Iterator[dict]:
    """The data sets in a data loader's config, wrappers such as RepeatDataset opened."""
    inner = cfg.get('datasets', cfg.get('dataset'))
    if inner is None:
        yield cfg
    else:
        for dataset in inner if isinstance(inner, (list, tuple)) else [inner]:
            yield from _datasets(dataset)


def check_datasets(cfg: Config, loaders: tuple[str, ...]) -> None:
    """Raise at once where a data loader's files are missing.

    Args:
        cfg: A config with data loaders.
        loaders: Names of data loaders, ``'train_dataloader'`` and the like; those the config
            does not have, or has as None, are skipped.

    Raises:
        FileNotFoundError: Naming the data loader, its setting and the path.
    """
    for loader in loaders:
        for dataset in _datasets(cfg.get(loader) or {}):
            # Other storage than local files is the library's business.
            if dataset.get('backend_args'):
                continue
            root = dataset.get('data_root') or ''
            paths = {'data_root': root}
            if isinstance(dataset.get('ann_file'), str) and dataset['ann_file']:
                paths['ann_file'] = os.path.join(root, dataset['ann_file'])
            for key, prefix in (dataset.get('data_prefix') or {}).items():
                if isinstance(prefix, str):
                    paths[f'data_prefix.{key}'] = os.path.join(root, prefix)
            for key, path in paths.items():
                if path and '://' not in path and not os.path.exists(path):
                    raise FileNotFoundError(
                        f'{loader}: {key} {path!r} does not exist (looked for '
                        f'{os.path.abspath(path)}); docs/data_preparation.md tells how to '
                        'prepare a data set'
                    )


def prepare_config(args: argparse.Namespace, loaders: tuple[str, ...]) -> Config:
    """The config that the common arguments describe, checked as far as its files go.

    Args:
        args: With ``config`` and what :func:`add_common_arguments` adds.
        loaders: The data loaders to check, see :func:`check_datasets`.

    Raises:
        FileNotFoundError: As :func:`load_config` and :func:`check_datasets` do.
    """
    cfg = load_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = os.path.join('work_dirs', Path(args.config.split('::')[-1]).stem)
    check_datasets(cfg, loaders)
    return cfg


class NamingPipeline(Compose):
    """A data set's pipeline that names the files of a sample it fails on.

    Args:
        pipeline: The pipeline it takes the place of.
    """

    def __init__(self, pipeline: Compose) -> None:
        self.transforms = pipeline.transforms

    def __call__(self, data: dict) -> dict | None:
        """Process a sample.

        Raises:
            RuntimeError: Naming the files, where a transform raised anything.
        """
        files = [data[key] for key in ('img_path', 'seg_map_path') if data.get(key)]
        try:
            return super().__call__(data)
        except Exception as error:
            raise RuntimeError(
                f'cannot use {" with ".join(files) or "a sample"}: {type(error).__name__}: {error}'
            ) from error


def build_datasets(runner: Runner, loaders: tuple[str, ...]) -> None:
    """Build the runner's data sets, so that what is wrong with them is told by name.

    Args:
        runner: A runner that has not run yet.
        loaders: As of :func:`check_datasets`.

    Raises:
        ValueError: For a data set that cannot be read, or has not a single sample, and one whose
            annotation file lacks classes of its ``metainfo``; naming the file.
    """
    for name in loaders:
        # The runner takes a data set as well as its config, but its config would not.
        loader = getattr(runner, f'_{name}', None)
        if not isinstance(loader, dict) or not isinstance(loader.get('dataset'), dict):
            continue
        cfg = loader['dataset']
        try:
            dataset = DATASETS.build(cfg)
            empty = len(dataset) == 0
        except FileNotFoundError:
            raise
        except Exception as error:
            # What mmengine makes of no sample.
            empty = 'need at least one array to concatenate' in str(error)
            if not empty:
                raise ValueError(
                    f'{name}: the data set cannot be read: {type(error).__name__}: {error}; '
                    f'it has {_describe(cfg)}'
                ) from error
        if empty:
            raise ValueError(f'{name}: the data set has no sample to use; it has {_describe(cfg)}')
        for leaf in leaf_datasets(dataset):
            check_categories(leaf)
            if isinstance(getattr(leaf, 'pipeline', None), Compose):
                leaf.pipeline = NamingPipeline(leaf.pipeline)
        setattr(runner, f'_{name}', {**loader, 'dataset': dataset})


def _describe(cfg: dict) -> str:
    """What decides which samples data sets have: files, filter, classes."""
    keys = ('data_root', 'ann_file', 'data_prefix', 'img_suffix', 'seg_map_suffix', 'filter_cfg')
    parts = []
    for dataset in _datasets(cfg):
        parts += [f'{key}={dataset[key]!r}' for key in keys if dataset.get(key)]
        parts.append(f'classes={(dataset.get("metainfo") or {}).get("classes", "its own")}')
        path = os.path.join(dataset.get('data_root') or '', dataset.get('ann_file') or '')
        if path.endswith('.json') and os.path.isfile(path):
            try:
                content = load(path)
                names = [category.get('name') for category in content.get('categories', [])]
                counts = [f'{len(content.get(key, []))} {key}' for key in ('images', 'annotations')]
            except (ValueError, AttributeError, TypeError):
                parts.append('the file is no COCO annotation file')
            else:
                parts.append(f'the file has {", ".join(counts)} and categories {names}')
    return ', '.join(parts)


def add_hook(cfg: Config, hook: dict) -> None:
    """Add a hook to the config's ``custom_hooks``, unless it has one of that type."""
    hooks = list(cfg.get('custom_hooks') or ())
    if all(hook['type'] != present.get('type') for present in hooks):
        cfg.custom_hooks = [*hooks, hook]


def _without_sync_bn(cfg: object) -> bool:
    """Replace SyncBN by BN in a model's config; whether there was any."""
    found = False
    if isinstance(cfg, dict):
        if cfg.get('type') in ('SyncBN', 'MMSyncBN'):
            cfg['type'], found = 'BN', True
        cfg = list(cfg.values())
    for value in cfg if isinstance(cfg, list | tuple) else ():
        found = _without_sync_bn(value) or found
    return found


def build_runner(cfg: Config, local_rank: int = 0) -> Runner:
    """Build the config's runner; start its process group where mmengine cannot.

    mmengine starts a process group on GPUs only. Without one, ``--launcher pytorch`` gets
    gloo and a model wrapper that asks for no device. Nothing in this process reads a file with
    ``torch.load`` but with ``weights_only``, unless the environment says otherwise.
    """
    os.environ.setdefault('LOCAL_RANK', str(local_rank))
    if not trusts_checkpoints():
        os.environ.setdefault('TORCH_FORCE_WEIGHTS_ONLY_LOAD', '1')
    if not torch.cuda.is_available() and _without_sync_bn(cfg.model):
        print_log(
            'No GPU is visible, and PyTorch has SyncBN for GPUs only: BN takes its place, with '
            'statistics of each process alone.',
            logger='current',
            level=logging.WARNING,
        )
    hook = cfg.get('default_hooks', {}).get('checkpoint') or {}
    if hook.get('type') in ('CheckpointHook', CheckpointHook):
        hook.type = 'DurableCheckpointHook'
    if cfg.launcher == 'pytorch' and not torch.cuda.is_available():
        print_log('No GPU is visible: the processes communicate by gloo.', logger='current')
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group('gloo')
        cfg.env_cfg.dist_cfg.backend = 'gloo'
        if cfg.get('model_wrapper_cfg') is None:
            cfg.model_wrapper_cfg = dict(
                type='MMDistributedDataParallel',
                broadcast_buffers=False,
                find_unused_parameters=cfg.get('find_unused_parameters', False),
            )
        cfg.model_wrapper_cfg.device_ids = None
    if 'runner_type' in cfg:
        return RUNNERS.build(cfg)
    return Runner.from_cfg(cfg)
