"""One suite that every backbone passes."""

import copy
import logging
import pickle
import sys
import types

import pytest
import torch
from families import FAMILIES, channels
from mmengine.logging import MMLogger
from mmengine.registry import MODELS

from inline_mm import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin
from inline_mm.analysis.complexity import count_macs
from inline_mm.checkpoint import CheckpointError, to_authors

LEVELS = (0, 1, 2, 3)
STRIDES = {family: [8] * 4 if family == 'deit' else [4, 8, 16, 32] for family in FAMILIES}
every_family = pytest.mark.parametrize('family', FAMILIES)


def build(family, arch=None, **settings):
    cfg = dict(FAMILIES[family], out_indices=LEVELS, **settings)
    cfg['arch'] = dict(cfg['arch'], **(arch or {}))
    torch.manual_seed(0)
    return MODELS.build(cfg)


def images(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


def assert_all_near(ours, theirs, tolerance=1e-5):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def gradients(model, x):
    model.zero_grad()
    sum(
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in model(x)
    ).backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


# Running


@every_family
@pytest.mark.parametrize('size', [(64, 64), (40, 72), (33, 71), (9, 8)])
@torch.no_grad()
def test_every_level_has_its_stride_and_channels_at_any_size(family, size):
    outs = build(family).eval()(images(2, 3, *size))
    assert isinstance(outs, tuple)
    for out, stride, width in zip(outs, STRIDES[family], channels(family), strict=True):
        assert out.shape == (2, width, -(-size[0] // stride), -(-size[1] // stride))
        assert out.isfinite().all()


@every_family
def test_some_levels_are_those_of_all(family):
    model, some = build(family).eval(), build(family).eval()
    some.out_indices = (1, 2)
    x = images(1, 3, 40, 64)
    with torch.no_grad():
        assert_all_near(some(x), model(x)[1:3])


@every_family
@pytest.mark.parametrize('levels', [LEVELS, (0, 2), (1,)])
def test_every_parameter_receives_a_gradient(family, levels):
    cfg = dict(FAMILIES[family], out_indices=levels)
    model = MODELS.build(cfg).train()
    grads = gradients(model, images(2, 3, 40, 40))
    assert set(grads) == {key for key, _ in model.named_parameters()}
    assert all(grad.isfinite().all() for grad in grads.values())


@every_family
@torch.no_grad()
def test_an_images_features_do_not_depend_on_the_batch(family):
    model = build(family).eval()
    x = images(3, 3, 40, 56)
    together = model(x)
    for i in range(3):
        assert_all_near(model(x[i : i + 1]), [out[i : i + 1] for out in together])


@every_family
def test_with_cp_changes_neither_features_nor_gradients(family):
    x = images(2, 3, 40, 40).requires_grad_()
    plain, frugal = build(family).train(), build(family, with_cp=True).train()
    assert_all_near(plain(x), frugal(x))
    expected, grads = gradients(plain, x), gradients(frugal, x)
    assert set(grads) == set(expected)
    assert_all_near([grads[key] for key in expected], expected.values())


@every_family
def test_eval_is_deterministic_and_training_is_not(family):
    model = build(family, drop_rate=0.2, attn_drop_rate=0.2)
    x = images(1, 3, 40, 40)
    with torch.no_grad():
        assert_all_near(model.eval()(x), model(x), 0)
        assert not torch.equal(model.train()(x)[-1], model(x)[-1])


@every_family
def test_modes_return_the_module(family):
    model = build(family)
    assert model.train() is model and model.training
    assert model.eval() is model and not model.training


@every_family
@pytest.mark.parametrize('frozen', [-1, 0, 1, 3, 4])
def test_frozen_stages_do_not_train(family, frozen):
    model = build(family, frozen_stages=frozen, drop_rate=0.1).train()
    levels = model.levels()
    for i, modules in enumerate(levels):
        for module in modules:
            assert module.training == (i > frozen)
            assert all(p.requires_grad == (i > frozen) for p in module.parameters())
    inside = {id(p) for modules in levels for m in modules for p in m.parameters()}
    for key, p in model.named_parameters():
        if id(p) not in inside:  # output norms, and DeiT's class token
            level = 0 if key == 'cls_token' else int(key.split('.')[0].removeprefix('norm')) + 1
            assert p.requires_grad == (level > frozen), key
    if frozen < 4:
        trained = {key for key, p in model.named_parameters() if p.requires_grad}
        assert set(gradients(model, images(1, 3, 32, 32))) == trained


@every_family
@torch.no_grad()
def test_copies_give_the_same_features(family):
    model = build(family).eval()
    x = images(1, 3, 40, 48)
    expected = model(x)
    other = build(family).eval()
    for p in other.parameters():
        p.add_(1)
    other.load_state_dict(model.state_dict())
    for twin in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_all_near(twin(x), expected, 0)


@every_family
@torch.no_grad()
def test_sizes_may_follow_each_other_in_any_order(family):
    model = build(family).eval()
    small, large = images(1, 3, 32, 40), images(1, 3, 72, 40)
    first = model(small)
    model(large)
    assert_all_near(model(small), first)


@every_family
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
@torch.no_grad()
def test_other_dtypes_stay_near(family, dtype):
    model = build(family).eval()
    x = images(1, 3, 40, 40)
    expected = model(x)
    outs = model.to(dtype)(x.to(dtype))
    assert all(out.dtype == dtype for out in outs)
    assert_all_near([out.float() for out in outs], expected, 0.15 if dtype.itemsize == 2 else 1e-4)


@every_family
def test_traced_model_gives_the_same_features(family):
    model = build(family).eval()
    x = images(2, 3, 40, 40)
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
        assert_all_near(traced(x + 1), model(x + 1))


@pytest.mark.slow
@every_family
def test_exported_model_gives_the_same_features(family):
    if family == 'swin' and torch.__version__ < (2, 6):
        pytest.skip('PyTorch 2.5 records attention with another memory layout than it runs with')
    model = build(family).eval()
    x = images(2, 3, 40, 40)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        assert_all_near(program.module()(x + 1), model(x + 1))


@pytest.mark.slow
@every_family
def test_compiles_to_one_graph_without_breaks(family):
    model = build(family).eval()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    x = images(2, 3, 40, 40)
    with torch.no_grad():
        for image in (x, x + 1):
            assert_all_near(compiled(image), model(image))
    assert len(graphs) == 1


@torch.no_grad()
def test_deits_final_norm_is_the_last_outputs_only():
    plain, normed = (build('deit', final_norm=norm).eval() for norm in (False, True))
    x = images(1, 3, 32, 32)
    before, after = plain(x), normed(x)
    assert_all_near(after[:3], before[:3])
    tokens = before[3].permute(0, 2, 3, 1)
    assert_all_near([after[3].permute(0, 2, 3, 1)], [normed.norm(tokens)])


# Sizes

TABLE = [  # millions of parameters with the classifier, 10^9 multiply-accumulates, at a side of
    (InLinePVT, 'tiny', 12.03, 1.98, 224),
    (InLinePVT, 'small', 21.56, 3.91, 224),
    (InLinePVT, 'medium', 37.62, 6.86, 224),
    (InLinePVT, 'large', 51.15, 10.13, 224),
    (InLineSwin, 'tiny', 29.22, 4.46, 224),
    (InLineSwin, 'small', 49.79, 8.72, 224),
    (InLineSwin, 'base', 88.35, 15.40, 224),
    (InLineCSwin, 'tiny', 20.60, 4.31, 224),
    (InLineCSwin, 'small', 33.03, 6.77, 224),
    (InLineCSwin, 'base', 73.41, 14.88, 224),
    (InLineDeiT, 'tiny', 6.48, 1.11, 224),
    (InLineDeiT, 'small', 16.73, 4.97, 288),
    (InLineDeiT, 'base', 23.80, 17.17, 448),
]


@pytest.mark.slow
@pytest.mark.parametrize(('cls', 'arch', 'params', 'gmacs', 'side'), TABLE)
def test_published_sizes_cost_what_was_published(cls, arch, params, gmacs, side):
    with torch.device('meta'):
        model = cls(arch, out_norm=False)
    widths = model.arch['embed_dims']
    width = widths[-1] if isinstance(widths, list) else widths * (1 if cls is InLineDeiT else 8)
    classifier = 1000 * (width + 1) + (0 if cls is InLinePVT else 2 * width)
    total = sum(p.numel() for p in model.parameters()) + classifier
    assert total / 1e6 == pytest.approx(params, rel=1e-3)
    macs = count_macs(model, (side, side)) + 1000 * width
    assert macs / 1e9 == pytest.approx(gmacs, rel=5e-3)


@pytest.mark.parametrize('cls', [InLineSwin, InLineCSwin])
def test_the_384_pixel_preset_has_larger_windows_or_stripes(cls):
    with torch.device('meta'):
        plain, large = cls('base'), cls('base-384')
    for model, side in ((plain, 7), (large, 12)):
        layers = [block.attn for block in model.stages[2]]
        sides = {getattr(m, 'window_size', None) or getattr(m, 'split_size', None) for m in layers}
        assert sides - {None} == {side}


def test_windows_and_stripes_are_no_larger_than_the_map_was_in_pretraining():
    swin = build('swin', dict(window_size=7), img_size=64)
    assert swin.stages[2][1].attn.window_size == 4 and swin.stages[3][0].attn.window_size == 2
    cswin = build('cswin', dict(split_sizes=[1, 2, 4, 2]), img_size=64)
    assert cswin.stages[2][1].attn.split_size is None


# Wrong input


@every_family
@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(arch='huge'), r"arch must be one of \['tiny', .*got 'huge'"),
        (dict(arch=dict(depths=1)), r"arch lacks \['embed_dims', 'num_heads'\]"),
        (dict(arch_key=dict(width=3)), r"arch has unknown \['width'\]"),
        (dict(arch_key=dict(num_heads=5)), 'num_heads'),
        (dict(arch_key=dict(depths='two')), r"arch\['depths'\] must .*got 'two'"),
        (dict(arch_key=dict(embed_dims=-8)), r"arch\['embed_dims'\] must .*got -8"),
        (dict(arch_key=dict(attention=['inline'] * 3)), 'one entry per stage.*got'),
        (dict(arch_key=dict(attention=['in-line'])), r"arch\['attention'\]"),
        (dict(out_indices=(0, 4)), r'out_indices must be increasing .* 0 to 3 .*got \(0, 4\)'),
        (dict(out_indices=(2, 1)), r'out_indices must be increasing .*got \(2, 1\)'),
        (dict(out_indices=()), 'out_indices must be'),
        (dict(frozen_stages=5), r'frozen_stages must be from -1 .* to 4, got 5'),
        (dict(drop_path_rate=1.5), r'drop_path_rate must be .*got 1.5'),
        (dict(drop_rate=-0.1), r'drop_rate must be .*got -0.1'),
        (dict(in_channels=0), 'in_channels must be a positive number, got 0'),
        (dict(img_size=0), 'img_size must be .*got 0'),
        (dict(img_size=(32, 32, 32)), 'img_size must be'),
    ],
)
def test_wrong_settings_are_named(family, settings, message):
    cfg = dict(FAMILIES[family], out_indices=LEVELS)
    settings = dict(settings)
    cfg['arch'] = dict(cfg['arch'], **settings.pop('arch_key', {}))
    with pytest.raises(ValueError, match=message):
        MODELS.build(dict(cfg, **settings))


