"""Checkpoints of the backbones: safe reading, the authors' parameter names, and strict loading.

A checkpoint is read with ``weights_only``: nothing in it runs. The authors' classification
checkpoints, bare state dicts, and whole detectors or segmenters trained here are all accepted;
what is not used is reported, and what does not fit is an error.
"""

import argparse
import functools
import os
import os.path as osp
import pickle
import re
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from mmengine.fileio import get_local_path
from mmengine.logging import HistoryBuffer, print_log
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor, nn

__all__ = [
    'CheckpointError',
    'Fitted',
    'fit_checkpoint',
    'from_authors',
    'guard_mmengine',
    'is_whole',
    'load_backbone',
    'read_checkpoint',
    'to_authors',
    'trusts_checkpoints',
]

StateDict = dict[str, Tensor]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, is not safe, or does not fit the model."""


# --------------------------------------------------------------------------------------------------
# Reading


def _inert(module: str, name: str) -> type:
    """Stands in for a configuration class: its objects become mappings, none of its code runs."""

    def new(cls):
        return OrderedDict()  # PyTorch's safe unpickler fills these, and no other subclass of dict.

    return type(name, (), {'__module__': module, '__qualname__': name, '__new__': new})


def _alias(path: str, function: Callable) -> Callable:
    """The function, to be found by a checkpoint under another name."""

    @functools.wraps(function)
    def alias(*args):
        return function(*args)

    alias.__module__, alias.__name__ = path.rsplit('.', 1)
    alias.__qualname__ = alias.__name__
    return alias


def _history_buffer_method(owner: type, name: str) -> Callable:
    """The one use that mmengine's log history has for getattr, and no other."""
    if owner is not HistoryBuffer or name not in ('min', 'max', 'mean', 'current'):
        raise pickle.UnpicklingError(f'it asks for getattr({owner!r}, {name!r})')
    return getattr(owner, name)


_numpy_core = np._core if hasattr(np, '_core') else np.core

#: Globals a training checkpoint may name beside its tensors. Configuration objects of the
#: authors' trainers become plain mappings; argparse's namespace has no code of its own; the rest
#: is the log history that mmengine keeps, with numpy's arrays under the names of numpy 1 and 2.
_SAFE_GLOBALS = (
    _inert('yacs.config', 'CfgNode'),
    set,  # PyTorch before 2.6 does not allow it by itself; every CfgNode holds one.
    argparse.Namespace,
    HistoryBuffer,
    _alias('builtins.getattr', _history_buffer_method),
    np.ndarray,
    np.dtype,
    *(type(np.dtype(kind)) for kind in ('bool', 'int32', 'int64', 'uint32', 'float32', 'float64')),
    *(
        _alias(f'numpy.{core}.multiarray.{name}', getattr(_numpy_core.multiarray, name))
        for core in ('core', '_core')
        for name in ('_reconstruct', 'scalar')
    ),
)

#: Entries under which trainers keep the weights, in order of preference.
_WRAPPERS = ('state_dict', 'model', 'model_state_dict', 'module')


def read_checkpoint(path: str) -> StateDict:
    """Read the weights of a checkpoint without running anything in it.

    Args:
        path: A ``.pth`` file (``torch.save``) or a ``.safetensors`` file; local, an http(s)
            address, or any location mmengine's file backends know.

    Returns:
        dict[str, Tensor]: The model's entries, on the CPU; a wrapping ``state_dict`` or ``model``
        entry and a ``module.`` prefix are taken off.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is no checkpoint, is truncated, holds no weights, or would
            run code when unpickled.
    """
    path = osp.expanduser(str(path))
    if '://' not in path and not osp.isfile(path):
        what = 'is a folder' if osp.isdir(path) else 'does not exist'
        raise FileNotFoundError(f'checkpoint {path!r} {what}')
    if path.startswith(('http://', 'https://')):
        content = _safely(
            path, lambda: torch.hub.load_state_dict_from_url(path, 'cpu', weights_only=True)
        )
    else:
        with get_local_path(path) as local:
            content = _safely(path, lambda: _read_local(local))
    return _find_weights(content, path)


