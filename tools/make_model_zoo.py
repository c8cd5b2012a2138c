"""Write docs/model_zoo.md: every backbone and config with its cost, counted here."""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import yaml
from mmengine.config import utils as config_utils

sys.path.insert(0, str(Path(__file__).parent))

from get_flops import SIZES, build

from inline_mm.analysis.complexity import measure
from inline_mm.timm_models import BACKBONES

REPO = Path(__file__).parent.parent
PAGE = REPO / 'docs/model_zoo.md'

#: ImageNet-1k top-1 on the authors' page, of the 224 px model (DeiT: 224, 288, 448 px).
IMAGENET = dict(
    inline_deit_tiny=74.5, inline_deit_small=80.2, inline_deit_base=82.3,
    inline_pvt_tiny=78.2, inline_pvt_small=82.0, inline_pvt_medium=83.2, inline_pvt_large=83.6,
    inline_swin_tiny=82.4, inline_swin_small=83.6, inline_swin_base=84.1,
    inline_cswin_tiny=83.2, inline_cswin_small=83.8, inline_cswin_base=84.5,
)  # fmt: skip

#: What the paper reports for the model and schedule of a config.
PAPER = {
    'fpn_inline-pvt-t_8xb4-40k_ade20k-512x512': 'mIoU 39.16, mAcc 50.63',
    'upernet_inline-swin-t_8xb2-160k_ade20k-512x512': 'mIoU 45.57, mAcc 57.60',
}

HEAD = """\
# Model zoo

<!-- Written by tools/make_model_zoo.py: change that, not this page. -->

`python tools/make_model_zoo.py` writes this page. Parameters, multiply-accumulates (MACs) and
activations are counted here, on the models as they are built, by
[get_flops.py](../tools/get_flops.py); accuracies are not ours unless the column says so.

- *GMACs* are matrix products and convolutions of one image. *plain* has InLine attention with q and
  k in full, as the paper and its code count it; *folded* is what this package computes, with the
  same result.
- *trained here* is what this project has trained itself and measured. Where it says no, a config
  has been built and its pipelines have been read, but it has not been trained to its end: COCO,
  ADE20K and ImageNet need more than the machines this project has.
- The authors publish ImageNet weights only, on [their page](https://github.com/LeapLabTHU/InLine).
  No weights are published for detection and segmentation, by them or by us.

## Backbones

Parameters include the classifier of 1000 classes. Top-1 is what the authors'
[page](https://github.com/LeapLabTHU/InLine) gives for ImageNet-1k at the size in pixels. It lists
CSwin with 25, 43 and 96 M parameters, which the authors' own code does not give: it has those in
this table.

| timm name | recipe | px | params (M) | GMACs plain | folded | top-1 (authors) | trained here |
|---|---|---|---|---|---|---|---|
{backbones}

The backbones alone, without a classifier, at the sizes of dense prediction:

| timm name | params (M) | 800 x 1280: GMACs plain | folded | 512 x 2048: GMACs plain | folded |
|---|---|---|---|---|---|
{dense}

## COCO

At 800 x 1280. Two-stage detectors are counted with 1000 boxes, and 100 in the mask head. For COCO
results of the paper see its tables ([arXiv:2412.06590](https://arxiv.org/abs/2412.06590)).

| config | params (M) | GMACs plain | GMACs folded | activations (M) | trained here |
|---|---|---|---|---|---|
{coco}

## ADE20K

At 512 x 2048. The paper's softmax counterparts: Semantic FPN with PVT-T has mIoU 36.57 and mAcc
46.72, UPerNet with Swin-T mIoU 44.51 and mAcc 55.61
([arXiv:2412.06590](https://arxiv.org/abs/2412.06590)).

| config | params (M) | GMACs plain | GMACs folded | activations (M) | paper | trained here |
|---|---|---|---|---|---|---|
{ade20k}

## Built-in shapes

Small models for the [built-in data set](data_preparation.md), at 128 x 128.

| config | params (M) | GMACs plain | GMACs folded | activations (M) | trained here |
|---|---|---|---|---|---|
{mini}
"""


