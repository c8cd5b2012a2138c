"""Puts a backbone into a config that exists: :func:`plug_backbone`."""

from .check import check_model, synthetic_batch
from .config import Change, ConfigError, PlugError, PluggedConfig, installed_configs
from .core import backbone_names, plug_backbone

__all__ = [
    'Change',
    'ConfigError',
    'PlugError',
    'PluggedConfig',
    'backbone_names',
    'check_model',
    'installed_configs',
    'plug_backbone',
    'synthetic_batch',
]