@every_family
def test_an_arch_of_another_type_is_named(family):
    with pytest.raises(TypeError, match=r'arch must be one of .* or a dict, got 3'):
        MODELS.build(dict(FAMILIES[family], arch=3))


@every_family
def test_a_misspelt_argument_is_refused(family):
    with pytest.raises(TypeError, match='with_cpp'):
        MODELS.build(dict(FAMILIES[family], with_cpp=True))


@pytest.mark.parametrize('family', ['pvt', 'swin', 'cswin'])
def test_heads_have_to_divide_the_channels(family):
    with pytest.raises(ValueError, match='num_heads must be positive and divide embed_dims'):
        build(family, dict(num_heads=[3, 3, 3, 3]))


def test_deits_final_norm_needs_the_last_block():
    with pytest.raises(ValueError, match=r'final_norm=True needs the last block, 3,.*got \(1,\)'):
        MODELS.build(dict(FAMILIES['deit'], out_indices=(1,), final_norm=True))


@every_family
@pytest.mark.parametrize(
    ('size', 'message'),
    [
        ((1, 4, 32, 32), r'takes images \(B, 3, H, W\).*got shape \(1, 4, 32, 32\)'),
        ((3, 32, 32), r'takes images \(B, 3, H, W\).*got shape \(3, 32, 32\)'),
        ((1, 3, 3, 32), r'at least . x . pixels, one patch, got \(3, 32\)'),
    ],
)
def test_wrong_images_are_named(family, size, message):
    with pytest.raises(ValueError, match=message):
        build(family)(images(*size))