def _read_local(path: str, map_location='cpu'):
    if path.endswith('.safetensors'):
        from safetensors.torch import load_file

        return load_file(path)
    if osp.getsize(path) == 0:
        raise EOFError('the file is empty')
    return torch.load(path, map_location=map_location, weights_only=True)


def _safely(path: str, read: Callable):
    try:
        with torch.serialization.safe_globals(list(_SAFE_GLOBALS)):
            return read()
    except pickle.UnpicklingError as error:
        named = re.search(r'GLOBAL ([\w.]+)', str(error))
        if named:
            raise CheckpointError(
                f'checkpoint {path!r} refused: to unpickle it would run code ({named.group(1)}). '
                'If you trust it, load it yourself with torch.load(..., weights_only=False) and '
                "save its state dict alone: torch.save({'state_dict': ...}, FILE); or set "
                f'{_TRUST}=1 in the environment for mmengine to load it as it is'
            ) from error
        raise CheckpointError(f'{path!r} is not a readable checkpoint: {error}') from error
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f'checkpoint {path!r} cannot be read: {error}') from error
    except Exception as error:  # Whatever a damaged file makes its reader raise.
        detail = 'truncated or damaged' if _starts_as_checkpoint(path) else 'no checkpoint'
        raise CheckpointError(f'{path!r} is {detail}: {error}') from error


def _starts_as_checkpoint(path: str) -> bool:
    if not osp.isfile(path):
        return False
    with open(path, 'rb') as file:
        return file.read(2) == b'PK'


def is_whole(path: str) -> bool:
    """Whether a local file is a checkpoint that was written to its end; it is not read."""
    try:
        with zipfile.ZipFile(path) as archive:  # Its directory is written last.
            return any(name.endswith('/data.pkl') for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _find_weights(content: object, path: str) -> StateDict:
    for _ in range(2):  # A wrapper may hold another.
        if isinstance(content, Mapping):
            inner = next((content[key] for key in _WRAPPERS if key in content), None)
            if isinstance(inner, Mapping):
                content = inner
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f'checkpoint {path!r} holds a {type(content).__name__}, not a state dict'
        )
    weights = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if not weights:
        raise CheckpointError(
            f'checkpoint {path!r} holds no weights; a state dict was looked for at its top level '
            f'and under {", ".join(map(repr, _WRAPPERS))}, and it has {list(content)[:8]}'
        )
    if all(key.startswith('module.') for key in weights):
        weights = {key.removeprefix('module.'): value for key, value in weights.items()}
    return weights


# --------------------------------------------------------------------------------------------------
# Reading by mmengine

#: PyTorch's variable for reading without ``weights_only``; PyTorch before 2.6 does not know it.
_TRUST = 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'
_FORCE = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD'
_FORCING = threading.RLock()


def trusts_checkpoints() -> bool:
    """Whether the environment allows checkpoints to run code when they are loaded."""
    return os.environ.get(_TRUST, '0').lower() in ('1', 'y', 'yes', 'true')


def guard_mmengine() -> None:
    """Make mmengine refuse checkpoints that would run code, or hold weights that are not numbers.

    mmengine reads every checkpoint (``load_from``, ``resume``, ``init_cfg``, the inferencers)
    through the loaders of its ``CheckpointLoader``; these are replaced, for this process. Other
    uses of ``torch.load`` are left alone. With ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1`` in the
    environment, mmengine's own loaders are used as they are. Calling it again changes nothing.
    """
    for prefix, loader in list(CheckpointLoader._schemes.items()):
        if not hasattr(loader, '__wrapped__'):
            CheckpointLoader.register_scheme(prefix, loader=_guarded(prefix, loader), force=True)


