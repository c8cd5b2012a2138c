"""Configs as plugging sees them: read from anywhere, changed on the record, dumped as changes."""

from __future__ import annotations

import os.path as osp
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.utils import get_installed_path

from ..launch import load_config

__all__ = [
    'Change',
    'ConfigError',
    'PlugError',
    'PluggedConfig',
    'Recorder',
    'read_config',
    'type_name',
]


class PlugError(ValueError):
    """A backbone that cannot be put into a config; the message says why."""


class ConfigError(PlugError):
    """A config that cannot be read, or that has no model."""


@dataclass(frozen=True)
class Change:
    """One setting of a config that was changed, and why. ``key`` is dotted, as in --cfg-options."""

    key: str
    old: Any
    new: Any
    why: str

    def __str__(self) -> str:
        return f'{self.key}: {_brief(self.old)} -> {_brief(self.new)}  # {self.why}'


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        value = dict(value)
    text = repr(value)
    return text if len(text) <= 120 else f'{text[:117]}...'


class Recorder:
    """Changes nodes of a config and keeps a record of it."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def set(self, node: dict, path: str, key: str, value: Any, why: str) -> None:
        """Set ``node[key]``, where ``path`` leads to ``node``; an equal value is no change."""
        old = node.get(key)
        if key in node and old == value and type(old) is type(value):
            return
        self.note(f'{path}.{key}' if path else key, old, value, why)
        node[key] = value

    def drop(self, node: dict, path: str, key: str, why: str) -> None:
        """Set ``node[key]`` to None where it is there and not None."""
        if node.get(key) is not None:
            self.set(node, path, key, None, why)

    def note(self, key: str, old: Any, new: Any, why: str) -> None:
        """Record a change made elsewhere, or (old equal to new) something the user should know."""
        self.changes.append(Change(key, old, new, why))


def type_name(node: Any) -> str:
    """The class name in a config node, without scope or module; '' where there is none."""
    kind = node.get('type') if isinstance(node, Mapping) else None
    if kind is None:
        return ''
    # A config in mmengine's new Python syntax holds the class itself.
    return (kind if isinstance(kind, str) else kind.__name__).rpartition('.')[2]


def library_of(cfg: Config) -> str | None:
    """The library in whose registry a config's names are looked up."""
    if scope := cfg.get('default_scope'):
        return scope
    kind = cfg.model.get('type')
    if isinstance(kind, str) and '.' in kind:
        return kind.partition('.')[0]
    return 'mmseg' if 'decode_head' in cfg.model else 'mmdet'


def read_config(cfg: Config | str | Path) -> tuple[Config, dict | None]:
    """A copy of a config, or the config read from a path or from ``'mmdet::...'``.

    A config of an installed library comes as one that inherits from it would have it: with the
    library's ``_scope_`` in its settings.

    Returns:
        tuple: The config, and what inheriting from its file gives; None for one without a file.

    Raises:
        ConfigError: If it cannot be read, or has no model.
        TypeError: If ``cfg`` is none of these.
    """
    if isinstance(cfg, Config):
        cfg, base = _rebase(Config(cfg.to_dict(), filename=cfg.filename))
    elif isinstance(cfg, (str, Path)):
        cfg = _load(str(cfg))
        base = cfg.to_dict()
    else:
        raise TypeError(
            f'cfg must be a Config, a path or a name like mmdet::..., got {type(cfg).__name__}'
        )
    if not isinstance(cfg.get('model'), dict):
        raise ConfigError(
            f'config {cfg.filename or "without a file name"} has no model: it is a part of '
            'configs (a base, a data set, test-time augmentation), not one to train'
        )
    return cfg, base


def _inherit(reference: str, filename: str, text: str = '') -> Config:
    cfg = Config.fromstring(f'_base_ = {reference!r}\n{text}', '.py')
    return Config(cfg.to_dict(), filename=filename)


def _load(name: str) -> Config:
    try:
        reference = name if '::' in name else _reference(name, None)
        if '::' not in reference:
            return load_config(name)
        package, _, rest = reference.partition('::')
        if find_spec(package) is None:  # mmengine would go and install it
            raise ModuleNotFoundError(name=package)
        filename = str(Path(get_installed_path(package), '.mim', 'configs', rest))
        return _inherit(reference, filename)
    except Exception as error:  # whatever code in a config, or what it imports, raises
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ModuleNotFoundError) and cause.name:
                raise ConfigError(
                    f'config {name!r} does not load: it needs the package '
                    f'{cause.name.partition(".")[0]!r}, which is not installed'
                ) from error
            cause = cause.__cause__ or cause.__context__
        raise ConfigError(f'config {name!r} does not load: {error}') from error