# Checkpoints


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.text = ''

    def emit(self, record):
        self.text += record.getMessage()


@pytest.fixture
def logged():
    handler = Lines()
    logger = MMLogger.get_current_instance()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def load(family, path, **settings):
    settings.setdefault('out_norm', False)
    model = build(family, init_cfg=dict(type='Pretrained', checkpoint=str(path)), **settings)
    for p in model.parameters():
        p.data.zero_()
    model.init_weights()
    return model.eval()


def authors(model):
    """The state of a classifier of the authors', with what theirs hold beside parameters."""
    state = to_authors(model.state_dict(), model.family)
    if model.family != 'pvt':
        state |= {'norm.weight': torch.ones(4), 'norm.bias': torch.ones(4)}
    if model.family == 'swin':
        state['layers.3.blocks.0.attn.relative_position_index'] = torch.zeros(4, 4).long()
        state['layers.2.blocks.1.attn_mask'] = torch.zeros(1, 4, 4)
    return state | {'head.weight': torch.ones(7, 4), 'head.bias': torch.ones(7)}


FORMS = {
    'bare': lambda model: model.state_dict(),
    'ours': lambda model: dict(state_dict=model.state_dict(), meta=dict(epoch=1)),
    'authors': lambda model: dict(model=authors(model), epoch=299),
    'parallel': lambda model: {f'module.{k}': v for k, v in authors(model).items()},
    'detector': lambda model: dict(
        state_dict={
            **{f'backbone.{k}': v for k, v in model.state_dict().items()},
            'neck.weight': torch.ones(1),
        }
    ),
}