def _guarded(prefix: str, loader: Callable) -> Callable:
    """A loader of mmengine's that raises a CheckpointError for what it must not load."""

    @functools.wraps(loader)
    def guarded(filename, map_location=None):
        if trusts_checkpoints():
            return loader(filename, map_location)
        if prefix:
            with _weights_only_forced():
                content = _safely(filename, lambda: loader(filename, map_location))
        else:
            path = osp.expanduser(filename)
            if not osp.isfile(path):
                raise FileNotFoundError(f'checkpoint {filename!r} does not exist')
            content = _safely(path, lambda: _read_local(path, map_location))
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f'checkpoint {filename!r} holds a {type(content).__name__}, not a state dict'
            )
        _refuse_nan(content, filename)
        return content

    return guarded


@contextmanager
def _weights_only_forced() -> Iterator[None]:
    # mmengine's loaders do not pass weights_only on; the environment is the one way in.
    with _FORCING:
        before = os.environ.get(_FORCE)
        os.environ[_FORCE] = '1'
        try:
            yield
        finally:
            os.environ.pop(_FORCE) if before is None else os.environ.update({_FORCE: before})


def _refuse_nan(content: Mapping, path: str) -> None:
    weights = content.get('state_dict', content)
    damaged = [
        key
        for key, value in (weights.items() if isinstance(weights, Mapping) else ())
        if isinstance(value, Tensor) and value.is_floating_point() and value.isnan().any()
    ]
    if damaged:
        raise CheckpointError(
            f'checkpoint {path!r} holds weights that are nan: {some(damaged)}; '
            'the training that wrote it had diverged'
        )


# --------------------------------------------------------------------------------------------------
# Names

#: Authors' names and ours, by family: the first that matches is replaced. With a dot at its end it
#: is a prefix, otherwise a whole name.
PREFIXES: dict[str, list[tuple[str, str]]] = {
    'pvt': [
        pair
        for i in range(4)
        for pair in (
            (f'patch_embed{i + 1}.proj.', f'patch_embeds.{i}.projection.'),
            (f'patch_embed{i + 1}.norm.', f'patch_embeds.{i}.norm.'),
            (f'pos_embed{i + 1}', f'pos_embeds.{i}.weight'),
            (f'block{i + 1}.', f'stages.{i}.'),
        )
    ],
    'swin': [
        ('patch_embed.proj.', 'patch_embeds.0.projection.'),
        ('patch_embed.norm.', 'patch_embeds.0.norm.'),
        *((f'layers.{i}.blocks.', f'stages.{i}.') for i in range(4)),
        *((f'layers.{i}.downsample.', f'patch_embeds.{i + 1}.') for i in range(3)),
    ],
    'cswin': [
        ('stage1_conv_embed.0.', 'patch_embeds.0.projection.'),
        ('stage1_conv_embed.2.', 'patch_embeds.0.norm.'),
        *((f'merge{i}.conv.', f'patch_embeds.{i}.projection.') for i in range(1, 4)),
        *((f'merge{i}.norm.', f'patch_embeds.{i}.norm.') for i in range(1, 4)),
        *((f'stage{i + 1}.', f'stages.{i}.') for i in range(4)),
    ],
    'deit': [
        ('patch_embed.proj.', 'patch_embed.projection.'),
        ('pos_embed', 'pos_embed.weight'),
        ('blocks.', 'blocks.'),
    ],
}

#: Replaced anywhere in a name of a block.
INFIXES: dict[str, list[tuple[str, str]]] = {
    'pvt': [('.attn.residual.', '.attn.local.')],
    'swin': [
        ('.attn.residual.', '.attn.local.'),
        ('.attn.relative_position_bias_table', '.attn.rel_pos.relative_position_bias_table'),
    ],
    # The authors' block holds q, k, v and the output projection; its branches hold the rest.
    'cswin': [
        ('.attns.0.residual.', '.attn.local.'),
        ('.attns.0.get_v.', '.attn.lepe.'),
        ('.attns.1.get_v.', '.attn.lepe_horizontal.'),
        ('.qkv.', '.attn.qkv.'),
        ('.proj.', '.attn.proj.'),
    ],
    'deit': [('.attn.residual.', '.attn.local.')],
}


