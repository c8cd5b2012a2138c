"""Files that are malicious, damaged, or not what the config says: refused by name, or they work."""

import copy
import functools
import http.server
import json
import os
import pickle
import runpy
import sys
import threading
import zipfile
from pathlib import Path

import cv2
import mmengine
import numpy as np
import pytest
import torch
from families import FAMILIES, segmentor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mmengine.config import Config
from mmengine.logging import HistoryBuffer
from mmengine.registry import MODELS
from PIL import Image

from inline_mm import InLinePVT
from inline_mm.checkpoint import CheckpointError, read_checkpoint
from inline_mm.datasets import make_shapes
from inline_mm.launch import build_datasets, build_runner

REPO = Path(__file__).parent.parent
MASK_RCNN = REPO / 'configs/mini/mask-rcnn_inline-pvt-mini_fpn_10e_shapes.py'
CLASSES = ('ground', 'circle', 'square', 'triangle')
REFUSED = 'refused: to unpickle it would run code'


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f'touch {self.path}',)


@pytest.fixture
def payload(tmp_path):
    """A checkpoint that makes a file when it is unpickled, and that file."""
    marker, path = tmp_path / 'marker', tmp_path / 'payload.pth'
    torch.save(dict(meta=dict(epoch=1, iter=1, x=Payload(marker)), state_dict={}), path)
    return str(path), marker


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    root = tmp_path_factory.mktemp('data') / 'shapes'
    return make_shapes(root, num_train=4, num_val=1, image_size=32)


def segmentation(root, work_dir, num_classes=4, batch_size=2, **settings):
    """Config to train and test a small segmentor with."""
    load = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations')]
    dataset = dict(
        type='BaseSegDataset',
        metainfo=dict(classes=CLASSES[:num_classes], palette=[[0, 0, 0]] * num_classes),
        data_root=str(root),
        data_prefix=dict(img_path='images/train', seg_map_path='labels/train'),
        img_suffix='.png',
        reduce_zero_label=True,
        pipeline=[*load, dict(type='PackSegInputs')],
    )
    loader = dict(
        batch_size=batch_size,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=False),
        dataset=dataset,
    )
    test_loader = dict(loader, batch_size=1, dataset=dict(dataset, test_mode=True))
    cfg = dict(
        default_scope='mmseg',
        custom_imports=dict(imports=['inline_mm']),
        model=segmentor('pvt', num_classes),
        train_dataloader=loader,
        train_cfg=dict(type='EpochBasedTrainLoop', max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        test_dataloader=test_loader,
        test_cfg=dict(type='TestLoop'),
        test_evaluator=dict(type='IoUMetric'),
        custom_hooks=[dict(type='CheckTargetsHook')],
        work_dir=str(work_dir),
        launcher='none',
    )
    cfg['test_pipeline'] = dataset['pipeline']
    return Config(dict(cfg, **settings))


def train(cfg):
    runner = build_runner(cfg)
    build_datasets(runner, ('train_dataloader',))
    runner.train()


# Checkpoints that would run code


def inference(path, root, folder, monkeypatch):
    from mmseg.apis import init_model

    init_model(segmentation(root, folder), path, device='cpu')


def mmseg_inferencer(path, root, folder, monkeypatch):
    from mmseg.apis import MMSegInferencer

    segmentation(root, folder).dump(folder / 'config.py')
    MMSegInferencer(str(folder / 'config.py'), path, device='cpu')


def det_inferencer(path, root, folder, monkeypatch):
    from mmdet.apis import DetInferencer

    DetInferencer(str(MASK_RCNN), path, device='cpu')


def test(path, root, folder, monkeypatch):
    build_runner(segmentation(root, folder, load_from=path)).test()


def fine_tune(path, root, folder, monkeypatch):
    train(segmentation(root, folder, load_from=path))


def resume(path, root, folder, monkeypatch):
    train(segmentation(root, folder, load_from=path, resume=True))


def pretrained_backbone(path, root, folder, monkeypatch):
    model = segmentor('pvt', init_cfg=dict(type='Pretrained', checkpoint=path))
    train(segmentation(root, folder, model=model))


def pretrained_model(path, root, folder, monkeypatch):
    model = dict(segmentor('pvt'), init_cfg=dict(type='Pretrained', checkpoint=path))
    train(segmentation(root, folder, model=model))


def convert(path, root, folder, monkeypatch):
    monkeypatch.setattr(
        sys, 'argv', ['convert', path, str(folder / 'out.pth'), '--family', 'pvt', '--arch', 'tiny']
    )
    runpy.run_path(str(REPO / 'tools/convert_checkpoint.py'), run_name='__main__')


USES = [
    fine_tune, resume, pretrained_backbone, pretrained_model, test, inference, mmseg_inferencer,
    det_inferencer,
]  # fmt: skip
test.__test__ = False


@pytest.mark.parametrize('use', USES, ids=lambda use: use.__name__)
def test_checkpoint_that_runs_code_is_refused(use, payload, shapes, tmp_path, monkeypatch):
    path, marker = payload
    with pytest.raises(CheckpointError, match=f'{path}.*{REFUSED}.*posix.system') as error:
        use(path, shapes, tmp_path, monkeypatch)
    assert 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1' in str(error.value)
    assert not marker.exists()


def test_conversion_refuses_it_too(payload, tmp_path, monkeypatch, capsys):
    path, marker = payload
    with pytest.raises((CheckpointError, SystemExit)) as error:
        convert(path, None, tmp_path, monkeypatch)
    assert REFUSED in str(error.value) + capsys.readouterr().err
    assert not marker.exists() and not (tmp_path / 'out.pth').exists()


def test_download_that_runs_code_is_refused(payload, tmp_path, monkeypatch):
    _, marker = payload
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'cache'))
    monkeypatch.setenv('MMENGINE_HOME', str(tmp_path / 'cache'))
    monkeypatch.delenv('TORCH_FORCE_WEIGHTS_ONLY_LOAD', raising=False)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f'http://127.0.0.1:{server.server_port}/payload.pth'
        with pytest.raises(CheckpointError, match=REFUSED):
            mmengine.runner.CheckpointLoader.load_checkpoint(address, 'cpu')
        server.shutdown()
    assert not marker.exists()
    assert 'TORCH_FORCE_WEIGHTS_ONLY_LOAD' not in os.environ


