"""InLine backbones, registered in mmengine's ``MODELS``.

mmdet, mmseg and mmpretrain look a bare name up in their own registry and then in mmengine's, so
one registration serves them all and none of them has to be imported for it.
"""

from .inline_pvt import InLinePVT

__all__ = ['InLinePVT']
