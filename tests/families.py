"""A backbone of every family, small enough for tests of training."""

PYRAMID = dict(depths=[1, 1, 2, 1], num_heads=[1, 2, 2, 4])
FAMILIES = dict(
    pvt=dict(
        type='InLinePVT',
        arch=dict(**PYRAMID, embed_dims=[16, 32, 32, 64], mlp_ratios=[2, 2, 2, 2]),
        img_size=32,
        drop_path_rate=0.0,
    ),
    swin=dict(
        type='InLineSwin',
        arch=dict(
            **PYRAMID,
            embed_dims=16,
            attention=['inline', 'inline', ['inline', 'softmax'], 'softmax'],
            window_size=2,
        ),
        drop_path_rate=0.0,
    ),
    cswin=dict(
        type='InLineCSwin',
        arch=dict(
            depths=[1, 1, 2, 1],
            num_heads=[2, 2, 4, 4],
            embed_dims=16,
            attention=['inline', 'inline', ['inline', 'softmax'], 'softmax'],
            split_sizes=[1, 2, 2, 2],
        ),
        drop_path_rate=0.0,
    ),
    deit=dict(
        type='InLineDeiT',
        arch=dict(depths=4, num_heads=2, embed_dims=32, patch_size=8),
        img_size=32,
        drop_path_rate=0.0,
    ),
)


def segmentor(family: str, num_classes: int = 4, **settings) -> dict:
    """Config of a segmentor: all levels through an FPN; DeiT's last one, which has no pyramid."""
    backbone = dict(FAMILIES[family], **settings)
    head = dict(num_classes=num_classes, channels=8, dropout_ratio=0.0, align_corners=False)
    model = dict(
        type='mmseg.EncoderDecoder',
        data_preprocessor=dict(
            type='mmseg.SegDataPreProcessor', mean=[127.5] * 3, std=[64.0] * 3, size=(32, 32)
        ),
        backbone=backbone,
        train_cfg=dict(),
        test_cfg=dict(mode='whole'),
    )
    widths = channels(family)
    levels = backbone.get('out_indices', range(4))
    if family == 'deit' or len(levels) == 1:
        level = levels[0] if len(levels) == 1 else 0
        model['decode_head'] = dict(
            type='mmseg.FCNHead', in_channels=widths[level], in_index=0, num_convs=1, **head
        )
    else:
        widths = [widths[level] for level in levels]
        model['neck'] = dict(
            type='mmseg.FPN', in_channels=widths, out_channels=8, num_outs=len(widths)
        )
        model['decode_head'] = dict(
            type='mmseg.FPNHead',
            in_channels=[8] * len(widths),
            in_index=list(range(len(widths))),
            feature_strides=[4 * 2**level for level in levels],
            **head,
        )
    return model


def channels(family: str) -> list[int]:
    """Channels of every level."""
    widths = FAMILIES[family]['arch']['embed_dims']
    if family == 'deit':
        return [widths] * 4
    return widths if isinstance(widths, list) else [widths * 2**level for level in range(4)]