def models_of(folder: str) -> list[dict]:
    """The models in the metafile of a folder of configs."""
    return yaml.safe_load((REPO / 'configs' / folder / 'metafile.yml').read_text())['Models']


def trained_here(model: dict) -> str:
    """What a metafile's ``Results`` say, or that there are none."""
    metrics = [
        f'{name} {value}'
        for result in model.get('Results', [])
        for name, value in result['Metrics'].items()
    ]
    return ', '.join(metrics) or 'no'


def backbone_row(name: str) -> str:
    """A classifier's line in the first table."""
    model, size = build(name)
    counts = measure(model, size)
    recipe = recipes()[name]
    numbers = [f'{counts.parameters / 1e6:.2f}']
    numbers += [f'{macs / 1e9:.2f}' for macs in (counts.plain_macs, counts.macs)]
    cells = [
        f'`{name}`',
        f'[{recipe["Name"].rpartition("_")[2]}](../{recipe["Config"]})',
        str(size[0]),
        *numbers,
        str(IMAGENET.get(name, '')),
        trained_here(recipe),
    ]
    return line(cells)


def dense_row(name: str) -> str:
    """A backbone's line in the second table."""
    backbone = build(name)[0].backbone
    counts = [measure(backbone, SIZES[library]) for library in ('mmdet', 'mmseg')]
    cells = [f'`{name}`', f'{counts[0].parameters / 1e6:.2f}']
    cells += [f'{n / 1e9:.1f}' for count in counts for n in (count.plain_macs, count.macs)]
    return line(cells)


def config_row(folder: str, model: dict) -> str:
    """A config's line in the table of its folder."""
    network, size = build(str(REPO / model['Config']))
    if folder == 'mini':
        size = (128, 128)
    counts = measure(network, size)
    cells = [f'[{model["Name"]}](../{model["Config"]})', f'{counts.parameters / 1e6:.2f}']
    digits = 2 if folder == 'mini' else 1
    cells += [f'{n / 1e9:.{digits}f}' for n in (counts.plain_macs, counts.macs)]
    cells.append(f'{counts.activations / 1e6:.0f}')
    if folder == 'ade20k':
        cells.append(PAPER.get(model['Name'], ''))
    return line([*cells, trained_here(model)])


def recipes() -> dict[str, dict]:
    """The ImageNet config of every classifier, from the metafile."""
    letters = dict(t='tiny', s='small', m='medium', l='large', b='base')
    found = {}
    for model in models_of('imagenet'):
        _, family, letter = model['Name'].split('_')[0].split('-')
        name = f'inline_{family}_{letters[letter]}'
        found[name + ('_384' if model['Name'].endswith('384px') else '')] = model
    return found


def line(cells: list[str]) -> str:
    return '| ' + ' | '.join(cells) + ' |'


def page(row: Callable[..., str]) -> str:
    """The page.

    Args:
        row: Makes a line of a table; called as ``row(kind, *arguments)`` with ``'backbone'`` or
            ``'dense'`` and a name, or ``'config'``, a folder and a model of its metafile.
    """
    names = [
        f'inline_{family}_{arch.replace("-", "_")}'
        for family, backbone in BACKBONES.items()
        for arch in backbone.presets
    ]
    tables = dict(
        backbones='\n'.join(row('backbone', name) for name in names),
        dense='\n'.join(row('dense', name) for name in names),
    )
    for folder in ('coco', 'ade20k', 'mini'):
        tables[folder] = '\n'.join(row('config', folder, model) for model in models_of(folder))
    return HEAD.format(**tables)


def make_row(kind: str, *arguments) -> str:
    """A line of a table, counted anew."""
    return dict(backbone=backbone_row, dense=dense_row, config=config_row)[kind](*arguments)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    # mmengine reads a hundred metafiles for each base that a config names by package.
    config_utils.load = functools.cache(config_utils.load)
    PAGE.write_text(page(make_row))
    print(f'wrote {PAGE}')


if __name__ == '__main__':
    main()