def _rename(key: str, prefixes: Iterable[tuple[str, str]], infixes) -> str:
    for old, new in prefixes:
        if key == old or (old.endswith('.') and key.startswith(old)):
            key = new + key[len(old) :]
            for part, replacement in infixes:
                key = key.replace(part, replacement)
            break
    return key


def from_authors(state: StateDict, family: str, own_keys: Iterable[str] | None = None) -> StateDict:
    """Rename the authors' entries to ours; ours are left as they are.

    Args:
        state: Entries under the authors' names, or ours.
        family: ``'pvt'``, ``'swin'``, ``'cswin'`` or ``'deit'``.
        own_keys: The names in the model's own state dict, which tell which layers have q, k and v
            in one; by default those with a local part.

    Returns:
        dict[str, Tensor]: The same tensors under our names; separate q and kv are joined where
        the model has them in one layer.
    """
    renamed = {
        _rename(key, PREFIXES[family], INFIXES[family]): value for key, value in state.items()
    }
    if own_keys is None:
        own_keys = (key.replace('.local.0.', '.qkv.') for key in renamed if '.attn.local.0.' in key)
    own_keys = set(own_keys)
    out = {}
    for key, value in renamed.items():
        joined = re.sub(r'\.attn\.(q|kv)\.(weight|bias)$', r'.attn.qkv.\2', key)
        if joined == key or key in own_keys or joined not in own_keys:
            out[key] = value
        elif joined not in out:
            parts = [joined.replace('.qkv.', f'.{part}.') for part in ('q', 'kv')]
            absent = [part for part in parts if part not in renamed]
            if absent:
                raise CheckpointError(f'{key!r} is there without {absent[0]!r}')
            out[joined] = torch.cat([renamed[part] for part in parts])
    return out


def to_authors(state: StateDict, family: str) -> StateDict:
    """Rename our entries to the authors'; the inverse of :func:`from_authors`.

    Args:
        state: A backbone's state dict, or anything keyed and shaped like it (gradients).
        family: ``'pvt'``, ``'swin'``, ``'cswin'`` or ``'deit'``.

    Returns:
        dict[str, Tensor]: The same tensors under the authors' names.
    """
    prefixes = [(new, old) for old, new in PREFIXES[family]]
    infixes = [(new, old) for old, new in INFIXES[family]]
    out = {}
    for key, value in state.items():
        theirs = _rename(key, prefixes, infixes)
        if family == 'pvt' and '.attn.qkv.' in theirs:
            # The authors' PVT has one layer for queries and one for keys and values.
            third = value.shape[0] // 3
            out[theirs.replace('.qkv.', '.q.')] = value[:third]
            out[theirs.replace('.qkv.', '.kv.')] = value[third:]
        else:
            out[theirs] = value
    return out


# --------------------------------------------------------------------------------------------------
# Loading

#: Names of the published models that a backbone has no use for, and why.
_NOT_USED = {
    r'head\..*': 'classifier',
    r'norm\..*': 'norm before the classifier',
    r'.*\.relative_position_index': 'recomputed',
    r'.*\.attn_mask': 'recomputed',
}


class Fitted(NamedTuple):
    """What a checkpoint holds for a backbone; see :func:`fit_checkpoint`.

    Attributes:
        entries: What the backbone takes, under its names and in its shapes.
        not_used: What it has no use for, by reason: names and tensors.
        num_outside: Entries outside the prefix.
        resized: Which entries were resized, and from and to which shape.
        new: The backbone's entries that the checkpoint may lack and does.
    """

    entries: StateDict
    not_used: dict[str, StateDict]
    num_outside: int
    resized: list[str]
    new: list[str]


