"""Opens the XLA device while pytest collects, as tests/xla/conftest.py does and for its reason."""

import os

from tpuscope.engine import torch_xla as runtime

if runtime.installed():
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    runtime.device()
