"""XLA on the CPU: the compiler front of a TPU, without one."""

import os

import pytest

from mshnet.training import backend as backends
from tpuscope.engine import torch_xla as runtime

# Autograd counts the devices once, at the first backward pass of a process. A device that is
# opened later cannot take part, so this one is opened while pytest collects the tests.
if runtime.installed():
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    runtime.device()


@pytest.fixture(scope="session")
def xla():
    """The XLA backend of this process."""
    os.environ["PJRT_DEVICE"] = "CPU"
    return backends.make_backend("tpu")
