"""Parameters, multiply-accumulates and activations, counted without running a model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, segmentor
from mmengine.registry import MODELS, init_default_scope
from torch import nn

import inline_mm  # noqa: F401 (registers the backbones)
from inline_mm.analysis.complexity import count_macs, measure

REPO = Path(__file__).parent.parent


def test_counts_are_those_of_the_formula():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.Flatten())
    model.in_channels = 3
    counts = measure(model, (16, 32))
    outputs = 8 * 8 * 16
    assert counts.parameters == 8 * 3 * 9
    assert counts.macs == counts.plain_macs == outputs * 3 * 9
    assert counts.activations == outputs


@pytest.mark.parametrize('family', FAMILIES)
def test_folding_needs_fewer_and_leaves_the_model_alone(family):
    model = MODELS.build(FAMILIES[family])
    before = {name: p.clone() for name, p in model.named_parameters()}
    counts = measure(model, (64, 96))
    assert counts.macs < counts.plain_macs == count_macs(model, (64, 96))
    assert counts.parameters == sum(p.numel() for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_cost_grows_linearly_with_the_pixels():
    model = MODELS.build(FAMILIES['pvt'])
    small, large = (measure(model, (side, side)) for side in (512, 1024))
    assert large.macs == pytest.approx(4 * small.macs, rel=0.05)
    assert large.activations == pytest.approx(4 * small.activations, rel=0.05)


def test_heads_of_a_segmentor_are_counted():
    init_default_scope('mmseg')
    model = MODELS.build(segmentor('pvt'))
    whole, backbone = measure(model, (64, 64)), measure(model.backbone, (64, 64))
    assert whole.macs > backbone.macs
    assert whole.parameters > backbone.parameters


def run(*arguments):
    return subprocess.run(
        [sys.executable, 'tools/get_flops.py', *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_tool_counts_detectors_and_classifiers():
    result = run('configs/mini/mask-rcnn_inline-pvt-mini_fpn_10e_shapes.py', '--shape', '128')
    assert result.returncode == 0, result.stderr
    assert '128 x 128' in result.stdout and 'MaskRCNN' in result.stdout
    result = run('inline_pvt_tiny')
    assert 'Parameters:   12.03 M' in result.stdout
    assert 'MACs, plain:  1.98 G' in result.stdout


def test_tool_names_what_it_cannot_use():
    result = run('inline_pvt_giant')
    assert result.returncode == 2
    assert 'inline_pvt_giant' in result.stderr
