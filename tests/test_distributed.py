"""Several processes: data parallel, sharded, and the tools that start them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, segmentor
from mmengine.config import Config
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, STRATEGIES
from mmengine.structures import PixelData
from processes import run
from torch.distributed.fsdp import FullyShardedDataParallel

import inline_mm  # noqa: F401
from inline_mm.datasets import make_shapes
from inline_mm.launch import build_runner
from inline_mm.layers import Block

REPO = Path(__file__).parent.parent
VARIANTS = dict(
    all_levels=dict(),
    # The second level alone, recomputed in the backward pass.
    one_level_cp=dict(out_indices=(1,), with_cp=True),
)


def batch(images):
    """A batch of random images and labels, the same every time."""
    from mmseg.structures import SegDataSample

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (4, 3, 32, 32), generator=generator).float()
    labels = torch.randint(0, 4, (4, 1, 32, 32), generator=generator)
    samples = [SegDataSample(gt_sem_seg=PixelData(data=label)) for label in labels[images]]
    return dict(inputs=list(inputs[images]), data_samples=samples)


def build(cfg, init=False):
    torch.manual_seed(0)
    model = MODELS.build(cfg)
    if init:
        model.init_weights()
    return model


def two_steps(cfg, images, optimizer, init=False):
    """Losses of two steps, the first gradients and the last weights."""
    model = build(cfg, init)
    if torch.distributed.is_initialized():
        # find_unused_parameters is left off: a parameter without a gradient raises in step two.
        model = MMDistributedDataParallel(model, broadcast_buffers=False)
    wrapper = build_optim_wrapper(model, dict(type='OptimWrapper', optimizer=optimizer))
    model.train()
    losses, gradients = [], None
    for _ in range(2):
        data = getattr(model, 'module', model).data_preprocessor(batch(images), True)
        loss = sum(value for key, value in model(**data, mode='loss').items() if 'loss' in key)
        wrapper.optimizer.zero_grad()
        loss.backward()
        named = getattr(model, 'module', model).named_parameters()
        gradients = gradients or {name: param.grad.clone().numpy() for name, param in named}
        wrapper.optimizer.step()
        losses.append(loss.item())
    named = getattr(model, 'module', model).named_parameters()
    return losses, gradients, {name: param.detach().numpy() for name, param in named}


def half_of_two_steps(cfg, optimizer):
    rank = torch.distributed.get_rank()
    return two_steps(cfg, slice(2 * rank, 2 * rank + 2), optimizer)


@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('family', FAMILIES)
def test_two_ranks_learn_as_one_process_with_the_whole_batch(family, variant):
    cfg = segmentor(family, **VARIANTS[variant])
    sgd = dict(type='SGD', lr=0.1)
    losses, gradients, _ = two_steps(cfg, slice(0, 4), sgd)
    (first, gradients_of_rank, _), (second, *_) = run(half_of_two_steps, cfg, sgd, ranks=2)
    for one, other, whole in zip(first, second, losses, strict=True):
        assert (one + other) / 2 == pytest.approx(whole, rel=1e-5)
    assert gradients_of_rank.keys() == gradients.keys()
    largest = max(abs(gradient).max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert abs(gradients_of_rank[name] - gradient).max() <= 1e-5 * largest, name


@pytest.mark.parametrize('family', FAMILIES)
def test_zero_shards_the_optimiser_and_learns_the_same(family):
    cfg = segmentor(family)
    adam = dict(type='SGD', lr=0.1, momentum=0.9)
    sharded = dict(type='ZeroRedundancyOptimizer', optimizer_type='SGD', lr=0.1, momentum=0.9)
    _, _, expected = two_steps(cfg, slice(0, 4), adam)
    for _, _, weights in run(half_of_two_steps, cfg, sharded, ranks=2):
        for name, value in expected.items():
            assert abs(weights[name] - value).max() <= 1e-5 * max(1, abs(value).max()), name


def fsdp_step(cfg):
    strategy = STRATEGIES.build(
        dict(
            type='FSDPStrategy',
            model_wrapper=dict(
                type='MMFullyShardedDataParallel',
                device_id=torch.device('cpu'),
                auto_wrap_policy='wrap_blocks',
            ),
        )
    )
    model, wrapper = strategy.prepare(
        # mmengine would initialise it, from another seed, had it not been done.
        build(cfg, init=True),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
    )
    units = sum(isinstance(module, FullyShardedDataParallel) for module in model.modules()) - 1
    assert units == sum(isinstance(module, Block) for module in model.modules()) > 0
    rank = torch.distributed.get_rank()
    losses = [
        model.train_step(batch(slice(2 * rank, 2 * rank + 2)), wrapper)['loss'].item()
        for _ in range(2)
    ]
    return losses, sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize('family', FAMILIES)
def test_fsdp_shards_the_model_and_learns_the_same(family):
    cfg = segmentor(family)
    losses, gradients, _ = two_steps(cfg, slice(0, 4), dict(type='SGD', lr=0.1), init=True)
    (first, held), (second, held_by_other) = run(fsdp_step, cfg, ranks=2)
    for one, other, whole in zip(first, second, losses, strict=True):
        assert (one + other) / 2 == pytest.approx(whole, rel=1e-5)
    whole = sum(gradient.size for gradient in gradients.values())
    assert whole <= held + held_by_other < 1.1 * whole


def test_sync_bn_becomes_bn_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    model = segmentor('pvt')
    model['decode_head']['norm_cfg'] = dict(type='SyncBN', requires_grad=True)
    cfg = Config(dict(model=model, work_dir=str(tmp_path), launcher='none', default_scope='mmseg'))
    runner = build_runner(cfg)
    kinds = {type(module) for module in runner.model.modules()}
    assert torch.nn.SyncBatchNorm not in kinds and torch.nn.BatchNorm2d in kinds
    loss = runner.model.train().loss(**runner.model.data_preprocessor(batch(slice(0, 2)), True))
    assert loss['decode.loss_ce'].isfinite()


@pytest.mark.slow
def test_testing_with_two_processes_gives_the_metric_of_one(tmp_path):
    # An odd number of images: the sampler repeats one, which must not count twice.
    make_shapes(tmp_path / 'data/shapes', num_train=1, num_val=5)
    config = REPO / 'configs/mini/fpn_inline-pvt-mini_1xb8-500_shapes.py'
    torch.manual_seed(0)
    model = MODELS.build(dict(Config.fromfile(config).model, type='mmseg.EncoderDecoder'))
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'weights.pth')
    options = [
        'test_dataloader.num_workers=0',
        'test_dataloader.persistent_workers=False',
        'test_dataloader.batch_size=1',
    ]
    metrics = []
    for command in (
        [sys.executable, REPO / 'tools/test.py', config, 'weights.pth'],
        ['bash', REPO / 'tools/dist_test.sh', config, 'weights.pth', '2'],
    ):
        work_dir = tmp_path / str(len(metrics))
        process = subprocess.run(
            [*map(str, command), '--work-dir', str(work_dir), '--cfg-options', *options],
            cwd=tmp_path,
            env=dict(os.environ, OMP_NUM_THREADS='1', PYTHON=sys.executable, PORT='29517'),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.returncode == 0, process.stdout[-3000:]
        (log,) = work_dir.glob('*/*.json')
        metrics.append(json.loads(log.read_text()))
    for key in ('aAcc', 'mIoU', 'mAcc'):
        assert metrics[0][key] == metrics[1][key]
    assert metrics[0]['aAcc'] > 0
