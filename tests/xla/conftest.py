"""XLA on the CPU: the compiler front of a TPU, without one."""

import os

import pytest

from mshnet.training import backend as backends


@pytest.fixture(scope="session")
def xla():
    """The XLA backend of this process."""
    os.environ["PJRT_DEVICE"] = "CPU"
    return backends.choose("tpu")
