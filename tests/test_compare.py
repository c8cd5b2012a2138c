"""tools/compare_attention.py: the configs it compares, its tables, and one real comparison."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from mmengine.registry import MODELS

REPO = Path(__file__).parent.parent

spec = importlib.util.spec_from_file_location('compare', REPO / 'tools/compare_attention.py')
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)

TINY = [
    '--num-train', '8', '--num-val', '2', '--image-size', '64', '--scale', '0.2', '0.4',
    '--objects', '1', '3', '--clutter', '0', '1', '--iters', '2', '--epochs', '1',
    '--batch-size', '4',
]  # fmt: skip


def test_variants_differ_in_the_attention_of_every_block_and_in_nothing_else():
    args = SimpleNamespace(image_size=64, iters=7, epochs=3, batch_size=5)
    configs, kinds = [], set()
    for variant in compare.VARIANTS:
        cfg = compare.make_config('segmentation', variant, args, Path('data'))
        backbone = MODELS.build(cfg.model.backbone)
        layers = [block.attn for stage in backbone.stages for block in stage]
        assert len(layers) == 5
        of_this = {
            (type(a), getattr(a, 'feature_map', None), getattr(a, 'local', None) is not None)
            for a in layers
        }
        assert len(of_this) == 1, variant
        kinds |= of_this
        del cfg.model.backbone.arch['attention']
        configs.append(cfg.to_dict())
    assert len(kinds) == len(compare.VARIANTS)
    assert all(cfg == configs[0] for cfg in configs)


@pytest.mark.parametrize('task', compare.CONFIGS)
def test_size_schedule_and_data_reach_the_config(task):
    args = SimpleNamespace(image_size=160, iters=7, epochs=3, batch_size=5)
    cfg = compare.make_config(task, 'inline', args, Path('/somewhere/data'))
    length = 7 if task == 'segmentation' else 3
    assert cfg.train_cfg['max_iters' if task == 'segmentation' else 'max_epochs'] == length
    assert cfg.param_scheduler[-1].T_max == cfg.param_scheduler[-1].end == length
    assert cfg.model.backbone.img_size == 160
    for split in ('train', 'val'):
        loader = cfg[f'{split}_dataloader']
        assert loader.batch_size == 5 and loader.dataset.data_root == '/somewhere/data/'
        assert all(t.get('scale', (160, 160)) == (160, 160) for t in loader.dataset.pipeline)
    assert 'Resize' in str(cfg.val_dataloader.dataset.pipeline)
    if task == 'detection':
        assert cfg.val_evaluator.ann_file == '/somewhere/data/annotations/instances_val.json'


def result(variant, seed, value):
    return dict(
        task='segmentation', variant=variant, seed=seed, metrics=dict(mIoU=value, mAcc=50.0)
    )  # fmt: skip


def test_table_has_mean_and_deviation_over_seeds():
    summary = compare.summarise(
        [result('inline', 0, 60.0), result('linear', 0, 40.0), result('inline', 1, 64.0)],
        dict(segmentation={variant: {'ms per step': 100.2} for variant in ('linear', 'inline')}),
    )
    assert [(row['variant'], row['seeds']) for row in summary] == [('linear', 1), ('inline', 2)]
    assert summary[1]['metrics']['mIoU'] == dict(mean=62.0, std=pytest.approx(8**0.5))
    lines = compare.to_markdown(summary).splitlines()
    assert lines[0] == '| segmentation | seeds | mIoU | mAcc | ms per step |'
    assert lines[2] == '| linear, relu | 1 | 40.0 | 50.0 | 100 |'
    assert lines[3] == '| InLine (identity) | 2 | 62.0 ± 2.8 | 50.0 ± 0.0 | 100 |'


@pytest.mark.slow
def test_a_comparison_trains_measures_and_goes_on_where_it_was(tmp_path, capsys):
    options = ['--work-dir', str(tmp_path), *TINY, '--tasks', 'segmentation', '--seeds', '0']
    compare.main([*options, '--variants', 'inline-relu'])
    found = json.loads((tmp_path / 'results.json').read_text())
    (run,) = found['runs']
    assert (run['variant'], run['seed']) == ('inline-relu', 0)
    assert 0 <= run['metrics']['mIoU'] <= run['metrics']['mAcc'] <= 100
    assert all(cost > 0 for cost in found['summary'][0]['costs'].values())
    assert found['summary'][0]['metrics']['mIoU']['std'] is None
    assert '| InLine, relu | 1 |' in (tmp_path / 'results.md').read_text()

    # A finished run is not run again.
    output = tmp_path / 'segmentation/inline-relu/seed0/output.txt'
    before = output.stat().st_mtime_ns
    compare.main([*options, '--variants', 'inline-relu'])
    assert output.stat().st_mtime_ns == before

    # Runs of other settings are not mixed with these.
    with pytest.raises(SystemExit):
        compare.main([*options, '--iters', '3'])
    assert 'holds runs with other settings' in capsys.readouterr().err


def test_a_failed_run_is_reported_with_the_end_of_its_output(tmp_path, monkeypatch):
    (tmp_path / 'tools').mkdir()
    (tmp_path / 'tools/train.py').write_text("raise RuntimeError('out of luck')")
    monkeypatch.setattr(compare, 'REPO', tmp_path)
    with pytest.raises(RuntimeError, match=r'inline seed 0 failed \(1\)(.|\n)*out of luck'):
        compare.run('segmentation', 'inline', 0, tmp_path / 'x.py', tmp_path / 'run', threads=1)
    assert not (tmp_path / 'run/result.json').exists()


def test_wrong_arguments_are_named(capsys):
    with pytest.raises(SystemExit):
        compare.main(['--batch-size', '0'])
    assert '--batch-size must be at least 1, got 0' in capsys.readouterr().err