def test_trusted_checkpoint_loads_as_mmengine_does(payload, monkeypatch):
    path, marker = payload
    monkeypatch.delenv('TORCH_FORCE_WEIGHTS_ONLY_LOAD', raising=False)
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    mmengine.runner.CheckpointLoader.load_checkpoint(path, 'cpu')
    assert marker.exists()


def test_other_uses_of_torch_load_are_left_alone(payload, monkeypatch):
    path, marker = payload
    monkeypatch.delenv('TORCH_FORCE_WEIGHTS_ONLY_LOAD', raising=False)
    torch.load(path, weights_only=False)
    assert marker.exists()


def test_getattr_serves_the_log_history_alone(tmp_path):
    class Escape:
        def __reduce__(self):
            return getattr, (HistoryBuffer, '__init__')

    torch.save(dict(state_dict={}, x=Escape()), tmp_path / 'x.pth')
    with pytest.raises(CheckpointError, match=r"asks for getattr\(.*HistoryBuffer.*'__init__'\)"):
        mmengine.runner.CheckpointLoader.load_checkpoint(str(tmp_path / 'x.pth'), 'cpu')


def test_checkpoints_of_numpy_1_and_2_are_read(tmp_path):
    history = HistoryBuffer([1.0, 2.0], [1, 1])
    content = dict(state_dict=dict(w=torch.ones(2)), history=history, value=np.float64(3.0))
    torch.save(content, tmp_path / 'x.pth')
    with zipfile.ZipFile(tmp_path / 'x.pth') as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    for core in (b'numpy.core.', b'numpy._core.'):
        with zipfile.ZipFile(tmp_path / 'y.pth', 'w') as archive:
            for name, data in entries.items():
                if name.endswith('data.pkl'):
                    data = data.replace(b'numpy._core.', core).replace(b'numpy.core.', core)
                    assert core in data
                archive.writestr(name, data)
        loaded = mmengine.runner.CheckpointLoader.load_checkpoint(str(tmp_path / 'y.pth'), 'cpu')
        assert loaded['history'].mean() == 1.5 and loaded['value'] == 3.0
        assert read_checkpoint(str(tmp_path / 'y.pth')).keys() == {'w'}


# Damaged checkpoints


