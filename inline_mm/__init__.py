"""InLine (injective linear attention) backbones for OpenMMLab."""

from .compat import check_stack, register_config_packages
from .version import __version__

check_stack()
register_config_packages()

from .backbones import InLinePVT  # noqa: E402

__all__ = ['InLinePVT', '__version__', 'check_stack']
