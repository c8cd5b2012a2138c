"""InLine (injective linear attention) backbones for OpenMMLab."""

from .compat import check_stack, register_config_packages
from .version import __version__

check_stack()
register_config_packages()

from .backbones import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin  # noqa: E402

__all__ = ['InLineCSwin', 'InLineDeiT', 'InLinePVT', 'InLineSwin', '__version__', 'check_stack']