def damaged(kind, folder):
    path = folder / f'{kind}.pth'
    weights = {f'backbone.{k}': v for k, v in InLinePVT(**pvt()).state_dict().items()}
    name = next(iter(weights))
    if kind == 'nan':
        weights[name] = torch.full_like(weights[name], float('nan'))
    elif kind == 'integers':
        weights[name] = torch.ones_like(weights[name], dtype=torch.int8)
    elif kind == 'other_size':
        weights = {k: torch.ones(3) for k in weights}
    torch.save([1, 2] if kind == 'list' else dict(state_dict=weights), path)
    content = path.read_bytes()
    if kind == 'truncated':
        path.write_bytes(content[: len(content) // 2])
    elif kind == 'empty':
        path.write_bytes(b'')
    elif kind == 'text':
        path.write_bytes(b'<html>404</html>')
    return str(path)


def pvt():
    return {key: value for key, value in FAMILIES['pvt'].items() if key != 'type'}


DAMAGED = {
    'truncated': 'truncated or damaged',
    'empty': 'the file is empty',
    'text': 'not a readable|no checkpoint',
    'list': 'holds a list',
    'nan': 'not finite|nan',
    'integers': 'dtype torch.int8',
    'other_size': 'has shape',
}


@pytest.mark.parametrize('kind', DAMAGED)
def test_damaged_checkpoint_of_a_backbone_is_named(kind, tmp_path):
    path = damaged(kind, tmp_path)
    model = InLinePVT(**pvt(), init_cfg=dict(type='Pretrained', checkpoint=path))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=f'{path}.*({DAMAGED[kind]})'):
        model.init_weights()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize('kind', ['truncated', 'empty', 'text', 'list', 'nan'])
def test_damaged_checkpoint_of_a_model_is_named(kind, tmp_path):
    path = damaged(kind, tmp_path)
    with pytest.raises(CheckpointError, match=f'{path}.*({DAMAGED[kind]})'):
        mmengine.runner.CheckpointLoader.load_checkpoint(path, 'cpu')


@pytest.mark.parametrize('use', ['test', 'resume'])
def test_checkpoint_of_another_model_is_refused(use, shapes, tmp_path):
    path = str(tmp_path / 'swin.pth')
    other = dict(state_dict=MODELS.build(segmentor('swin')).state_dict())
    torch.save(dict(other, meta=dict(epoch=0, iter=0), message_hub={}), path)
    hooks = [dict(type='StrictLoadHook')]
    cfg = segmentation(shapes, tmp_path, load_from=path, custom_hooks=hooks)
    cfg.resume = use == 'resume'
    runner = build_runner(cfg)
    with pytest.raises(CheckpointError, match=f'{path}.*does not fit.*missing: .*unknown to the'):
        runner.test() if use == 'test' else runner.train()


@given(
    st.one_of(
        st.binary(max_size=300).map(lambda data: ('replace', 0, data)),
        st.tuples(
            st.sampled_from(['overwrite', 'cut']),
            st.integers(0, 3000),
            st.binary(min_size=1, max_size=8),
        ),
    )
)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_reader_survives_any_bytes(tmp_path_factory, change):
    path = tmp_path_factory.getbasetemp() / 'fuzz.pth'
    torch.save(dict(state_dict=dict(a=torch.ones(8), b=torch.zeros(2)), meta=dict(x=[1])), path)
    how, position, data = change
    content = path.read_bytes()
    position %= len(content)
    if how == 'replace':
        path.write_bytes(data)
    elif how == 'cut':
        path.write_bytes(content[:position])
    else:
        path.write_bytes(content[:position] + data + content[position + len(data) :])
    try:
        state = read_checkpoint(str(path))
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert all(isinstance(value, torch.Tensor) for value in state.values())


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_reader_survives_any_pickle(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / 'fuzz_pickle.pth'
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('archive/data.pkl', pickle.PROTO + b'\x02' + data + pickle.STOP)
        archive.writestr('archive/version', '3')
    with pytest.raises(CheckpointError):
        read_checkpoint(str(path))


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=3)
    | st.sampled_from(['inline', 'softmax', 'linear']),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)  # fmt: skip


