"""Hooks for long training runs: checkpoints that outlive a crash, and checks against silence.

``tools/train.py`` and ``tools/test.py`` add them by themselves. Elsewhere name them in a config::

    default_hooks = dict(checkpoint=dict(type='DurableCheckpointHook'))
    custom_hooks = [dict(type='CheckTargetsHook'), dict(type='StrictLoadHook')]
"""

import os
import os.path as osp
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, get_file_backend, register_backend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from .checkpoint import CheckpointError, is_whole, some

__all__ = ['CheckTargetsHook', 'DurableCheckpointHook', 'StrictLoadHook', 'latest_checkpoint']

_UNFINISHED = '.unfinished'


class DurableLocalBackend(LocalBackend):
    """Local files that appear under their name only once they are written to the end."""

    def __init__(self) -> None:
        super().__init__()
        self._postponed: list[str | Path] | None = None

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write ``obj``; a file of that name is replaced only by a whole one.

        Raises:
            OSError: If it cannot be written, for instance for lack of space.
        """
        unfinished = f'{filepath}{_UNFINISHED}'
        try:
            os.makedirs(osp.dirname(osp.abspath(filepath)), exist_ok=True)
            with open(unfinished, 'wb') as file:
                file.write(obj)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, filepath)
        except OSError as error:
            if osp.exists(unfinished):
                os.remove(unfinished)
            raise OSError(
                error.errno,
                f'{os.strerror(error.errno)}, so the checkpoint was not saved '
                f'({len(obj) / 2**20:.1f} MiB); those saved before are untouched',
                str(filepath),
            ) from error

    def remove(self, filepath: str | Path) -> None:
        """Remove a file, at the end of :meth:`postponed_removals` if that is under way."""
        if self._postponed is None:
            super().remove(filepath)
        else:
            self._postponed.append(filepath)

    @contextmanager
    def postponed_removals(self) -> Iterator[None]:
        """Remove files when this context ends, and not at all if it ends with an exception."""
        self._postponed = []
        try:
            yield
            removals = self._postponed
        finally:
            self._postponed = None
        for filepath in removals:
            self.remove(filepath)


register_backend('durable_local', DurableLocalBackend)


@HOOKS.register_module()
class DurableCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook for runs that may be killed, or run out of disk, at any moment.

    A checkpoint is written beside its place and moved there when it is whole, and one that is
    outdated is removed after the next one is whole (mmengine removes it before). So there is a
    whole checkpoint at all times after the first. This holds for local files, which checkpoints
    are unless ``out_dir`` or ``backend_args`` says otherwise, and for ``Runner``; the strategies
    of ``FlexibleRunner`` write checkpoints by their own means.

    Args:
        backend_args: As of CheckpointHook. Local files are written durably where it is None.
        **kwargs: The other arguments of CheckpointHook.
    """

    def __init__(self, *, backend_args: dict | None = None, **kwargs: Any) -> None:
        super().__init__(backend_args=backend_args, **kwargs)

    def before_train(self, runner: Runner) -> None:
        """Set up the folder, and clear away what an interrupted run had not finished."""
        out_dir = runner.work_dir if self.out_dir is None else self.out_dir
        unset = self.backend_args is None and self.file_client_args is None
        if unset and type(get_file_backend(out_dir)) is LocalBackend:
            self.backend_args = dict(backend='durable_local')
        super().before_train(runner)
        if isinstance(self.file_backend, DurableLocalBackend) and is_main_process():
            for unfinished in Path(self.out_dir).glob(f'*.pth{_UNFINISHED}'):
                unfinished.unlink()

    def _save_checkpoint_with_step(self, runner, step, meta):
        if not isinstance(self.file_backend, DurableLocalBackend):
            super()._save_checkpoint_with_step(runner, step, meta)
            return
        with self.file_backend.postponed_removals():
            super()._save_checkpoint_with_step(runner, step, meta)


def latest_checkpoint(work_dir: str | Path) -> str | None:
    """The newest whole checkpoint of a run, to resume from.

    It is the one that mmengine's ``last_checkpoint`` file names, or, where that is not whole, the
    newest ``iter_*.pth`` or ``epoch_*.pth`` of the folder that is. Files are told apart by their
    end, they are not read.

    Args:
        work_dir: Folder of the run.

    Returns:
        str | None: Its path; None if the folder holds no checkpoint at all.

    Raises:
        CheckpointError: If there are checkpoints, but none is whole.
    """
    work_dir = Path(work_dir)
    named = work_dir / 'last_checkpoint'
    name = named.read_text().strip() if named.is_file() else ''
    if name and ('://' in name or osp.isdir(name)):
        return name  # Other storage, or a folder of shards: not ours to judge.
    candidates = [
        path for pattern in ('iter_*.pth', 'epoch_*.pth') for path in work_dir.glob(pattern)
    ]
    candidates.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    if name:
        # The work dir may have been moved since.
        candidates[:0] = [Path(name), work_dir / Path(name).name]
    present = [path for path in candidates if path.is_file()]
    whole = next((str(path) for path in present if is_whole(str(path))), None)
    if present and whole is None:
        raise CheckpointError(
            f'no checkpoint in {str(work_dir)!r} is whole: {some([str(p) for p in present])}; '
            'remove them to start anew, or name another with --resume CHECKPOINT'
        )
    return whole