@every_family
@pytest.mark.parametrize('form', FORMS)
@torch.no_grad()
def test_checkpoints_of_every_form_load(family, form, tmp_path, logged):
    source = build(family, out_norm=False).eval()
    torch.save(FORMS[form](source), tmp_path / 'weights.pth')
    x = images(1, 3, 40, 40)
    assert_all_near(load(family, tmp_path / 'weights.pth')(x), source(x), 0)
    assert f'loaded {len(source.state_dict())} entries' in logged.text
    if form in ('authors', 'parallel'):
        assert 'not used (classifier): head.weight, head.bias' in logged.text
        assert ('not used (recomputed)' in logged.text) == (family == 'swin')
    if form == 'detector':
        assert 'not used (outside the backbone): 1 entries' in logged.text


def test_a_configuration_object_beside_the_weights_is_not_unpickled(tmp_path, monkeypatch):
    class CfgNode(dict):
        def __setstate__(self, state):
            raise AssertionError('its code ran')

    CfgNode.__module__, CfgNode.__qualname__ = 'yacs.config', 'CfgNode'
    config = CfgNode(MODEL=CfgNode(NAME='inline'), EPOCHS=300)
    # What yacs keeps beside the settings.
    config.__dict__.update(
        {'__immutable__': True, '__deprecated_keys__': {'OLD'}, '__renamed_keys__': {}}
    )
    source = build('swin', out_norm=False).eval()
    with monkeypatch.context() as patch:
        module = types.ModuleType('yacs.config')
        module.CfgNode = CfgNode
        patch.setitem(sys.modules, 'yacs', types.ModuleType('yacs'))
        patch.setitem(sys.modules, 'yacs.config', module)
        torch.save(dict(model=authors(source), config=config), tmp_path / 'weights.pth')
    assert 'yacs' not in sys.modules
    x = images(1, 3, 32, 32)
    assert_all_near(load('swin', tmp_path / 'weights.pth')(x), source(x), 0)


