"""Checks, at import, that an OpenMMLab stack is there and that its parts fit together."""


def check_stack() -> None:
    """Raise ``ImportError`` naming what to install where no usable stack is found."""
