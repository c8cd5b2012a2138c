"""What timm asks of its models: forward, backward, default configs, features, intermediates."""

import json
import math

import pytest
import timm
import torch
from families import FAMILIES
from safetensors import safe_open
from test_reference import CASES, assert_near, backbone_config, image_of
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import FeatureInfo
from timm.optim import create_optimizer_v2
from torch import nn

from inline_mm.checkpoint import load_backbone, to_authors
from inline_mm.timm_models import InLineClassifier

NAMES = [
    *(f'inline_pvt_{size}' for size in ('tiny', 'small', 'medium', 'large')),
    *(f'inline_swin_{size}' for size in ('tiny', 'small', 'base', 'base_384')),
    *(f'inline_cswin_{size}' for size in ('tiny', 'small', 'base', 'base_384')),
    *(f'inline_deit_{size}' for size in ('tiny', 'small', 'base')),
]
#: Parameters in millions with the 1000-class head, from the authors' code.
PARAMETERS = dict(
    inline_pvt_tiny=12.03, inline_pvt_small=21.56, inline_pvt_medium=37.62, inline_pvt_large=51.15,
    inline_swin_tiny=29.22, inline_swin_small=49.79, inline_swin_base=88.35,
    inline_cswin_tiny=20.60, inline_cswin_small=33.03, inline_cswin_base=73.41,
    inline_deit_tiny=6.48, inline_deit_small=16.73, inline_deit_base=23.80,
)  # fmt: skip

#: Pixels where not 224.
SIZES = dict(
    inline_swin_base_384=384, inline_cswin_base_384=384, inline_deit_small=288, inline_deit_base=448
)


def create(family, **kwargs):
    """A small model of a family, through timm's factory."""
    arch = FAMILIES[family]['arch']
    torch.manual_seed(0)
    return timm.create_model(f'inline_{family}_tiny', arch=arch, **{'img_size': 32, **kwargs})


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def image():
    return torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(0))


def test_all_sizes_are_registered():
    assert sorted(timm.list_models('inline_*')) == sorted(NAMES)


