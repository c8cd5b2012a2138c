"""A small data set that needs no download: coloured shapes on textured ground.

One folder serves both tasks::

    root/
        images/{train,val}/000000.png
        annotations/instances_{train,val}.json     COCO: visible polygons, boxes, areas
        labels/{train,val}/000000.png              ADE20K: one label per pixel
        shapes.json                                the arguments; written last

The label images follow ADE20K: 0 means unlabelled (it does not occur here), and class ``i`` is
stored as ``i + 1``, so they are read with ``reduce_zero_label=True``. Their classes are
``('ground', *CLASSES)``; clutter counts as ground.

Image ``i`` of a split depends on the seed, the split and ``i`` alone: a larger set begins with
the images of a smaller one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from numbers import Real
from pathlib import Path

import cv2
import numpy as np
from rich.progress import track

CLASSES = ('circle', 'square', 'triangle')
#: RGB colours of ``('ground', *CLASSES)``, to draw labels with.
PALETTE = ((96, 96, 96), (220, 60, 60), (70, 140, 240), (240, 190, 40))

_MARKER = 'shapes.json'
# Raised whenever the pixels or annotations made from the same arguments change.
_VERSION = 3
_SPLITS = ('train', 'val')
# Vertices are integers in units of 1/16 pixel: rasterising is exact, the same on every machine.
_SUBPIXEL = 16
_GROUND, _CLUTTER = -1, -2
_TRIES = 20


def _check_int(name: str, value: int, lowest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < lowest:
        raise ValueError(f'{name} must be an integer of at least {lowest}, but got {value!r}')
    return int(value)


def _check_range(
    name: str, value: Sequence, kind: type, lowest: float, highest: float = math.inf
) -> list:
    allowed = f'at least {lowest}' if highest == math.inf else f'within [{lowest}, {highest}]'
    valid = (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
        and lowest <= value[0] <= value[1] <= highest
    )
    if not valid:
        what = 'integers' if kind is int else 'numbers'
        raise ValueError(
            f'{name} must be two {what} (low, high), low <= high, {allowed}, but got {value!r}'
        )
    return list(value)


def _arguments(
    num_train: int,
    num_val: int,
    image_size: int | Sequence[int],
    objects: Sequence[int],
    scale: Sequence[float],
    clutter: Sequence[int],
    min_visible: float,
    clutter_on_top: bool,
    class_colours: bool,
    seed: int,
) -> dict:
    """Check the arguments of :func:`make_shapes`; return them as they stand in the marker."""
    if isinstance(image_size, int):
        image_size = (image_size, image_size)
    if not isinstance(image_size, list | tuple) or len(image_size) != 2:
        raise ValueError(
            f'image_size must be an integer or two integers (height, width), but got {image_size!r}'
        )
    size = [_check_int('image_size', side, 16) for side in image_size]
    if not isinstance(min_visible, Real) or not 0 < min_visible <= 1:
        raise ValueError(f'min_visible must be within (0, 1], but got {min_visible!r}')
    for name, value in (('clutter_on_top', clutter_on_top), ('class_colours', class_colours)):
        if not isinstance(value, bool):
            raise ValueError(f'{name} must be True or False, but got {value!r}')
    scale = _check_range('scale', scale, Real, 0, 1)
    if scale[0] * min(size) < 4:
        raise ValueError(
            'scale must make objects of at least 4 pixels: the low end '
            f'{scale[0]} of an image of {size[0]}x{size[1]} gives '
            f'{scale[0] * min(size):.1f} pixels'
        )
    return dict(
        version=_VERSION,
        num_train=_check_int('num_train', num_train, 1),
        num_val=_check_int('num_val', num_val, 1),
        image_size=size,
        objects=_check_range('objects', objects, int, 1),
        scale=scale,
        clutter=_check_range('clutter', clutter, int, 0),
        min_visible=float(min_visible),
        clutter_on_top=clutter_on_top,
        class_colours=class_colours,
        seed=_check_int('seed', seed, 0),
    )


def _uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return low + (high - low) * rng.random()


def _ground(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Two octaves of smooth noise around one colour, (H, W, 3), float32."""
    image = np.empty((height, width, 3), np.float32)
    image[:] = 90 + 60 * rng.random(3)
    for cells, strength in ((4, 50), (24, 24)):
        knots = (rng.random((cells + 1, cells + 1, 3)) - 0.5).astype(np.float32) * strength
        # Bilinear interpolation by separable steps, elementwise and hence the same everywhere.
        for axis, length in ((0, height), (1, width)):
            position = np.arange(length) * (cells / length)
            low = position.astype(int)
            weight = (position - low).astype(np.float32)
            weight = weight[:, None, None] if axis == 0 else weight[:, None]
            knots = (
                np.take(knots, low, axis) * (1 - weight) + np.take(knots, low + 1, axis) * weight
            )
        image += knots
    return image


