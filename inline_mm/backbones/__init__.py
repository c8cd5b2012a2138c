"""InLine backbones, registered in mmengine's ``MODELS``.

mmdet, mmseg and mmpretrain look a bare name up in their own registry and then in mmengine's, so
one registration serves them all and none of them has to be imported for it.
"""

from .inline_cswin import InLineCSwin
from .inline_deit import InLineDeiT
from .inline_pvt import InLinePVT
from .inline_swin import InLineSwin

__all__ = ['InLineCSwin', 'InLineDeiT', 'InLinePVT', 'InLineSwin']