@pytest.mark.parametrize('name', NAMES)
def test_default_config_fits_the_model(name):
    with torch.device('meta'):
        model = timm.create_model(name).eval()
    cfg = model.default_cfg
    size = cfg['input_size']
    assert size == (3, SIZES.get(name, 224), SIZES.get(name, 224))
    state = model.state_dict()
    assert cfg['classifier'] + '.weight' in state
    assert state[cfg['first_conv'] + '.weight'].shape[1] == 3
    with torch.no_grad():
        features = model.forward_features(torch.empty(1, *size, device='meta'))
    if cfg['pool_size'] is None:
        assert features.shape == (1, 1 + (size[1] // 16) ** 2, model.num_features)
    else:
        assert features.shape == (1, model.num_features, *cfg['pool_size'])
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    if name in PARAMETERS:
        assert millions == pytest.approx(PARAMETERS[name], abs=0.01)


def test_forward(family, image):
    model = create(family).eval()
    with torch.no_grad():
        logits = model(image)
    assert logits.shape == (2, 1000)
    assert logits.isfinite().all()


def test_every_parameter_gets_a_gradient(family, image):
    model = create(family, num_classes=42, drop_rate=0.1, drop_path_rate=0.1)
    logits = model(image)
    assert logits.shape == (2, 42)
    logits.square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_classifier_can_be_reset_and_removed(family, image):
    model = create(family).eval()
    with torch.no_grad():
        features = model.forward_features(image)
        pooled = model.forward_head(features, pre_logits=True)
        assert torch.equal(model.get_classifier()(pooled), model(image))
        model.reset_classifier(0)
        assert isinstance(model.get_classifier(), nn.Identity)
        assert torch.equal(model(image), pooled)
        assert pooled.shape == (2, model.num_features)
        model.reset_classifier(0, '')
        assert torch.equal(model(image), features)
        model.reset_classifier(5, 'avg')
        assert model(image).shape == (2, 5)
        headless = create(family, num_classes=0, global_pool='').eval()
        assert torch.equal(headless(image), features)
        assert create(family, num_classes=0).eval()(image).shape == pooled.shape


def test_feature_extraction(family, image):
    model = create(family, features_only=True).eval()
    indices = [1, 2, 3] if family == 'deit' else [0, 1, 2, 3]
    whole = create(family).eval()
    with torch.no_grad():
        outputs = model(image)
        expected = whole.forward_intermediates(image, indices=indices, intermediates_only=True)
    assert len(outputs) == len(model.feature_info.channels()) == len(indices)
    infos = zip(outputs, model.feature_info.channels(), model.feature_info.reduction(), strict=True)
    for output, channels, reduction in infos:
        assert output.shape == (2, channels, 64 // reduction, 32 // reduction)
    for output, reference in zip(outputs, expected, strict=True):
        assert torch.equal(output, reference)


def test_feature_extraction_builds_no_more_than_it_needs(family, image):
    model = create(family, features_only=True, out_indices=(0, 1)).eval()
    whole = create(family, features_only=True).eval()
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in whole.parameters())
    with torch.no_grad():
        assert len(model(image)) == 2


def test_intermediates(family, image):
    model = create(family).eval()
    info = FeatureInfo(model.feature_info, len(model.feature_info))
    with torch.no_grad():
        features, intermediates = model.forward_intermediates(image)
        assert torch.equal(features, model.forward_features(image))
        assert len(intermediates) == len(info.channels())
        for output, channels, reduction in zip(
            intermediates, info.channels(), info.reduction(), strict=True
        ):
            hw = [math.ceil(side / reduction) for side in image.shape[2:]]
            assert output.shape == (2, channels, *hw)
        last = model.forward_intermediates(image, indices=1, norm=True, intermediates_only=True)
        only = model.forward_intermediates(
            image, indices=[0], stop_early=True, intermediates_only=True
        )
    tokens = features[:, 1:].transpose(1, 2).unflatten(2, (8, 4)) if family == 'deit' else features
    assert torch.equal(last[0], tokens)
    assert torch.equal(only[0], intermediates[0])
    with pytest.raises(ValueError, match='output_fmt'):
        model.forward_intermediates(image, output_fmt='NHWC')


def test_prefix_tokens_come_with_intermediates(image):
    model = create('deit').eval()
    with torch.no_grad():
        features, pairs = model.forward_intermediates(
            image, norm=True, output_fmt='NLC', return_prefix_tokens=True
        )
    patches, prefix = pairs[-1]
    assert torch.equal(torch.cat([prefix, patches], dim=1), features)


def test_channels_and_sizes(family):
    model = create(family, in_chans=5, img_size=(48, 64)).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 5, 33, 40)).shape == (1, 1000)
    with pytest.raises(ValueError, match='in_channels=5'):
        model(torch.randn(1, 3, 64, 64))


def test_checkpointed_gradients_are_the_same(family, image):
    grads = []
    for enable in (False, True):
        model = create(family, drop_path_rate=0.0)
        model.set_grad_checkpointing(enable)
        model(image).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-4, atol=1e-7)


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match='global_pool'):
        create('pvt', global_pool='token')
    with pytest.raises(ValueError, match='num_classes=0'):
        create('pvt', global_pool='')
    with pytest.raises(TypeError, match='window'):
        create('pvt', window=7)
    with pytest.raises(ValueError, match='family'):
        InLineClassifier('resnet', 'tiny')


def authors_checkpoint(model, path):
    """A checkpoint of a model as the authors write theirs."""
    state = to_authors(model.backbone.state_dict(), model.backbone.family)
    state.update({k: v for k, v in model.state_dict().items() if not k.startswith('backbone.')})
    torch.save({'model': state}, path)


