#!/usr/bin/env python
"""Put a backbone into every config of the installed mmdet and mmseg, and say how it went.

One row a config: plugged (the plugged config reads back equal from its dump, and its model builds
and predicts on noise), refused because ..., failed with .... Equal models, which many configs
share, run once. Rows are kept in a file as they come, and a second call goes on where the first
stopped.

    python tools/plug_report.py --library mmdet --sample 50 --seed 0
"""

import argparse
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from queue import Empty, Queue

from mmengine.config import Config, DictAction
from mmengine.utils import ProgressBar, get_installed_path

from inline_mm.plug import ConfigError, PlugError, backbone_names, installed_configs
from inline_mm.plug.config import library_of, read_config, type_name
from inline_mm.plug.rewire import UNPLUGGABLE, find_hosts

#: InLine-PVT's four stages at a size that builds in no time; it stands in by default.
SMALL = dict(
    type='InLinePVT',
    arch=dict(
        depths=[1, 1, 1, 1],
        embed_dims=[32, 64, 160, 256],
        num_heads=[1, 2, 5, 8],
        mlp_ratios=[2, 2, 2, 2],
    ),
)

STATES = {
    'plugged': 'plugged, reads back equal, predicts',
    'refused': 'refused, with a reason',
    'failed': 'failed',
    'not runnable': 'plugged, but its own model does not run here either',
    'not loadable': 'does not load, or has no model',
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--library', choices=['mmdet', 'mmseg'], help='default: both')
    parser.add_argument(
        '--backbone',
        metavar='NAME',
        help=f'default: a small InLinePVT; {", ".join(backbone_names())}, or a registered class',
    )
    parser.add_argument('--backbone-options', nargs='+', action=DictAction, metavar='KEY=VALUE')
    parser.add_argument('--sample', type=int, metavar='N', help='N configs of each library')
    parser.add_argument('--seed', type=int, default=0, help='of --sample')
    parser.add_argument('--match', default='', help='only configs whose name contains this')
    parser.add_argument('--jobs', type=int, default=1, help='configs at a time')
    parser.add_argument('--size', type=int, default=64, help='side of the images')
    parser.add_argument('--timeout', type=float, default=600, help='seconds for one config')
    parser.add_argument(
        '--out', default='work_dirs/plug_report.jsonl', help='the rows, a line of JSON each'
    )
    parser.add_argument(
        '--retry',
        nargs='*',
        default=[],
        choices=list(STATES),
        help='states whose rows are made anew',
    )
    return parser.parse_args()


# --------------------------------------------------------------------------------------------------
# One config


def _brief(error: BaseException) -> str:
    text = ' '.join(str(error).split())
    return f'{type(error).__name__}: {text[:300]}'


def _run(cfg: Config, size: int) -> None:
    """Predict, or where that takes an op of the GPU or a tracker has none, compute a loss."""
    from inline_mm.plug import check_model

    first = None
    # Query-based detectors choose queries among pixels, others have large kernels.
    for side, loss in ((size, False), (400, False), (size, True)):
        try:
            check_model(cfg, (side, side), loss=loss, predict=not loss)
            return
        except Exception as error:
            first = first or error
    raise first


def _reads_back(cfg: Config) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'plugged.py')
        cfg.dump(path)
        return Config.fromfile(path).to_dict() == cfg.to_dict()


def examine(name: str, backbone, size: int, done: dict[str, tuple[str, str]]) -> dict:
    """The row of one config; ``done`` maps models that ran before to their state and reason."""
    from inline_mm.plug import plug_backbone

    row = dict(config=name, state='', reason='', old='', model='', key='')
    try:
        original, _ = read_config(name)
    except ConfigError as error:
        return {**row, 'state': 'not loadable', 'reason': str(error)}
    row['model'] = type_name(original.model)
    row['old'] = ', '.join(type_name(host.backbone) for host in find_hosts(original.model))
    try:
        cfg = plug_backbone(name, backbone)
        if not _reads_back(cfg):
            return {**row, 'state': 'failed', 'reason': 'the dump does not read back equal'}
    except PlugError as error:
        return {**row, 'state': 'refused', 'reason': str(error)}
    except Exception as error:
        return {**row, 'state': 'failed', 'reason': _brief(error)}
    text = repr((library_of(cfg), cfg.model.to_dict(), cfg.get('data_preprocessor')))
    row['key'] = hashlib.sha1(text.encode()).hexdigest()
    if row['key'] not in done:
        done[row['key']] = _try_out(cfg, original, size)
    state, reason = done[row['key']]
    return {**row, 'state': state, 'reason': reason}


def _try_out(cfg: Config, original: Config, size: int) -> tuple[str, str]:
    # Teachers are named by their path in the library's repository.
    here = os.getcwd()
    os.chdir(Path(get_installed_path(library_of(cfg)), '.mim'))
    try:
        _run(cfg, size)
        return 'plugged', ''
    except Exception as error:
        reason = _brief(error)
        try:
            _run(original, size)
        except Exception as own:
            if type(own) is type(error) and str(own)[:60] == str(error)[:60]:
                return 'not runnable', reason
        return 'failed', reason
    finally:
        os.chdir(here)


