"""The backbones as timm's image classifiers: ``timm.create_model('inline_pvt_small')``.

Importing inline_mm registers one model per family and preset, named ``inline_{family}_{preset}``.
Their parameters lie under ``backbone.``, ``norm.`` and ``head.``, so a classifier trained by timm's
scripts is a ``Pretrained`` checkpoint of the backbone as it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from .backbones import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin
from .backbones.base import InLineBackbone, tokens_to_map
from .checkpoint import from_authors

__all__ = ['InLineClassifier', 'checkpoint_filter_fn']

BACKBONES: dict[str, type[InLineBackbone]] = {
    backbone.family: backbone for backbone in (InLinePVT, InLineSwin, InLineCSwin, InLineDeiT)
}
#: Eps of the norm before the classifier; PVT has none.
NORM_EPS = {'swin': 1e-5, 'cswin': 1e-5, 'deit': 1e-6}


class InLineClassifier(nn.Module):
    """A backbone, a norm where the family has one, pooling and a linear classifier.

    It has the interface of timm's models. Feature maps are NCHW; DeiT's features are tokens
    (B, 1 + H*W, C), class token first.

    Args:
        family: ``'pvt'``, ``'swin'``, ``'cswin'`` or ``'deit'``.
        arch: Name of a preset of the family, or a dict, as of the backbone.
        num_classes: Classes; 0 for none, so that pooled features come out.
        in_chans: Channels of the images.
        img_size: Pre-training image size; by default the preset's. Images may have any size.
        global_pool: ``'avg'``; DeiT also ``'token'``, its default; ``''`` for none, without a
            classifier only.
        drop_rate: Dropout probability before the classifier.
        proj_drop_rate: Dropout probability within the backbone.
        attn_drop_rate: Dropout probability of softmax attention weights.
        drop_path_rate: Stochastic depth of the last block.

    Raises:
        ValueError: For a setting out of range.
    """

    def __init__(
        self,
        family: str,
        arch: str | Mapping[str, Any],
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        global_pool: str | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
    ) -> None:
        super().__init__()
        if family not in BACKBONES:
            raise ValueError(f'family must be one of {list(BACKBONES)}, got {family!r}')
        is_deit = family == 'deit'
        sizes = {} if img_size is None else dict(img_size=img_size)
        self.backbone = BACKBONES[family](
            arch,
            in_channels=in_chans,
            drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
            out_norm=False,
            **sizes,
        )
        self.in_chans = in_chans
        self.num_prefix_tokens = 1 if is_deit else 0
        self.feature_info = self._feature_info()
        self.num_features = self.head_hidden_size = self.feature_info[-1]['num_chs']
        self.norm = nn.Identity()
        if family in NORM_EPS:
            self.norm = nn.LayerNorm(self.num_features, eps=NORM_EPS[family])
        self.head_drop = nn.Dropout(drop_rate)
        self.global_pool = 'token' if is_deit else 'avg'
        self.reset_classifier(num_classes, global_pool)

    def _feature_info(self) -> list[dict[str, Any]]:
        arch = self.backbone.arch
        if self.num_prefix_tokens:
            return [
                dict(
                    num_chs=arch['embed_dims'],
                    reduction=arch['patch_size'],
                    module=f'backbone.blocks.{i}',
                )
                for i in range(arch['depths'])
            ]
        dims = arch['embed_dims']
        if isinstance(dims, int):
            dims = [dims * 2**i for i in range(4)]
        return [
            dict(num_chs=dims[i], reduction=4 * 2**i, module=f'backbone.stages.{i}')
            for i in range(4)
        ]

    # Classifier

    def get_classifier(self) -> nn.Module:
        """The linear classifier, an ``Identity`` where there is none."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Make a new classifier, and choose another pooling unless ``global_pool`` is None."""
        if global_pool is not None:
            allowed = ['avg', '', *(['token'] if self.num_prefix_tokens else [])]
            if global_pool not in allowed:
                raise ValueError(f'global_pool must be one of {allowed}, got {global_pool!r}')
            self.global_pool = global_pool
        if num_classes and not self.global_pool:
            raise ValueError(
                f"global_pool='' leaves the features unpooled and needs num_classes=0, "
                f'got {num_classes!r}'
            )
        self.num_classes = num_classes
        self.head = nn.Identity()
        if num_classes:
            like = next(self.backbone.parameters())
            self.head = nn.Linear(
                self.num_features, num_classes, device=like.device, dtype=like.dtype
            )
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    # Running

    def _features(self, tokens: Tensor, hw: tuple[int, int]) -> Tensor:
        """Tokens of the last level as the features of the family."""
        tokens = self.norm(tokens)
        return tokens if self.num_prefix_tokens else tokens_to_map(tokens, hw)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) to normed features (B, C, H / 32, W / 32), DeiT's tokens."""
        self.backbone.check_image(x)
        for tokens, hw in self.backbone.forward_levels(x):  # noqa: B007 (the last one counts)
            pass
        return self._features(tokens, hw)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features to (B, num_classes), or with ``pre_logits`` to what the classifier gets."""
        if self.num_prefix_tokens and self.global_pool:
            x = x[:, 0] if self.global_pool == 'token' else x[:, 1:].mean(dim=1)
        elif self.global_pool:
            x = x.mean(dim=(2, 3))
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) to (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
        return_prefix_tokens: bool = False,
    ) -> Any:
        """Features of several levels.

        Args:
            x: Images (B, in_chans, H, W).
            indices: Levels: the last n for a number, all for None.
            norm: Whether intermediates go through the classifier's norm; in a pyramid only the
                last can.
            stop_early: Whether to run no further than the last level asked for.
            output_fmt: ``'NCHW'``; DeiT also ``'NLC'``.
            intermediates_only: Whether to return the intermediates without the features.
            return_prefix_tokens: Whether each of DeiT's is a pair: the map, its class token.

        Returns:
            list or tuple: The intermediates, or the features and the intermediates.
        """
        formats = ('NCHW', 'NLC') if self.num_prefix_tokens else ('NCHW',)
        if output_fmt not in formats:
            raise ValueError(f'output_fmt must be one of {formats}, got {output_fmt!r}')
        take, last = feature_take_indices(len(self.feature_info), indices)
        final = len(self.feature_info) - 1
        self.backbone.check_image(x)
        intermediates = []
        for i, (tokens, hw) in enumerate(self.backbone.forward_levels(x)):
            if i in take:
                fits = i == final or bool(self.num_prefix_tokens)
                out = self.norm(tokens) if norm and fits else tokens
                prefix, out = out[:, : self.num_prefix_tokens], out[:, self.num_prefix_tokens :]
                out = tokens_to_map(out, hw).contiguous() if output_fmt == 'NCHW' else out
                intermediates.append((out, prefix) if return_prefix_tokens else out)
            if stop_early and i == last:
                break
        if intermediates_only:
            return intermediates
        features = tokens_to_map(tokens, hw) if i < final else self._features(tokens, hw)
        return features, intermediates

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Remove what the given levels do not need; returns their indices."""
        take, last = feature_take_indices(len(self.feature_info), indices)
        is_cut = last < len(self.feature_info) - 1
        for name in ('patch_embeds', 'pos_embeds', 'stages', 'blocks'):
            if hasattr(self.backbone, name):
                setattr(self.backbone, name, getattr(self.backbone, name)[: last + 1])
        self.feature_info = self.feature_info[: last + 1]
        self.num_features = self.head_hidden_size = self.feature_info[-1]['num_chs']
        if prune_norm or (is_cut and not self.num_prefix_tokens):
            self.norm = nn.Identity()
        if prune_head or is_cut:
            self.reset_classifier(0, '')
        return take

    # Training

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of keeping their activations."""
        self.backbone.with_cp = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters of more than one dimension without weight decay."""
        tables = ('pos_embed', 'cls_token', 'relative_position_bias_table')
        return {
            name for name, _ in self.named_parameters() if any(table in name for table in tables)
        }

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that tell the layers of parameters, for layer-wise learning rates."""
        if self.num_prefix_tokens:
            return dict(
                stem=r'^backbone\.(?:patch_embed|pos_embed|cls_token)',
                blocks=[(r'^backbone\.blocks\.(\d+)', None), (r'^norm', (99999,))],
            )
        embedding = (r'^backbone\.(?:patch|pos)_embeds\.([1-9])', () if coarse else (0,))
        block = r'^backbone\.stages\.(\d+)' if coarse else r'^backbone\.stages\.(\d+)\.(\d+)'
        return dict(
            stem=r'^backbone\.(?:patch|pos)_embeds\.0',
            blocks=[embedding, (block, None), (r'^norm', (99999,))],
        )

    # Checkpoints

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ):
        """Load parameters under our names or the authors'; see :func:`checkpoint_filter_fn`."""
        state = checkpoint_filter_fn(state_dict, self)
        return super().load_state_dict(state, strict=strict, assign=assign)


