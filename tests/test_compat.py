"""The stack check: real installations that are incomplete, and versions that do not fit."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from inline_mm import compat

REPO = Path(__file__).parents[1]


def import_inline_mm(*paths, flags=(), then=''):
    """Import the package in a fresh interpreter with ``paths`` in front of its module path."""
    code = f'import sys; sys.path[:0] = {[str(path) for path in paths]}; import inline_mm'
    return subprocess.run(
        [sys.executable, *flags, '-c', code + then], capture_output=True, text=True, check=False
    )


def make_distribution(folder: Path, name: str, version: str) -> None:
    """Write the metadata that a package manager leaves for an installed distribution."""
    info = folder / f'{name.replace("-", "_")}-{version}.dist-info'
    info.mkdir(parents=True)
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')


def test_the_present_stack_passes():
    found = compat.installed_distributions()
    assert {'torch', 'timm'} <= found.keys()
    assert compat.missing_packages() == []
    assert compat.version_conflicts(found) == []
    assert compat.mmcv_ops_problem(found) is None
    compat.check_stack()


def test_without_any_stack_the_error_says_what_to_install():
    result = import_inline_mm(REPO, flags=['-I', '-S'])
    assert result.returncode != 0
    error = result.stderr
    assert 'ImportError' in error
    assert 'missing: torch, timm, mmengine, mmcv' in error
    assert "'inline_mm[maintained]'" in error
    assert "'inline_mm[classic]'" in error


def test_without_mmengine_the_error_names_it_and_what_was_found(tmp_path):
    for package in ('torch', 'timm'):
        origin = Path(find_spec(package).origin).parent
        (tmp_path / package).symlink_to(origin)
    make_distribution(tmp_path, 'torch', '2.10.0')
    result = import_inline_mm(REPO, tmp_path, flags=['-I', '-S'])
    assert result.returncode != 0
    assert 'missing: mmengine, mmcv' in result.stderr
    assert 'torch 2.10.0' in result.stderr


def test_two_distributions_of_one_package_are_refused(tmp_path):
    present = compat.installed_distributions()
    other = 'mmcv' if 'onedl-mmcv' in present else 'onedl-mmcv'
    make_distribution(tmp_path, other, '2.1.0')
    result = import_inline_mm(tmp_path, REPO)
    assert result.returncode != 0
    assert 'mmcv and onedl-mmcv both install the package `mmcv`' in result.stderr
    assert 'pip uninstall mmcv onedl-mmcv' in result.stderr


@pytest.mark.parametrize(
    ('found', 'complaint'),
    [
        ({'mmdet': '3.3.0', 'mmcv': '2.2.0'}, 'mmdet 3.3.0 refuses mmcv 2.2.0'),
        ({'mmsegmentation': '1.2.2', 'mmcv': '2.2.0'}, 'mmsegmentation 1.2.2 refuses mmcv 2.2.0'),
        ({'mmdet': '3.3.0', 'onedl-mmcv': '2.3.6'}, 'mmdet 3.3.0 refuses onedl-mmcv 2.3.6'),
        ({'mmdet': '2.28.2', 'mmcv': '2.1.0'}, 'mmdet 2.28.2 is too old'),
        ({'mmcv-full': '1.7.2'}, 'mmcv-full 1.7.2 is too old'),
        ({'mmengine': '0.7.0'}, 'mmengine 0.7.0 is too old'),
        ({'torch': '1.13.1'}, 'torch 1.13.1 is too old'),
        ({'torch': '1.13.1+cu117'}, 'torch 1.13.1'),
        ({'timm': '0.9.16'}, 'timm 0.9.16 is too old'),
    ],
)
def test_combinations_that_cannot_work_are_named(found, complaint):
    problems = compat.version_conflicts(found)
    assert len(problems) == 1
    assert complaint in problems[0]


@pytest.mark.parametrize(
    'found',
    [
        {'torch': '2.5.1+cpu', 'mmcv': '2.1.0', 'mmengine': '0.10.7', 'mmdet': '3.3.0'},
        {'torch': '2.10.0', 'onedl-mmcv': '2.3.6', 'onedl-mmsegmentation': '1.4.2'},
        {'torch': '2.6.0a0+git1', 'mmcv-lite': '2.1.0', 'mmsegmentation': '1.2.2'},
        {},
    ],
)
def test_combinations_that_work_pass(found):
    assert compat.version_conflicts(found) == []


@pytest.mark.parametrize(('torch', 'expected'), [('2.5.1+cu124', False), ('2.6.0', True)])
def test_mmengine_that_cannot_read_its_own_checkpoints_is_warned_of(torch, expected):
    texts = compat.stack_warnings({'mmengine': '0.10.7', 'torch': torch})
    assert any('cannot read the checkpoints' in text for text in texts) == expected


def test_ops_built_against_another_torch_say_how_to_rebuild(tmp_path):
    mmcv = Path(find_spec('mmcv').origin).parent
    broken = tmp_path / 'mmcv'
    broken.mkdir()
    for entry in mmcv.iterdir():
        if not entry.name.startswith('_ext'):
            (broken / entry.name).symlink_to(entry)
    source = tmp_path / '_ext.c'
    source.write_text(
        'extern void symbol_of_another_torch(void);\n'
        'void *PyInit__ext(void) { symbol_of_another_torch(); return 0; }\n'
    )
    library = next(path.name for path in mmcv.glob('_ext*.so'))
    subprocess.run(
        ['gcc', '-shared', '-fPIC', '-o', str(broken / library), str(source)], check=True
    )
    result = import_inline_mm(tmp_path, REPO)
    assert result.returncode != 0
    assert 'symbol_of_another_torch' in result.stderr
    assert re.search(r'--no-cache-dir --force-reinstall --no-deps (onedl-)?mmcv==', result.stderr)


def test_mmcv_without_ops_warns_because_mmdet_needs_them(tmp_path):
    if find_spec('mmdet') is None:
        pytest.skip('the warning is for mmdet')
    mmcv = Path(find_spec('mmcv').origin).parent
    bare = tmp_path / 'mmcv'
    bare.mkdir()
    for entry in mmcv.iterdir():
        if not entry.name.startswith('_ext'):
            (bare / entry.name).symlink_to(entry)
    result = import_inline_mm(tmp_path, REPO)
    assert 'without its compiled ops' in result.stderr


def test_the_check_imports_neither_mmdet_nor_mmseg():
    result = import_inline_mm(REPO, then='; print({"mmdet", "mmseg"} & set(sys.modules))')
    assert result.stdout == 'set()\n', result.stderr


@pytest.mark.parametrize('requirements', ['requirements.txt', 'requirements-classic.txt'])
def test_the_install_help_names_the_pinned_torch(requirements):
    pins = (REPO / requirements).read_text().splitlines()
    for pin in pins:
        if pin.startswith(('torch==', 'torchvision==', 'setuptools')):
            assert pin in compat.INSTALL_HELP
