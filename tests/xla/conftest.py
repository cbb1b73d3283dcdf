"""XLA on the CPU, opened in each process before anything else uses autograd."""

import os

import pytest

from mshnet.training import backend as backends
from tpuscope.engine import torch_xla as runtime

# Autograd counts the devices once, at the first backward pass of a process, and a device that is
# opened later takes no part. So this one is opened while pytest collects the tests, which each
# worker of pytest-xdist does for itself before it runs the first.
if runtime.installed():
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    runtime.device()


@pytest.fixture(scope="session")
def xla():
    """Return the XLA backend of this process."""
    os.environ["PJRT_DEVICE"] = "CPU"
    return backends.make_backend("tpu")
