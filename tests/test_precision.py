"""Mixed precision, memory options, layer-wise learning rates, and inputs at the edge."""

import copy
import re

import pytest
import torch
from families import FAMILIES, segmentor
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from mmengine.runner import CheckpointLoader
from test_distributed import batch
from torch import nn
from torch.nn import functional as F

import inline_mm  # noqa: F401
from inline_mm.launch import build_runner

#: By how much the loss may differ.
DTYPES = {'bfloat16': 1e-2, 'float16': 2e-3}
CONSTRUCTOR = 'inline_mm.LearningRateDecayOptimizerConstructor'


def build(family, **settings):
    torch.manual_seed(0)
    return MODELS.build(segmentor(family, **settings)).train()


# Precision


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('family', FAMILIES)
def test_amp_on_the_cpu_follows_fp32(family, dtype):
    if torch.cuda.is_available():
        pytest.skip('there is a GPU, where the wrapper of mmengine is used')
    model = build(family)
    model.init_weights()
    sgd = dict(type='SGD', lr=0.05)
    plain = build_optim_wrapper(model, dict(type='OptimWrapper', optimizer=sgd))
    cast = copy.deepcopy(model)
    amp = dict(type='CPUAmpOptimWrapper', dtype=dtype, loss_scale=256.0, optimizer=sgd)
    amp = build_optim_wrapper(cast, amp)
    data = batch(slice(0, 4))
    for _ in range(3):
        expected = model.train_step(data, plain)['loss'].item()
        assert cast.train_step(data, amp)['loss'].item() == pytest.approx(expected, DTYPES[dtype])
    assert all(param.dtype == torch.float32 for param in cast.parameters())


def test_loss_scale_falls_where_gradients_overflow_and_is_saved():
    model = build('pvt')
    cfg = dict(
        type='CPUAmpOptimWrapper',
        dtype='float16',
        loss_scale=dict(init_scale=2.0**40),
        optimizer=dict(type='SGD', lr=0.05),
    )
    wrapper = build_optim_wrapper(model, cfg)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    loss = model.train_step(batch(slice(0, 4)), wrapper)['loss']
    assert loss.isfinite()
    assert wrapper.loss_scaler.get_scale() == 2.0**39
    assert all(torch.equal(before[name], param) for name, param in model.named_parameters())
    other = build_optim_wrapper(model, cfg)
    other.load_state_dict(wrapper.state_dict())
    assert other.loss_scaler.get_scale() == 2.0**39


@pytest.mark.parametrize(
    ('option', 'message'),
    [(dict(dtype='float64'), 'dtype must be one of'), (dict(loss_scale='x'), 'loss_scale must')],
)
def test_wrong_option_of_amp_is_named(option, message):
    cfg = dict(type='CPUAmpOptimWrapper', optimizer=dict(type='SGD', lr=0.1), **option)
    with pytest.raises(ValueError, match=message):
        build_optim_wrapper(nn.Linear(1, 1), cfg)


# Memory


def saved_bytes(model, images):
    """Bytes that the forward pass keeps for the backward pass, parameters aside."""
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outs = model(images)
    total = sum(kept.values())
    sum(out.square().mean() for out in outs).backward()
    return total


@pytest.mark.parametrize('family', FAMILIES)
def test_with_cp_keeps_less_and_computes_the_same(family):
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    kept, gradients = [], []
    for with_cp in (False, True):
        torch.manual_seed(0)
        model = MODELS.build(dict(FAMILIES[family], with_cp=with_cp)).train()
        kept.append(saved_bytes(model, images))
        gradients.append([param.grad for param in model.parameters()])
    assert kept[1] < 0.5 * kept[0]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


# Training options