def _rebase(cfg: Config) -> tuple[Config, dict | None]:
    """A config made by hand or read by other means, and what inheriting from its file gives."""
    if cfg.filename is None or not cfg.filename.endswith('.py') or not osp.isfile(cfg.filename):
        return cfg, None
    reference = _reference(cfg.filename, None)
    if '::' not in reference:
        return cfg, Config.fromfile(cfg.filename).to_dict()
    base = _inherit(reference, cfg.filename)
    if '_scope_' not in (cfg.get('model') or {}):
        changed = _overrides(Config.fromfile(cfg.filename).to_dict(), cfg.to_dict())
        if '_delete_' in changed:
            return cfg, None
        cfg = _inherit(reference, cfg.filename, Config(changed).pretty_text if changed else '')
    return cfg, base.to_dict()


def _reference(filename: str, folder: str | None) -> str:
    """How a config in ``folder`` names the config ``filename`` as its base."""
    path = Path(osp.abspath(filename))
    front, found, rest = path.as_posix().rpartition('/.mim/configs/')
    package = Path(front).name
    # A copy of a library that is not the installed one is named by its path.
    if found and find_spec(package) is not None:
        installed = Path(get_installed_path(package), '.mim', 'configs', rest)
        if installed.exists() and installed.samefile(path):
            return f'{package}::{rest}'
    return path.as_posix() if folder is None else Path(osp.relpath(path, folder)).as_posix()


def _overrides(base: Mapping, new: Mapping) -> dict:
    """What a child config has to state so that, merged into ``base``, it gives ``new``."""
    if base.keys() - new.keys() or base.get('type') != new.get('type'):
        return {'_delete_': True, **new}
    out = {}
    for key, value in new.items():
        if key not in base:
            out[key] = value
        elif isinstance(value, Mapping):
            if not isinstance(base[key], Mapping):
                out[key] = {'_delete_': True, **value}
            elif changed := _overrides(base[key], value):
                out[key] = changed
        elif value != base[key]:
            out[key] = value
    return out


class PluggedConfig(Config):
    """A config whose dump inherits from the file it was read from and states the differences.

    Attributes:
        changes (list[Change]): What :func:`~inline_mm.plug_backbone` changed, in order.
    """

    def __init__(self, cfg: Config, base: dict | None, changes: list[Change]) -> None:
        super().__init__(cfg.to_dict(), filename=cfg.filename)
        object.__setattr__(self, 'changes', list(changes))
        object.__setattr__(self, '_base', base)

    def dump(self, file: str | Path | None = None) -> str | None:
        """Write the config as a ``.py`` file, or return its text where ``file`` is None.

        It begins with ``_base_``: ``'mmdet::...'`` for a config of an installed library, else a
        path relative to ``file``. Where inheriting cannot express the config (it was made in
        memory, or lost a setting at the top), and for other formats, everything is written out.
        """
        path = None if file is None else osp.abspath(str(file))
        if path is not None and not path.endswith('.py'):
            return super().dump(file)
        text = self._text_from_base(None if path is None else osp.dirname(path))
        if path is None:
            return text
        Path(path).write_text(text, encoding='utf-8')
        return None

    def _text_from_base(self, folder: str | None) -> str:
        base = self.__dict__.get('_base')  # a copy that was pickled has none
        changed = None if base is None else _overrides(base, self.to_dict())
        if changed is None or '_delete_' in changed:
            return self.pretty_text
        text = f'_base_ = {_reference(self.filename, folder)!r}\n'
        return text + Config(changed).pretty_text if changed else text


def installed_configs(package: str) -> Iterator[str]:
    """Names (``'mmdet::...'``) of the configs that an installed library ships, bases left out.

    Raises:
        PlugError: If the library is not installed, or ships none.
    """
    try:
        root = Path(get_installed_path(package), '.mim', 'configs')
    except Exception as error:
        raise PlugError(f'{package} is not installed: {error}') from error
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob('*.py')
        if '_base_' not in path.relative_to(root).parts
    )
    if not names:
        raise PlugError(f'{package} ships no configs: {root} has none')
    yield from (f'{package}::{name}' for name in names)
