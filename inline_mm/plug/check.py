"""Tries a config's model out: one loss, backward and prediction on a batch of noise, on the CPU."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.logging import MessageHub
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, DefaultScope
from mmengine.structures import InstanceData, PixelData
from torch import Tensor, nn

from .config import library_of, type_name
from .features import quiet, use_library

__all__ = ['CheckResult', 'build_model', 'check_model', 'synthetic_batch']


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes:
        loss: The sum of the losses; None where no loss was asked for.
        untrained: Parameters of backbones that got no gradient, which distributed training
            refuses unless it is told to look for them.
        predictions: Number of predicted samples; None where no prediction was asked for.
    """

    loss: float | None
    untrained: list[str]
    predictions: int | None


def _nodes(node: Any) -> Iterator[dict]:
    if isinstance(node, dict):
        yield node
    if isinstance(node, (dict, list, tuple)):
        for value in node.values() if isinstance(node, dict) else node:
            yield from _nodes(value)


def _small_bert(folder: str) -> str:
    """Write a BERT of one layer with random weights, and a tokenizer of single letters."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    vocabulary = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *letters]
    vocabulary += [f'##{letter}' for letter in letters]
    vocabulary_file = Path(folder, 'vocab.txt')
    vocabulary_file.write_text('\n'.join(vocabulary))
    sizes = dict(hidden_size=96, intermediate_size=96, num_attention_heads=12)
    config = BertConfig(vocab_size=len(vocabulary), num_hidden_layers=1, **sizes)
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(str(vocabulary_file)).save_pretrained(folder)
    return folder


def build_model(cfg: Config, size: tuple[int, int]) -> nn.Module:
    """Build a config's model on the CPU without pre-trained weights, for images of a size.

    Padding to a training size and batch augmentations are left out; SyncBN, which needs a GPU,
    becomes BN; for a pre-trained language model, which would be downloaded, a small random one
    stands in.
    """
    scope = library_of(cfg)
    use_library(scope)
    model_cfg = deepcopy(cfg.model)
    if 'data_preprocessor' not in model_cfg and cfg.get('data_preprocessor'):
        model_cfg.data_preprocessor = deepcopy(cfg.data_preprocessor)
    for node in _nodes(model_cfg):
        init = node.get('init_cfg')
        if isinstance(init, dict) and init.get('type') == 'Pretrained':
            node['init_cfg'] = None
        for key in ('pretrained', 'teacher_ckpt'):
            if node.get(key) is not None:
                node[key] = None
        if node.get('batch_augments'):
            node['batch_augments'] = None
        if type_name(node) == 'SegDataPreProcessor':
            node.update(size=size, size_divisor=None)
    with quiet(), DefaultScope.overwrite_default_scope(scope), TemporaryDirectory() as folder:
        languages = [n['language_model'] for n in _nodes(model_cfg) if 'language_model' in n]
        if languages:
            name = _small_bert(folder)
            for node in _nodes(model_cfg):
                if 'lang_model_name' in node:
                    node['lang_model_name'] = name
            for node in languages:
                node['name'] = name
        model = revert_sync_batchnorm(MODELS.build(model_cfg))
        model.init_weights()
    if hasattr(model, 'set_epoch'):  # what mmdet's SetEpochInfoHook does
        model.set_epoch(0)
    return model


# --------------------------------------------------------------------------------------------------
# Batches


#: Heads that learn from a semantic map, and the stride at which they take it.
_SEMANTIC = {
    'PanopticFPNHead': 1,
    'MaskFormerHead': 1,
    'Mask2FormerHead': 1,
    'FusedSemanticHead': 8,
    'SCNetSemanticHead': 8,
}


def _least(model: Mapping, key: str, default: int) -> int:
    values = [node[key] for node in _nodes(model) if isinstance(node.get(key), int)]
    return min(values, default=default)


def _meta(size: tuple[int, int], index: int) -> dict:
    return dict(
        img_id=index,
        img_path='noise.png',
        img_shape=size,
        ori_shape=size,
        scale_factor=(1.0, 1.0),
        flip=False,
        flip_direction=None,
        border=[0, size[0], 0, size[1]],
        homography_matrix=np.eye(3, dtype=np.float32),
    )


def _instances(rng: np.random.Generator, size: tuple[int, int], classes: int) -> InstanceData:
    """Three objects with boxes, masks, labels and track identities."""
    from mmdet.structures.bbox import HorizontalBoxes
    from mmdet.structures.mask import BitmapMasks

    height, width = size
    corner = rng.uniform(0, 0.4, (3, 2)) * (width, height)
    extent = rng.uniform(0.3, 0.6, (3, 2)) * (width, height)
    boxes = np.concatenate([corner, corner + extent], 1).astype('float32')
    masks = np.zeros((3, height, width), np.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes.astype(int), strict=True):
        mask[y1:y2, x1:x2] = 1
    return InstanceData(
        bboxes=HorizontalBoxes(torch.from_numpy(boxes)),
        labels=torch.from_numpy(rng.integers(0, classes, 3)),
        masks=BitmapMasks(masks, height, width),
        instances_ids=torch.arange(3),
    )


def _detection(model: Mapping, rng: np.random.Generator, size: tuple[int, int], index: int):
    from mmdet.structures import DetDataSample
    from mmdet.structures.bbox import HorizontalBoxes

    sample = DetDataSample(metainfo=_meta(size, index))
    sample.gt_instances = _instances(rng, size, _least(model, 'num_classes', 2))
    sample.ignored_instances = InstanceData(
        bboxes=HorizontalBoxes(torch.zeros(0, 4)), labels=torch.zeros(0).long()
    )
    proposals = sample.gt_instances.bboxes.tensor.clone()
    sample.proposals = InstanceData(bboxes=proposals, scores=torch.ones(len(proposals)))
    semantic = {type_name(node): node for node in _nodes(model) if type_name(node) in _SEMANTIC}
    if semantic:
        head = next(iter(semantic.values()))
        stride = _SEMANTIC[type_name(head)]
        shape = (1, size[0] // stride, size[1] // stride)
        classes = head.get('num_things_classes', 0) + head.get('num_stuff_classes', 0)
        labels = rng.integers(0, classes or head['num_classes'], shape)
        sample.gt_sem_seg = PixelData(sem_seg=torch.from_numpy(labels))
    if any('language_model' in node for node in _nodes(model)):
        sample.set_metainfo(dict(text=('cell', 'dog'), custom_entities=True))
        sample.gt_instances.labels.clamp_(max=1)
    return sample


def _segmentation(model: Mapping, rng: np.random.Generator, size: tuple[int, int], index: int):
    from mmseg.structures import SegDataSample

    sample = SegDataSample(metainfo=_meta(size, index))
    labels = rng.integers(0, max(_least(model, 'num_classes', 2), 2), (1, *size))
    sample.gt_sem_seg = PixelData(data=torch.from_numpy(labels))
    return sample


def _image(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))


def _video(model: Mapping, rng: np.random.Generator, size: tuple[int, int], index: int) -> dict:
    from mmdet.structures import TrackDataSample

    frames = []
    for frame in range(2):
        sample = _detection(model, rng, size, index)
        # Their preprocessor leaves box types alone.
        for objects in (sample.gt_instances, sample.ignored_instances):
            objects.bboxes = objects.bboxes.tensor
        video = dict(frame_id=frame, video_id=0, video_length=2, ori_video_length=2)
        sample.set_metainfo(dict(video, is_video_data=True))
        frames.append(sample)
    track = TrackDataSample(metainfo=dict(key_frames_inds=[0], ref_frames_inds=[1]))
    track.video_data_samples = frames
    return dict(inputs=_image(rng, 2, 3, *size), data_samples=track)


def synthetic_batch(
    cfg: Config, size: tuple[int, int] = (256, 256), training: bool = True, seed: int = 0
) -> dict:
    """A batch of noise, as the data loader of a config would give it, objects and labels included.

    Args:
        cfg: A config of mmdet (detection, instances, panoptic, tracking, semi-supervised) or mmseg.
        size: Height and width of the images.
        training: Two images, or videos, to compute losses on; else one to predict.
        seed: Of the noise.

    Returns:
        dict: ``inputs`` and ``data_samples``, to be handed to the model's data preprocessor.
    """
    rng = np.random.default_rng(seed)
    model = cfg.model
    preprocessor = model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}
    kind = type_name(preprocessor)
    images = 2 if training else 1

    def batch(sample: Callable) -> dict:
        return pseudo_collate(
            [
                dict(inputs=_image(rng, 3, *size), data_samples=sample(model, rng, size, i))
                for i in range(images)
            ]
        )

    if kind == 'SegDataPreProcessor':
        return batch(_segmentation)
    if kind == 'TrackDataPreprocessor' and not (training and preprocessor.get('use_det_processor')):
        return pseudo_collate([_video(model, rng, size, i) for i in range(images)])
    if kind == 'MultiBranchDataPreprocessor' and training:
        branches = {name: batch(_detection) for name in ('sup', 'unsup_teacher', 'unsup_student')}
        return {
            key: {name: branch[key] for name, branch in branches.items()}
            for key in ('inputs', 'data_samples')
        }
    return batch(_detection)


# --------------------------------------------------------------------------------------------------
# Running


def check_model(
    cfg: Config, size: tuple[int, int] = (256, 256), loss: bool = True, predict: bool = True
) -> CheckResult:
    """Build the model of a config, compute a loss, its gradients, and a prediction.

    Args:
        cfg: A config of mmdet or mmseg.
        size: Height and width of the images.
        loss: Whether to compute losses and gradients.
        predict: Whether to predict.

    Raises:
        Exception: Whatever building or running the model raises.
    """
    torch.manual_seed(0)
    scope = library_of(cfg)
    model = build_model(cfg, size)
    hub = MessageHub.get_current_instance()
    for progress in ('epoch', 'iter'):  # losses that change during training ask for them
        if hub.get_info(progress) is None:
            hub.update_info(progress, 0)
    value, untrained, predictions = None, [], None
    with DefaultScope.overwrite_default_scope(scope):
        if loss:
            model.train()
            data = model.data_preprocessor(synthetic_batch(cfg, size), True)
            total, _ = model.parse_losses(model(**data, mode='loss'))
            total.backward()
            value = float(total.detach())
            untrained = [
                name
                for name, parameter in model.named_parameters()
                if 'backbone.' in name and parameter.requires_grad and parameter.grad is None
            ]
        if predict:
            model.eval()
            batch = synthetic_batch(cfg, size, training=False)
            with torch.no_grad():
                results = model(**model.data_preprocessor(batch, False), mode='predict')
            predictions = len(results)
    return CheckResult(value, untrained, predictions)
