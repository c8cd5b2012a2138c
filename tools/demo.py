"""Train, test and draw a small detector and a small segmentor with InLine backbones.

Everything happens by the tools one would use oneself, on the built-in data set, in a few
minutes on two CPU cores. Run it again to go on after an interruption.
"""

import argparse
import json
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np

from inline_mm.datasets import CLASSES, PALETTE, make_shapes

REPO = Path(__file__).resolve().parent.parent
CONFIGS = dict(
    detection='configs/mini/mask-rcnn_inline-pvt-mini_fpn_16e_shapes.py',
    segmentation='configs/mini/fpn_inline-pvt-mini_1xb8-500_shapes.py',
)
METRICS = dict(
    detection={'bbox_mAP': 'coco/bbox_mAP', 'segm_mAP': 'coco/segm_mAP'},
    segmentation={'mIoU': 'mIoU'},
)
# Pictures are drawn this many times as large as the images.
ZOOM = 3


def run_tool(tool: str, task: str, root: Path, *arguments: str) -> None:
    """Run tools/train.py or tools/test.py on the demo's data set."""
    options = [
        f'{split}_dataloader.dataset.data_root={root / "data"}'
        for split in ('train', 'val', 'test')
    ]
    if task == 'detection':
        options += [
            f'{split}_evaluator.ann_file={root}/data/annotations/instances_val.json'
            for split in ('val', 'test')
        ]
    subprocess.run(
        [
            sys.executable,
            REPO / 'tools' / tool,
            REPO / CONFIGS[task],
            *arguments,
            '--cfg-options',
            *options,
        ],
        check=True,
    )


def test(task: str, root: Path) -> tuple[dict[str, float], Path]:
    """Test the trained model: its metrics between 0 and 1, the path of its predictions."""
    folder = root / task / 'test'
    shutil.rmtree(folder, ignore_errors=True)
    checkpoint = (root / task / 'last_checkpoint').read_text().strip()
    predictions = folder / ('predictions.pkl' if task == 'detection' else 'predictions')
    run_tool(
        'test.py', task, root, checkpoint, '--work-dir', str(folder), '--out', str(predictions)
    )
    (log,) = folder.glob('*/*.json')
    logged = json.loads(log.read_text())
    percent = 100 if task == 'segmentation' else 1
    return {
        name: round(logged[key] / percent, 4) for name, key in METRICS[task].items()
    }, predictions


def enlarge(image: np.ndarray, interpolation: int = cv2.INTER_NEAREST) -> np.ndarray:
    return cv2.resize(image, None, fx=ZOOM, fy=ZOOM, interpolation=interpolation)


def read_image(path: str | Path) -> np.ndarray:
    return enlarge(cv2.imread(str(path))[..., ::-1], cv2.INTER_CUBIC)


def draw_detection(predictions: Path, root: Path, count: int) -> list[np.ndarray]:
    """Pictures of ground truth and prediction side by side."""
    from mmdet.structures import DetDataSample
    from mmdet.visualization import DetLocalVisualizer
    from mmengine.structures import InstanceData
    from pycocotools import mask as rle
    from pycocotools.coco import COCO

    visualizer = DetLocalVisualizer(name='detection')
    visualizer.dataset_meta = dict(classes=CLASSES, palette=list(PALETTE[1:]))
    coco = COCO(str(root / 'data/annotations/instances_val.json'))
    pictures = []
    with open(predictions, 'rb') as file:
        samples = pickle.load(file)[:count]
    for sample in samples:
        image = read_image(sample['img_path'])
        truth = coco.loadAnns(coco.getAnnIds(sample['img_id']))
        boxes = np.array([a['bbox'] for a in truth], float)
        boxes[:, 2:] += boxes[:, :2]
        found = sample['pred_instances']
        masks = [
            np.array([enlarge(mask) for mask in one], bool).reshape(-1, *image.shape[:2])
            for one in (map(coco.annToMask, truth), map(rle.decode, found['masks']))
        ]
        instances = [
            InstanceData(
                bboxes=boxes * ZOOM,
                labels=np.array([a['category_id'] - 1 for a in truth]),
                masks=masks[0],
            ),
            InstanceData(
                bboxes=found['bboxes'].numpy() * ZOOM,
                labels=found['labels'].numpy(),
                scores=found['scores'].numpy(),
                masks=masks[1],
            ),
        ]
        data_sample = DetDataSample(gt_instances=instances[0], pred_instances=instances[1])
        visualizer.add_datasample('', image, data_sample, pred_score_thr=0.5)
        pictures.append(visualizer.get_image())
    return pictures