@HOOKS.register_module()
class StrictLoadHook(Hook):
    """Refuse a loaded checkpoint that does not fit the whole model; mmengine only warns.

    For testing and resuming. In fine-tuning a head may well be another: leave it out there.
    """

    # After hooks that rewrite the checkpoint, such as EMAHook.
    priority = 'VERY_LOW'

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Compare names and shapes.

        Raises:
            CheckpointError: Naming what is missing, unknown, or of another shape.
        """
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        own = getattr(model, 'module', model).state_dict()
        state = checkpoint.get('state_dict', checkpoint)
        state = {key.removeprefix('module.'): value for key, value in state.items()}
        problems = {
            'missing': [key for key in own if key not in state],
            'unknown to the model': [key for key in state if key not in own],
            'of another shape': [
                f'{key} {tuple(state[key].shape)}, the model has {tuple(value.shape)}'
                for key, value in own.items()
                if key in state and state[key].shape != value.shape
            ],
        }
        if any(problems.values()):
            listing = '; '.join(f'{what}: {some(keys)}' for what, keys in problems.items() if keys)
            raise CheckpointError(
                f'checkpoint {runner._load_from!r} does not fit the model of the config: {listing}'
            )


@HOOKS.register_module()
class CheckTargetsHook(Hook):
    """Stop a training run that has nothing, or something wrong, to learn from.

    Before training, every COCO data set must know all classes of its ``metainfo`` (mmdet drops
    the others' annotations, and numbers the rest anew, without a word). In training, one of the
    first ``patience`` batches must hold a box, or a pixel that is not ignored; and no pixel may
    have a label that is no class (which on a GPU ends in an assertion that names nothing).

    Args:
        patience: Number of batches.
        ignore_index: Label of pixels that are left out.
    """

    def __init__(self, patience: int = 50, ignore_index: int = 255) -> None:
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f'patience must be a positive number of batches, got {patience!r}')
        self.patience = patience
        self.ignore_index = ignore_index
        self._batches_without = 0
        self._found = False

    def before_train(self, runner: Runner) -> None:
        """Compare the classes of data sets with those of their annotation files.

        Raises:
            ValueError: Naming the annotation file and the classes it lacks.
        """
        self._batches_without, self._found = 0, False
        for dataset in leaf_datasets(runner.train_dataloader.dataset):
            check_categories(dataset)

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | Sequence | None = None
    ) -> None:
        """Look at the annotations of a batch.

        Raises:
            ValueError: For a label that is no class, naming the file; or if there have been
                ``patience`` batches, or an epoch, with no annotation.
        """
        samples = data_batch.get('data_samples') if isinstance(data_batch, dict) else None
        if not samples:
            return
        dataset = runner.train_dataloader.dataset
        classes = (getattr(dataset, 'metainfo', None) or {}).get('classes')
        judged = False
        for sample in samples:
            if hasattr(sample, 'gt_instances'):
                judged = True
                self._found |= len(sample.gt_instances) > 0
            labels = getattr(getattr(sample, 'gt_sem_seg', None), 'data', None)
            if isinstance(labels, Tensor):
                judged = True
                labels = labels[labels != self.ignore_index]
                self._found |= labels.numel() > 0
                if classes and labels.numel() and labels.max() >= len(classes):
                    raise ValueError(
                        f'label image {sample.get("seg_map_path")!r} holds the label '
                        f'{int(labels.max())}, but there are {len(classes)} classes, 0 to '
                        f'{len(classes) - 1}, and {self.ignore_index} for pixels to ignore: check '
                        'metainfo.classes and reduce_zero_label'
                    )
        if self._found or not judged:
            return
        self._batches_without += 1
        if self._batches_without >= min(self.patience, len(runner.train_dataloader)):
            files = sorted({str(_annotations(leaf)) for leaf in leaf_datasets(dataset)})
            raise ValueError(
                f'none of the first {self._batches_without} batches of train_dataloader has '
                'anything to learn from, not a box or a pixel that is not ignored: check the '
                f'annotations ({", ".join(files)}), metainfo.classes and reduce_zero_label'
            )


def _annotations(dataset: Any) -> Any:
    """The annotation file of a data set, or its folders."""
    return getattr(dataset, 'ann_file', None) or getattr(dataset, 'data_prefix', None) or dataset


def leaf_datasets(dataset: Any) -> Iterator[Any]:
    """Data sets inside wrappers such as ConcatDataset and RepeatDataset."""
    inner = getattr(dataset, 'datasets', None) or getattr(dataset, 'dataset', None)
    if inner is None:
        yield dataset
    else:
        for one in inner if isinstance(inner, list | tuple) else [inner]:
            yield from leaf_datasets(one)


def check_categories(dataset: Any) -> None:
    """Raise a ValueError where a COCO data set's file lacks classes of its ``metainfo``."""
    cat_ids = getattr(dataset, 'cat_ids', None)
    classes = dataset.metainfo.get('classes') if hasattr(dataset, 'metainfo') else None
    if cat_ids is None or classes is None or len(cat_ids) == len(classes):
        return
    from mmengine.fileio import load

    present = {category['name'] for category in load(dataset.ann_file).get('categories', [])}
    raise ValueError(
        f'annotation file {dataset.ann_file!r} has {len(cat_ids)} of the {len(classes)} classes in '
        f'metainfo.classes; it lacks {some([name for name in classes if name not in present])}, '
        f'and has {some(sorted(present))}. metainfo.classes must be names of its categories'
    )
