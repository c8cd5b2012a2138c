"""Train the same small detector and segmentor with different attention, and compare.

Everything but the attention of the backbone is the same: data, schedule, seeds, numbers of
channels and blocks. An interrupted comparison goes on where it was: finished runs are kept, the
others go on from their last checkpoint.
"""

import argparse
import copy
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inline_mm.datasets import make_shapes
from inline_mm.launch import load_config

REPO = Path(__file__).resolve().parent.parent
CONFIGS = dict(
    segmentation='configs/mini/fpn_inline-pvt-mini_1xb8-500_shapes.py',
    detection='configs/mini/mask-rcnn_inline-pvt-mini_fpn_10e_shapes.py',
)
#: What every block attends by, as an entry of the backbone's ``arch['attention']``.
VARIANTS = {
    'softmax': 'softmax',
    'linear': 'linear',
    'inline-no-local': dict(type='inline', local=False),
    'inline': dict(type='inline', feature_map='identity'),
    'inline-relu': dict(type='inline', feature_map='relu'),
    'inline-leaky_relu': dict(type='inline', feature_map='leaky_relu'),
    'inline-exp': dict(type='inline', feature_map='exp'),
}
NAMES = {
    'softmax': 'softmax (spatially reduced keys)',
    'linear': 'linear, relu',
    'inline-no-local': 'InLine without local part',
    'inline': 'InLine (identity)',
    'inline-relu': 'InLine, relu',
    'inline-leaky_relu': 'InLine, leaky_relu',
    'inline-exp': 'InLine, exp',
}
#: Metrics in the logs and what they are multiplied by to be percentages.
METRICS = dict(
    segmentation={'mIoU': 1, 'mAcc': 1},
    detection={'coco/bbox_mAP': 100, 'coco/segm_mAP': 100},
)


def parse_args(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/compare_attention'))
    parser.add_argument('--restart', action='store_true', help='forget earlier runs')
    parser.add_argument(
        '--tasks', nargs='+', choices=CONFIGS, default=list(CONFIGS), metavar='TASK'
    )
    parser.add_argument(
        '--variants', nargs='+', choices=VARIANTS, default=list(VARIANTS), metavar='VARIANT',
        help=f'of {", ".join(VARIANTS)}',
    )  # fmt: skip
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2], metavar='SEED')
    parser.add_argument('--iters', type=int, default=300, help='iterations of a segmentor')
    parser.add_argument('--epochs', type=int, default=4, help='epochs of a detector')
    parser.add_argument('--batch-size', type=int, default=4, help='images per iteration')
    parser.add_argument(
        '--jobs', type=int, default=1, help='runs at a time, which share the processor cores'
    )
    data = parser.add_argument_group('data set of coloured shapes, see tools/make_shapes.py')
    data.add_argument('--num-train', type=int, default=256)
    data.add_argument('--num-val', type=int, default=64)
    data.add_argument('--image-size', type=int, default=160)
    for name, low_high in (('objects', (3, 7)), ('clutter', (8, 16))):
        data.add_argument(f'--{name}', type=int, nargs=2, default=low_high, metavar=('LOW', 'HIGH'))
    data.add_argument('--scale', type=float, nargs=2, default=(0.15, 0.35), metavar=('LOW', 'HIGH'))
    args = parser.parse_args(argv)
    for name in ('iters', 'epochs', 'batch_size', 'jobs'):
        if getattr(args, name) < 1:
            flag = name.replace('_', '-')
            parser.error(f'--{flag} must be at least 1, got {getattr(args, name)}')
    return parser, args


# Configs


def _transforms(cfg: object) -> Iterator[dict]:
    """Every dict with a type in a pipeline, those inside other transforms too."""
    if isinstance(cfg, dict):
        if 'type' in cfg:
            yield cfg
        cfg = list(cfg.values())
    if isinstance(cfg, list | tuple):
        for item in cfg:
            yield from _transforms(item)


def make_config(task: str, variant: str, args: argparse.Namespace, data: Path) -> Config:
    """The mini config of a task with the attention, data and schedule of the comparison."""
    cfg = load_config(str(REPO / CONFIGS[task]))
    size = args.image_size
    cfg.model.backbone.arch.attention = [VARIANTS[variant]] * 4
    cfg.model.backbone.img_size = size
    if task == 'segmentation':
        cfg.model.data_preprocessor.size = (size, size)
    for split in ('train', 'val', 'test'):
        loader = cfg[f'{split}_dataloader']
        loader.dataset.data_root = f'{data}/'
        loader.batch_size = args.batch_size
        for transform in _transforms(loader.dataset.pipeline):
            if transform['type'] == 'Resize':
                transform['scale'] = (size, size)
        if split != 'train' and task == 'detection':
            cfg[f'{split}_evaluator'].ann_file = f'{data}/annotations/instances_val.json'
    length = args.iters if task == 'segmentation' else args.epochs
    cfg.train_cfg['max_iters' if task == 'segmentation' else 'max_epochs'] = length
    cfg.train_cfg.val_interval = length
    cfg.param_scheduler[-1].update(T_max=length, end=length)
    return cfg


