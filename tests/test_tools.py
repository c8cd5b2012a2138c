"""The command line tools, run as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
import torch
from mmengine.config import Config

from inline_mm.datasets import make_shapes
from inline_mm.launch import check_datasets, load_config

REPO = Path(__file__).parent.parent
DETECTION = REPO / 'configs/mini/mask-rcnn_inline-pvt-mini_fpn_10e_shapes.py'
SEGMENTATION = REPO / 'configs/mini/fpn_inline-pvt-mini_1xb8-500_shapes.py'
# Two iterations and a validation.
SHORT = {
    DETECTION: ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1'],
    SEGMENTATION: ['train_cfg.max_iters=2', 'train_cfg.val_interval=2'],
}
FAST = [
    'train_dataloader.batch_size=4',
    'train_dataloader.num_workers=0',
    'train_dataloader.persistent_workers=False',
    'val_dataloader.num_workers=0',
    'val_dataloader.persistent_workers=False',
    'test_dataloader.num_workers=0',
    'test_dataloader.persistent_workers=False',
    'default_hooks.logger.interval=1',
]


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    """A working directory outside the repository, with data where the mini configs want it."""
    root = tmp_path_factory.mktemp('work')
    make_shapes(root / 'data/shapes', num_train=8, num_val=2)
    return root


def run(work, *command, check=True):
    process = subprocess.run(
        list(map(str, command)),
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS='1', PYTHON=sys.executable, PYTHONPATH=str(REPO)),
    )
    if check:
        assert process.returncode == 0, process.stdout[-4000:]
    return process


def tool(name):
    return [sys.executable, REPO / 'tools' / name]


def logged(folder, key):
    """Values of a key in the newest log of a work dir."""
    log = max(folder.glob('*/vis_data/scalars.json'))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line[key] for line in lines if key in line]


@pytest.fixture(scope='module', params=[DETECTION, SEGMENTATION], ids=['detection', 'segmentation'])
def trained(request, work):
    config = request.param
    folder = work / 'work_dirs' / config.stem
    options = [*SHORT[config], *FAST]
    run(work, *tool('train.py'), config, '--cfg-options', *options)
    return config, folder, options


@pytest.mark.slow
def test_training_logs_losses_metrics_and_a_checkpoint(trained):
    config, folder, _ = trained
    losses = logged(folder, 'loss')
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    assert len(logged(folder, 'coco/bbox_mAP' if config is DETECTION else 'mIoU')) == 1
    checkpoint = Path((folder / 'last_checkpoint').read_text())
    assert checkpoint.name == ('epoch_1.pth' if config is DETECTION else 'iter_2.pth')
    assert (folder / config.name).is_file()


@pytest.mark.slow
def test_testing_measures_draws_and_writes_predictions(trained, work):
    config, folder, options = trained
    checkpoint = (folder / 'last_checkpoint').read_text()
    out = 'out.pkl' if config is DETECTION else 'out'
    tta = [] if config is DETECTION else ['--tta']
    run(
        work, *tool('test.py'), config, checkpoint, '--work-dir', folder / 'test',
        '--show-dir', f'show-{config.stem}', '--out', out, *tta, '--cfg-options', *options,
    )  # fmt: skip
    metrics = json.loads(next((folder / 'test').glob('*/*.json')).read_text())
    if config is DETECTION:
        assert {'coco/bbox_mAP', 'coco/segm_mAP'} <= metrics.keys()
        assert (work / out).is_file()
    else:
        assert 0 <= metrics['mIoU'] <= 100
        label = cv2.imread(str(work / out / '000000.png'), cv2.IMREAD_UNCHANGED)
        assert label.shape == (128, 128)
    pictures = list((work / f'show-{config.stem}').rglob('*.png'))
    assert len(pictures) == 2
    # Ground truth and prediction side by side.
    assert cv2.imread(str(pictures[0])).shape == (128, 256, 3)


@pytest.mark.slow
def test_resume_goes_on_from_the_latest_checkpoint(trained, work):
    config, folder, options = trained
    if config is DETECTION:
        pytest.skip('the same code as for segmentation')
    options = [*options, 'train_cfg.max_iters=3', 'train_cfg.val_interval=3']
    output = run(work, *tool('train.py'), config, '--resume', '--cfg-options', *options).stdout
    assert 'resumed epoch: 0, iter: 2' in output
    assert len(logged(folder, 'loss')) == 1


@pytest.mark.slow
def test_two_processes_train_on_the_cpu(work):
    if torch.cuda.is_available():
        pytest.skip('with a GPU the processes would use it')
    folder = work / 'distributed'
    env = ['env', 'PORT=29511']
    run(
        work, *env, 'bash', REPO / 'tools/dist_train.sh', DETECTION, 2, '--work-dir', folder,
        '--cfg-options', *SHORT[DETECTION], *FAST,
    )  # fmt: skip
    # Eight images in batches of four over two processes: one step.
    assert len(logged(folder, 'loss')) == 1
    assert len(logged(folder, 'coco/bbox_mAP')) == 1


@pytest.mark.slow
def test_missing_data_set_is_named_before_anything_starts(tmp_path):
    process = run(tmp_path, *tool('train.py'), DETECTION, check=False)
    assert process.returncode == 2
    assert "train_dataloader: data_root 'data/shapes/' does not exist" in process.stdout
    assert str(tmp_path) in process.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([DETECTION, 'none.pth'], "checkpoint 'none.pth' does not exist"),
        ([DETECTION, __file__, '--tta'], '--tta merges boxes only'),
        ([DETECTION, __file__, '--out', 'x.json'], "--out 'x.json' must be a .pkl"),
    ],
    ids=['checkpoint', 'tta', 'out'],
)
def test_bad_arguments_of_test_are_refused(work, arguments, message):
    process = run(work, *tool('test.py'), *arguments, check=False)
    assert process.returncode == 2
    assert message in process.stdout


def test_unknown_config_is_named():
    with pytest.raises(FileNotFoundError, match=r"config 'configs/none\.py' does not exist"):
        load_config('configs/none.py')
    with pytest.raises(FileNotFoundError, match="names the package 'inlinemm'"):
        load_config('inlinemm::coco/x.py')


def test_config_of_the_package_is_found_by_name():
    by_name = load_config(f'inline_mm::mini/{SEGMENTATION.name}', {'max_iters': 7})
    expected = Config.fromfile(SEGMENTATION)
    assert by_name.model == expected.model
    assert by_name.max_iters == 7


def test_data_sets_inside_wrappers_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inner = dict(type='CocoDataset', data_root='a', ann_file='b.json', data_prefix=dict(img='c'))
    cfg = Config(
        dict(train_dataloader=dict(dataset=dict(type='RepeatDataset', times=2, dataset=inner)))
    )
    for path, message in (('a', 'data_root'), ('a/b.json', 'ann_file'), ('a/c', 'data_prefix.img')):
        with pytest.raises(FileNotFoundError, match=f'train_dataloader: {message} '):
            check_datasets(cfg, ('train_dataloader', 'val_dataloader'))
        Path(path).mkdir()
    check_datasets(cfg, ('train_dataloader', 'val_dataloader'))


def test_data_sets_in_other_storage_are_left_to_the_library():
    remote = dict(type='CocoDataset', data_root='s3://bucket', ann_file='b.json')
    backend = dict(type='CocoDataset', data_root='none', backend_args=dict(backend='petrel'))
    for dataset in (remote, backend):
        cfg = Config(dict(train_dataloader=dict(dataset=dataset)))
        check_datasets(cfg, ('train_dataloader',))