def draw_segmentation(predictions: Path, root: Path, count: int) -> list[np.ndarray]:
    """Pictures of ground truth and prediction side by side."""
    import torch
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample
    from mmseg.visualization import SegLocalVisualizer

    visualizer = SegLocalVisualizer(name='segmentation', alpha=0.6)
    visualizer.dataset_meta = dict(classes=('ground', *CLASSES), palette=list(PALETTE))
    pictures = []
    for image in sorted((root / 'data/images/val').iterdir())[:count]:
        # Both as ADE20K stores them: class + 1.
        truth, found = [
            PixelData(data=torch.from_numpy(enlarge(cv2.imread(str(folder / image.name), 0)) - 1))
            for folder in (root / 'data/labels/val', predictions)
        ]
        halves = []
        for draw_gt in (True, False):
            visualizer.add_datasample(
                '',
                read_image(image),
                SegDataSample(gt_sem_seg=truth, pred_sem_seg=found),
                draw_gt=draw_gt,
                draw_pred=not draw_gt,
                with_labels=False,
            )
            halves.append(visualizer.get_image())
        pictures.append(np.concatenate(halves, 1))
    return pictures


def tile(pictures: list[np.ndarray], path: Path, columns: int = 2) -> None:
    """Write pictures of ground truth and prediction in rows, under a line that says so."""
    width = pictures[0].shape[1]
    header = np.full((22, width, 3), 255, np.uint8)
    for text, left in (('ground truth', 0), ('prediction', width // 2)):
        cv2.putText(
            header, text, (left + 6, 16), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (0, 0, 0), 1, cv2.LINE_AA
        )
    stacks = [np.concatenate([header, *pictures[i::columns]]) for i in range(columns)]
    height = min(len(stack) for stack in stacks)
    gap = np.full((height, 8, 3), 255, np.uint8)
    row = [part for stack in stacks for part in (gap, stack[:height])][1:]
    cv2.imwrite(str(path), np.concatenate(row, 1)[..., ::-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/demo'))
    parser.add_argument('--restart', action='store_true', help='forget earlier runs')
    args = parser.parse_args()
    root = args.work_dir.resolve()
    if args.restart:
        shutil.rmtree(root, ignore_errors=True)

    start = time.time()
    results, seconds = {}, {}
    print('demo: making the data set', flush=True)
    make_shapes(root / 'data', progress=True)
    for task in CONFIGS:
        began = time.time()
        print(f'demo: training, {task} ({began - start:.0f} s so far)', flush=True)
        run_tool('train.py', task, root, '--work-dir', str(root / task), '--resume')
        seconds[f'{task}_train'] = round(time.time() - began, 1)
        began = time.time()
        print(f'demo: testing, {task} ({began - start:.0f} s so far)', flush=True)
        metrics, predictions = test(task, root)
        results.update(metrics)
        draw = draw_detection if task == 'detection' else draw_segmentation
        tile(draw(predictions, root, 8), root / f'{task}.png')
        seconds[f'{task}_test'] = round(time.time() - began, 1)
    seconds['total'] = round(time.time() - start, 1)
    (root / 'results.json').write_text(json.dumps(dict(**results, seconds=seconds), indent=2))
    print(
        f'demo: {results}, {seconds["total"]} s\n'
        f'demo: pictures and results.json are in {args.work_dir}'
    )


if __name__ == '__main__':
    main()