@every_family
def test_output_norms_that_a_classifier_lacks_are_left_as_initialised(family, tmp_path, logged):
    torch.save(build(family, out_norm=False).state_dict(), tmp_path / 'weights.pth')
    load(family, tmp_path / 'weights.pth', out_norm=True)
    assert 'left as initialised: norm0.weight' in logged.text


@every_family
def test_levels_that_are_not_built_are_left_out(family, tmp_path, logged):
    source = build(family, out_norm=False)
    torch.save(dict(model=authors(source)), tmp_path / 'weights.pth')
    cfg = dict(FAMILIES[family], out_indices=(1,))
    cfg['init_cfg'] = dict(type='Pretrained', checkpoint=str(tmp_path / 'weights.pth'))
    model = MODELS.build(cfg)
    model.init_weights()
    assert 'after the last of out_indices' in logged.text
    state = source.state_dict()
    assert all(
        torch.equal(value, state[key])
        for key, value in model.state_dict().items()
        if not key.startswith('norm')
    )


@pytest.mark.parametrize(
    ('family', 'before', 'now', 'line'),
    [
        ('pvt', dict(img_size=32), dict(img_size=64), 'pos_embeds.0.weight (1, 64, 16) -> (1, 256'),
        ('deit', dict(img_size=32), dict(img_size=64), 'pos_embed.weight (1, 17, 32) -> (1, 65'),
        (
            'swin',
            dict(arch=dict(window_size=2)),
            dict(arch=dict(window_size=4)),
            'relative_position_bias_table (9, 2) -> (49, 2)',
        ),
    ],
)
def test_what_depends_on_a_size_is_resized_and_logged(family, before, now, line, tmp_path, logged):
    settings = dict(FAMILIES[family])
    settings.pop('img_size', None)
    source = build_with(settings, before)
    for key, p in source.named_parameters():
        if 'pos' in key:
            p.data.fill_(0.5)
    torch.save(dict(model=authors(source)), tmp_path / 'weights.pth')
    checkpoint = dict(type='Pretrained', checkpoint=str(tmp_path / 'weights.pth'))
    model = build_with(settings, dict(now, init_cfg=checkpoint))
    model.init_weights()
    assert 'resized: ' in logged.text and line in logged.text
    for key, p in model.named_parameters():
        if 'pos' in key:
            torch.testing.assert_close(p.data, torch.full_like(p, 0.5))


def build_with(settings, changes):
    cfg = dict(settings, **changes, out_norm=False)
    cfg['arch'] = dict(settings['arch'], **changes.get('arch', {}))
    return MODELS.build(cfg)


@every_family
def test_another_familys_checkpoint_is_refused_and_nothing_is_loaded(family, tmp_path):
    other = 'pvt' if family != 'pvt' else 'swin'
    torch.save(dict(model=authors(build(other, out_norm=False))), tmp_path / 'weights.pth')
    model = build(
        family, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'weights.pth'))
    )
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=r'does not fit .* is it of another family or size\?'):
        model.init_weights()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@every_family
def test_another_sizes_checkpoint_is_refused(family, tmp_path):
    dims = [32, 64, 64, 128] if family == 'pvt' else 64
    source = build(family, dict(embed_dims=dims), out_norm=False)
    torch.save(dict(model=authors(source)), tmp_path / 'weights.pth')
    with pytest.raises(CheckpointError, match='the model wants'):
        load(family, tmp_path / 'weights.pth')


@every_family
def test_a_missing_file_and_one_that_is_no_checkpoint_are_named(family, tmp_path):
    with pytest.raises(FileNotFoundError, match=r'nowhere\.pth'):
        load(family, tmp_path / 'nowhere.pth')
    (tmp_path / 'text.pth').write_text('no checkpoint at all')
    with pytest.raises(CheckpointError, match=r'text\.pth'):
        load(family, tmp_path / 'text.pth')
