"""Export to ONNX and ``torch.export``, for any batch, height and width.

In a recorded graph the operators and layers use forms without a branch or a group count that
depends on the batch or the map, so one graph serves all sizes.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

__all__ = ['DenseOutputs', 'export_onnx', 'export_program', 'largest_difference', 'run_onnx']


class DenseOutputs(nn.Module):
    """What is exported of a model: a segmentor's logits, or a backbone's maps.

    Args:
        model: A backbone or classifier, or a detector or segmentor of mmdet or mmseg. Of a
            detector the backbone is taken: boxes are for the framework that runs it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        is_detector = hasattr(model, 'backbone') and hasattr(model, 'bbox_head')
        is_detector = is_detector or hasattr(model, 'roi_head')
        self.model = (model.backbone if is_detector else model).eval()
        self.is_segmentor = hasattr(self.model, 'decode_head')

    def output_names(self) -> list[str]:
        """Names of the outputs in order."""
        if self.is_segmentor or not hasattr(self.model, 'out_indices'):
            return ['logits']
        return [f'level{i}' for i in self.model.out_indices]

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Normalised images (B, C, H, W) to logits, or to a map per output."""
        if self.is_segmentor:
            return self.model.decode_head(self.model.extract_feat(image))
        return self.model(image)


def example_image(model: nn.Module, size: tuple[int, int]) -> Tensor:
    """Two images to record a graph with; one would be taken for a constant."""
    backbone = getattr(model, 'backbone', model)
    channels = getattr(backbone, 'in_channels', 3)
    return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))


def dynamic_shapes() -> dict:
    """Which dimensions of the image are open, for ``torch.export``."""
    dim = torch.export.Dim
    is_open = dim.DYNAMIC if hasattr(dim, 'DYNAMIC') else dim.AUTO
    return {'image': {0: is_open, 2: is_open, 3: is_open}}


def export_program(model: nn.Module, size: tuple[int, int]) -> torch.export.ExportedProgram:
    """Export a model with ``torch.export``.

    Args:
        model: See :class:`DenseOutputs`.
        size: ``(H, W)`` to record the graph with. Where the model has Swin's windows, their map
            must be larger than one window; the graph is for such sizes.
    """
    dense = DenseOutputs(model)
    with torch.no_grad():
        return torch.export.export(
            dense,
            (example_image(dense.model, size),),
            dynamic_shapes=dynamic_shapes(),
            strict=False,
        )


def export_onnx(
    model: nn.Module,
    path: str | Path,
    size: tuple[int, int],
    opset: int = 18,
    dynamo: bool = False,
) -> None:
    """Export a model to ONNX.

    Args:
        model: See :class:`DenseOutputs`.
        path: Of the file to write.
        size: See :func:`export_program`.
        opset: Version of ONNX's operators.
        dynamo: Whether to build on ``torch.export`` instead of tracing, which is much slower for
            graphs of open size.
    """
    dense = DenseOutputs(model)
    names = dense.output_names()
    image = example_image(dense.model, size)
    settings = dict(input_names=['image'], output_names=names, opset_version=opset, dynamo=dynamo)
    if dynamo:
        settings.update(dynamic_shapes=dynamic_shapes(), external_data=False)
    else:
        axes = {0: 'batch', 2: 'height', 3: 'width'}
        outputs = {name: {0: 'batch', 2: f'{name}_height', 3: f'{name}_width'} for name in names}
        if not dense.is_segmentor and names == ['logits']:
            outputs = {'logits': {0: 'batch'}}
        settings['dynamic_axes'] = {'image': axes, **outputs}
    with torch.no_grad():
        torch.onnx.export(dense, (image,), str(path), **settings)


def run_onnx(path: str | Path, image: Tensor) -> list[Tensor]:
    """The outputs of an ONNX file for images, by onnxruntime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    return [torch.from_numpy(output) for output in session.run(None, {'image': image.numpy()})]


@torch.no_grad()
def largest_difference(model: nn.Module, image: Tensor, outputs: Sequence[Tensor]) -> float:
    """How far outputs are from the model's, relative to the largest number of each.

    Raises:
        ValueError: If their number or a shape differs.
    """
    expected = DenseOutputs(model)(image)
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    shapes = [[tuple(o.shape) for o in each] for each in (expected, outputs)]
    if shapes[0] != shapes[1]:
        raise ValueError(f'outputs have shapes {shapes[1]}, the model gives {shapes[0]}')
    return max(
        ((output - reference).abs().max() / reference.abs().max()).item()
        for output, reference in zip(outputs, expected, strict=True)
    )