@pytest.mark.parametrize('family', FAMILIES)
def test_any_setting_is_taken_or_named(family):
    arch = FAMILIES[family]['arch']
    keys = st.sampled_from([*arch, 'attention', 'depth', 'embed_dims', 'num_heads'])

    @given(st.one_of(st.tuples(keys, anything), st.tuples(st.just(None), anything)))
    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
    def check(change):
        key, value = change
        cfg = dict(FAMILIES[family], arch=value if key is None else dict(arch, **{key: value}))
        try:
            MODELS.build(cfg)
        except (ValueError, TypeError) as error:
            assert 'arch' in str(error) or str(key) in str(error), (change, error)

    check()


# Images


def write_image(kind, path):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (48, 40, 4), dtype=np.uint8)
    if kind == 'grey':
        cv2.imwrite(str(path), pixels[..., 0])
    elif kind == '16bit':
        cv2.imwrite(str(path), pixels[..., :3].astype(np.uint16) * 257)
    elif kind == 'rgba':
        cv2.imwrite(str(path), pixels)
    elif kind == 'cmyk':
        Image.fromarray(pixels, 'CMYK').save(path, format='JPEG')
    elif kind == 'one_pixel_wide':
        cv2.imwrite(str(path), pixels[:, :1, :3])
    elif kind == 'one_pixel':
        cv2.imwrite(str(path), pixels[:1, :1, :3])
    elif kind == 'wide':
        cv2.imwrite(str(path), rng.integers(0, 256, (8, 20_000, 3), dtype=np.uint8))
    else:
        data = cv2.imencode('.png', pixels)[1].tobytes()
        path.write_bytes({'truncated': data[:200], 'zero_bytes': b'', 'text': b'no'}[kind])


GOOD_IMAGES = ('grey', '16bit', 'rgba', 'cmyk', 'one_pixel_wide', 'one_pixel', 'wide')
BAD_IMAGES = ('truncated', 'zero_bytes', 'text')


@pytest.mark.parametrize('kind', GOOD_IMAGES)
@pytest.mark.parametrize('family', FAMILIES)
def test_odd_image_is_segmented(family, kind, tmp_path):
    from mmseg.apis import inference_model, init_model

    write_image(kind, tmp_path / 'x.png')
    cfg = segmentation(tmp_path, tmp_path, model=segmentor(family))
    del cfg.model.data_preprocessor['size']
    cfg.model.data_preprocessor.test_cfg = dict(size_divisor=32)
    cfg.test_pipeline = [dict(type='LoadImageFromFile'), dict(type='PackSegInputs')]
    model = init_model(cfg, device='cpu')
    sample = inference_model(model, str(tmp_path / 'x.png'))
    height, width = cv2.imread(str(tmp_path / 'x.png')).shape[:2]
    assert sample.pred_sem_seg.data.shape == (1, height, width)
    assert sample.seg_logits.data.isfinite().all()


@pytest.mark.parametrize('which', ['images', 'labels'])
@pytest.mark.parametrize('kind', BAD_IMAGES)
def test_damaged_file_is_named(which, kind, tmp_path):
    root = make_shapes(tmp_path / 'data', num_train=2, num_val=1, image_size=32)
    path = Path(root) / which / 'train' / '000001.png'
    if kind == 'truncated':
        path.write_bytes(path.read_bytes()[:60])
    else:
        write_image(kind, path)
    with pytest.raises(RuntimeError, match=f'cannot use .*{path}'):
        train(segmentation(root, tmp_path))


@pytest.mark.parametrize('which', ['images', 'labels'])
def test_missing_file_is_named(which, tmp_path):
    root = make_shapes(tmp_path / 'data', num_train=2, num_val=1, image_size=32)
    path = Path(root) / which / 'train' / '000001.png'
    path.unlink()
    if which == 'images':  # A folder's images are what there is; a label without one is unused.
        path = Path(root) / 'images/train'
        (path / '000000.png').unlink()
    with pytest.raises((RuntimeError, ValueError), match=path.name):
        train(segmentation(root, tmp_path))


# Annotations


def test_labels_without_a_class_stop_training(tmp_path):
    root = make_shapes(tmp_path / 'data', num_train=2, num_val=1, image_size=32)
    for path in sorted((Path(root) / 'labels/train').glob('*.png')):
        cv2.imwrite(str(path), np.full((32, 32), 3, np.uint8))
    train(segmentation(root, tmp_path / 'a'))
    with pytest.raises(ValueError, match=r"label image '.*/00000\d.png' holds the label 2, but"):
        train(segmentation(root, tmp_path / 'b', num_classes=2))
    for path in (Path(root) / 'labels/train').glob('*.png'):
        cv2.imwrite(str(path), np.zeros((32, 32), np.uint8))
    with pytest.raises(ValueError, match=r'none of the first 1 batches.*labels/train'):
        train(segmentation(root, tmp_path / 'c'))


