from .shapes import CLASSES, PALETTE, is_complete, make_shapes

__all__ = ['CLASSES', 'PALETTE', 'is_complete', 'make_shapes']
