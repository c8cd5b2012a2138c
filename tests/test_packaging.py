"""What a built wheel carries and declares, and that mmengine finds the configs in it."""

import os
import shutil
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from inline_mm import __version__

REPO = Path(__file__).parents[1]
EXTRAS = {
    'maintained': ['requirements.txt'],
    'classic': ['requirements-classic.txt'],
    'test': ['requirements-test.txt'],
    'export': ['requirements-export.txt'],
    'dev': ['requirements-test.txt', 'requirements-dev.txt'],
}
LEAF_CONFIGS = sorted(
    path.relative_to(REPO).as_posix()
    for path in (REPO / 'configs').glob('*/*.py')
    if path.parent.name != '_base_'
)


def listed_models() -> list[dict]:
    index = yaml.safe_load((REPO / 'model-index.yml').read_text())
    return [
        model
        for metafile in index['Import']
        for model in yaml.safe_load((REPO / metafile).read_text())['Models']
    ]


def requirements_of(*files: str) -> list[str]:
    lines = [line for file in files for line in (REPO / file).read_text().splitlines()]
    return sorted(str(Requirement(line)) for line in lines if line and not line.startswith('#'))


def pip(*arguments) -> None:
    command = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '-q', *arguments]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope='module')
def installed(tmp_path_factory) -> Path:
    """A folder into which a freshly built wheel of the project is installed."""
    folder = tmp_path_factory.mktemp('wheel')
    source = folder / 'source'
    # A copy, so that nothing left in the tree by earlier builds gets in, and nothing is left.
    shutil.copytree(
        REPO,
        source,
        symlinks=True,
        ignore=lambda where, names: [
            name
            for name in names
            if (name.startswith('.') and name != '.mim')
            or name in ('__pycache__', 'build', 'data', 'dist', 'tests', 'work_dirs')
            or name.endswith('.egg-info')
        ],
    )
    if not (source / 'README.md').exists():
        (source / 'README.md').write_text('inline_mm\n')
    pip('wheel', '--no-deps', '--no-build-isolation', '--no-index', '-w', folder, source)
    target = folder / 'site'
    pip('install', '--no-deps', '--no-index', '--target', target, next(folder.glob('*.whl')))
    return target


@pytest.fixture(scope='module')
def metadata(installed) -> Message:
    info = next(installed.glob('inline_mm-*.dist-info'))
    return Parser().parsestr((info / 'METADATA').read_text())


def run_installed(installed: Path, code: str, cwd: Path) -> str:
    """Run code in a fresh interpreter that imports the installed wheel, not the source tree."""
    path = [str(installed), os.environ.get('PYTHONPATH')]
    result = subprocess.run(
        [sys.executable, '-c', code],
        cwd=cwd,
        env={
            **os.environ,
            'PYTHONPATH': os.pathsep.join(filter(None, path)),
            'PYTHONWARNINGS': 'ignore',
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_metafiles_list_every_config_once():
    models = listed_models()
    assert sorted(model['Config'] for model in models) == LEAF_CONFIGS
    assert all(model['Name'] == Path(model['Config']).stem for model in models)


def test_links_of_the_source_tree_lead_to_configs_and_tools():
    for name in ('configs', 'tools', 'model-index.yml'):
        link = REPO / 'inline_mm' / '.mim' / name
        assert link.is_symlink()
        assert link.resolve() == REPO / name


def test_wheel_depends_on_no_stack(metadata):
    requirements = [Requirement(text) for text in metadata.get_all('Requires-Dist')]
    unconditional = {item.name for item in requirements if item.marker is None}
    assert unconditional == {'torch', 'timm', 'numpy'}


@pytest.mark.parametrize('extra', EXTRAS)
def test_extra_is_its_requirements_file(metadata, extra):
    found = []
    for text in metadata.get_all('Requires-Dist'):
        requirement = Requirement(text)
        if requirement.marker is not None and requirement.marker.evaluate({'extra': extra}):
            requirement.marker = None
            found.append(str(requirement))
    assert sorted(found) == requirements_of(*EXTRAS[extra])


def test_wheel_metadata(installed, metadata):
    distribution = PathDistribution(next(installed.glob('inline_mm-*.dist-info')))
    assert distribution.version == __version__
    assert metadata['License-Expression'] == 'Apache-2.0'
    assert metadata['Requires-Python'] == '>=3.10'
    licence = next(file for file in distribution.files if file.name == 'LICENSE')
    assert licence.read_text() == (REPO / 'LICENSE').read_text()
    assert f'version: {__version__}\n' in (REPO / 'CITATION.cff').read_text()
    assert f'[{__version__}]' in (REPO / 'CHANGELOG.md').read_text()


def test_wheel_carries_configs_and_tools_as_files(installed):
    mim = installed / 'inline_mm' / '.mim'
    for folder in ('configs', 'tools'):
        expected = {
            path.relative_to(REPO).as_posix()
            for path in (REPO / folder).rglob('*')
            if path.is_file() and '__pycache__' not in path.parts
        }
        carried = {
            path.relative_to(mim).as_posix()
            for path in (mim / folder).rglob('*')
            if path.is_file() and '__pycache__' not in path.parts
        }
        assert carried == expected
    assert not any(path.is_symlink() for path in mim.rglob('*'))


def test_a_config_inherits_from_the_wheel_by_name(installed, tmp_path):
    leaf = LEAF_CONFIGS[0].removeprefix('configs/')
    (tmp_path / 'mine.py').write_text(f"_base_ = 'inline_mm::{leaf}'\nwork_dir = 'mine'\n")
    code = f"""
import inline_mm
assert inline_mm.__file__.startswith({str(installed)!r})
from mmengine.config import Config
from mmengine.hub import get_config
cfg = Config.fromfile('mine.py')
assert cfg.work_dir == 'mine'
print(cfg.model.backbone.type, get_config('inline_mm::{leaf}').model.backbone.type)
"""
    assert run_installed(installed, code, tmp_path).split() == ['InLinePVT', 'InLinePVT']


def test_a_base_can_import_the_package_for_tools_that_do_not(installed, tmp_path):
    leaf = LEAF_CONFIGS[0].removeprefix('configs/')
    (tmp_path / 'mine.py').write_text(f"_base_ = __import__('inline_mm') and 'inline_mm::{leaf}'\n")
    code = """
from mmengine.config import Config
print(Config.fromfile('mine.py').model.backbone.type)
"""
    assert run_installed(installed, code, tmp_path).strip() == 'InLinePVT'


def test_the_source_tree_serves_configs_by_name_too(tmp_path):
    code = """
import inline_mm
from mmengine.hub import get_config
print(get_config('inline_mm::_base_/datasets/shapes_instance.py').dataset_type)
"""
    assert run_installed(REPO, code, tmp_path).strip() == 'CocoDataset'