# Runs


def run(task: str, variant: str, seed: int, config: Path, folder: Path, threads: int) -> dict:
    """Train and evaluate; what was measured.

    Raises:
        RuntimeError: If training fails; the end of its output is in the message.
    """
    done = folder / 'result.json'
    if done.is_file():
        return json.loads(done.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, REPO / 'tools/train.py', config, '--work-dir', folder, '--resume',
        '--cfg-options', f'randomness.seed={seed}', 'train_dataloader.num_workers=0',
        'train_dataloader.persistent_workers=False', 'val_dataloader.num_workers=0',
        'val_dataloader.persistent_workers=False',
    ]  # fmt: skip
    began = time.time()
    with open(folder / 'output.txt', 'a') as output:
        process = subprocess.run(
            list(map(str, command)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(os.environ, OMP_NUM_THREADS=str(threads)),
        )
    if process.returncode != 0:
        tail = (folder / 'output.txt').read_text()[-2000:]
        raise RuntimeError(f'{task} {variant} seed {seed} failed ({process.returncode}):\n{tail}')
    logs = sorted(folder.glob('*/vis_data/scalars.json'))
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    result = dict(
        task=task,
        variant=variant,
        seed=seed,
        metrics={
            key.split('/')[-1]: round(factor * next(x[key] for x in lines[::-1] if key in x), 2)
            for key, factor in METRICS[task].items()
        },
        seconds=round(time.time() - began, 1),
    )
    done.write_text(json.dumps(result, indent=2))
    return result


# Costs


class TrainingStep:
    """A step of training without the optimiser, on one batch of the training data."""

    def __init__(self, cfg: Config) -> None:
        init_default_scope(cfg.default_scope)
        torch.manual_seed(0)
        self.device = get_device()
        self.model = revert_sync_batchnorm(MODELS.build(cfg.model)).to(self.device).train()
        cfg.train_dataloader.update(num_workers=0, persistent_workers=False)
        data = next(iter(Runner.build_dataloader(cfg.train_dataloader, seed=0)))
        self.data = self.model.data_preprocessor(data, True)

    def run(self) -> None:
        losses = self.model(**copy.deepcopy(self.data), mode='loss')
        self.model.parse_losses(losses)[0].backward()
        self.model.zero_grad()

    def milliseconds(self) -> float:
        began = time.perf_counter()
        self.run()
        if self.device == 'cuda':
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began)

    def kept_mib(self) -> float:
        """Memory of what the forward pass keeps for the backward pass, parameters left out."""
        parameters = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.run()
        return sum(kept.values()) / 2**20


def measure_costs(configs: dict[str, Config], threads: int, rounds: int = 7) -> dict[str, dict]:
    """Time and memory of a training step by variant.

    The variants take turns and the fastest of their steps counts, so that whatever else the
    machine does meets them all alike.
    """
    torch.set_num_threads(threads)
    steps = {variant: TrainingStep(cfg) for variant, cfg in configs.items()}
    memory = {variant: step.kept_mib() for variant, step in steps.items()}
    times = [
        {variant: step.milliseconds() for variant, step in steps.items()} for _ in range(rounds)
    ]
    return {
        variant: {
            'ms per step': round(min(of[variant] for of in times), 1),
            'kept for backward, MiB': round(memory[variant], 1),
        }
        for variant in steps
    }


# Tables


def summarise(results: list[dict], costs: dict[str, dict]) -> list[dict]:
    """Mean and standard deviation over seeds, and costs, per task and variant."""
    summary = []
    for task in CONFIGS:
        for variant in VARIANTS:
            runs = [r for r in results if (r['task'], r['variant']) == (task, variant)]
            if not runs:
                continue
            columns = {key: [r['metrics'][key] for r in runs] for key in runs[0]['metrics']}
            metrics = {
                key: dict(
                    mean=statistics.mean(column),
                    std=statistics.stdev(column) if len(column) > 1 else None,
                )
                for key, column in columns.items()
            }
            cost = costs.get(task, {}).get(variant, {})
            summary.append(
                dict(task=task, variant=variant, seeds=len(runs), metrics=metrics, costs=cost)
            )
    return summary


