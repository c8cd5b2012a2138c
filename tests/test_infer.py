"""tools/infer.py, on real (if untrained) models and real files."""

import importlib.util
import json
import re
from itertools import pairwise
from pathlib import Path

import cv2
import mmcv
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.runner import save_checkpoint
from pycocotools import mask as rle

import inline_mm  # noqa: F401

REPO = Path(__file__).parent.parent
CONFIGS = dict(
    mmdet=REPO / 'configs/mini/mask-rcnn_inline-pvt-mini_fpn_10e_shapes.py',
    mmseg=REPO / 'configs/mini/fpn_inline-pvt-mini_1xb8-500_shapes.py',
)

spec = importlib.util.spec_from_file_location('infer', REPO / 'tools/infer.py')
infer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(infer)


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory):
    """An untrained model's checkpoint per library, without class names of its own."""
    from mmengine.registry import MODELS, init_default_scope

    root = tmp_path_factory.mktemp('checkpoints')
    for scope, path in CONFIGS.items():
        torch.manual_seed(0)
        init_default_scope(scope)
        model = MODELS.build(Config.fromfile(path).model)
        save_checkpoint(dict(state_dict=model.state_dict()), str(root / f'{scope}.pth'))
    return root


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / 'images'
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ('a.png', 'b.jpg', 'b.png'):
        image = cv2.resize(rng.integers(0, 255, (5, 8, 3), np.uint8), (176, 128))
        cv2.imwrite(str(folder / name), image)
    return folder


def run(scope, source, checkpoints, out, *options):
    infer.main([str(source), str(CONFIGS[scope]), str(checkpoints / f'{scope}.pth'),
                '--out', str(out), '--device', 'cpu', *map(str, options)])  # fmt: skip


def read(path):
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize('tiled', [False, True])
def test_a_detector_draws_and_describes_every_image_of_a_folder(
    checkpoints, images, tmp_path, tiled
):
    options = ['--tile', 112, '--overlap', 32] if tiled else []
    # Untrained, it finds as much as it may.
    few = ['--cfg-options', 'model.test_cfg.rcnn.max_per_img=5']
    run('mmdet', images, checkpoints, tmp_path, '--score-thr', 0.1, *options, *few)
    assert sorted(p.name for p in (tmp_path / 'preds').iterdir()) == [
        'a.json', 'b.jpg.json', 'b.png.json'
    ]  # fmt: skip
    for name in ('a', 'b.jpg', 'b.png'):
        found = read(tmp_path / 'preds' / f'{name}.json')
        assert (found['height'], found['width']) == (128, 176)
        assert found['instances']
        for instance in found['instances']:
            # Class names from the config, as the checkpoint has none.
            assert instance['name'] == ('circle', 'square', 'triangle')[instance['label']]
            x1, y1, x2, y2 = instance['bbox']
            assert 0 <= x1 <= x2 <= 176 and 0 <= y1 <= y2 <= 128
            assert rle.decode(instance['mask']).shape == (128, 176)
        assert cv2.imread(str(tmp_path / 'vis' / f'{name}.png')).shape == (128, 176, 3)


@pytest.mark.slow
def test_a_segmentor_in_tiles_labels_each_pixel_as_the_tile_around_it_does(
    checkpoints, images, tmp_path
):
    source = images / 'a.png'
    run('mmseg', source, checkpoints, tmp_path / 'whole')
    run('mmseg', source, checkpoints, tmp_path / 'tiled', '--tile', 128, '--overlap', 64)
    labels = cv2.imread(str(tmp_path / 'tiled/preds/a.png'), 0)
    assert labels.shape == (128, 176)
    found = read(tmp_path / 'tiled/preds/a.json')['segments']
    assert sum(segment['pixels'] for segment in found) == labels.size
    for segment in found:
        assert (rle.decode(segment['mask']).astype(bool) == (labels == segment['label'])).all()
    # The tiles by themselves: columns 0 to 127 and 48 to 175, which meet in the middle.
    parts = tmp_path / 'parts'
    parts.mkdir()
    pixels = cv2.imread(str(source))
    cv2.imwrite(str(parts / 'left.png'), pixels[:, :128])
    cv2.imwrite(str(parts / 'right.png'), pixels[:, 48:])
    run('mmseg', parts, checkpoints, tmp_path / 'alone')
    left, right = (
        cv2.imread(str(tmp_path / f'alone/preds/{side}.png'), 0) for side in ('left', 'right')
    )
    np.testing.assert_array_equal(labels, np.concatenate([left[:, :88], right[:, 40:]], 1))


