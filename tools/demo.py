"""Train, test and draw a small detector and a small segmentor with InLine backbones.

Everything happens by the tools one would use oneself, on the built-in data set, in a few
minutes on two CPU cores, which the two tasks share. Run it again to go on after an interruption.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np

from inline_mm.datasets import CLASSES, PALETTE, make_shapes

REPO = Path(__file__).resolve().parent.parent
CONFIGS = dict(
    detection='configs/mini/mask-rcnn_inline-pvt-mini_fpn_10e_shapes.py',
    segmentation='configs/mini/fpn_inline-pvt-mini_1xb8-500_shapes.py',
)
METRICS = dict(
    detection={'bbox_mAP': 'coco/bbox_mAP', 'segm_mAP': 'coco/segm_mAP'},
    segmentation={'mIoU': 'mIoU'},
)
# Pictures are drawn for this many images, this many times as large as they are.
PICTURES, ZOOM = 8, 3


def run_tool(task: str, tool: str, *arguments: str | Path) -> None:
    """Run one of the tools on half of the cores, its output marked with the task.

    Raises:
        SystemExit: If it fails.
    """
    threads = max((os.cpu_count() or 2) // len(CONFIGS), 1)
    process = subprocess.Popen(
        [sys.executable, REPO / 'tools' / tool, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors='replace',
        env={**os.environ, 'OMP_NUM_THREADS': str(threads)},
    )
    for line in process.stdout:
        if line.strip():
            print(f'{task:12} | {line}', end='', flush=True)
    if process.wait():
        raise SystemExit(f'demo: {tool} failed at {task}; its output is above')


def data_options(task: str, root: Path) -> list[str]:
    """The options that point a config at the demo's data set."""
    data = root / 'data'
    options = [f'{split}_dataloader.dataset.data_root={data}' for split in ('train', 'val', 'test')]
    if task == 'detection':
        options += [
            f'{split}_evaluator.ann_file={data}/annotations/instances_val.json'
            for split in ('val', 'test')
        ]
    return ['--cfg-options', *options]


def train(task: str, root: Path) -> tuple[dict[str, float], float]:
    """Train and test: the metrics between 0 and 1, and the seconds it took."""
    start = time.time()
    folder, config, options = root / task, REPO / CONFIGS[task], data_options(task, root)
    run_tool(task, 'train.py', config, '--work-dir', folder, '--resume', *options)
    shutil.rmtree(folder / 'test', ignore_errors=True)
    run_tool(task, 'test.py', config, checkpoint(folder), '--work-dir', folder / 'test', *options)
    (log,) = (folder / 'test').glob('*/*.json')
    logged = json.loads(log.read_text())
    percent = 100 if task == 'segmentation' else 1
    metrics = {name: round(logged[key] / percent, 4) for name, key in METRICS[task].items()}
    return metrics, time.time() - start


def checkpoint(folder: Path) -> str:
    return (folder / 'last_checkpoint').read_text().strip()


def draw(task: str, root: Path) -> None:
    """Write TASK.png: predictions, as tools/infer.py draws them, beside ground truth."""
    folder = root / task
    enlarged = folder / 'images'
    shutil.rmtree(enlarged, ignore_errors=True)
    enlarged.mkdir()
    paths = sorted((root / 'data/images/val').iterdir())[:PICTURES]
    for path in paths:
        cv2.imwrite(str(enlarged / path.name), enlarge(cv2.imread(str(path)), cv2.INTER_CUBIC))
    out = folder / 'predictions'
    run_tool(
        task, 'infer.py', enlarged, REPO / CONFIGS[task], checkpoint(folder),
        '--out', out, '--score-thr', '0.5',
    )  # fmt: skip
    pictures = []
    for path in paths:
        image = cv2.imread(str(enlarged / path.name))[..., ::-1]
        truth = (truth_of_detection if task == 'detection' else truth_of_segmentation)(
            image, path, root / 'data'
        )
        found = cv2.imread(str(out / 'vis' / path.name))[..., ::-1]
        pictures.append(np.concatenate([truth, found], 1))
    tile(pictures, root / f'{task}.png')