@functools.cache
def mask_rcnn():
    return Config.fromfile(MASK_RCNN)


def detection(root, work_dir):
    cfg = copy.deepcopy(mask_rcnn())
    cfg.merge_from_dict(
        dict(
            work_dir=str(work_dir),
            launcher='none',
            train_cfg=dict(_delete_=True, type='EpochBasedTrainLoop', max_epochs=1),
            custom_hooks=[dict(type='CheckTargetsHook')],
        )
    )
    cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None
    loader = cfg.train_dataloader
    loader.update(num_workers=0, persistent_workers=False, batch_size=4)
    loader.dataset.data_root = str(root)
    loader.dataset.filter_cfg = None
    loader.dataset.pipeline[2].scale = (32, 32)
    return cfg


def edit(content, kind):
    boxes, images = content['annotations'], content['images']
    if kind == 'empty_images':
        content['annotations'] = [box for box in boxes if box['image_id'] == boxes[0]['image_id']]
    elif kind == 'some_odd_boxes':
        boxes[0]['bbox'] = [500, 500, 9, 9]
        boxes[1]['area'] = 0
        boxes[2]['category_id'] = 77
        boxes[3]['bbox'] = [-5, -5, 20, 20]
    elif kind == 'all_outside':
        for box in boxes:
            box['bbox'] = [500, 500, 9, 9]
    elif kind == 'all_zero_area':
        for box in boxes:
            box['area'] = 0
    elif kind == 'all_unknown':
        for box in boxes:
            box['category_id'] = 77
    elif kind == 'other_categories':
        for category in content['categories']:
            category['name'] = category['name'].upper()
    elif kind == 'one_category_less':
        content['categories'] = content['categories'][1:]
    elif kind == 'no_images':
        content['images'] = content['annotations'] = []
    elif kind == 'missing_image':
        images[0]['file_name'] = 'gone.png'
    elif kind == 'no_boxes_key':
        del boxes[0]['bbox']
    return content


ANNOTATIONS = {
    'empty_images': None,
    'some_odd_boxes': None,
    'all_outside': 'none of the first 1 batches.*instances_train.json',
    'all_zero_area': 'none of the first 1 batches.*instances_train.json',
    'all_unknown': 'none of the first 1 batches.*instances_train.json',
    'other_categories': 'has 0 of the 3 classes.*lacks circle, square, triangle.*and has CIRCLE',
    'one_category_less': 'instances_train.json.* has 2 of the 3 classes.*lacks circle',
    'no_images': 'no sample to use.*instances_train.json.*0 images',
    'missing_image': 'cannot use .*gone.png.*FileNotFoundError',
    'no_boxes_key': 'cannot be read: KeyError: .*bbox.*instances_train.json',
    'no_json': 'cannot be read: JSONDecodeError.*instances_train.json',
}


@pytest.mark.parametrize('kind', ANNOTATIONS)
def test_odd_annotations_train_or_are_named(kind, tmp_path):
    root = make_shapes(tmp_path / 'data', num_train=4, num_val=1, image_size=32)
    path = Path(root) / 'annotations/instances_train.json'
    text = json.dumps(edit(json.loads(path.read_text()), kind))
    path.write_text(text[:-50] if kind == 'no_json' else text)
    cfg = detection(root, tmp_path)
    if ANNOTATIONS[kind] is None:
        train(cfg)
    else:
        with pytest.raises((RuntimeError, ValueError), match=ANNOTATIONS[kind]):
            train(cfg)


def test_data_set_that_a_filter_empties_is_named(tmp_path):
    root = make_shapes(tmp_path / 'data', num_train=2, num_val=1, image_size=32)
    cfg = detection(root, tmp_path)
    cfg.train_dataloader.dataset.filter_cfg = dict(filter_empty_gt=True, min_size=64)
    with pytest.raises(ValueError, match=r'train_dataloader: the data set has no sample.*min_size'):
        train(cfg)