def fit_checkpoint(model: nn.Module, path: str, prefix: str | None = None) -> Fitted:
    """Read a checkpoint for a backbone and bring it to its names and shapes, strictly.

    Args:
        model: A backbone of this package; it is not changed.
        path: See :func:`read_checkpoint`.
        prefix: Take only entries under this prefix; by default ``'backbone.'`` where the
            checkpoint has it.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is unreadable or unsafe, has entries that are not finite or
            have another shape, lacks some, or has some the model does not know.
    """
    state = read_checkpoint(path)
    num_outside = 0
    if prefix is None and any(key.startswith('backbone.') for key in state):
        prefix = 'backbone.'
    if prefix is not None:
        prefix = prefix.rstrip('.') + '.'
        inside = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        if not inside:
            raise CheckpointError(f'checkpoint {path!r} has no entries under prefix {prefix!r}')
        num_outside = len(state) - len(inside)
        state = inside
    own = model.state_dict()
    state = from_authors(state, model.family, own)
    not_used, unknown = {}, []
    for key in [key for key in state if key not in own]:
        reason = next((why for name, why in _NOT_USED.items() if re.fullmatch(name, key)), None)
        reason = reason or model.why_not_used(key)
        value = state.pop(key)
        if reason is None:
            unknown.append(key)
        else:
            not_used.setdefault(reason, {})[key] = value
    missing = [key for key in own if key not in state and not model.may_be_missing(key)]
    resized = []
    problems = []
    for key, value in list(state.items()):
        if not value.is_floating_point():
            problems.append(f'{key} has dtype {value.dtype}, not a floating-point one')
        elif not value.isfinite().all():
            problems.append(f'{key} has entries that are not finite')
        elif value.shape != own[key].shape:
            fitted = model.fit_parameter(key, value)
            if fitted is None or fitted.shape != own[key].shape:
                problems.append(
                    f'{key} has shape {tuple(value.shape)}, the model wants {tuple(own[key].shape)}'
                )
            else:
                resized.append(f'{key} {tuple(value.shape)} -> {tuple(fitted.shape)}')
                state[key] = fitted
    if unknown:
        problems.append(f'unknown to the model: {some(unknown)}')
    if missing:
        problems.append(f'missing: {some(missing)}')
    if problems:
        raise CheckpointError(
            f'checkpoint {path!r} does not fit {type(model).__name__} (arch {model.arch_name}); '
            f'is it of another family or size? {some(problems, "; ")}'
        )
    new = [key for key in own if key not in state]
    return Fitted(state, not_used, num_outside, resized, new)


def load_backbone(model: nn.Module, path: str, prefix: str | None = None) -> None:
    """Load a checkpoint into a backbone, strictly, and log what was not used, resized or lacking.

    Args:
        model: A backbone of this package.
        path: See :func:`read_checkpoint`.
        prefix: See :func:`fit_checkpoint`.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: See :func:`fit_checkpoint`. Nothing is loaded then.
    """
    fitted = fit_checkpoint(model, path, prefix)
    model.load_state_dict({**model.state_dict(), **fitted.entries})
    notes = [f'{len(fitted.entries)} entries from {path}']
    notes += [f'not used ({why}): {some(list(them))}' for why, them in fitted.not_used.items()]
    if fitted.num_outside:
        notes.append(f'not used (outside the backbone): {fitted.num_outside} entries')
    if fitted.resized:
        notes.append(f'resized: {some(fitted.resized)}')
    if fitted.new:
        notes.append(f'not in the checkpoint, left as initialised: {some(fitted.new)}')
    print_log(f'{type(model).__name__} loaded {"; ".join(notes)}', logger='current')


def some(items: list[str], joiner: str = ', ', most: int = 6) -> str:
    more = f'{joiner}... ({len(items)} in all)' if len(items) > most else ''
    return joiner.join(items[:most]) + more
