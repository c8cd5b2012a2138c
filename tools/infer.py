"""Detect or segment in images and videos; the config decides which.

OUT/vis holds pictures with boxes and masks, or with label colours; OUT/preds holds a JSON file per
input: boxes (x1, y1, x2, y2 in pixels), scores, labels, masks in COCO's run-length encoding. A
segmentor's label images, one class number per pixel, lie beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import cv2
import mmcv
import numpy as np
import torch
from mmcv.ops import batched_nms
from mmengine.config import Config, DictAction
from mmengine.infer import BaseInferencer
from mmengine.structures import InstanceData, PixelData
from PIL import Image
from pycocotools import mask as rle
from rich.progress import Progress
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from inline_mm.checkpoint import CheckpointError
from inline_mm.launch import load_config

VIDEO_EXTENSIONS = ('.mp4', '.avi', '.mov', '.mkv', '.webm')
# A box at the inner edge of a tile is taken for the rest of an object where a larger box of its
# class covers this much of it.
COVERED = 0.7
# How near to the edge a box must end to count as cut by it, in pixels.
EDGE = 2


class InputError(ValueError):
    """An input that cannot be read."""


def parse_args(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('input', type=Path, help='an image, a video, or a folder of them')
    parser.add_argument('config', help='config file, or inline_mm::PATH for one of the package')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--out', type=Path, default=Path('outputs'), help='default: outputs')
    parser.add_argument('--device', default='auto', help="'auto' (default), 'cpu', 'cuda:0', ...")
    parser.add_argument(
        '--score-thr', type=float, default=0.3, metavar='SCORE',
        help='draw boxes from this score on (default: 0.3); the JSON file has all',
    )  # fmt: skip
    parser.add_argument(
        '--tile', type=int, metavar='PIXELS',
        help='cut images larger than this into squares, each of which goes through the test '
        'pipeline as if it were an image, and put the predictions together',
    )  # fmt: skip
    parser.add_argument(
        '--overlap', type=int, metavar='PIXELS',
        help='by how much tiles overlap; best as large as objects are (default: a quarter tile)',
    )  # fmt: skip
    parser.add_argument(
        '--cfg-options', nargs='+', action=DictAction, metavar='KEY=VALUE',
        help='settings that replace those of the config',
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.tile is not None and args.tile < 32:
        parser.error(f'--tile must be at least 32 pixels, got {args.tile}')
    if args.overlap is not None and args.tile is None:
        parser.error('--overlap goes with --tile')
    if args.tile is not None:
        if args.overlap is None:
            args.overlap = args.tile // 4
        if not 0 <= args.overlap < args.tile:
            parser.error(f'--overlap must be from 0 to below --tile, got {args.overlap}')
    return parser, args


# Inputs


def find_inputs(path: Path) -> tuple[list[Path], int]:
    """The images and videos at a path, and how many other files a folder has.

    Raises:
        InputError: If there is nothing to read.
    """
    allowed = (*IMG_EXTENSIONS, *VIDEO_EXTENSIONS)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
        found = [file for file in files if file.suffix.lower() in allowed]
        if not found:
            raise InputError(f'folder {str(path)!r} has no images or videos ({", ".join(allowed)})')
        return found, len(files) - len(found)
    if not path.is_file():
        raise InputError(f'input {str(path)!r} does not exist')
    if path.suffix.lower() not in allowed:
        raise InputError(
            f'input {str(path)!r} is neither an image nor a video by its name; '
            f'allowed are {", ".join(allowed)}'
        )
    return [path], 0


def read_image(path: Path) -> np.ndarray:
    """An image as the test pipeline reads it, (H, W, 3) uint8 BGR.

    Raises:
        InputError: If it is damaged; OpenCV alone would fill up what a truncated file lacks.
    """
    Image.MAX_IMAGE_PIXELS = 2**30  # OpenCV's own limit.
    try:
        with Image.open(path) as image:
            image.load()
        pixels = mmcv.imread(str(path))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, cv2.error) as error:
        raise InputError(f'{path}: damaged, or no image: {error}') from error
    if pixels is None:
        raise InputError(f'{path}: an image of a kind that OpenCV cannot read')
    return pixels


def output_names(inputs: list[Path]) -> list[str]:
    """A name for each input's outputs: without its suffix, where that is unique."""
    count = Counter(path.stem for path in inputs)
    return [path.stem if count[path.stem] == 1 else path.name for path in inputs]


# Tiles


def tile_starts(side: int, tile: int, overlap: int) -> list[int]:
    """Where tiles begin along a side, the last moved back to end with it."""
    if side <= tile:
        return [0]
    return [*range(0, side - tile, tile - overlap), side - tile]