def test_authors_checkpoint_gives_the_same_logits(family, image, tmp_path):
    model = create(family, num_classes=7).eval()
    path = tmp_path / 'authors.pth'
    authors_checkpoint(model, path)
    with torch.no_grad():
        expected = model(image)
        torch.manual_seed(1)
        loaded = timm.create_model(
            f'inline_{family}_tiny',
            arch=FAMILIES[family]['arch'],
            img_size=32,
            num_classes=7,
            checkpoint_path=str(path),
        ).eval()
        assert torch.equal(loaded(image), expected)
        # The same file for another task: timm's way to drop the classifier.
        tuned = create(
            family,
            num_classes=3,
            pretrained=True,
            pretrained_cfg_overlay=dict(file=str(path), num_classes=7),
        ).eval()
        assert torch.equal(tuned.forward_features(image), model.forward_features(image))


def test_checkpoint_of_another_model_is_refused(tmp_path):
    path = tmp_path / 'swin.pth'
    authors_checkpoint(create('swin'), path)
    with pytest.raises(RuntimeError, match='Missing key'):
        create('pvt', checkpoint_path=str(path))


def test_missing_published_weights_are_said_to_be_missing():
    with pytest.raises(RuntimeError, match='No pretrained weights exist for inline_pvt_tiny'):
        timm.create_model('inline_pvt_tiny', pretrained=True)


def test_a_trained_classifier_initialises_the_backbone(family, tmp_path):
    model = create(family)
    path = tmp_path / 'model_best.pth.tar'
    torch.save(
        {'epoch': 1, 'arch': f'inline_{family}_tiny', 'state_dict': model.state_dict()}, path
    )
    fresh = create(family, num_classes=0).backbone
    nn.init.zeros_(next(fresh.parameters()))
    load_backbone(fresh, str(path))
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, model.backbone.state_dict()[name])


@pytest.mark.parametrize('name', CASES)
def test_reference_logits(name):
    with safe_open(CASES[name], 'pt') as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    cfg = backbone_config(metadata['family'], json.loads(metadata['config']))
    model = InLineClassifier(
        metadata['family'], cfg['arch'], num_classes=7, img_size=cfg['img_size']
    ).eval()
    model.load_state_dict(
        {k.removeprefix('weights/'): v for k, v in tensors.items() if k.startswith('weights/')}
    )
    with torch.no_grad():
        assert_near(model(image_of(tensors)), tensors['logits'], 1e-4, 'logits')


def test_optimiser_groups_of_timm(family):
    model = create(family)
    optimizer = create_optimizer_v2(
        model, opt='adamw', lr=1e-3, weight_decay=0.05, layer_decay=0.7, filter_bias_and_bn=True
    )
    groups = {id(p): group for group in optimizer.param_groups for p in group['params']}
    by_name = {name: groups[id(p)] for name, p in model.named_parameters()}
    undecayed = model.no_weight_decay()
    for name, parameter in model.named_parameters():
        flat = parameter.ndim <= 1 or name.endswith('.bias') or name in undecayed
        assert by_name[name]['weight_decay'] == (0.0 if flat else 0.05), name
    first = 'backbone.blocks.0.' if family == 'deit' else 'backbone.stages.0.0.'
    stem, block = ('backbone.patch_embed', first)
    scales = [
        {group['lr_scale'] for name, group in by_name.items() if name.startswith(prefix)}
        for prefix in (stem + ('.' if family == 'deit' else 's.0.'), block, 'norm.', 'head.')
    ]
    smallest, largest = min(scales[0]), max(scales[3])
    assert scales[0] == {smallest} and scales[3] == {largest} == {1.0}
    assert all(smallest < scale < 1 for scale in scales[1])


def test_training_with_timms_optimiser_lowers_the_loss(image):
    model = create('pvt', num_classes=2, drop_path_rate=0.0)
    optimizer = create_optimizer_v2(model, opt='adamw', lr=3e-3, weight_decay=0.05)
    target = torch.tensor([0, 1])
    losses = []
    for _ in range(8):
        loss = LabelSmoothingCrossEntropy(0.1)(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 1.5
