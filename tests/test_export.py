"""Exported graphs give the model's results at every batch and size."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from mmengine.registry import MODELS

import inline_mm  # noqa: F401 (registers the backbones)
from inline_mm.export import export_onnx, largest_difference, run_onnx

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ('onnx', 'onnxruntime', 'onnxscript')),
    reason='onnx, onnxscript and onnxruntime are not all installed',
)
#: Another batch than the recorded two, the recorded size and others, one of odd sides.
IMAGES = [
    torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(batch))
    for size in ((96, 128), (128, 64), (133, 189))
    for batch in (1, 3)
]


def build(family):
    torch.manual_seed(0)
    return MODELS.build(FAMILIES[family]).eval()


def assert_same_everywhere(model, run):
    for image in IMAGES:
        outputs = run(image)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        assert largest_difference(model, image, outputs) <= 1e-4, tuple(image.shape)


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize('family', [family for family in FAMILIES if family != 'cswin'])
def test_onnx_of_a_backbone(family, tmp_path):
    model = build(family)
    path = tmp_path / 'backbone.onnx'
    export_onnx(model, path, (96, 128))
    assert_same_everywhere(model, lambda image: run_onnx(path, image))


def test_outputs_of_another_shape_are_no_match():
    model = build('pvt')
    with pytest.raises(ValueError, match='shapes'):
        largest_difference(model, IMAGES[0], [torch.zeros(1)])


def test_tool_refuses_other_formats():
    result = subprocess.run(
        [sys.executable, 'tools/export_onnx.py', 'inline_pvt_tiny', '--out', 'model.engine'],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert '.onnx or .pt2' in result.stderr