def tile_cores(side: int, tile: int, overlap: int) -> list[tuple[int, int]]:
    """The part of each tile along a side that is farther from its edges than from any other's."""
    starts = tile_starts(side, tile, overlap)
    between = [(right + left + tile) // 2 for left, right in pairwise(starts)]
    return list(pairwise([0, *between, side]))


def merge_boxes(
    boxes: Tensor, scores: Tensor, labels: Tensor, cut: Tensor, iou_threshold: float
) -> Tensor:
    """Which boxes of overlapping tiles to keep.

    Args:
        boxes: (n, 4), x1, y1, x2, y2 in the image.
        scores, labels: (n,).
        cut: (n,), whether a box ends at an edge where its tile has cut the image.
        iou_threshold: Above it, of two boxes of one class the better one stays.

    Returns:
        Tensor: Indices by falling score.
    """
    if not len(boxes):
        return torch.zeros(0, dtype=torch.long, device=boxes.device)
    nms = dict(type='nms', iou_threshold=iou_threshold)
    _, keep = batched_nms(boxes, scores, labels, nms)
    boxes, labels, cut = boxes[keep], labels[keep], cut[keep]
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    corner = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    size = (torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:]) - corner).clamp_min(0)
    covered = size.prod(2) > COVERED * area.unsqueeze(1)
    larger = (labels.unsqueeze(1) == labels) & (area > area.unsqueeze(1))
    return keep[~(cut & (covered & larger).any(1))]


# Models


class StrictInferencer(BaseInferencer):
    """Refuses a checkpoint that does not fit, and takes class names from the config at need."""

    def _load_weights_to_model(self, model, checkpoint, cfg):
        state = checkpoint.get('state_dict', checkpoint)
        state = {key.removeprefix('module.'): value for key, value in state.items()}
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise CheckpointError(f'the checkpoint does not fit the config: {error}') from error
        meta = dict(checkpoint.get('meta') or {})
        if 'dataset_meta' not in meta:
            from mmengine.registry import DATASETS

            dataset = DATASETS.build(dict(cfg.test_dataloader.dataset, lazy_init=True))
            meta['dataset_meta'] = dataset.metainfo
        super()._load_weights_to_model(model, dict(state_dict=state, meta=meta), cfg)


class Predictor:
    """A model that predicts on images of any size, draws, and describes what it predicts.

    Args:
        inferencer: The library's, with the model.
        tile: Side of the tiles that larger images are cut into; None leaves them whole.
        overlap: By how much tiles overlap.
        score_thr: Boxes below it are not drawn.
    """

    def __init__(
        self, inferencer: BaseInferencer, tile: int | None, overlap: int, score_thr: float
    ) -> None:
        self.inferencer = inferencer
        self.tile = tile
        self.overlap = overlap
        self.score_thr = score_thr
        self.classes = inferencer.model.dataset_meta['classes']

    def predict(self, image: np.ndarray, progress: Progress):
        """The data sample of an image (H, W, 3) BGR, its arrays on the CPU."""
        height, width = image.shape[:2]
        if self.tile is None or max(height, width) <= self.tile:
            return self.finish(self.run(image), (height, width))
        rows, columns = (tile_starts(side, self.tile, self.overlap) for side in (height, width))
        corners = [(y, x) for y in rows for x in columns]
        parts = []
        task = progress.add_task('tiles', total=len(corners))
        for y, x in corners:
            tile = np.ascontiguousarray(image[y : y + self.tile, x : x + self.tile])
            parts.append(self.run(tile))
            progress.advance(task)
        progress.remove_task(task)
        return self.merge(parts, corners, (height, width))