def enlarge(image: np.ndarray, interpolation: int = cv2.INTER_NEAREST) -> np.ndarray:
    return cv2.resize(image, None, fx=ZOOM, fy=ZOOM, interpolation=interpolation)


def truth_of_detection(image: np.ndarray, path: Path, data: Path) -> np.ndarray:
    """Boxes and masks of an image as annotated."""
    from mmdet.structures import DetDataSample
    from mmdet.visualization import DetLocalVisualizer
    from mmengine.structures import InstanceData
    from pycocotools.coco import COCO

    visualizer = DetLocalVisualizer(name='truth')
    visualizer.dataset_meta = dict(classes=CLASSES, palette=list(PALETTE[1:]))
    coco = COCO(str(data / 'annotations/instances_val.json'))
    (index,) = [i for i, entry in coco.imgs.items() if entry['file_name'] == path.name]
    truth = coco.loadAnns(coco.getAnnIds(index))
    boxes = np.array([a['bbox'] for a in truth], float)
    boxes[:, 2:] += boxes[:, :2]
    instances = InstanceData(
        bboxes=boxes * ZOOM,
        labels=np.array([a['category_id'] - 1 for a in truth]),
        masks=np.array([enlarge(coco.annToMask(a)) for a in truth], bool),
    )
    visualizer.add_datasample('', image, DetDataSample(gt_instances=instances), draw_pred=False)
    return visualizer.get_image()


def truth_of_segmentation(image: np.ndarray, path: Path, data: Path) -> np.ndarray:
    """Label colours of an image as annotated."""
    import torch
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample
    from mmseg.visualization import SegLocalVisualizer

    visualizer = SegLocalVisualizer(name='truth', alpha=0.6)
    visualizer.dataset_meta = dict(classes=('ground', *CLASSES), palette=list(PALETTE))
    # Stored as ADE20K does: class + 1.
    labels = enlarge(cv2.imread(str(data / 'labels/val' / path.name), 0)) - 1
    sample = SegDataSample(gt_sem_seg=PixelData(data=torch.from_numpy(labels)))
    visualizer.add_datasample('', image, sample, draw_pred=False)
    return visualizer.get_image()


def tile(pictures: list[np.ndarray], path: Path, columns: int = 2) -> None:
    """Write pictures of ground truth and prediction in rows, under a line that says so."""
    width = pictures[0].shape[1]
    header = np.full((22, width, 3), 255, np.uint8)
    for text, left in (('ground truth', 0), ('prediction', width // 2)):
        cv2.putText(
            header, text, (left + 6, 16), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (0, 0, 0), 1, cv2.LINE_AA
        )
    stacks = [np.concatenate([header, *pictures[i::columns]]) for i in range(columns)]
    gap = np.full((len(stacks[0]), 8, 3), 255, np.uint8)
    row = [part for stack in stacks for part in (gap, stack)][1:]
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
    print(f'demo: training and testing {" and ".join(CONFIGS)}', flush=True)
    with ThreadPoolExecutor() as pool:
        for task, future in {task: pool.submit(train, task, root) for task in CONFIGS}.items():
            metrics, seconds[task] = future.result()
            results.update(metrics)
    print('demo: drawing', flush=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda task: draw(task, root), CONFIGS))
    seconds['total'] = time.time() - start
    seconds = {name: round(value, 1) for name, value in seconds.items()}
    (root / 'results.json').write_text(json.dumps(dict(**results, seconds=seconds), indent=2))
    print(
        f'demo: {results}, {seconds["total"]} s\n'
        f'demo: pictures and results.json are in {args.work_dir}'
    )


if __name__ == '__main__':
    main()
