"""TorchTPU's device on XLA:CPU: run by ``make test-torchtpu``, in an environment of its own."""

import pytest
import torch

from tpuscope.engine import torch_tpu


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """Open the device once; PJRT_DEVICE=CPU makes it the CPU plugin's."""
    assert torch_tpu.on_cpu(), "set PJRT_DEVICE=CPU: these tests are for machines without a TPU"
    return torch_tpu.device()
