"""One step of training with one config of each detector and segmentor, on a synthetic batch."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData
from mmengine.utils import import_modules_from_strings

ROOT = Path(__file__).parent.parent / 'configs'
DETECTORS = [
    'mask-rcnn_inline-pvt-t_fpn_1x_coco.py',
    'retinanet_inline-swin-t_fpn_1x_coco.py',
    'mask-rcnn_inline-cswin-t_fpn_ms-crop-3x_coco.py',
    'cascade-mask-rcnn_inline-swin-t_fpn_1x_coco.py',
    'mask-rcnn_inline-deit-t_fpn_1x_coco.py',
]
SEGMENTORS = [
    'fpn_inline-pvt-t_8xb4-40k_ade20k-512x512.py',
    'upernet_inline-swin-t_8xb2-160k_ade20k-512x512.py',
    'upernet_inline-deit-s_8xb2-160k_ade20k-512x512.py',
]
SIZE = (64, 96)


def build(path):
    cfg = Config.fromfile(path)
    init_default_scope(cfg.default_scope)
    import_modules_from_strings(**cfg.custom_imports)
    # As large as the batch, and few boxes: what a step is made of stays the same.
    if cfg.default_scope == 'mmseg':
        cfg.model.data_preprocessor.size = SIZE
    rcnn = cfg.model.get('train_cfg', {}).get('rcnn', [])
    for stage in rcnn if isinstance(rcnn, list) else [rcnn]:
        stage.sampler.num = 32
    torch.manual_seed(0)
    # Plain batch norm, as the libraries' own tools use where there is one process.
    return revert_sync_batchnorm(MODELS.build(cfg.model)).train()


def assert_trains(model, batch):
    batch = model.data_preprocessor(batch, training=True)
    loss, losses = model.parse_losses(model(**batch, mode='loss'))
    assert loss.isfinite() and len(losses) > 1
    loss.backward()
    idle = [
        key
        for key, p in model.backbone.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.isfinite().all())
    ]
    assert not idle


@pytest.mark.slow
@pytest.mark.parametrize('name', DETECTORS)
def test_a_detector_takes_a_step(name):
    from mmdet.testing import demo_mm_inputs

    model = build(ROOT / 'coco' / name)
    batch = demo_mm_inputs(2, [(3, 64, 96), (3, 64, 64)], num_items=[2, 1], with_mask=True)
    assert_trains(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize('name', SEGMENTORS)
def test_a_segmentor_takes_a_step(name):
    from mmseg.structures import SegDataSample

    model = build(ROOT / 'ade20k' / name)
    labels = torch.randint(0, 150, (2, 1, *SIZE))
    samples = [
        SegDataSample(gt_sem_seg=PixelData(data=label), metainfo=dict(img_shape=SIZE))
        for label in labels
    ]
    images = torch.randint(0, 256, (2, 3, *SIZE), dtype=torch.uint8)
    assert_trains(model, dict(inputs=list(images), data_samples=samples))
