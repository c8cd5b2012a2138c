"""InLine (injective linear attention) backbones for OpenMMLab."""

from .compat import check_stack
from .version import __version__

check_stack()

from mmengine.config.utils import MODULE2PACKAGE  # noqa: E402

# Lets `_base_ = 'inline_mm::coco/...'` find configs/. mmengine looks for a distribution of the
# name given here, whose location is wrong for an editable install, and after that for a module,
# next to which it then looks for `.mim`. Naming a module leads to the right folder in every case.
MODULE2PACKAGE.setdefault('inline_mm', 'inline_mm.version')

__all__ = ['__version__', 'check_stack']