@pytest.mark.parametrize('family', FAMILIES)
def test_accumulated_gradients_are_those_of_the_whole_batch(family):
    model = build(family)
    halves = copy.deepcopy(model)
    sgd = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1))
    model.train_step(batch(slice(0, 4)), build_optim_wrapper(model, sgd))
    wrapper = build_optim_wrapper(halves, dict(sgd, accumulative_counts=2))
    wrapper.initialize_count_status(halves, 0, 4)
    for half in (slice(0, 2), slice(2, 4)):
        halves.train_step(batch(half), wrapper)
    for (name, one), (_, other) in zip(
        model.named_parameters(), halves.named_parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


class Batches(torch.utils.data.Dataset):
    """The images of `batch`, one at a time."""

    metainfo = dict(classes=('a', 'b', 'c', 'd'))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        data = batch(slice(index, index + 1))
        return dict(inputs=data['inputs'][0], data_samples=data['data_samples'][0])


@pytest.mark.parametrize('family', FAMILIES)
def test_runner_trains_with_ema_and_frozen_stages(family, tmp_path):
    cfg = Config(
        dict(
            default_scope='mmseg',
            model=segmentor(family, frozen_stages=2),
            train_cfg=dict(type='EpochBasedTrainLoop', max_epochs=2),
            optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.05), constructor=CONSTRUCTOR),
            custom_hooks=[dict(type='EMAHook', momentum=0.5), dict(type='CheckTargetsHook')],
            work_dir=str(tmp_path),
            launcher='none',
        )
    )
    cfg.optim_wrapper.paramwise_cfg = dict(decay_rate=0.9)
    cfg.train_dataloader = dict(batch_size=2, num_workers=0, sampler=dict(type='DefaultSampler'))
    runner = build_runner(cfg)
    runner._train_dataloader['dataset'] = Batches()
    runner.model.init_weights()
    before = {name: param.clone() for name, param in runner.model.named_parameters()}
    runner.train()
    backbone = runner.model.backbone
    frozen = {
        f'backbone.{name}' for name, param in backbone.named_parameters() if not param.requires_grad
    }
    assert frozen
    for name, param in runner.model.named_parameters():
        if not name.endswith(('.k.bias', 'sr.bias')):
            assert torch.equal(param, before[name]) == (name in frozen), name
    saved = CheckpointLoader.load_checkpoint(str(tmp_path / 'epoch_2.pth'), 'cpu')
    name = 'decode_head.conv_seg.weight'
    # The averaged weights are what is saved as the model's, and lag behind.
    averaged, last = saved['state_dict'][name], saved['ema_state_dict'][f'module.{name}']
    assert not torch.equal(averaged, last)
    assert (averaged - before[name]).norm() < (last - before[name]).norm()


# Layer-wise learning rates


class Detector(BaseModel):
    """A backbone and something after it."""

    def __init__(self, family):
        super().__init__()
        self.backbone = MODELS.build(dict(FAMILIES[family], out_norm=True))
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return x


def rates(family, optimizer=None, **paramwise):
    optimizer = optimizer or dict(type='AdamW', lr=1.0, weight_decay=0.05)
    model = Detector(family)
    cfg = dict(optimizer=optimizer, constructor=CONSTRUCTOR, paramwise_cfg=paramwise)
    groups = build_optim_wrapper(model, cfg).optimizer.param_groups
    found = {
        name: (group['lr'], group['weight_decay'])
        for group in groups
        for name in group['param_names']
    }
    assert found.keys() == dict(model.named_parameters()).keys()
    return found


def block(family, stage, index):
    return f'blocks.{stage}' if family == 'deit' else f'stages.{stage}.{index}'


@pytest.mark.parametrize('family', FAMILIES)
def test_learning_rate_falls_by_layers(family):
    found = rates(family, decay_rate=0.5, decay_type='layer_wise')
    blocks = (
        [(0, 0), (1, 0), (2, 0), (3, 0)] if family == 'deit'
        else [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0)]
    )  # fmt: skip
    depth = len(blocks)
    stem = [rate for name, rate in found.items() if re.match(r'backbone.patch_embed(s.0)?\.', name)]
    assert set(stem) == {(0.5 ** (depth + 1), 0.05), (0.5 ** (depth + 1), 0.0)}
    for i, (stage, index) in enumerate(blocks):
        name = f'backbone.{block(family, stage, index)}.mlp.fc1'
        assert found[f'{name}.weight'] == (0.5 ** (depth - i), 0.05)
        assert found[f'{name}.bias'] == (0.5 ** (depth - i), 0.0)
    assert found['head.weight'] == (1.0, 0.05)
    assert found['backbone.norm3.weight'] == (1.0, 0.0)
    embedding = dict(pvt='pos_embeds.0.weight', deit='pos_embed.weight').get(family)
    if embedding:
        assert found[f'backbone.{embedding}'] == (0.5 ** (depth + 1), 0.0)
    if family == 'deit':
        assert found['backbone.cls_token'] == (0.5 ** (depth + 1), 0.0)


