"""InLine (injective linear attention) backbones for OpenMMLab."""

from .compat import check_stack, register_config_packages
from .version import __version__

check_stack()
register_config_packages()

from .backbones import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin  # noqa: E402
from .checkpoint import guard_mmengine  # noqa: E402
from .hooks import CheckTargetsHook, DurableCheckpointHook, StrictLoadHook  # noqa: E402
from .optim import CPUAmpOptimWrapper, LearningRateDecayOptimizerConstructor  # noqa: E402
from .plug import plug_backbone  # noqa: E402
from .timm_models import InLineClassifier  # noqa: E402

guard_mmengine()

__all__ = [
    'CPUAmpOptimWrapper',
    'CheckTargetsHook',
    'DurableCheckpointHook',
    'InLineCSwin',
    'InLineClassifier',
    'InLineDeiT',
    'InLinePVT',
    'InLineSwin',
    'LearningRateDecayOptimizerConstructor',
    'StrictLoadHook',
    '__version__',
    'check_stack',
    'guard_mmengine',
    'plug_backbone',
]
