"""The benchmark tools run, and write what they say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / 'tools'


def run(tool, *args):
    command = [sys.executable, str(TOOLS / tool), *map(str, args)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_attention_benchmark_measures_every_side(tmp_path):
    args = [
        '--shapes',
        '8,2,6,5,2',
        '16,2,4,4,1',
        '--rounds',
        '2',
        '--budget',
        '0.2',
        '--device',
        'cpu',
        '--out',
    ]
    printed = run('benchmark_attention.py', *args, tmp_path)
    assert '| geometric mean |' in printed
    results = json.loads((tmp_path / 'attention.json').read_text())['results']
    assert [result['shape'] for result in results] == [[8, 2, 6, 5, 2], [16, 2, 4, 4, 1]]
    for result in results:
        assert set(result['sides']) == {'naive', 'inline', 'linear', 'softmax', 'products'}
        assert all(row['forward'] > 0 and row['train'] > 0 for row in result['sides'].values())
        assert result['sides']['inline']['error'] < 1e-5
    assert (tmp_path / 'attention.md').exists()
    assert (tmp_path / 'attention.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.slow
def test_scaling_benchmark_measures_what_fits_and_says_what_does_not(tmp_path):
    args = ['--backbones', 'inline-pvt-tiny', 'inline-pvt-tiny:softmax', '--sizes', 32, 64]
    args += ['--rounds', 1, '--device', 'cpu', '--out', tmp_path]
    run('benchmark_scaling.py', *args)
    results = json.loads((tmp_path / 'scaling.json').read_text())['results']
    for rows in results.values():
        assert rows['32']['seconds'] > 0 and rows['64']['macs'] > 3 * rows['32']['macs']
    assert (tmp_path / 'scaling.png').read_bytes().startswith(b'\x89PNG')
    assert 'would take' in run('benchmark_scaling.py', *args, '--max-seconds', 1e-9)