@pytest.mark.parametrize('family', FAMILIES)
def test_learning_rate_falls_by_stages(family):
    found = rates(family, decay_rate=0.5, decay_type='stage_wise')
    more = rates(family, decay_rate=0.5, decay_type='stage_wise', num_layers=6)
    for stage in range(4):
        name = f'backbone.{block(family, stage, 0)}.mlp.fc1.weight'
        assert found[name][0] == 0.5 ** (4 - stage)
        # As the field's ConvNeXt recipes have it: more layers than stages.
        assert more[name][0] == 0.5 ** (6 - stage)
    if family != 'deit':
        assert found['backbone.stages.2.1.mlp.fc1.weight'][0] == 0.25


def test_blocks_are_spread_over_fewer_layers():
    found = rates('pvt', decay_rate=0.5, num_layers=2)
    names = [f'backbone.{block("pvt", *at)}.mlp.fc1.weight' for at in ((0, 0), (2, 0), (2, 1))]
    assert [found[name][0] for name in names] == [0.25, 0.25, 0.5]


def test_default_options_are_understood_too():
    keys = dict(custom_keys={'head': dict(lr_mult=10.0), 'norm1': dict(decay_mult=2.0)})
    found = rates('swin', decay_rate=0.5, **keys)
    assert found['head.weight'][0] == 10.0
    assert found['backbone.stages.3.0.norm1.weight'] == (0.5, 0.1)


@pytest.mark.parametrize(
    ('paramwise', 'message'),
    [
        (dict(), 'decay_rate must be a number'),
        (dict(decay_rate=1.5), 'decay_rate must be a number'),
        (dict(decay_rate=0.5, decay_type='x'), "decay_type must be 'layer_wise' or"),
        (dict(decay_rate=0.5, num_layers=9), 'num_layers must be 1 to 5, its blocks'),
        (dict(decay_rate=0.5, num_layers=3, decay_type='stage_wise'), 'at least 4, its stages'),
        (dict(decay_rate=0.5, decay_typ='layer_wise'), r"unknown \['decay_typ'\]"),
    ],
)
def test_wrong_option_of_the_constructor_is_named(paramwise, message):
    with pytest.raises(ValueError, match=message):
        rates('pvt', **paramwise)


def test_other_backbones_are_sent_elsewhere():
    cfg = dict(
        optimizer=dict(type='SGD', lr=1.0),
        constructor=CONSTRUCTOR,
        paramwise_cfg=dict(decay_rate=0.5),
    )
    with pytest.raises(ValueError, match='needs a backbone of inline_mm, and Linear has none'):
        build_optim_wrapper(nn.Linear(1, 1), cfg)


# Inputs at the edge


def extreme(step, size=64):
    """Normalised images as they come from constant, saturated, black and one-pixel pictures."""
    pixels = torch.zeros(1, 3, size, size)
    kind = step % 5
    if kind == 0:
        pixels += 127.0
    elif kind == 1:
        pixels += 255.0
    elif kind == 3:
        pixels[..., step % size, (7 * step) % size] = 255.0
    elif kind == 4:
        pixels[..., : size // 2] = 255.0
    # ImageNet's mean and deviation, and once in a while no normalisation at all.
    return pixels if step % 50 == 4 else (pixels - 116.0) / 57.0


def steps_in_half(family, count, size=64, dtype=torch.float16):
    """Train on extreme inputs, computing in half precision; fail at the first nan."""
    torch.manual_seed(0)
    model = MODELS.build(dict(FAMILIES[family])).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10)
    skipped = 0
    for step in range(count):
        with torch.autocast('cpu', dtype):
            outs = model(extreme(step, size))
            loss = sum(F.smooth_l1_loss(out.float(), torch.ones_like(out).float()) for out in outs)
        assert all(out.isfinite().all() for out in outs), f'step {step}: forward'
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for name, param in model.named_parameters():
            assert not param.grad.isnan().any(), f'step {step}: gradient of {name}'
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
    assert all(param.isfinite().all() for param in model.parameters())
    # Overflows of the scaled loss are the scaler's business, and rare.
    assert skipped <= max(1, count // 100)


@pytest.mark.parametrize('family', FAMILIES)
def test_extreme_inputs_give_no_nan_in_half_precision(family):
    steps_in_half(family, 15)


if __name__ == '__main__':
    import sys

    steps_in_half(sys.argv[1], int(sys.argv[2]))
    print(f'{sys.argv[1]}: {sys.argv[2]} steps without nan')