def _colour(rng: np.random.Generator, kind: str, ground: np.ndarray, by_class: bool) -> np.ndarray:
    """A colour that stands out from the ground; clutter wears the colours of all classes."""
    index = CLASSES.index(kind) if kind in CLASSES else int(rng.integers(len(CLASSES)))
    for _ in range(_TRIES):
        colour = 255 * rng.random(3)
        if by_class:
            colour = (np.array(PALETTE[index + 1]) + 0.4 * (colour - 127.5)).clip(0, 255)
        if np.abs(colour - ground).max() >= 70:
            break
    return colour


def _polygon(rng: np.random.Generator, kind: str, diameter: float) -> np.ndarray:
    """Vertices around the origin of a convex shape of that diameter, (V, 2), in pixels."""
    if kind == 'bar':
        ratio = _uniform(rng, 0.08, 0.16)
        vertices = np.array([(1, ratio), (-1, ratio), (-1, -ratio), (1, -ratio)])
    else:
        count = {'circle': 40, 'square': 4, 'triangle': 3}[kind]
        angles = 2 * np.pi * np.arange(count) / count
        vertices = np.stack([np.cos(angles), np.sin(angles)], 1)
    angle = 2 * np.pi * rng.random()
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    # Not a matrix product: the order of its sums differs between BLAS libraries.
    return (vertices[:, None] * turn).sum(-1) * (diameter / 2)


