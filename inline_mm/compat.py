"""What depends on the OpenMMLab stack that is installed: whether it fits, where its configs lie.

All of it runs when the package is imported. Only the metadata of installed distributions and the
loading of mmcv's compiled ops are looked at; mmdet and mmseg are not imported.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

#: Import package -> the distributions that provide it. mmdet and mmseg are optional.
DISTRIBUTIONS = {
    'torch': ('torch',),
    'timm': ('timm',),
    'mmengine': ('mmengine', 'mmengine-lite', 'onedl-mmengine'),
    'mmcv': ('mmcv', 'mmcv-lite', 'mmcv-full', 'onedl-mmcv'),
    'mmdet': ('mmdet', 'onedl-mmdetection'),
    'mmseg': ('mmsegmentation', 'onedl-mmsegmentation'),
}
REQUIRED = ('torch', 'timm', 'mmengine', 'mmcv')

#: Import package -> oldest version that can work, and why.
OLDEST = {
    'torch': ('2.5', 'it brought safe_globals, by which checkpoints are read safely'),
    'timm': ('1.0', 'the layers used here are those of timm 1.0'),
    'mmengine': ('0.8.0', 'older ones do not find classes by their import path'),
    'mmcv': ('2.0.0', 'mmcv 1.x does not build on mmengine'),
    'mmdet': ('3.0.0', 'mmdet 2.x does not build on mmengine'),
    'mmseg': ('1.0.0', 'mmsegmentation 0.x does not build on mmengine'),
}

INSTALL_HELP = """\
Install one of the two stacks that are known to work, torch first (Python 3.11, Linux):
  maintained (default):
    pip install torch==2.10.0 torchvision==0.25.0 'setuptools>=80' wheel ninja packaging psutil
    MMCV_WITH_OPS=1 pip install --no-build-isolation 'inline_mm[maintained]'
  classic (OpenMMLab's own last releases):
    pip install torch==2.5.1 torchvision==0.20.1 'setuptools>=77,<81' wheel ninja packaging psutil
    MMCV_WITH_OPS=1 pip install --no-build-isolation 'inline_mm[classic]'
or, in a clone of the repository, `make env` or `make env STACK=classic`."""


def installed_distributions() -> dict[str, str]:
    """Versions of the installed distributions named in :data:`DISTRIBUTIONS`."""
    found = {}
    for name in (name for names in DISTRIBUTIONS.values() for name in names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def missing_packages() -> list[str]:
    """Required packages that cannot be imported, however they were (not) installed."""
    return [package for package in REQUIRED if find_spec(package) is None]


def version_conflicts(found: Mapping[str, str]) -> list[str]:
    """Reasons why these distributions cannot work together, one sentence each.

    Args:
        found (Mapping[str, str]): Distribution name to version, as
            :func:`installed_distributions` returns it. A package that is importable but absent
            here (a source tree on the path) is not judged.

    Returns:
        list[str]: Empty where no conflict is known.
    """
    from mmengine.utils import digit_version

    problems = []
    for package, names in DISTRIBUTIONS.items():
        twins = [name for name in names if name in found]
        if len(twins) > 1:
            problems.append(
                f'{" and ".join(twins)} both install the package `{package}` and overwrite each '
                f'other: pip uninstall {" ".join(twins)}, then install the one you want'
            )
        oldest, reason = OLDEST[package]
        problems += [
            f'{name} {found[name]} is too old, {oldest} is needed: {reason}'
            for name in twins
            if digit_version(found[name]) < digit_version(oldest)
        ]
    # OpenMMLab's last mmdet and mmsegmentation refuse to be imported with a newer mmcv.
    mmcv = next((name for name in DISTRIBUTIONS['mmcv'] if name in found), None)
    if mmcv and digit_version(found[mmcv]) >= digit_version('2.2.0'):
        problems += [
            f'{name} {found[name]} refuses {mmcv} {found[mmcv]}: it needs mmcv < 2.2.0 '
            f'(or use {successor} instead)'
            for name, successor in (
                ('mmdet', 'onedl-mmdetection'),
                ('mmsegmentation', 'onedl-mmsegmentation'),
            )
            if name in found
        ]
    return problems


def mmcv_ops_problem(found: Mapping[str, str]) -> str | None:
    """Why mmcv's compiled ops do not load against the present torch; None where they do.

    An mmcv without compiled ops is no problem as such: mmsegmentation can do without.
    """
    import torch  # its libraries have to be loaded before those linked against them

    if find_spec('mmcv._ext') is None:
        return None
    try:
        importlib.import_module('mmcv._ext')
    except (ImportError, OSError) as error:
        mmcv = next((name for name in DISTRIBUTIONS['mmcv'] if name in found), 'mmcv')
        pin = f'{mmcv}=={found[mmcv]}' if mmcv in found else mmcv
        return (
            f"mmcv's compiled ops do not load with torch {torch.__version__}: they were built "
            f'against another torch ({error}). Build them again:\n'
            '    MMCV_WITH_OPS=1 pip install --no-build-isolation --no-cache-dir '
            f'--force-reinstall --no-deps {pin}'
        )
    return None


def stack_warnings(found: Mapping[str, str]) -> list[str]:
    """What will fail with these distributions, though training without it works."""
    from mmengine.utils import digit_version

    texts = []
    if find_spec('mmdet') is not None and find_spec('mmcv._ext') is None:
        texts.append(
            'mmcv is installed without its compiled ops, which mmdet needs: install it with '
            'MMCV_WITH_OPS=1 and --no-build-isolation, after torch. See docs/installation.md.'
        )
    if 'mmengine' in found and find_spec('pkg_resources') is None:
        texts.append(
            f"mmengine {found['mmengine']} resolves `_base_ = 'mmdet::...'` by pkg_resources, "
            "which this setuptools no longer has: pip install 'setuptools<81'"
        )
    if digit_version(found.get('mmengine', '1.0')) <= digit_version('0.10.7') and digit_version(
        found.get('torch', '0.0')
    ) >= digit_version('2.6'):
        texts.append(
            f'mmengine {found["mmengine"]} cannot read the checkpoints it writes with torch '
            f'{found["torch"]}, so resuming and testing will fail: use torch < 2.6, or '
            'onedl-mmengine'
        )
    return texts


def _fail(problems: list[str], found: Mapping[str, str]) -> None:
    listing = ', '.join(f'{name} {number}' for name, number in found.items()) or 'none of them'
    lines = '\n'.join(f'- {problem}' for problem in problems)
    raise ImportError(
        f'inline_mm cannot work with what is installed here:\n{lines}\n'
        f'Found: Python {sys.version.split()[0]}, {listing}.\n{INSTALL_HELP}'
    )


def check_stack() -> None:
    """Check that torch, timm, mmengine and mmcv are installed and fit together.

    Either of mmdet and mmsegmentation, or neither, may be present.

    Raises:
        ImportError: A required package is missing, versions are known not to work together, or
            mmcv's compiled ops do not load. The message names the versions found and what to
            install.
    """
    found = installed_distributions()
    if sys.version_info < (3, 10):  # noqa: UP036 (a source tree on the path has met no pip)
        _fail(['Python >= 3.10 is needed'], found)
    missing = missing_packages()
    if missing:
        _fail([f'missing: {", ".join(missing)}'], found)
    problems = version_conflicts(found)
    if not problems:
        problem = mmcv_ops_problem(found)
        problems = [problem] if problem else []
    if problems:
        _fail(problems, found)
    for text in stack_warnings(found):
        warnings.warn(text, stacklevel=3)


def register_config_packages() -> None:
    """Teach mmengine where configs named ``inline_mm::...`` and ``mmseg::...`` lie.

    mmengine maps the name before ``::`` to a distribution and finds the folder of a distribution,
    or of a module where there is no such distribution; next to it lies ``.mim``.
    """
    from mmengine.config.utils import MODULE2PACKAGE

    # The folder of a distribution is wrong for an editable install. Naming a module instead
    # leads to the right one, however this package was installed.
    MODULE2PACKAGE.setdefault('inline_mm', 'inline_mm.version')
    # The maintained fork still looks for OpenMMLab's distribution `mmsegmentation`, which it does
    # not install itself.
    if 'mmsegmentation' not in installed_distributions():
        MODULE2PACKAGE['mmseg'] = 'mmseg'
