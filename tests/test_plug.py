"""Plugging: what is rewired, what is refused, what a dump says, and one model of every type."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.utils import get_installed_path

from inline_mm.plug import ConfigError, PlugError, backbone_names, check_model, plug_backbone
from inline_mm.plug.config import type_name
from inline_mm.plug.features import measure
from inline_mm.plug.rewire import find_hosts

ROOT = Path(__file__).parents[1]
CHANNELS = [32, 64, 160, 256]
SMALL = dict(
    type='InLinePVT',
    arch=dict(
        depths=[1, 1, 1, 1], embed_dims=CHANNELS, num_heads=[1, 2, 5, 8], mlp_ratios=[2, 2, 2, 2]
    ),
)
RETINANET = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
PSPNET = 'mmseg::pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py'


def whys(cfg: Config) -> str:
    return '\n'.join(map(str, cfg.changes))


# --------------------------------------------------------------------------------------------------
# The old backbone


@pytest.mark.parametrize(
    ('scope', 'backbone', 'strides', 'channels'),
    [
        ('mmdet', dict(type='ResNet', depth=50), [4, 8, 16, 32], [256, 512, 1024, 2048]),
        ('mmdet', dict(type='CSPDarknet'), [8, 16, 32], [256, 512, 1024]),
        ('mmdet', dict(type='SwinTransformer'), [4, 8, 16, 32], [96, 192, 384, 768]),
        (
            'mmseg',
            dict(type='ResNetV1c', depth=18, strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4)),
            [4, 8, 8, 8],
            [64, 128, 256, 512],
        ),
        ('mmseg', dict(type='VisionTransformer', out_indices=[2, 5]), [16, 16], [768, 768]),
    ],
)
def test_old_backbone_is_measured_without_memory(scope, backbone, strides, channels):
    __import__(f'{scope}.models')
    levels = measure(backbone, scope)
    assert [x.stride for x in levels] == strides
    assert [x.channels for x in levels] == channels


# --------------------------------------------------------------------------------------------------
# What is rewired


def test_fpn_gets_the_levels_it_reads():
    cfg = plug_backbone(RETINANET, SMALL)
    assert cfg.model.backbone.out_indices == (1, 2, 3)
    assert cfg.model.neck.in_channels == CHANNELS[1:]
    assert cfg.model.neck.start_level == 0
    assert 'model.neck.start_level: 1 -> 0' in whys(cfg)


def test_neck_that_starts_with_the_deepest_level_keeps_its_order():
    cfg = plug_backbone('mmdet::yolo/yolov3_d53_8xb8-320-273e_coco.py', SMALL)
    assert cfg.model.neck.in_channels == CHANNELS[:0:-1]


def test_dilated_segmenter_gets_levels_of_the_same_depth_with_a_note():
    cfg = plug_backbone(PSPNET, SMALL)
    assert cfg.model.backbone.out_indices == (2, 3)
    head, auxiliary = cfg.model.decode_head, cfg.model.auxiliary_head
    assert (head.in_index, head.in_channels) == (1, CHANNELS[3])
    assert (auxiliary.in_index, auxiliary.in_channels) == (0, CHANNELS[2])
    assert "'stride 8' -> 'stride 32'" in whys(cfg)


def test_head_that_also_reads_a_low_level_gets_its_channels():
    cfg = plug_backbone(
        'mmseg::deeplabv3plus/deeplabv3plus_r50-d8_4xb2-40k_cityscapes-512x1024.py', SMALL
    )
    head = cfg.model.decode_head
    assert cfg.model.backbone.out_indices == (0, 2, 3)
    assert (head.c1_in_channels, head.in_channels, head.in_index) == (32, 256, 2)


def test_resnet_stage_as_roi_head_gets_its_width_through_a_neck():
    cfg = plug_backbone('mmdet::faster_rcnn/faster-rcnn_r50-caffe-c4_ms-1x_coco.py', SMALL)
    assert cfg.model.backbone.out_indices == (2,)
    assert type_name(cfg.model.neck) == 'ChannelMapper'
    assert (cfg.model.neck.in_channels, cfg.model.neck.out_channels) == ([160], 1024)


def test_pyramid_neck_of_a_vit_is_left_out():
    cfg = plug_backbone('mmseg::beit/beit-base_upernet_8xb2-160k_ade20k-640x640.py', SMALL)
    assert cfg.model.neck is None
    assert cfg.model.decode_head.in_channels == CHANNELS
    assert 'constructor' not in cfg.optim_wrapper


def test_kept_decay_by_layer_is_that_of_the_new_backbone():
    cfg = plug_backbone(
        'mmseg::beit/beit-base_upernet_8xb2-160k_ade20k-640x640.py', SMALL, optimizer='keep'
    )
    wrapper = cfg.optim_wrapper
    assert wrapper.constructor == 'inline_mm.LearningRateDecayOptimizerConstructor'
    assert wrapper.paramwise_cfg == dict(decay_rate=0.9, decay_type='layer_wise')
    assert wrapper.optimizer.lr == 3e-5


@pytest.mark.parametrize(
    ('name', 'neck', 'levels'),
    [
        ('mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py', ['Feature2Pyramid', 'FPN'], 4),
        ('mmdet::yolox/yolox_tiny_8xb8-300e_coco.py', ['MultiLevelNeck', 'YOLOXPAFPN'], 3),
        ('mmseg::upernet/upernet_r50_4xb2-40k_cityscapes-512x1024.py', ['Feature2Pyramid'], 4),
    ],
)
def test_single_scale_backbone_gets_a_pyramid_neck(name, neck, levels):
    arch = dict(depths=4, embed_dims=64, num_heads=2)
    cfg = plug_backbone(name, dict(type='InLineDeiT', arch=arch))
    necks = cfg.model.neck if isinstance(cfg.model.neck, list) else [cfg.model.neck]
    assert [type_name(node) for node in necks] == neck
    assert len(cfg.model.backbone.out_indices) == levels
    assert check_model(cfg, (64, 64)).loss > 0


@pytest.mark.parametrize(
    ('name', 'path'),
    [
        (
            'mmdet::soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py',
            'model.detector',
        ),
        (
            'mmdet::qdtrack/qdtrack_faster-rcnn_r50_fpn_8xb2-4e_'
            'mot17halftrain_test-mot17halfval.py',
            'model.detector',
        ),
    ],
)
def test_backbone_inside_a_wrapper_is_found(name, path):
    cfg = plug_backbone(name, SMALL)
    (host,) = find_hosts(cfg.model)
    assert host.path == path
    assert host.node.backbone.type == 'InLinePVT'
    assert host.node.get('init_cfg') is None


def test_other_backbones_than_ours_can_be_plugged():
    cfg = plug_backbone(RETINANET, dict(type='MobileNetV2'))
    assert cfg.model.backbone.out_indices == (2, 4, 7)
    assert cfg.model.neck.in_channels == [32, 96, 1280]
    assert cfg.optim_wrapper.optimizer.type == 'SGD'
    assert cfg.get('custom_imports') is None


# --------------------------------------------------------------------------------------------------
# What goes with the backbone


def test_normalisation_becomes_rgb_inside_multi_branch_preprocessors_too():
    cfg = plug_backbone(
        'mmdet::soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py', SMALL
    )
    inner = cfg.model.data_preprocessor.data_preprocessor
    assert inner.mean == [123.675, 116.28, 103.53]
    assert inner.std == [58.395, 57.12, 57.375]
    assert inner.bgr_to_rgb is True
    assert 'mean' not in cfg.model.data_preprocessor


def test_old_weights_go_and_ours_come():
    cfg = Config(dict(get_config(PSPNET)), filename=get_config(PSPNET).filename)
    cfg.load_from = 'pspnet.pth'
    plugged = plug_backbone(cfg, SMALL)
    assert plugged.load_from is None
    assert plugged.model.pretrained is None
    assert 'init_cfg' not in plugged.model.backbone


def test_custom_imports_are_added_to():
    cfg = get_config(RETINANET)
    cfg.custom_imports = dict(imports='json', allow_failed_imports=True)
    plugged = plug_backbone(cfg, SMALL)
    assert plugged.custom_imports == dict(imports=['json', 'inline_mm'], allow_failed_imports=True)


def test_recipe_is_scaled_to_the_batch_size_and_keeps_the_schedule():
    cfg = plug_backbone(PSPNET, 'inline-swin-tiny')  # 4 GPUs x 2 images
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 3e-5, 0.01)
    assert 'momentum' not in optimizer
    (scheduler,) = cfg.param_scheduler
    assert (scheduler.type, scheduler.end, scheduler.power) == ('PolyLR', 40000, 0.9)
    assert scheduler.eta_min == pytest.approx(1e-4 * 3e-5 / 0.01)


def test_recipe_excludes_norms_biases_and_tables_from_decay():
    from mmdet.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS

    cfg = plug_backbone('mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py', SMALL)
    assert cfg.optim_wrapper.optimizer.lr == 1e-4  # AdamW, tuned for the heads: kept
    backbone = MODELS.build(cfg.model.backbone)
    model = torch.nn.ModuleDict(dict(backbone=backbone))
    wrapper = copy.deepcopy(cfg.optim_wrapper)
    constructor = OPTIM_WRAPPER_CONSTRUCTORS.build(
        dict(
            type='DefaultOptimWrapperConstructor',
            paramwise_cfg=wrapper.pop('paramwise_cfg'),
            optim_wrapper_cfg=wrapper,
        )
    )
    groups = {g['params'][0]: g for g in constructor(model).optimizer.param_groups}
    for name, parameter in model.named_parameters():
        assert groups[parameter]['lr'] == pytest.approx(1e-5), name
        if 'norm' in name or 'pos_embed' in name:
            assert groups[parameter]['weight_decay'] == 0, name
    assert groups[backbone.stages[0][0].mlp.fc1.weight]['weight_decay'] == 0.05


def test_keep_leaves_the_optimizer():
    kept = plug_backbone(RETINANET, SMALL, optimizer='keep')
    assert (
        kept.optim_wrapper == plug_backbone(RETINANET, dict(type='ResNet', depth=18)).optim_wrapper
    )
    assert kept.optim_wrapper.optimizer.type == 'SGD'


# --------------------------------------------------------------------------------------------------
# The config that comes out


@pytest.mark.parametrize('source', ['name', 'path', 'config', 'changed config', 'own file'])
def test_dump_inherits_states_the_changes_and_reads_back_equal(source, tmp_path):
    cfg = get_config(RETINANET)
    given = {
        'name': RETINANET,
        'path': cfg.filename,
        'config': cfg,
        'changed config': cfg,
        'own file': str(tmp_path / 'own.py'),
    }[source]
    if source == 'changed config':
        cfg.train_dataloader.batch_size = 7
    if source == 'own file':
        Path(given).write_text(
            f'_base_ = {RETINANET!r}\nmodel = dict(bbox_head=dict(num_classes=3))'
        )
    plugged = plug_backbone(given, SMALL)
    before = plugged.to_dict()
    (tmp_path / 'sub').mkdir()
    path = tmp_path / 'sub' / 'plugged.py'
    plugged.dump(path)
    assert Config.fromfile(path).to_dict() == before == plugged.to_dict()
    text = path.read_text()
    base = '../own.py' if source == 'own file' else RETINANET
    assert text.startswith(f"_base_ = '{base}'\n")
    assert 'bbox_head' not in text and 'pipeline' not in text
    assert ('batch_size=7' in text) == (source == 'changed config')


def test_config_made_in_memory_is_dumped_whole(tmp_path):
    cfg = Config(get_config(RETINANET).to_dict())
    plugged = plug_backbone(cfg, SMALL)
    plugged.dump(tmp_path / 'plugged.py')
    assert Config.fromfile(tmp_path / 'plugged.py').to_dict() == plugged.to_dict()


def test_given_config_is_not_modified():
    cfg = get_config(RETINANET)
    before = copy.deepcopy(cfg.to_dict())
    plug_backbone(cfg, SMALL)
    assert cfg.to_dict() == before


def test_short_names_are_those_of_the_presets():
    assert {'inline-pvt-small', 'inline-swin-tiny', 'inline-cswin-base'} <= set(backbone_names())
    cfg = plug_backbone(RETINANET, 'inline-pvt-tiny', img_size=384)
    assert dict(cfg.model.backbone) == dict(
        type='InLinePVT', arch='tiny', img_size=384, drop_path_rate=0.2, out_indices=(1, 2, 3)
    )


# --------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ('name', 'reason'),
    [
        ('mmdet::ssd/ssd300_coco.py', "cut for VGG's"),
        (
            'mmdet::cornernet/cornernet_hourglass104_10xb5-crop511-210e-mstest_coco.py',
            'encoder and decoder in one',
        ),
        ('mmdet::detectors/detectors_cascade-rcnn_r50_1x_coco.py', 'feeds its output back'),
        ('mmseg::unet/unet-s5-d16_fcn_4xb4-160k_cityscapes-512x1024.py', 'one network'),
        ('mmseg::stdc/stdc1_4xb12-80k_cityscapes-512x1024.py', 'is its backbone'),
        ('mmseg::dpt/dpt_vit-b16_8xb2-160k_ade20k-512x512.py', 'class token'),
        ('mmseg::san/san-vit-b16_coco-stuff164k-640x640.py', 'CLIP'),
    ],
)
def test_models_that_are_their_backbone_are_refused_with_the_reason(name, reason):
    with pytest.raises(PlugError, match=reason):
        plug_backbone(name, SMALL)


def test_config_without_a_model_is_refused():
    with pytest.raises(ConfigError, match='has no model'):
        plug_backbone('mmdet::rtmdet/rtmdet_tta.py', SMALL)


def test_missing_package_of_a_config_is_named(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text("custom_imports = dict(imports=['not_there.models'])\nmodel = dict()\n")
    with pytest.raises(ConfigError, match="needs the package 'not_there'"):
        plug_backbone(path, SMALL)
    with pytest.raises(ConfigError, match="needs the package 'mmnothing'"):
        plug_backbone('mmnothing::x/y.py', SMALL)


@pytest.mark.parametrize(
    ('backbone', 'message'),
    [
        ('inline-pvt-smal', 'did you mean inline-pvt-small'),
        (dict(type='InlinePVT'), 'did you mean InLinePVT'),
        (dict(type='InLinePVT', archs='tiny'), r"no argument 'archs' \(did you mean 'arch'\?\)"),
        (dict(type='InLinePVT', arch='huge'), "arch must be one of .*'huge'"),
        (dict(arch='tiny'), "needs a 'type'"),
    ],
)
def test_wrong_backbone_is_refused_with_what_is_allowed(backbone, message):
    with pytest.raises(PlugError, match=message):
        plug_backbone(RETINANET, backbone)


def test_checkpoint_of_another_family_is_refused(tmp_path):
    from mmengine.registry import MODELS

    arch = dict(depths=[1, 1, 1, 1], embed_dims=16, num_heads=[1, 2, 4, 8])
    swin = MODELS.build(dict(type='InLineSwin', arch=arch))
    path = tmp_path / 'swin.pth'
    torch.save(dict(state_dict=swin.state_dict()), path)
    with pytest.raises(PlugError, match='does not fit InLinePVT'):
        plug_backbone(RETINANET, SMALL, checkpoint=path)


def test_checkpoint_of_the_backbone_is_named_in_the_config(tmp_path):
    from mmengine.registry import MODELS

    path = tmp_path / 'pvt.pth'
    torch.save(dict(state_dict=MODELS.build(SMALL).state_dict()), path)
    cfg = plug_backbone(RETINANET, SMALL, checkpoint=path)
    assert cfg.model.backbone.init_cfg == dict(type='Pretrained', checkpoint=str(path))


# --------------------------------------------------------------------------------------------------
# Tools


def test_tool_prints_changes_and_checks_the_model(tmp_path):
    path = tmp_path / 'plugged.py'
    arch = SMALL['arch']
    command = [
        sys.executable,
        str(ROOT / 'tools' / 'plug_backbone.py'),
        PSPNET.replace('r50', 'r18').replace('40k', '80k'),
        *('--backbone', 'InLinePVT', '--out', str(path), '--check', '--check-size', '64', '64'),
        *('--backbone-options', *(f'arch.{k}={v}'.replace(' ', '') for k, v in arch.items())),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert 'model.decode_head.in_channels: 512 -> 256' in done.stdout
    assert 'check passed' in done.stdout
    assert path.read_text().startswith('_base_')


# --------------------------------------------------------------------------------------------------
# One model of every type

#: A config for each type of detector, tracker and segmenter, neck and head in the libraries.
SAMPLE = [
    'mmdet::atss/atss_r50_fpn_1x_coco.py',
    'mmdet::autoassign/autoassign_r50-caffe_fpn_1x_coco.py',
    'mmdet::boxinst/boxinst_r50_fpn_ms-90k_coco.py',
    'mmdet::cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py',
    'mmdet::cascade_rpn/cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco.py',
    'mmdet::centernet/centernet_r18_8xb16-crop512-140e_coco.py',
    'mmdet::centernet/centernet-update_r18_fpn_8xb8-amp-lsj-200e_coco.py',
    'mmdet::condinst/condinst_r50_fpn_ms-poly-90k_coco_instance.py',
    'mmdet::conditional_detr/conditional-detr_r50_8xb2-50e_coco.py',
    'mmdet::crowddet/crowddet-rcnn_r50_fpn_8xb2-30e_crowdhuman.py',
    'mmdet::dab_detr/dab-detr_r50_8xb2-50e_coco.py',
    'mmdet::ddod/ddod_r50_fpn_1x_coco.py',
    'mmdet::ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py',
    'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
    'mmdet::detr/detr_r50_8xb2-150e_coco.py',
    'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py',
    'mmdet::dyhead/atss_r50-caffe_fpn_dyhead_1x_coco.py',
    'mmdet::fast_rcnn/fast-rcnn_r50_fpn_1x_coco.py',
    'mmdet::faster_rcnn/faster-rcnn_r50-caffe-dc5_1x_coco.py',
    'mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py',
    'mmdet::foveabox/fovea_r50_fpn_4xb4-1x_coco.py',
    'mmdet::fpg/retinanet_r50_fpg-chn128_crop640_50e_coco.py',
    'mmdet::fsaf/fsaf_r50_fpn_1x_coco.py',
    'mmdet::gfl/gfl_r50_fpn_1x_coco.py',
    'mmdet::grid_rcnn/grid-rcnn_r50_fpn_gn-head_1x_coco.py',
    'mmdet::guided_anchoring/ga-retinanet_r50_fpn_1x_coco.py',
    'mmdet::hrnet/faster-rcnn_hrnetv2p-w18-1x_coco.py',
    'mmdet::htc/htc_r50_fpn_1x_coco.py',
    'mmdet::ld/ld_r18-gflv1-r101_fpn_1x_coco.py',
    'mmdet::libra_rcnn/libra-faster-rcnn_r50_fpn_1x_coco.py',
    'mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py',
    'mmdet::mask2former_vis/mask2former_r50_8xb2-8e_youtubevis2019.py',
    'mmdet::maskformer/maskformer_r50_ms-16xb1-75e_coco.py',
    'mmdet::masktrack_rcnn/masktrack-rcnn_mask-rcnn_r50_fpn_8xb1-12e_youtubevis2019.py',
    'mmdet::ms_rcnn/ms-rcnn_r50_fpn_1x_coco.py',
    'mmdet::nas_fpn/retinanet_r50_nasfpn_crop640-50e_coco.py',
    'mmdet::panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py',
    'mmdet::point_rend/point-rend_r50-caffe_fpn_ms-1x_coco.py',
    'mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py',
    'mmdet::qdtrack/qdtrack_faster-rcnn_r50_fpn_8xb2-4e_mot17halftrain_test-mot17halfval.py',
    'mmdet::queryinst/queryinst_r50_fpn_1x_coco.py',
    'mmdet::reppoints/reppoints-moment_r50_fpn_1x_coco.py',
    'mmdet::rpn/rpn_r50_fpn_1x_coco.py',
    'mmdet::rtmdet/rtmdet-ins_tiny_8xb32-300e_coco.py',
    'mmdet::scnet/scnet_r50_fpn_1x_coco.py',
    'mmdet::soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py',
    'mmdet::solo/decoupled-solo-light_r50_fpn_3x_coco.py',
    'mmdet::solov2/solov2-light_r18_fpn_ms-3x_coco.py',
    'mmdet::sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py',
    'mmdet::ssd/ssdlite_mobilenetv2-scratch_8xb24-600e_coco.py',
    'mmdet::tood/tood_r50_fpn_1x_coco.py',
    'mmdet::vfnet/vfnet_r50_fpn_1x_coco.py',
    'mmdet::yolact/yolact_r50_1xb8-55e_coco.py',
    'mmdet::yolo/yolov3_mobilenetv2_8xb24-320-300e_coco.py',
    'mmdet::yolof/yolof_r50-c5_8xb8-1x_coco.py',
    'mmdet::yolox/yolox_tiny_8xb8-300e_coco.py',
    'mmseg::ann/ann_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::apcnet/apcnet_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::ccnet/ccnet_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::danet/danet_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::deeplabv3plus/deeplabv3plus_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::dmnet/dmnet_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::dnlnet/dnl_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::emanet/emanet_r50-d8_4xb2-80k_cityscapes-512x1024.py',
    'mmseg::encnet/encnet_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::fastfcn/fastfcn_r50-d32_jpu_aspp_4xb2-80k_cityscapes-512x1024.py',
    'mmseg::gcnet/gcnet_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::hrnet/fcn_hr18s_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::isanet/isanet_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::knet/knet-s3_r50-d8_fcn_8xb2-adamw-80k_ade20k-512x512.py',
    'mmseg::mobilenet_v3/mobilenet-v3-d8_lraspp_4xb4-320k_cityscapes-512x1024.py',
    'mmseg::nonlocal_net/nonlocal_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::ocrnet/ocrnet_r101-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::point_rend/pointrend_r50_4xb2-80k_cityscapes-512x1024.py',
    'mmseg::psanet/psanet_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py',
    'mmseg::segmenter/segmenter_vit-s_mask_8xb1-160k_ade20k-512x512.py',
    'mmseg::segnext/segnext_mscan-t_1xb16-adamw-160k_ade20k-512x512.py',
    'mmseg::sem_fpn/fpn_r50_4xb2-80k_cityscapes-512x1024.py',
    'mmseg::setr/setr_vit-l_mla_8xb2-160k_ade20k-512x512.py',
    'mmseg::setr/setr_vit-l_pup_8xb2-160k_ade20k-512x512.py',
    'mmseg::upernet/upernet_r18_4xb2-40k_cityscapes-512x1024.py',
    'mmseg::vit/vit_deit-s16_mln_upernet_8xb2-160k_ade20k-512x512.py',
]

#: Smaller heads of the same types, for speed.
SHRUNK = dict(stacked_convs=1, num_queries=20, num_proposals=20)


def shrink(node):
    for value in node.values() if isinstance(node, dict) else node:
        if isinstance(value, (dict, list)):
            shrink(value)
    if isinstance(node, dict):
        for key, least in SHRUNK.items():
            if isinstance(node.get(key), int):
                node[key] = min(node[key], least)
        if 'layer_cfg' in node:  # a transformer
            node['num_layers'] = 2
        if type_name(node).endswith('Sampler'):
            node['num'] = 16


@pytest.mark.slow
@pytest.mark.parametrize('name', SAMPLE)
def test_plugged_model_has_a_loss_and_gradients(name, monkeypatch):
    # Teachers are named by their path in the library's repository.
    monkeypatch.chdir(Path(get_installed_path(name.partition('::')[0]), '.mim'))
    cfg = plug_backbone(name, SMALL)
    shrink(cfg.model)
    # DDOD's deformable convolutions need 3 x 3 pixels at stride 128, LR-ASPP pools 49 x 49.
    side = 400 if 'ddod' in name or 'lraspp' in name else 64
    result = check_model(cfg, (side, side), predict=False)
    assert result.loss == pytest.approx(result.loss)  # not NaN
    assert result.untrained == []
