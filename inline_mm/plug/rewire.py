"""Connects what read the old backbone to the new one: necks, heads, indices, channel numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from .config import PlugError, Recorder, type_name
from .features import Level

__all__ = ['Host', 'find_hosts', 'refuse_unpluggable', 'rewire']

_REAL_TIME = 'the real-time segmenter is its backbone: {}, so another would be another model'

#: What cannot take another backbone, and why: detectors and segmenters, backbones, necks, heads.
UNPLUGGABLE = {
    'Detectron2Wrapper': 'detectron2 builds the whole model from a config of its own',
    'MultimodalEncoderDecoder': (
        "its side adapter taps a CLIP image encoder layer by layer and needs CLIP's text encoder"
    ),
    'ImageClassifier': 'it is a classifier (pre-training), not a detector or a segmenter',
    'BaseReID': 'it is a re-identification classifier, not a detector or a segmenter',
    'SSDVGG': (
        "SSD's extra layers and L2 scaling are cut for VGG's 38 x 38 and 19 x 19 maps at fixed "
        'input sizes'
    ),
    'HourglassNet': (
        'stacked hourglasses are encoder and decoder in one: each stack gives a stride-4 map that '
        'has heads and losses of its own'
    ),
    'TridentResNet': (
        'its branches with shared weights and different dilations are the method: they multiply '
        'the batch that the heads expect'
    ),
    'VPD': 'its features come from the denoising network of a text-to-image diffusion model',
    'BiSeNetV1': _REAL_TIME.format('a spatial and a context path, fused inside'),
    'BiSeNetV2': _REAL_TIME.format('a detail and a semantic branch, fused inside'),
    'STDCContextPathNet': _REAL_TIME.format('STDC stages with context path and fusion inside'),
    'ICNet': _REAL_TIME.format('three resolutions of the image, encoded with shared layers'),
    'ICNeck': _REAL_TIME.format('three resolutions of the image, encoded with shared layers'),
    'FastSCNN': _REAL_TIME.format('learning to downsample and a global branch, fused inside'),
    'CGNet': _REAL_TIME.format('context-guided blocks with image injection, up to the classifier'),
    'ERFNet': _REAL_TIME.format('encoder and decoder in one'),
    'DDRNet': _REAL_TIME.format('two branches that exchange features at every stage'),
    'PIDNet': _REAL_TIME.format('three branches that exchange features at every stage'),
    'UNet': 'encoder and decoder are one network, which gives decoded maps up to stride 1',
    'RFP': (
        'the recursive feature pyramid feeds its output back into the backbone, which only '
        "DetectoRS's ResNet takes"
    ),
    'DPTHead': "it reads ViT's class token beside every map, which no pyramid backbone gives",
}

#: Necks that bring maps of one stride (ViT's) to the strides of a pyramid.
_RESCALING = {'Feature2Pyramid': 'rescales', 'MultiLevelNeck': 'scales'}

_HEADS = (
    'decode_head',
    'auxiliary_head',
    'rpn_head',
    'bbox_head',
    'mask_head',
    'panoptic_head',
    'semantic_head',
    'track_head',
    'head',
)


@dataclass
class Host:
    """A detector or segmenter inside a config: the node that has the backbone.

    Attributes:
        path: Its dotted path, ``'model'`` or ``'model.detector'``.
        node: The node.
        parents: The nodes around it, outermost first, with their paths.
    """

    path: str
    node: dict
    parents: list[tuple[str, dict]]

    @property
    def backbone(self) -> dict:
        return self.node['backbone']


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        yield from node.items()
    elif isinstance(node, (list, tuple)):
        yield from ((str(i), value) for i, value in enumerate(node))


def find_hosts(model: dict) -> list[Host]:
    """The detectors and segmenters in a model's config that have a backbone, wrappers opened.

    A tracker's re-identification network is none of them, nor a teacher that has its own weights.
    """

    def walk(path: str, node: Any, parents: list[tuple[str, dict]]) -> Iterator[Host]:
        if isinstance(node, Mapping):
            if type_name(node.get('backbone')):
                yield Host(path, node, parents)
                return
            parents = [*parents, (path, node)]
        for key, value in _children(node):
            if key != 'reid':
                yield from walk(f'{path}.{key}', value, parents)

    return list(walk('model', model, []))


def refuse_unpluggable(model: dict) -> None:
    """Raise for models in which the backbone is no separate part.

    Raises:
        PlugError: Saying which part, and why.
    """
    hosts = find_hosts(model)
    for host in hosts:
        neck = host.node.get('neck')
        parts = [*(neck if isinstance(neck, (list, tuple)) else [neck])]
        parts += [head for _, head in _readers(host)]
        for part in [*(node for _, node in host.parents), host.node, host.backbone, *parts]:
            if type_name(part) in UNPLUGGABLE:
                raise PlugError(
                    f'{type_name(part)} cannot take another backbone: '
                    f'{UNPLUGGABLE[type_name(part)]}'
                )
    if not hosts:
        kind = type_name(model)
        raise PlugError(
            f'{kind} cannot take another backbone: {UNPLUGGABLE[kind]}'
            if kind in UNPLUGGABLE
            else f'the model ({kind or "no type"}) has no backbone'
        )


def _readers(host: Host) -> list[tuple[str, dict]]:
    """The heads of a host, with their paths; cascades and iterative heads opened."""
    found = []
    for key in _HEADS:
        head = host.node.get(key)
        path = f'{host.path}.{key}'
        for sub, node in _children(head) if isinstance(head, (list, tuple)) else [('', head)]:
            if isinstance(node, Mapping):
                at = f'{path}.{sub}' if sub else path
                inner = node.get('kernel_generate_head')
                found.append((f'{at}.kernel_generate_head', inner) if inner else (at, node))
    return found


def _match(targets: Sequence[Level], available: Sequence[Level]) -> list[Level] | None:
    """The levels nearest to ``targets`` in stride, in order of depth, none of them twice.

    Outputs of one stride, as dilated backbones have, are so matched by their depth: strides
    4, 8, 8, 8 become 4, 8, 16, 32.
    """
    if len(targets) > len(available):
        return None

    def cost(levels: Sequence[Level]) -> tuple[float, int]:
        octaves = sum(
            abs(math.log2(t.stride / x.stride)) for t, x in zip(targets, levels, strict=True)
        )
        return octaves, -sum(x.index for x in levels)

    return list(min(combinations(available, len(targets)), key=cost))


def _like(old: Any, values: Sequence) -> Any:
    """``values`` in the container, list or tuple, of ``old``; a number where that is one."""
    if isinstance(old, (list, tuple)):
        return type(old)(values)
    return values[0]


def rewire(
    host: Host, old: list[Level], new: list[Level], name: str, scope: str | None, rec: Recorder
) -> tuple[tuple[int, ...], list[str]]:
    """Connect a host's neck and heads to a new backbone, by stride.

    Args:
        host: The detector or segmenter.
        old: What its old backbone gives.
        new: All that the new one can give.
        name: The new one's class, for messages.
        scope: The library of the config.
        rec: Makes and records the changes.

    Returns:
        tuple: ``out_indices`` of the new backbone, and libraries the config now needs.

    Raises:
        PlugError: If no level of the new backbone stands in for one that is read.
    """
    return _Rewiring(host, old, new, name, scope, rec).run()


class _Rewiring:
    def __init__(self, host, old, new, name, scope, rec) -> None:
        self.host, self.old, self.all_new, self.name = host, old, new, name
        self.scope, self.rec = scope, rec
        self.imports: list[str] = []
        neck = host.node.get('neck')
        self.necks = list(neck) if isinstance(neck, (list, tuple)) else [neck] if neck else []
        self.neck_path = f'{host.path}.neck.0' if len(self.necks) > 1 else f'{host.path}.neck'
        self.flat_new = len(new) > 1 and len({x.stride for x in new}) == 1
        self.why_channels = f'channels of {name}'

    # What is read

    def targets(self) -> list[Level]:
        """The old outputs, at the stride at which a rescaling neck hands them on."""
        scales = None
        if self.necks and type_name(self.necks[0]) in _RESCALING:
            key = _RESCALING[type_name(self.necks[0])]
            scales = self.necks[0].get(key, [4, 2, 1, 0.5] if key == 'rescales' else None)
        if scales is None:
            return self.old
        return [
            Level(x.index, x.channels, round(x.stride / scale))
            for x, scale in zip(self.old, scales, strict=True)
        ]

    def used(self) -> list[int]:
        """Positions in the old outputs that are read."""
        everything = list(range(len(self.old)))
        if self.necks:
            start = self.necks[0].get('start_level', 0)
            return everything if type_name(self.necks[0]) == 'JPU' else everything[start:]
        positions: set[int] = set()
        for path, head in _readers(self.host):
            positions.update(self.positions_read(path, head))
        return sorted(positions) or everything

    def positions_read(self, path: str, head: dict) -> list[int]:
        """Positions in the old outputs that a head reads."""
        index = head.get('in_index')
        if index is None:
            many = isinstance(head.get('in_channels'), (list, tuple))
            index = list(range(len(self.old))) if many else -1
        positions = [i % len(self.old) for i in (index if isinstance(index, Sequence) else [index])]
        return [0, *positions] if 'c1_in_channels' in head else positions

    # Matching

    def run(self) -> tuple[tuple[int, ...], list[str]]:
        targets, used = self.targets(), self.used()
        flat_old = len(self.old) > 1 and len({x.stride for x in self.old}) == 1
        if self.flat_new:
            wanted = {targets[p].stride for p in used}
            if wanted == {self.all_new[0].stride} or (flat_old and self.necks):
                chosen = self.spread(used)
                self.keep_flat = True
                return self.connect(used, chosen, targets)
            return self.through_pyramid_neck(used, targets)
        self.keep_flat = False
        chosen = self.nearest(used, targets, self.all_new)
        return self.connect(used, chosen, targets)

    def nearest(
        self, used: list[int], targets: list[Level], available: list[Level]
    ) -> dict[int, Level]:
        full = _match(targets, available)
        strides = [x.stride for x in targets]
        if not self.necks and self.scope == 'mmseg' and len(set(strides)) == len(strides):
            # Undilated, and heads may read a level twice: none has to make way for another.
            full = [_match([x], available)[0] for x in targets]
        chosen = (
            {p: full[p] for p in used}
            if full
            else dict(zip(used, _match([targets[p] for p in used], available) or (), strict=False))
        )
        if len(chosen) < len(used):
            raise PlugError(
                f'{len(used)} levels are read (strides {[targets[p].stride for p in used]}), and '
                f'{self.name} gives {len(available)} (strides {[x.stride for x in available]})'
            )
        if self.scope != 'mmseg':
            wrong = {targets[p].stride: chosen[p].stride for p in used}
            wrong = {a: b for a, b in wrong.items() if a != b}
            if wrong:
                raise PlugError(
                    f'anchors, points and regions of interest are laid out for strides '
                    f'{list(wrong)}, and the nearest that {self.name} gives are '
                    f'{list(wrong.values())}'
                )
        return self.same_map_for_cascade(chosen, targets)

    def same_map_for_cascade(
        self, chosen: dict[int, Level], targets: list[Level]
    ) -> dict[int, Level]:
        """Heads of a cascade that shared a resolution go on sharing one.

        A later head (OCRHead) pools its features under the earlier one's prediction.
        """
        heads = self.host.node.get('decode_head')
        if self.necks or not isinstance(heads, (list, tuple)):
            return chosen
        positions = {p for i, h in enumerate(heads) for p in self.positions_read(str(i), h)}
        for stride in {targets[p].stride for p in positions}:
            group = [p for p in positions if targets[p].stride == stride]
            for p in group:
                chosen[p] = chosen[max(group)]
        return chosen

    def spread(self, positions: Sequence[int]) -> dict[int, Level]:
        """Blocks of a single-scale backbone, evenly spread up to the last."""
        depth, count = len(self.all_new), len(positions)
        return {
            p: self.all_new[max(0, round((i + 1) * depth / count) - 1)]
            for i, p in enumerate(positions)
        }

    # Changing the config

    def connect(
        self, used: list[int], chosen: dict[int, Level], targets: list[Level]
    ) -> tuple[tuple[int, ...], list[str]]:
        """Write channels and indices for ``chosen[position]`` in place of the old outputs."""
        outputs = sorted(set(chosen.values()), key=lambda x: x.index)
        for p in used:
            if chosen[p].stride != targets[p].stride and not self.keep_flat:
                self.rec.note(
                    f'{self.host.path}.backbone (output {p})',
                    f'stride {targets[p].stride}',
                    f'stride {chosen[p].stride}',
                    f'the nearest stride of {self.name}, in order of depth (it is not dilated); '
                    'predictions are upsampled to the image as before',
                )
        if not self.necks:
            self.connect_heads(chosen, outputs)
        else:
            self.connect_neck(used, chosen, outputs, targets)
        return tuple(x.index for x in outputs), self.imports

    def connect_heads(self, chosen: dict[int, Level], outputs: list[Level]) -> None:
        roi_head = self.host.node.get('roi_head')
        if roi_head:
            if roi_head.get('shared_head'):
                self.add_channel_mapper(outputs)
                return
            self.connect_roi_head(roi_head, outputs[0].channels)
        for path, head in _readers(self.host):
            if 'in_channels' not in head:
                continue
            self.connect_head(path, head, chosen, outputs)

    def connect_head(
        self, path: str, head: dict, chosen: dict[int, Level], outputs: list[Level]
    ) -> None:
        levels = [chosen[p] for p in self.positions_read(path, head)]
        if 'c1_in_channels' in head:
            self.rec.set(head, path, 'c1_in_channels', levels.pop(0).channels, self.why_channels)
        channels = _like(head['in_channels'], [x.channels for x in levels])
        self.rec.set(head, path, 'in_channels', channels, self.why_channels)
        index = head.get('in_index', -1)
        if index is not None and (index != -1 or levels != [outputs[-1]]):
            if isinstance(head['in_channels'], (list, tuple)) and 'in_index' not in head:
                return
            index = _like(index, [outputs.index(x) for x in levels])
            self.rec.set(head, path, 'in_index', index, 'position among the outputs that are read')

    def connect_roi_head(self, roi_head: dict, channels: int) -> None:
        """Regions of interest cut straight from the backbone's one output."""
        path = f'{self.host.path}.roi_head'
        for key, node in roi_head.items():
            wanted = 'out_channels' if key.endswith('roi_extractor') else 'in_channels'
            if key.endswith(('roi_extractor', '_head')):
                for sub, part in _children(node) if isinstance(node, list) else [('', node)]:
                    if isinstance(part, Mapping) and wanted in part:
                        at = f'{path}.{key}.{sub}' if sub else f'{path}.{key}'
                        self.rec.set(part, at, wanted, channels, self.why_channels)

    def add_channel_mapper(self, outputs: list[Level]) -> None:
        """A 1x1 convolution to the old width, for a ResNet stage that serves as RoI head."""
        width = self.old[-1].channels
        neck = dict(
            type='ChannelMapper' if self.scope == 'mmdet' else 'mmdet.ChannelMapper',
            in_channels=[x.channels for x in outputs],
            kernel_size=1,
            out_channels=width,
            act_cfg=None,
            num_outs=1,
        )
        self.rec.set(
            self.host.node,
            self.host.path,
            'neck',
            neck,
            f'roi_head.shared_head is a stage of a ResNet and takes {width} channels',
        )

    def connect_neck(
        self,
        used: list[int],
        chosen: dict[int, Level],
        outputs: list[Level],
        targets: list[Level],
    ) -> None:
        neck, path, kind = self.necks[0], self.neck_path, type_name(self.necks[0])
        channels = [chosen[p].channels for p in used]
        if kind in _RESCALING:
            self.connect_rescaling_neck(neck, kind, chosen, outputs, targets)
        elif kind == 'MLANeck' and not self.keep_flat:
            self.level_before(neck, channels, outputs, targets)
        elif 'in_channels' not in neck:
            # Pooling and the like hand on the width they get.
            self.connect_heads(chosen, outputs)
        elif not isinstance(neck['in_channels'], (list, tuple)):
            self.rec.set(neck, path, 'in_channels', channels[-1], self.why_channels)
        else:
            self.connect_neck_inputs(neck, path, kind, used, chosen)

    def connect_neck_inputs(
        self, neck: dict, path: str, kind: str, used: list[int], chosen: dict[int, Level]
    ) -> None:
        given = list(neck['in_channels'])
        before = [x.channels for x in self.old]
        if len(given) != len(before):
            raise PlugError(
                f'{kind} has {len(given)} in_channels, and the old backbone gives '
                f'{len(before)} maps'
            )
        channels = [chosen[p].channels for p in used]
        if given != before and given == before[::-1]:  # YOLOv3's, deepest first
            channels.reverse()
        self.rec.set(
            neck, path, 'in_channels', _like(neck['in_channels'], channels), self.why_channels
        )
        skipped = len(before) - len(used)
        if skipped:
            why = 'the backbone gives the levels in use alone, so that every parameter is trained'
            if neck.get('end_level', -1) > 0:
                self.rec.set(neck, path, 'end_level', neck['end_level'] - skipped, why)
            self.rec.set(neck, path, 'start_level', 0, why)
        if kind == 'SSDNeck':
            # It hands its inputs on, and grows the further levels from the last.
            width = _like(neck['out_channels'], [*channels, *neck['out_channels'][len(given) :]])
            self.rec.set(neck, path, 'out_channels', width, self.why_channels)
            head, at = self.host.node['bbox_head'], f'{self.host.path}.bbox_head'
            self.rec.set(
                head, at, 'in_channels', _like(head['in_channels'], width), self.why_channels
            )
        elif kind == 'JPU':
            # All but its last output are its inputs as they are.
            for at, head in _readers(self.host):
                many = isinstance(head['in_channels'], (list, tuple))
                index = head.get('in_index', -1)
                new = [
                    chosen[used[i]].channels if 0 <= i < len(used) - 1 else old
                    for i, old in zip(
                        index if many else [index],
                        head['in_channels'] if many else [head['in_channels']],
                        strict=True,
                    )
                ]
                self.rec.set(
                    head, at, 'in_channels', _like(head['in_channels'], new), self.why_channels
                )

    # Single-scale backbones

    def connect_rescaling_neck(
        self,
        neck: dict,
        kind: str,
        chosen: dict[int, Level],
        outputs: list[Level],
        targets: list[Level],
    ) -> None:
        """A neck that made a pyramid of ViT's maps."""
        levels = [chosen[p] for p in range(len(self.old))]
        if kind == 'MultiLevelNeck':
            channels = [x.channels for x in levels]
            self.rec.set(neck, self.neck_path, 'in_channels', channels, self.why_channels)
            scales = [x.stride / t.stride for x, t in zip(levels, targets, strict=True)]
            if scales != list(neck.get('scales', ())):
                scales = [int(s) if s == int(s) else s for s in scales]
                why = f'{self.name} gives a pyramid already'
                self.rec.set(neck, self.neck_path, 'scales', scales, why)
        elif self.keep_flat:
            self.rec.set(neck, self.neck_path, 'embed_dim', levels[0].channels, self.why_channels)
        else:
            rest = self.necks[1:]
            self.rec.set(
                self.host.node,
                self.host.path,
                'neck',
                rest or None,
                f'{self.name} gives a pyramid already',
            )
            self.necks = rest
            if not rest:
                self.connect_heads(chosen, outputs)

    def level_before(
        self, neck: dict, channels: list[int], outputs: list[Level], targets: list[Level]
    ) -> None:
        """Bring a pyramid to one stride for a neck that adds its inputs up."""
        width = neck['out_channels']
        scales = [x.stride / t.stride for x, t in zip(outputs, targets, strict=True)]
        leveller = self.pyramid_neck(channels, width, scales)
        self.rec.set(
            neck,
            f'{self.host.path}.neck.1',
            'in_channels',
            _like(neck['in_channels'], [width] * len(channels)),
            f'width of {leveller["type"]}',
        )
        self.rec.set(
            self.host.node,
            self.host.path,
            'neck',
            [leveller, *self.necks],
            f'{type_name(neck)} adds maps of one stride, {self.name} gives a pyramid',
        )

    def pyramid_neck(self, channels: list[int], width: int, scales: list[float]) -> dict:
        prefix = '' if self.scope == 'mmseg' else 'mmseg.'
        if prefix and 'mmseg.models' not in self.imports:
            self.imports.append('mmseg.models')
        scales = [int(s) if s == int(s) else s for s in scales]
        if scales == [4, 2, 1, 0.5] and set(channels) == {width}:
            # Group norm: it needs no large batch, and works on a CPU, where SyncBN does not.
            norm = dict(type='GN', num_groups=math.gcd(32, width))
            return dict(type=f'{prefix}Feature2Pyramid', embed_dim=width, norm_cfg=norm)
        return dict(
            type=f'{prefix}MultiLevelNeck', in_channels=channels, out_channels=width, scales=scales
        )

    def through_pyramid_neck(
        self, used: list[int], targets: list[Level]
    ) -> tuple[tuple[int, ...], list[str]]:
        """Give a single-scale backbone a pyramid neck, which the rest reads."""
        own = self.all_new[0]
        blocks = self.spread(range(4))
        virtual = [
            Level(i, own.channels, max(1, round(own.stride / scale)))
            for i, scale in enumerate((4, 2, 1, 0.5))
        ]
        if self.necks and type_name(self.necks[0]) == 'MLANeck':
            raise PlugError('MLANeck adds maps of one stride; nothing is to be rescaled')
        self.keep_flat = False
        chosen = self.nearest(used, targets, virtual)
        picked = sorted(set(chosen.values()), key=lambda x: x.index)
        neck = self.pyramid_neck(
            [own.channels] * len(picked), own.channels, [own.stride / x.stride for x in picked]
        )
        self.connect(used, chosen, targets)
        rest = self.host.node.get('neck')
        rest = list(rest) if isinstance(rest, (list, tuple)) else [rest] if rest else []
        self.rec.set(
            self.host.node,
            self.host.path,
            'neck',
            [neck, *rest] if rest else neck,
            f'{self.name} has one stride, {own.stride}: the neck makes a pyramid of '
            f'{len(picked)} of its blocks',
        )
        return tuple(blocks[x.index].index for x in picked), self.imports
