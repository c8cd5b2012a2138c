"""``tools/convert_checkpoint.py``: theirs to ours and back."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_reference import CASES, authors_config, backbone_config

ROOT = Path(__file__).parent.parent


def convert(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / 'tools/convert_checkpoint.py'), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize('name', ['pvt_iiss_64', 'swin_iiss_224', 'cswin_iiss_224', 'deit_64'])
def test_there_and_back_gives_every_entry_unchanged(name, tmp_path):
    family = name.split('_')[0]
    weights = {
        key.removeprefix('weights/'): value
        for key, value in load_file(CASES[name]).items()
        if key.startswith('weights/')
    }
    theirs, ours, back = (tmp_path / f'{stage}.pth' for stage in ('theirs', 'ours', 'back'))
    torch.save(dict(model=weights), theirs)
    config = backbone_config(family, authors_config(CASES[name]))
    options = ['--family', family, '--arch', config['arch'], '--img-size', config['img_size']]

    result = convert(theirs, ours, *options)
    assert result.returncode == 0, result.stderr
    assert 'written unchanged: head.weight (classifier)' in result.stdout
    result = convert(ours, back, *options, '--to', 'authors')
    assert result.returncode == 0, result.stderr
    returned = torch.load(back, weights_only=True)['model']
    assert set(returned) == set(weights)
    assert all(torch.equal(returned[key], value) for key, value in weights.items())


@pytest.mark.slow
def test_what_does_not_match_is_printed_and_nothing_is_written(tmp_path):
    torch.save(dict(model={'layers.0.blocks.0.norm1.weight': torch.ones(3)}), tmp_path / 'in.pth')
    target = tmp_path / 'out.pth'
    result = convert(tmp_path / 'in.pth', target, '--family', 'swin', '--arch', 'tiny')
    assert result.returncode == 1
    assert 'stages.0.0.norm1.weight has shape (3,), the model wants (96,)' in result.stderr
    assert 'missing: patch_embeds.0.projection.weight' in result.stderr
    assert 'Traceback' not in result.stderr
    result = convert(tmp_path / 'in.pth', target, '--family', 'swin', '--arch', 'huge')
    assert result.returncode == 2 and "arch must be one of ['tiny'" in result.stderr
    assert not target.exists()
