"""The built-in shapes data set."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine.registry import init_default_scope
from pycocotools.coco import COCO

from inline_mm.datasets import CLASSES, is_complete, make_shapes

SMALL = dict(num_train=4, num_val=2, image_size=64, clutter=(1, 3), min_visible=0.6)


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    """Crowded, with holes and cut-off parts."""
    return make_shapes(
        tmp_path_factory.mktemp('data') / 'shapes',
        num_train=12,
        num_val=2,
        image_size=(96, 128),
        objects=(6, 9),
        clutter=(4, 8),
        clutter_on_top=True,
        min_visible=0.6,
    )


def read_files(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob('*') if p.is_file()}


def test_same_arguments_give_the_same_files(tmp_path):
    first, second = (read_files(make_shapes(tmp_path / name, **SMALL)) for name in 'ab')
    assert first == second
    other = read_files(make_shapes(tmp_path / 'c', **SMALL, seed=1))
    assert first['images/train/000000.png'] != other['images/train/000000.png']


def test_a_larger_set_begins_with_the_smaller_one(tmp_path):
    small = read_files(make_shapes(tmp_path / 'small', **SMALL))
    large = read_files(make_shapes(tmp_path / 'large', **dict(SMALL, num_train=6)))
    for name in ('images/train/000003.png', 'labels/train/000003.png', 'images/val/000001.png'):
        assert small[name] == large[name]


def test_pixels_do_not_depend_on_the_machine(tmp_path):
    root = make_shapes(tmp_path / 'shapes', **SMALL)
    image = cv2.imread(str(root / 'images/train/000000.png'))
    label = cv2.imread(str(root / 'labels/train/000000.png'), cv2.IMREAD_UNCHANGED)
    assert (image.astype(np.int64).sum(), label.astype(np.int64).sum()) == (1415642, 5594)


def test_splits_differ(shapes):
    files = read_files(shapes)
    assert files['images/train/000000.png'] != files['images/val/000000.png']


def test_polygons_boxes_and_areas_describe_the_visible_pixels(shapes):
    coco = COCO(str(shapes / 'annotations/instances_train.json'))
    assert [c['name'] for c in coco.loadCats(coco.getCatIds())] == list(CLASSES)
    several_parts = 0
    for image in coco.imgs.values():
        assert (image['height'], image['width']) == (96, 128)
        label = cv2.imread(str(shapes / 'labels/train' / image['file_name']), cv2.IMREAD_UNCHANGED)
        owners = np.zeros(label.shape, int)
        classes = np.ones(label.shape, int)
        for annotation in coco.loadAnns(coco.getAnnIds(image['id'])):
            mask = coco.annToMask(annotation).astype(bool)
            rows, columns = np.nonzero(mask)
            left, top = columns.min(), rows.min()
            width, height = columns.max() + 1 - left, rows.max() + 1 - top
            assert annotation['area'] == mask.sum() > 0
            assert annotation['bbox'] == [left, top, width, height]
            assert annotation['iscrowd'] == 0
            several_parts += len(annotation['segmentation']) > 1
            owners += mask
            classes[mask] = annotation['category_id'] + 1
        assert owners.max() == 1, 'visible masks overlap'
        np.testing.assert_array_equal(classes, label)
    assert several_parts > 0


def test_objects_keep_their_visible_fraction(tmp_path):
    # A disc of the only possible diameter: its full area is known.
    root = make_shapes(
        tmp_path / 'shapes',
        num_train=8,
        num_val=1,
        image_size=96,
        objects=(6, 6),
        scale=(0.4, 0.4),
        clutter=(6, 6),
        clutter_on_top=True,
        min_visible=0.6,
    )
    coco = COCO(str(root / 'annotations/instances_train.json'))
    full = np.pi * (0.4 * 96 / 2) ** 2
    fractions = [a['area'] / full for a in coco.anns.values() if a['category_id'] == 1]
    assert 0.59 <= min(fractions) < 0.95 <= max(fractions) <= 1.02


def test_small_objects_on_a_large_image(tmp_path):
    root = make_shapes(
        tmp_path / 'shapes',
        num_train=1,
        num_val=1,
        image_size=(300, 500),
        objects=(40, 40),
        scale=(0.02, 0.05),
        clutter=(30, 30),
    )
    coco = COCO(str(root / 'annotations/instances_train.json'))
    assert len(coco.anns) == 40
    assert max(max(a['bbox'][2:]) for a in coco.anns.values()) <= 16


def test_coco_dataset_reads_it(shapes):
    from mmdet.datasets import CocoDataset

    init_default_scope('mmdet')
    dataset = CocoDataset(
        data_root=str(shapes),
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='images/train/'),
        metainfo=dict(classes=CLASSES),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
        ],
    )
    assert len(dataset) == 12
    sample = dataset[0]
    assert sample['img'].shape == (96, 128, 3)
    label = cv2.imread(str(shapes / 'labels/train/000000.png'), cv2.IMREAD_UNCHANGED)
    drawn = np.ones_like(label)
    for mask, category in zip(sample['gt_masks'].masks, sample['gt_bboxes_labels'], strict=True):
        drawn[mask.astype(bool)] = category + 2
    np.testing.assert_array_equal(drawn, label)


def test_seg_dataset_reads_it_with_reduced_labels(shapes):
    from mmseg.datasets import BaseSegDataset

    init_default_scope('mmseg')
    dataset = BaseSegDataset(
        data_root=str(shapes),
        data_prefix=dict(img_path='images/train', seg_map_path='labels/train'),
        img_suffix='.png',
        reduce_zero_label=True,
        metainfo=dict(classes=('ground', *CLASSES)),
        pipeline=[dict(type='LoadImageFromFile'), dict(type='LoadAnnotations')],
    )
    assert len(dataset) == 12
    seen = np.unique([dataset[i]['gt_seg_map'] for i in range(12)])
    assert seen.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ('argument', 'value'),
    [
        ('num_train', 0),
        ('num_val', 2.0),
        ('image_size', 8),
        ('image_size', (64, 64, 3)),
        ('image_size', '64'),
        ('objects', (0, 3)),
        ('objects', (3, 2)),
        ('objects', 3),
        ('scale', (0.2, 1.5)),
        ('scale', (0.01, 0.5)),
        ('clutter', (-1, 3)),
        ('min_visible', 0),
        ('clutter_on_top', 1),
        ('class_colours', 'no'),
        ('seed', -1),
    ],
)
def test_bad_argument_is_named_with_its_value(tmp_path, argument, value):
    with pytest.raises(ValueError, match=rf'{argument} must .*') as error:
        make_shapes(tmp_path / 'shapes', **{**SMALL, argument: value})
    assert str(value[0] if argument == 'scale' else value) in str(error.value)
    assert not (tmp_path / 'shapes').exists()


def test_a_finished_set_is_left_alone(tmp_path):
    root = make_shapes(tmp_path / 'shapes', **SMALL)
    assert is_complete(root)
    before = {p: p.stat().st_mtime_ns for p in root.rglob('*')}
    make_shapes(root, **SMALL)
    assert before == {p: p.stat().st_mtime_ns for p in root.rglob('*')}


def test_other_arguments_need_overwrite(tmp_path):
    root = make_shapes(tmp_path / 'shapes', **SMALL)
    with pytest.raises(FileExistsError, match='seed is 0, asked for 3'):
        make_shapes(root, **SMALL, seed=3)
    make_shapes(root, **SMALL, seed=3, overwrite=True)
    assert json.loads((root / 'shapes.json').read_text())['seed'] == 3
    assert [p.name for p in tmp_path.iterdir()] == ['shapes']


@pytest.mark.parametrize('overwrite', [False, True])
def test_foreign_folder_is_never_touched(tmp_path, overwrite):
    (tmp_path / 'thesis.txt').write_text('years of work')
    with pytest.raises(FileExistsError, match='is no shapes data set'):
        make_shapes(tmp_path, **SMALL, overwrite=overwrite)
    assert (tmp_path / 'thesis.txt').read_text() == 'years of work'


def test_interrupted_run_leaves_nothing_behind(tmp_path):
    repo = Path(__file__).parent.parent
    process = subprocess.Popen(
        [
            sys.executable,
            repo / 'tools/make_shapes.py',
            tmp_path / 'shapes',
            '--num-train',
            '100000',
        ],
        env=dict(os.environ, PYTHONPATH=str(repo)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.time() + 300
    while not list(tmp_path.rglob('000003.png')):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=300) != 0
    assert not list(tmp_path.iterdir())
