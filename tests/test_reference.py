"""The published architecture, case by case: features, logits and gradients."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from safetensors import safe_open

import inline_mm  # noqa: F401 (registers the backbones)
from inline_mm.checkpoint import to_authors

CASES = {path.stem: path for path in sorted((Path(__file__).parent / 'data').glob('*.safetensors'))}
CLASSES = dict(pvt='InLinePVT', swin='InLineSwin', cswin='InLineCSwin', deit='InLineDeiT')


def attention(attn_type, depths):
    """``IIMS2`` and the like: a letter per stage, then the InLine blocks of the mixed stage."""
    letters, number = re.fullmatch(r'([ISM]+)(\d*)', attn_type).groups()
    names = dict(I='inline', S='softmax')
    return [
        names.get(letter) or ['inline'] * int(number) + ['softmax'] * (depths[stage] - int(number))
        for stage, letter in enumerate(letters)
    ]


def backbone_config(family, config):
    """Our settings for the authors' keyword arguments."""
    depths = config['depths'] if 'depths' in config else config['depth']
    arch = dict(
        depths=depths,
        embed_dims=config['embed_dims'] if family == 'pvt' else config['embed_dim'],
        num_heads=config['num_heads'],
    )
    if 'attn_type' in config:
        arch['attention'] = attention(config['attn_type'], depths)
    arch.update(
        dict(mlp_ratios=config['mlp_ratios'])
        if family == 'pvt'
        else dict(mlp_ratio=config['mlp_ratio'])
    )
    if family == 'cswin':
        arch['split_sizes'] = config['split_size']
    settings = dict(type=CLASSES[family], arch=arch, img_size=config['img_size'], out_norm=False)
    if family == 'deit':
        settings['out_indices'] = tuple(range(depths))
    return settings


def authors_config(path):
    """The authors' keyword arguments of a case."""
    with safe_open(path, 'pt') as file:
        return json.loads(file.metadata()['config'])


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """The case's tensors and family, and the backbone loaded from the authors' layout."""
    with safe_open(CASES[request.param], 'pt') as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        family = file.metadata()['family']
    weights = {k.removeprefix('weights/'): v for k, v in tensors.items() if k.startswith('weights')}
    path = tmp_path / 'authors.pth'
    torch.save({'model': weights}, path)
    cfg = backbone_config(family, authors_config(CASES[request.param]))
    model = MODELS.build(dict(cfg, init_cfg=dict(type='Pretrained', checkpoint=str(path))))
    model.init_weights()
    return tensors, family, model.eval()


def image_of(tensors):
    return (tensors['image'].float() / 255 - 0.5) / 0.25


def assert_near(ours, reference, tolerance, name):
    difference = (ours - reference).abs().max()
    assert difference <= tolerance * reference.abs().max(), f'{name}: off by {difference}'


def logits_of(model, tensors, image, family):
    """The authors' classifier on our last stage."""
    *_, (tokens, _) = model.forward_levels(image)
    norm = [tensors.get(f'weights/norm.{part}') for part in ('weight', 'bias')]
    if norm[0] is not None:
        eps = 1e-6 if family == 'deit' else 1e-5
        tokens = F.layer_norm(tokens, tokens.shape[-1:], *norm, eps=eps)
    pooled = tokens[:, 0] if family == 'deit' else tokens.mean(dim=1)
    return F.linear(pooled, tensors['weights/head.weight'], tensors['weights/head.bias'])


@torch.no_grad()
def test_features_and_logits_agree(case):
    tensors, family, model = case
    image = image_of(tensors)
    features = model(image)
    expected = [key for key in tensors if key.startswith('features/')]
    assert len(features) == len(expected)
    for i, feature in enumerate(features):
        assert_near(feature, tensors[f'features/{i}'], 1e-4, f'features/{i}')
    if 'logits' in tensors:
        logits = logits_of(model, tensors, image, family)
        assert_near(logits, tensors['logits'], 1e-4, 'logits')


def test_gradients_agree(case):
    tensors, family, model = case
    expected = {k.removeprefix('grad/'): v for k, v in tensors.items() if k.startswith('grad/')}
    if not expected:
        pytest.skip('a case without gradients')
    image = image_of(tensors).requires_grad_()
    features = model(image)
    loss = sum((f * torch.linspace(-1, 1, f.numel()).view_as(f)).mean() for f in features)
    loss.backward()
    assert_near(loss, tensors['loss'], 1e-3, 'loss')
    grads = to_authors({key: p.grad for key, p in model.named_parameters()}, family)
    grads['image'] = image.grad
    for name, reference in expected.items():
        assert_near(grads[name], reference, 1e-3, name)


def test_every_family_has_a_case():
    assert {name.split('_')[0] for name in CASES} == set(CLASSES)