class Detector(Predictor):
    """Boxes, and masks where the model has them."""

    @staticmethod
    def load(cfg: Config, checkpoint: str, device: str | None) -> BaseInferencer:
        from mmdet.apis import DetInferencer

        class Inferencer(StrictInferencer, DetInferencer):
            pass

        return Inferencer(cfg, checkpoint, device=device, show_progress=False)

    def run(self, image: np.ndarray) -> InstanceData:
        result = self.inferencer(image, return_datasamples=True)
        return result['predictions'][0].pred_instances.cpu()

    def finish(self, found: InstanceData, shape: tuple[int, int], corners=None):
        """A data sample whose masks, if any, are run-length encoded."""
        from mmdet.structures import DetDataSample

        if 'masks' in found:
            masks = []
            for i, mask in enumerate(found.masks):
                if corners is not None:
                    y, x = corners[i]
                    whole = np.zeros(shape, np.uint8, order='F')
                    whole[y : y + mask.shape[0], x : x + mask.shape[1]] = mask
                    mask = whole
                code = rle.encode(np.asfortranarray(mask, dtype=np.uint8))
                masks.append(dict(code, counts=code['counts'].decode()))
            found = InstanceData(**{**dict(found.items()), 'masks': masks})
        return DetDataSample(pred_instances=found)

    def merge(self, parts: list[InstanceData], corners: list[tuple], shape: tuple[int, int]):
        boxes, cut, origins = [], [], []
        last_y, last_x = corners[-1]
        for (y, x), part in zip(corners, parts, strict=True):
            box = part.bboxes
            inner = torch.tensor([x > 0, y > 0, x < last_x, y < last_y])
            ends = torch.tensor([0, 0, *(min(self.tile, side) for side in shape[::-1])])
            cut.append((((box - ends).abs() <= EDGE) & inner).any(1))
            boxes.append(box + box.new_tensor([x, y, x, y]))
            origins += [(y, x)] * len(box)
        boxes, cut = torch.cat(boxes), torch.cat(cut)
        scores = torch.cat([part.scores for part in parts])
        labels = torch.cat([part.labels for part in parts])
        test_cfg = self.inferencer.cfg.model.get('test_cfg') or {}
        nms = (test_cfg.get('rcnn') or test_cfg).get('nms') or {}
        keep = merge_boxes(boxes, scores, labels, cut, nms.get('iou_threshold', 0.5))
        found = InstanceData(bboxes=boxes[keep], scores=scores[keep], labels=labels[keep])
        if all('masks' in part for part in parts):
            masks = [mask for part in parts for mask in part.masks]
            found.masks = [masks[i] for i in keep.tolist()]
        return self.finish(found, shape, [origins[i] for i in keep.tolist()])

    def draw(self, image: np.ndarray, sample) -> np.ndarray:
        found = sample.pred_instances
        found = found[found.scores >= self.score_thr]
        if 'masks' in found:
            masks = [rle.decode(dict(code)) for code in found.masks]
            masks = np.stack(masks) if masks else np.zeros((0, *image.shape[:2]))
            found = InstanceData(**{**dict(found.items()), 'masks': masks.astype(bool)})
        sample = type(sample)(pred_instances=found)
        return self.inferencer.visualize(
            [mmcv.bgr2rgb(image)], [sample], return_vis=True, pred_score_thr=self.score_thr
        )[0]

    def describe(self, sample) -> dict:
        found = sample.pred_instances
        instances = []
        for i in range(len(found)):
            label = int(found.labels[i])
            instances.append(
                dict(
                    label=label,
                    name=self.classes[label],
                    score=round(float(found.scores[i]), 5),
                    bbox=[round(value, 2) for value in found.bboxes[i].tolist()],
                )
            )
            if 'masks' in found:
                instances[-1]['mask'] = found.masks[i]
        return dict(instances=instances)

    def label_image(self, sample) -> None:
        return None


class Segmentor(Predictor):
    """A class per pixel."""

    @staticmethod
    def load(cfg: Config, checkpoint: str, device: str | None) -> BaseInferencer:
        from mmseg.apis import MMSegInferencer

        class Inferencer(StrictInferencer, MMSegInferencer):
            pass

        inferencer = Inferencer(cfg, checkpoint, device=device)
        inferencer.show_progress = False
        return inferencer

    def run(self, image: np.ndarray) -> np.ndarray:
        sample = self.inferencer(image, return_datasamples=True)
        return sample.pred_sem_seg.data[0].cpu().numpy().astype(np.uint8)

    def finish(self, labels: np.ndarray, shape: tuple[int, int]):
        from mmseg.structures import SegDataSample

        return SegDataSample(pred_sem_seg=PixelData(data=torch.from_numpy(labels)[None]))

    def merge(self, parts: list[np.ndarray], corners: list[tuple], shape: tuple[int, int]):
        """Every pixel has the label that the tile gives it whose edges are farthest away."""
        labels = np.empty(shape, np.uint8)
        cores = [tile_cores(side, self.tile, self.overlap) for side in shape]
        inside = [(rows, columns) for rows in cores[0] for columns in cores[1]]
        for (y, x), (rows, columns), part in zip(corners, inside, parts, strict=True):
            labels[slice(*rows), slice(*columns)] = part[
                rows[0] - y : rows[1] - y, columns[0] - x : columns[1] - x
            ]
        return self.finish(labels, shape)

    def draw(self, image: np.ndarray, sample) -> np.ndarray:
        return self.inferencer.visualize(
            [mmcv.bgr2rgb(image)], [sample], return_vis=True, opacity=0.6
        )[0]

    def describe(self, sample) -> dict:
        labels = self.label_image(sample)
        segments = []
        for label in np.unique(labels).tolist():
            mask = labels == label
            code = rle.encode(np.asfortranarray(mask, dtype=np.uint8))
            segments.append(
                dict(
                    label=label,
                    name=self.classes[label],
                    pixels=int(mask.sum()),
                    mask=dict(code, counts=code['counts'].decode()),
                )
            )
        return dict(segments=segments)

    def label_image(self, sample) -> np.ndarray:
        return sample.pred_sem_seg.data[0].numpy()


