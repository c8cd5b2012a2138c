"""InLine (injective linear attention) backbones for OpenMMLab."""

from .compat import check_stack
from .version import __version__

check_stack()

__all__ = ['__version__', 'check_stack']