def _rasterise(vertices: np.ndarray, height: int, width: int) -> tuple[slice, slice, np.ndarray]:
    """Pixels whose centre lies in a convex polygon: the window's rows and columns, its mask."""
    vertices = np.rint(vertices * _SUBPIXEL).astype(np.int64)
    low = np.maximum(vertices.min(0) // _SUBPIXEL, 0)
    high = np.minimum(vertices.max(0) // _SUBPIXEL + 1, (width, height))
    columns, rows = slice(low[0], high[0]), slice(low[1], high[1])
    x = (np.arange(low[0], high[0]) * _SUBPIXEL + _SUBPIXEL // 2)[None, :]
    y = (np.arange(low[1], high[1]) * _SUBPIXEL + _SUBPIXEL // 2)[:, None]
    mask = np.ones((y.size, x.size), bool)
    for (x0, y0), (x1, y1) in zip(vertices, np.roll(vertices, -1, 0), strict=True):
        mask &= (x1 - x0) * (y - y0) - (y1 - y0) * (x - x0) >= 0
    return rows, columns, mask


def _draw(rng: np.random.Generator, args: dict) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """One image: pixels (H, W, 3) uint8 RGB, owner of each pixel (H, W), class per object.

    The owner is an object's index, or negative for ground and clutter. Later shapes cover
    earlier ones; a place where one would hide an object beyond ``min_visible`` is drawn again.
    """
    height, width = args['image_size']
    image = _ground(rng, height, width)
    ground = image.mean((0, 1))
    owner = np.full((height, width), _GROUND, np.int32)
    areas, visible, names = [], [], []

    kinds = ['bar'] * int(rng.integers(args['clutter'][0], args['clutter'][1] + 1))
    for _ in range(rng.integers(args['objects'][0], args['objects'][1] + 1)):
        kinds.append(CLASSES[rng.integers(len(CLASSES))])
    if args['clutter_on_top']:
        kinds = [kinds[i] for i in rng.permutation(len(kinds))]
    for kind in kinds:
        for _ in range(_TRIES):
            diameter = _uniform(rng, *args['scale']) * min(height, width)
            shape = _polygon(rng, kind, diameter)
            # Whole shapes only: what is cut by the border is hard to tell apart.
            low, high = -shape.min(0), np.array([width, height]) - shape.max(0)
            rows, columns, mask = _rasterise(
                shape + low + (high - low) * rng.random(2), height, width
            )
            covered, losses = np.unique(owner[rows, columns][mask], return_counts=True)
            losses = {
                i: n for i, n in zip(covered.tolist(), losses.tolist(), strict=True) if i >= 0
            }
            if mask.any() and all(
                visible[i] - loss >= args['min_visible'] * areas[i] for i, loss in losses.items()
            ):
                break
        else:
            continue  # no room left
        colour = _colour(rng, kind, ground, args['class_colours'])
        for i, loss in losses.items():
            visible[i] -= loss
        if kind == 'bar':
            owner[rows, columns][mask] = _CLUTTER
        else:
            owner[rows, columns][mask] = len(areas)
            areas.append(int(mask.sum()))
            visible.append(areas[-1])
            names.append(kind)
        image[rows, columns][mask] = colour
    image += (rng.random((height, width, 1), dtype=np.float32) - 0.5) * 24
    return image.clip(0, 255).astype(np.uint8), owner, names


def _visible_polygons(mask: np.ndarray) -> list[list[float]]:
    """COCO polygons, ``[x0, y0, x1, y1, ...]`` each, that rasterise to the mask again."""
    # Contours run through pixel centres. Those of a fourfold enlargement run an eighth of a
    # pixel inside the edge of the pixels, so that all pixel centres are well inside.
    large = np.kron(mask.astype(np.uint8), np.ones((4, 4), np.uint8))
    contours, tree = cv2.findContours(large, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    polygons = []
    for contour, (_, _, hole, parent) in zip(contours, tree[0], strict=True):
        if parent >= 0:
            continue
        if hole >= 0:
            # A COCO polygon has no holes: cut the mask in two through the middle of this one.
            column = int(contours[hole][:, 0, 0].min() + contours[hole][:, 0, 0].max()) // 8
            left, right = mask.copy(), mask.copy()
            left[:, column:] = False
            right[:, :column] = False
            return _visible_polygons(left) + _visible_polygons(right)
        polygons.append(((contour[:, 0] + 0.5) / 4).ravel().tolist())
    return polygons


def _annotations(owner: np.ndarray, names: list[str]) -> list[dict]:
    annotations = []
    for index, name in enumerate(names):
        mask = owner == index
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        top, left = int(rows[0]), int(columns[0])
        height, width = int(rows[-1]) + 1 - top, int(columns[-1]) + 1 - left
        polygons = _visible_polygons(mask[top : top + height, left : left + width])
        offset = (left, top)
        annotations.append(
            dict(
                category_id=CLASSES.index(name) + 1,
                segmentation=[[v + offset[i % 2] for i, v in enumerate(p)] for p in polygons],
                area=int(mask.sum()),
                bbox=[left, top, width, height],
                iscrowd=0,
            )
        )
    return annotations


def _write_image(path: Path, image: np.ndarray) -> None:
    if image.ndim == 3:
        image = image[..., ::-1]
    if not cv2.imwrite(str(path), image):
        raise OSError(f'cannot write {path}')


def _write_split(root: Path, split: str, count: int, args: dict, progress: bool) -> None:
    images, annotations = [], []
    for folder in ('images', 'labels'):
        (root / folder / split).mkdir(parents=True)
    height, width = args['image_size']
    for index in track(range(count), f'{split} images', disable=not progress):
        rng = np.random.Generator(np.random.PCG64([args['seed'], _SPLITS.index(split), index]))
        image, owner, names = _draw(rng, args)
        file_name = f'{index:06d}.png'
        _write_image(root / 'images' / split / file_name, image)
        labels = np.ones((height, width), np.uint8)
        for i, name in enumerate(names):
            labels[owner == i] = CLASSES.index(name) + 2
        _write_image(root / 'labels' / split / file_name, labels)
        images.append(dict(id=index + 1, file_name=file_name, height=height, width=width))
        for annotation in _annotations(owner, names):
            annotations.append(dict(id=len(annotations) + 1, image_id=index + 1, **annotation))
    categories = [dict(id=i, name=name, supercategory='shape') for i, name in enumerate(CLASSES, 1)]
    (root / 'annotations').mkdir(exist_ok=True)
    with open(root / 'annotations' / f'instances_{split}.json', 'w') as file:
        json.dump(
            dict(
                info=dict(description='coloured shapes', version=str(_VERSION)),
                licenses=[],
                images=images,
                annotations=annotations,
                categories=categories,
            ),
            file,
        )


def _read_marker(root: Path) -> dict | None:
    try:
        with open(root / _MARKER) as file:
            return json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_complete(root: str | os.PathLike) -> bool:
    """Whether ``root`` holds a data set that :func:`make_shapes` has finished."""
    return _read_marker(Path(root)) is not None


def make_shapes(
    root: str | os.PathLike,
    num_train: int = 256,
    num_val: int = 64,
    image_size: int | Sequence[int] = 128,
    objects: Sequence[int] = (1, 3),
    scale: Sequence[float] = (0.3, 0.65),
    clutter: Sequence[int] = (0, 0),
    min_visible: float = 0.95,
    clutter_on_top: bool = False,
    class_colours: bool = True,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = False,
) -> Path:
    """Write the shapes data set, unless it is there already.

    It is written beside ``root`` and renamed when it is whole: an interrupted run leaves no
    half-written set behind under this name.

    Args:
        root: Folder of the data set.
        num_train: Number of training images.
        num_val: Number of validation images.
        image_size: Side in pixels, or (height, width). At least 16.
        objects: Fewest and most objects drawn on an image. Where there is no room left for
            one, it is left out.
        scale: Smallest and largest diameter of objects and clutter, as a fraction of the
            image's shorter side. At least 4 pixels.
        clutter: Fewest and most thin bars on an image, of no class.
        min_visible: Fraction of each object's area that stays visible, in (0, 1].
        clutter_on_top: Whether clutter lies among the objects and covers some; otherwise it lies
            beneath them.
        class_colours: Whether an object's colour suggests its class; clutter has the same
            colours. Otherwise only its form tells, which takes longer to learn.
        seed: The same arguments give the same pixels and annotations.
        overwrite: Replace a data set of other arguments, instead of raising.
        progress: Show a progress bar on the terminal.

    Returns:
        ``root`` as a path.

    Raises:
        ValueError: If an argument is out of its range.
        FileExistsError: If ``root`` holds a data set made with other arguments and
            ``overwrite`` is off, or holds anything else.
    """
    root = Path(root)
    args = _arguments(
        num_train,
        num_val,
        image_size,
        objects,
        scale,
        clutter,
        min_visible,
        clutter_on_top,
        class_colours,
        seed,
    )
    present = _read_marker(root)
    if present == args:
        return root
    if present is None and root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise FileExistsError(
            f'root {str(root)!r} exists and is no shapes data set: '
            'remove it, or give another folder'
        )
    if present is not None and not overwrite:
        differing = [
            f'{key} is {present.get(key)!r}, asked for {value!r}'
            for key, value in args.items()
            if present.get(key) != value
        ]
        raise FileExistsError(
            f'root {str(root)!r} holds a shapes data set made with other '
            f'arguments ({"; ".join(differing)}): remove it, give another '
            'folder, or allow overwriting'
        )

    root.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f'.{root.name}.', dir=root.parent))
    try:
        unfinished.chmod(0o777 & ~_umask())
        for split in _SPLITS:
            _write_split(unfinished, split, args[f'num_{split}'], args, progress)
        with open(unfinished / _MARKER, 'w') as file:
            json.dump(args, file, indent=2)
        if present is not None:
            shutil.rmtree(root)
        try:
            unfinished.rename(root)
        except OSError:
            # Another process was quicker. Its set will do if it is the same.
            if _read_marker(root) != args:
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return root


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
