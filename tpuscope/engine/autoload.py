"""Whether ``import torch`` loads torch_tpu. Imports nothing heavy."""

import importlib.util
import os
import sys


def switch_off() -> None:
    """Keep ``import torch`` from loading torch_tpu by itself; call it before that import.

    Loading takes seconds of CPU time, and where there is no TPU it asks for the cloud's metadata,
    which can take minutes. :func:`tpuscope.engine.torch_tpu.device` loads it when it is needed.
    """
    if "torch" not in sys.modules and importlib.util.find_spec("torch_tpu"):
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