@pytest.mark.slow
def test_a_damaged_file_is_reported_and_the_rest_is_done(checkpoints, images, tmp_path):
    whole = (images / 'b.jpg').read_bytes()
    (images / 'b.jpg').write_bytes(whole[: len(whole) // 2])
    (images / 'c.png').write_bytes(b'no image')
    (images / 'notes.txt').write_text('no image either, by its name')
    with pytest.raises(SystemExit) as stop:
        run('mmseg', images, checkpoints, tmp_path)
    message = str(stop.value)
    assert 'b.jpg: damaged, or no image' in message and 'c.png: damaged' in message
    assert 'notes.txt' not in message
    assert sorted(p.name for p in (tmp_path / 'vis').iterdir()) == ['a.png', 'b.png.png']


@pytest.mark.slow
def test_a_video_becomes_a_video_and_one_file_of_predictions(checkpoints, images, tmp_path):
    source = tmp_path / 'clip.avi'
    writer = cv2.VideoWriter(str(source), cv2.VideoWriter_fourcc(*'MJPG'), 5, (176, 128))
    for name in ('a.png', 'b.png'):
        writer.write(cv2.imread(str(images / name)))
    writer.release()
    run('mmseg', source, checkpoints, tmp_path / 'out')
    found = read(tmp_path / 'out/preds/clip.json')
    assert found['fps'] == 5 and len(found['frames']) == 2
    assert sum(s['pixels'] for s in found['frames'][1]['segments']) == 176 * 128
    video = mmcv.VideoReader(str(tmp_path / 'out/vis/clip.mp4'))
    assert (video.frame_cnt, video.width, video.height) == (2, 176, 128)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (dict(source='nowhere.png'), 'nowhere.png.* does not exist'),
        (dict(source='images.txt'), 'neither an image nor a video'),
        (dict(source='empty'), 'has no images or videos'),
        (dict(options=['--device', 'cuda:99']), "--device 'cuda:99' cannot be used"),
        (dict(options=['--overlap', '8']), '--overlap goes with --tile'),
        (dict(options=['--tile', '64', '--overlap', '64']), 'from 0 to below --tile, got 64'),
        (dict(checkpoint='mmseg'), 'the checkpoint does not fit the config: .*Missing key'),
        (dict(checkpoint='damaged'), r"damaged.pth' (is|cannot be read)"),
        (dict(config='nowhere.py'), "config 'nowhere.py' does not exist"),
    ],
)
def test_what_cannot_be_used_is_named(checkpoints, images, tmp_path, capsys, change, message):
    (tmp_path / 'images.txt').write_text('')
    (tmp_path / 'empty').mkdir()
    (checkpoints / 'damaged.pth').write_bytes((checkpoints / 'mmdet.pth').read_bytes()[:5000])
    source = tmp_path / change['source'] if 'source' in change else images
    checkpoint = checkpoints / f'{change.get("checkpoint", "mmdet")}.pth'
    config = change.get('config', str(CONFIGS['mmdet']))
    with pytest.raises(SystemExit) as stop:
        infer.main([str(source), config, str(checkpoint), '--out', str(tmp_path / 'out'),
                    *change.get('options', [])])  # fmt: skip
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error, re.DOTALL), error
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    ('side', 'tile', 'overlap'),
    [(100, 100, 20), (101, 100, 20), (999, 64, 16), (130, 64, 0), (40, 64, 63)],
)
def test_tiles_cover_a_side_and_every_pixel_is_one_tiles_own(side, tile, overlap):
    starts = infer.tile_starts(side, tile, overlap)
    cores = infer.tile_cores(side, tile, overlap)
    assert starts[0] == 0 and starts[-1] + min(tile, side) == side
    assert all(b - a <= tile - overlap for a, b in pairwise(starts))
    assert [pixel for core in cores for pixel in range(*core)] == list(range(side))
    for start, (low, high) in zip(starts, cores, strict=True):
        assert start <= low and high <= start + tile


def test_boxes_of_overlapping_tiles_become_one():
    boxes = torch.tensor([
        [10, 10, 50, 50],  # Seen whole by one tile,
        [11, 10, 50, 51],  # by another,
        [10, 10, 22, 50],  # and cut by a third,
        [12, 12, 48, 48],  # with another class inside,
        [20, 20, 30, 30],  # and a smaller object of its class that no edge cuts.
        [200, 10, 220, 50],  # Cut, but with nothing that it could be a part of.
    ]).float()  # fmt: skip
    scores = torch.tensor([0.8, 0.9, 0.95, 0.5, 0.4, 0.7])
    labels = torch.tensor([0, 0, 0, 1, 0, 0])
    cut = torch.tensor([False, False, True, True, False, True])
    keep = infer.merge_boxes(boxes, scores, labels, cut, 0.5)
    assert keep.tolist() == [1, 5, 3, 4]
    assert infer.merge_boxes(boxes[:0], scores[:0], labels[:0], cut[:0], 0.5).tolist() == []
