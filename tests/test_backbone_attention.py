"""Settings of a backbone's attention in ``arch['attention']``."""

import pytest
import torch

from inline_mm import InLinePVT
from inline_mm.layers import InLineAttention, LinearAttention, SpatialReductionAttention

ARCH = dict(depths=[1, 1, 2, 1], embed_dims=[16, 16, 32, 32], num_heads=[1, 1, 2, 2])


def build(*attention):
    return InLinePVT(dict(ARCH, attention=list(attention)), img_size=32)


def test_names_dicts_and_lists_of_both_choose_each_blocks_layer():
    model = build(
        dict(type='inline', local=False, feature_map='relu'),
        'softmax',
        ['inline', dict(type='linear', feature_map='exp')],
        dict(type='inline'),
    )
    layers = [block.attn for stage in model.stages for block in stage]
    assert [type(layer) for layer in layers] == [
        InLineAttention,
        SpatialReductionAttention,
        InLineAttention,
        LinearAttention,
        InLineAttention,
    ]
    assert layers[0].local is None and layers[0].feature_map == 'relu'
    assert layers[2].local is not None and layers[2].feature_map == 'identity'
    assert layers[3].feature_map == 'exp'
    assert [tuple(x.shape[1:]) for x in model(torch.rand(1, 3, 32, 32))][3] == (32, 1, 1)


def test_one_dict_serves_every_block_of_a_stage():
    model = build('inline', 'inline', dict(type='inline', local=False), 'inline')
    assert all(block.attn.local is None for block in model.stages[2])


@pytest.mark.parametrize(
    ('entry', 'message'),
    [
        ('swiglu', r"arch\['attention'\]\[0\] must hold names of .*'softmax'.*got 'swiglu'"),
        (dict(local=False), 'must hold names of .*, got None'),
        (dict(type='inline', lokal=False), r"unknown \['lokal'\] .*'local', 'feature_map'"),
        (dict(type='softmax', local=False), r"unknown \['local'\] for 'softmax'.*no settings"),
        (dict(type='inline', local='no'), "local must be True or False, got 'no'"),
        (dict(type='inline', feature_map='sin'), "feature_map must be one of .*got 'sin'"),
        (['inline', 'inline'], r'one per block of the stage, 1, got 2'),
    ],
)
def test_wrong_entries_are_named(entry, message):
    with pytest.raises(ValueError, match=message):
        build(entry, 'inline', 'inline', 'inline')


@pytest.mark.parametrize('attention', ['inline', dict(type='inline'), ['inline'] * 3])
def test_an_entry_per_stage_is_asked_for(attention):
    with pytest.raises(ValueError, match='one entry per stage, 4, got'):
        InLinePVT(dict(ARCH, attention=attention), img_size=32)