def checkpoint_filter_fn(
    state_dict: Mapping[str, Tensor], model: InLineClassifier
) -> dict[str, Tensor]:
    """The authors' classification checkpoint under our names and in the model's shapes.

    Args:
        state_dict: The authors' entries, or those of one of our classifiers, which stay.
        model: What they are for.

    Returns:
        dict[str, Tensor]: Renamed entries; position embeddings and bias tables of another size are
        resized, and what the model computes itself (index tables, masks) is left out.
    """
    if any(key.startswith('backbone.') for key in state_dict):
        return dict(state_dict)
    backbone = model.backbone
    own = backbone.state_dict()
    out, theirs = {}, {}
    for key, value in state_dict.items():
        if key.startswith(('norm.', 'head.')):
            out[key] = value
        elif not key.endswith(('.relative_position_index', '.attn_mask')):
            theirs[key] = value
    for key, value in from_authors(theirs, backbone.family, own).items():
        if key in own and value.shape != own[key].shape:
            fitted = backbone.fit_parameter(key, value)
            value = value if fitted is None else fitted
        out[f'backbone.{key}'] = value
    return out


def _default_cfg(family: str, arch: str) -> dict[str, Any]:
    backbone = BACKBONES[family]
    size = backbone.img_sizes.get(arch, 224)
    is_deit = family == 'deit'
    stem = 'backbone.patch_embed.projection' if is_deit else 'backbone.patch_embeds.0.projection'
    return dict(
        num_classes=1000,
        input_size=(3, size, size),
        pool_size=None if is_deit else (size // 32, size // 32),
        # The 384 px models were fine-tuned and tested on whole images.
        crop_pct=1.0 if size == 384 else 0.875,
        interpolation='bicubic',
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        first_conv=stem,
        classifier='head',
        paper_ids='arXiv:2412.06590',
        paper_name='Bridging the Divide: Reconsidering Softmax and Linear Attention',
        origin_url='https://github.com/LeapLabTHU/InLine',
    )


def _entrypoint(family: str, arch: str):
    """timm's entry point for a preset."""

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        feature_cfg = dict(
            feature_cls='getter', out_indices=3 if family == 'deit' else (0, 1, 2, 3)
        )
        return build_model_with_cfg(
            InLineClassifier,
            name,
            pretrained,
            feature_cfg=feature_cfg,
            pretrained_filter_fn=checkpoint_filter_fn,
            **dict(dict(family=family, arch=arch), **kwargs),
        )

    name = f'inline_{family}_{arch.replace("-", "_")}'
    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = f'{BACKBONES[family].__name__}({arch!r}) as a classifier.'
    return entrypoint


#: What timm knows of each model: input size, normalisation, first and last layer.
default_cfgs: dict[str, dict[str, Any]] = {}
for _family, _backbone in BACKBONES.items():
    for _arch in _backbone.presets:
        _function = _entrypoint(_family, _arch)
        default_cfgs[_function.__name__] = _default_cfg(_family, _arch)
        globals()[_function.__name__] = register_model(_function)
