"""Training runs that are killed, run out of disk, or find a damaged checkpoint."""

import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from families import segmentor
from mmengine.config import Config
from processes import start

from inline_mm.checkpoint import CheckpointError, is_whole
from inline_mm.datasets import make_shapes
from inline_mm.hooks import DurableLocalBackend, latest_checkpoint
from inline_mm.launch import build_runner

ITERATIONS = 16


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp('data') / 'shapes'
    return make_shapes(root, num_train=16, num_val=1, image_size=32)


def train(data, work_dir, resume=False, largest_file=None, **hook):
    """Train a small segmentor, as tools/train.py does it."""
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations'),
        dict(type='PackSegInputs'),
    ]
    cfg = Config(
        dict(
            default_scope='mmseg',
            model=segmentor('pvt'),
            train_dataloader=dict(
                batch_size=2,
                num_workers=0,
                sampler=dict(type='InfiniteSampler', shuffle=True),
                dataset=dict(
                    type='BaseSegDataset',
                    metainfo=dict(classes=('ground', 'circle', 'square', 'triangle')),
                    data_root=str(data),
                    data_prefix=dict(img_path='images/train', seg_map_path='labels/train'),
                    img_suffix='.png',
                    reduce_zero_label=True,
                    pipeline=pipeline,
                ),
            ),
            train_cfg=dict(type='IterBasedTrainLoop', max_iters=ITERATIONS, val_interval=1000),
            optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.01)),
            param_scheduler=[dict(type='PolyLR', end=ITERATIONS, power=0.9, by_epoch=False)],
            default_hooks=dict(
                logger=dict(type='LoggerHook', interval=1),
                checkpoint=dict(
                    type='CheckpointHook', by_epoch=False, interval=2, max_keep_ckpts=1, **hook
                ),
            ),
            randomness=dict(seed=0),
            work_dir=str(work_dir),
            launcher='none',
        )
    )
    if resume:
        cfg.load_from, cfg.resume = latest_checkpoint(work_dir), True
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    build_runner(cfg).train()


def losses(work_dir):
    """Loss and learning rate of every iteration, the last logged where there are several."""
    found = {}
    for log in sorted(Path(work_dir).glob('*/vis_data/scalars.json')):
        for line in log.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # The line it was killed at.
                continue
            found[entry['step']] = (entry['loss'], entry['lr'])
    return found


@pytest.mark.slow
def test_killed_runs_go_on_with_the_losses_of_an_uninterrupted_one(data, tmp_path):
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    reference = start(train, data, whole)
    rng = random.Random(0)
    kills = 0
    process = start(train, data, killed)
    while True:
        # At some moment of the next iterations, saving or computing.
        logged = len(losses(killed))
        while process.is_alive() and len(losses(killed)) < min(logged + 4, ITERATIONS - 1):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        if kills == 3 or not process.is_alive():
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        if (killed / 'last_checkpoint').exists():
            assert is_whole(latest_checkpoint(killed))
        time.sleep(1)  # Logs lie in folders named by the second.
        process = start(train, data, killed, latest_checkpoint(killed) is not None)
    process.join(60)
    reference.join(60)
    assert process.exitcode == reference.exitcode == 0
    assert kills == 3
    expected, found = losses(whole), losses(killed)
    assert len(expected) == ITERATIONS and found.keys() == expected.keys()
    for step, (loss, lr) in expected.items():
        assert found[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(lr)), step


@pytest.mark.slow
def test_full_disk_is_named_and_leaves_the_last_checkpoint_alone(data, tmp_path):
    first = start(train, data, tmp_path)
    while not (tmp_path / 'last_checkpoint').exists() and first.is_alive():
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    before = latest_checkpoint(tmp_path)
    second = start(train, data, tmp_path, True, 200_000, log=tmp_path / 'log')
    second.join(60)
    assert second.exitcode not in (0, None)
    error = (tmp_path / 'log').read_text()
    assert 'so the checkpoint was not saved' in error and 'iter_' in error
    assert latest_checkpoint(tmp_path) == before and is_whole(before)
    assert not list(tmp_path.glob('*.unfinished'))


def write_forever(path):
    backend = DurableLocalBackend()
    for number in range(256):
        backend.put(bytes([number]) * 20_000_000, path)


def test_file_being_written_is_never_seen_half(tmp_path):
    path = tmp_path / 'iter_1.pth'
    rng = random.Random(0)
    for _ in range(4):
        process = start(write_forever, str(path))
        while not path.exists():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        content = path.read_bytes()
        assert len(content) == 20_000_000 and len(set(content)) == 1


def checkpoint(path):
    torch.save(dict(state_dict=dict(weight=torch.zeros(100))), path)
    return path


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_truncated_latest_checkpoint_is_passed_over(tmp_path):
    good, bad = checkpoint(tmp_path / 'iter_2.pth'), checkpoint(tmp_path / 'iter_4.pth')
    (tmp_path / 'last_checkpoint').write_text(str(bad))
    assert latest_checkpoint(tmp_path) == str(bad)
    truncate(bad)
    assert latest_checkpoint(tmp_path) == str(good)
    truncate(good)
    with pytest.raises(CheckpointError, match=r'no checkpoint in .* is whole: .*iter_4\.pth'):
        latest_checkpoint(tmp_path)


def test_latest_checkpoint_is_found_in_a_moved_folder_and_without_the_note(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    good = checkpoint(tmp_path / 'epoch_3.pth')
    assert latest_checkpoint(tmp_path) == str(good)
    (tmp_path / 'last_checkpoint').write_text('/somewhere/else/epoch_3.pth')
    assert latest_checkpoint(tmp_path) == str(good)
    (tmp_path / 'last_checkpoint').write_text('')
    assert latest_checkpoint(tmp_path) == str(good)


def test_outdated_files_go_after_the_next_is_whole(tmp_path):
    backend = DurableLocalBackend()
    old = tmp_path / 'old'
    backend.put(b'1', old)
    with pytest.raises(OSError, match='not saved'), backend.postponed_removals():
        backend.remove(old)
        backend.put(b'2', tmp_path / 'old' / 'below-a-file')
    assert old.read_bytes() == b'1'
    with backend.postponed_removals():
        backend.remove(old)
        assert old.exists()
        backend.put(b'2', tmp_path / 'new')
    assert not old.exists()