def work(pipe, backbone, size: int, done: dict) -> None:
    """A worker process: names in, rows out."""
    import torch

    torch.set_num_threads(1)
    importlib.import_module('inline_mm')
    # For every name, mmengine reads all the metafiles of the library.
    utils = importlib.import_module('mmengine.config.utils')
    utils._get_cfg_metainfo = functools.cache(utils._get_cfg_metainfo)
    while (name := pipe.recv()) is not None:
        start = time.time()
        row = examine(name, backbone, size, done)
        pipe.send({**row, 'seconds': round(time.time() - start, 1)})


# --------------------------------------------------------------------------------------------------
# All configs


def run_all(names: list[str], args: argparse.Namespace, backbone, done: dict, keep) -> None:
    """Hand the names to worker processes; one that takes too long, or dies, is replaced."""
    context = multiprocessing.get_context('spawn')
    queue: Queue = Queue()
    for name in names:
        queue.put(name)

    def serve() -> None:
        process = pipe = None
        while True:
            try:
                name = queue.get_nowait()
            except Empty:
                break
            if process is None:
                pipe, far = context.Pipe()
                process = context.Process(
                    target=work, args=(far, backbone, args.size, dict(done)), daemon=True
                )
                process.start()
                far.close()
            row = dict(config=name, state='failed', old='', model='', key='')
            try:
                pipe.send(name)
                if pipe.poll(args.timeout):
                    row = pipe.recv()
                else:
                    row['reason'] = f'no answer within {args.timeout:g} s'
            except (EOFError, OSError):
                row['reason'] = f'the process died (exit code {process.exitcode})'
            if 'reason' in row and 'seconds' not in row:
                process.kill()
                process = None
            keep(row)
        if process is not None:
            pipe.send(None)
            process.join()

    threads = [threading.Thread(target=serve) for _ in range(args.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def summary(rows: list[dict]) -> str:
    """Tables in Markdown: states by library, and why configs were refused or failed."""
    libraries = sorted({row['config'].partition('::')[0] for row in rows})
    counts = Counter((row['config'].partition('::')[0], row['state']) for row in rows)
    lines = [f'| | {" | ".join(libraries)} |', f'|---|{"---:|" * len(libraries)}']
    for state, meaning in STATES.items():
        lines.append(f'| {meaning} | {" | ".join(str(counts[x, state]) for x in libraries)} |')
    lines.append(
        f'| all | {" | ".join(str(sum(counts[x, s] for s in STATES)) for x in libraries)} |'
    )

    def extractor(row: dict) -> bool:
        return row['state'] != 'not loadable' and not (
            {row['model'], *row['old'].split(', ')} & set(UNPLUGGABLE)
        )

    shares = []
    for library in libraries:
        eligible = [r for r in rows if r['config'].startswith(f'{library}::') and extractor(r)]
        plugged = sum(row['state'] == 'plugged' for row in eligible)
        share = f'{plugged} of {len(eligible)}'
        shares.append(f'{share} ({plugged / len(eligible):.1%})' if eligible else share)
    lines.append(
        f'| plugged, of those whose backbone is a feature extractor | {" | ".join(shares)} |'
    )
    checked = {row['key'] for row in rows if row['key']}
    lines.append(f'\nThe plugged configs hold {len(checked)} different models.')

    reasons = Counter(
        (row['state'], row['reason'] if row['state'] != 'not loadable' else _kind(row['reason']))
        for row in rows
        if row['state'] != 'plugged'
    )
    lines += ['', '| configs | state | reason |', '|---:|---|---|']
    lines += [
        f'| {count} | {state} | {reason} |'
        for (state, reason), count in sorted(
            reasons.items(), key=lambda item: (list(STATES).index(item[0][0]), -item[1])
        )
    ]
    return '\n'.join(lines)


def _kind(reason: str) -> str:
    """Reasons without the config's name, so that they can be counted."""
    if 'has no model' in reason:
        return 'it has no model: it is a part of configs'
    return reason.partition('does not load: ')[2] or reason


def main() -> int:
    args = parse_args()
    backbone = args.backbone or SMALL
    if args.backbone_options is not None:
        backbone = Config(dict(type=args.backbone or 'InLinePVT'))
        backbone.merge_from_dict(args.backbone_options)
        backbone = backbone.to_dict()
    names = []
    for library in [args.library] if args.library else ['mmdet', 'mmseg']:
        own = [name for name in installed_configs(library) if args.match in name]
        if args.sample is not None and args.sample < len(own):
            own = sorted(random.Random(args.seed).sample(own, args.sample))
        names += own

    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    key = json.dumps([backbone, args.size])
    rows: dict[str, dict] = {}
    others = []
    for line in out.read_text().splitlines() if out.exists() else []:
        row = json.loads(line)
        if row['for'] == key:
            rows[row['config']] = row
        else:
            others.append(line)
    rows = {name: row for name, row in rows.items() if row['state'] not in args.retry}
    out.write_text(''.join(f'{line}\n' for line in [*others, *map(json.dumps, rows.values())]))
    done = {row['key']: (row['state'], row['reason']) for row in rows.values() if row['key']}

    todo = [name for name in names if name not in rows]
    lock = threading.Lock()
    bar = ProgressBar(len(todo)) if todo else None

    def keep(row: dict) -> None:
        with lock, out.open('a') as file:
            rows[row['config']] = row
            file.write(json.dumps({**row, 'for': key}) + '\n')
            bar.update()

    run_all(todo, args, backbone, done, keep)
    print('\n')
    print(summary([rows[name] for name in names]))
    return 0


if __name__ == '__main__':
    sys.exit(main())
