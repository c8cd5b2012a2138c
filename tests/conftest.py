"""What one test sets for its whole process, the next one does not see."""

import os

import pytest
import torch
from mmengine.registry import DefaultScope

if 'PYTEST_XDIST_WORKER' in os.environ:  # Every core has a worker already.
    torch.set_num_threads(1)
    os.environ['OMP_NUM_THREADS'] = '1'


@pytest.fixture(autouse=True)
def isolation():
    environ = dict(os.environ)
    scopes = dict(DefaultScope._instance_dict)
    yield
    for kept, found in ((environ, os.environ), (scopes, DefaultScope._instance_dict)):
        found.clear()
        found.update(kept)