def to_markdown(summary: list[dict]) -> str:
    """A table per task: mean +- standard deviation over the seeds."""
    text = []
    for task in CONFIGS:
        rows = [row for row in summary if row['task'] == task]
        if not rows:
            continue
        keys = [*rows[0]['metrics'], *rows[0]['costs']]
        text += [f'| {task} | seeds | {" | ".join(keys)} |', '| --- ' * (len(keys) + 2) + '|']
        for row in rows:
            cells = []
            for value in row['metrics'].values():
                spread = '' if value['std'] is None else f' ± {value["std"]:.1f}'
                cells.append(f'{value["mean"]:.1f}{spread}')
            cells += [f'{value:.0f}' for value in row['costs'].values()]
            text.append(f'| {NAMES[row["variant"]]} | {row["seeds"]} | {" | ".join(cells)} |')
        text.append('')
    return '\n'.join(text)


def main(argv: list[str] | None = None) -> None:
    parser, args = parse_args(argv)
    root = args.work_dir.resolve()
    if args.restart:
        shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)

    data_keys = ('num_train', 'num_val', 'image_size', 'objects', 'scale', 'clutter')
    # Only forms tell the classes, and they are broken up: what attention is there for.
    data_args = dict(
        {key: getattr(args, key) for key in data_keys},
        clutter_on_top=True,
        class_colours=False,
        min_visible=0.6,
    )
    # What must not change between runs that are compared.
    schedule = {key: getattr(args, key) for key in ('iters', 'epochs', 'batch_size')}
    settings = json.loads(json.dumps(data_args | schedule))
    kept = root / 'settings.json'
    if kept.is_file() and json.loads(kept.read_text()) != settings:
        parser.error(
            f'{root} holds runs with other settings, {kept.read_text()}; give --restart to forget '
            'them, or another --work-dir'
        )
    kept.write_text(json.dumps(settings))
    try:
        make_shapes(root / 'data', **data_args, progress=True)
    except ValueError as error:
        parser.error(str(error))

    (root / 'configs').mkdir(exist_ok=True)
    configs = {}
    for task in args.tasks:
        for variant in args.variants:
            configs[task, variant] = root / 'configs' / f'{task}_{variant}.py'
            make_config(task, variant, args, root / 'data').dump(configs[task, variant])

    threads = max((os.cpu_count() or 1) // args.jobs, 1)
    columns = (
        TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    failures = []
    # All variants of a seed come before the next seed: an early table is a fair one.
    jobs = [(t, v, s) for t in args.tasks for s in args.seeds for v in args.variants]
    with Progress(*columns) as bar, ThreadPoolExecutor(args.jobs) as pool:
        progress = bar.add_task('runs', total=len(jobs))

        def work(job: tuple[str, str, int]) -> None:
            task, variant, seed = job
            folder = root / task / variant / f'seed{seed}'
            try:
                result = run(*job, configs[task, variant], folder, threads)
            except RuntimeError as error:
                failures.append(str(error))
                bar.console.print(str(error), markup=False)
            else:
                bar.console.print(f'{task} {variant} seed {seed}: {result["metrics"]}')
            bar.advance(progress)

        list(pool.map(work, jobs))

    # Every finished run of this work dir, not only those asked for now, and the costs of those.
    results = [json.loads(p.read_text()) for p in sorted(root.glob('*/*/*/result.json'))]
    costs = {}
    for task in CONFIGS:
        variants = [
            v for v in VARIANTS if any((r['task'], r['variant']) == (task, v) for r in results)
        ]
        measured = root / f'costs_{task}.json'
        costs[task] = json.loads(measured.read_text()) if measured.is_file() else {}
        if set(variants) - set(costs[task]):
            print(f'measuring a training step, {task}')
            of = {v: make_config(task, v, args, root / 'data') for v in variants}
            costs[task] = measure_costs(of, threads)
            measured.write_text(json.dumps(costs[task]))
    summary = summarise(results, costs)
    (root / 'results.json').write_text(
        json.dumps(dict(settings=settings, summary=summary, runs=results), indent=2)
    )
    (root / 'results.md').write_text(to_markdown(summary))
    print(f'{to_markdown(summary)}\nresults.json and results.md are in {args.work_dir}')
    if failures:
        sys.exit(f'{len(failures)} of {len(jobs)} runs failed; run again to try them again')


if __name__ == '__main__':
    main()