def load_predictor(args: argparse.Namespace) -> Predictor:
    """The predictor that the arguments describe.

    Raises:
        FileNotFoundError, ValueError: For a config, checkpoint or device that cannot be used.
    """
    cfg = load_config(args.config, args.cfg_options)
    kinds = dict(mmdet=Detector, mmseg=Segmentor)
    scope = cfg.get('default_scope')
    if scope not in kinds:
        raise ValueError(f"default_scope of the config must be 'mmdet' or 'mmseg', got {scope!r}")
    device = None if args.device == 'auto' else args.device
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f'--device {device!r} cannot be used: {error}') from error
    inferencer = kinds[scope].load(cfg, args.checkpoint, device)
    return kinds[scope](inferencer, args.tile, args.overlap or 0, args.score_thr)


# Outputs


def frames(video: mmcv.VideoReader, path: Path) -> Iterator[np.ndarray]:
    """The frames of a video.

    Raises:
        InputError: Where it ends early.
    """
    for index in range(video.frame_cnt):
        frame = video.read()
        if frame is None:
            raise InputError(f'{path}: damaged: {index} of {video.frame_cnt} frames could be read')
        yield frame


def infer_video(predictor: Predictor, path: Path, name: str, out: Path, progress: Progress):
    """Write the video with what is found in it, and the predictions frame by frame."""
    video = mmcv.VideoReader(str(path))
    if not video.opened or video.frame_cnt < 1:
        raise InputError(f'{path}: damaged, or no video')
    picture = out / 'vis' / f'{name}.mp4'
    size = (video.width, video.height)
    writer = cv2.VideoWriter(str(picture), cv2.VideoWriter_fourcc(*'mp4v'), video.fps or 25, size)
    task = progress.add_task(path.name, total=video.frame_cnt)
    head = dict(path=str(path), height=video.height, width=video.width, fps=video.fps)
    try:
        with open(out / 'preds' / f'{name}.json', 'w') as file:
            # One frame at a time: a long video's predictions need not fit into memory.
            file.write(json.dumps(head)[:-1] + ', "frames": [')
            try:
                for index, frame in enumerate(frames(video, path)):
                    sample = predictor.predict(frame, progress)
                    writer.write(mmcv.rgb2bgr(predictor.draw(frame, sample)))
                    file.write((',\n' if index else '\n') + json.dumps(predictor.describe(sample)))
                    progress.advance(task)
            finally:
                file.write('\n]}\n')
    finally:
        writer.release()
        progress.remove_task(task)


def infer_image(predictor: Predictor, path: Path, name: str, out: Path, progress: Progress):
    """Write the picture, the predictions and, of a segmentor, the label image."""
    image = read_image(path)
    sample = predictor.predict(image, progress)
    mmcv.imwrite(mmcv.rgb2bgr(predictor.draw(image, sample)), str(out / 'vis' / f'{name}.png'))
    labels = predictor.label_image(sample)
    if labels is not None:
        mmcv.imwrite(labels, str(out / 'preds' / f'{name}.png'))
    height, width = image.shape[:2]
    found = dict(path=str(path), height=height, width=width, **predictor.describe(sample))
    (out / 'preds' / f'{name}.json').write_text(json.dumps(found))


def main(argv: list[str] | None = None) -> None:
    parser, args = parse_args(argv)
    try:
        inputs, others = find_inputs(args.input)
        predictor = load_predictor(args)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    if others:
        print(f'left out: {others} files that are neither images nor videos by their names')
    for folder in ('vis', 'preds'):
        (args.out / folder).mkdir(parents=True, exist_ok=True)

    failures = []
    with Progress() as progress:
        task = progress.add_task('inputs', total=len(inputs))
        for path, name in zip(inputs, output_names(inputs), strict=True):
            is_video = path.suffix.lower() in VIDEO_EXTENSIONS
            try:
                (infer_video if is_video else infer_image)(
                    predictor, path, name, args.out, progress
                )
            except InputError as error:
                failures.append(str(error))
            except torch.cuda.OutOfMemoryError as error:
                failures.append(f'{path}: {error}; a --tile smaller than the image needs less')
            progress.advance(task)
    print(f'{len(inputs) - len(failures)} of {len(inputs)} inputs done, see {args.out}')
    if failures:
        sys.exit('\n'.join(['not done:', *failures]))


if __name__ == '__main__':
    main()
