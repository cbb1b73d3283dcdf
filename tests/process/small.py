"""A training run of a narrow network: in this process, or ``python small.py '{"overrides": …}'``.

The command line has no flag for the widths, and a test cannot kill its own process. SMALL_DTYPE
names another type to compute in. Under torchrun one process prints for all.
"""

import functools
import json
import os
import subprocess
import sys

NARROW = {
    "widths": [2, 4, 4, 8, 8],
    "depths": [1, 1, 1, 1, 1],
    "base_size": 32,
    "crop_size": 32,
    "batch_size": 8,
    "workers": 0,
    "warm_epoch": 0,
}


def request(overrides, resume=None):
    """Arguments of ``api.train``; a run that is resumed by its folder has its own widths."""
    return (overrides if resume not in (None, "auto") else NARROW | overrides), resume


def train(overrides, resume=None):
    """Train in this process; the messages, one a line."""
    from mshnet import api

    messages = []
    api.train(*request(overrides, resume), messages.append)
    return "\n".join(messages)


def start(overrides, resume=None, env=None, **kwargs):
    """Start training in a new process; its standard output goes to a pipe by default.

    It uses one thread: beside other work, two threads that wait for each other are slower. Its
    environment is this process's with the variables added.
    """
    kwargs = {"stdout": subprocess.PIPE, "text": True} | kwargs
    command = [sys.executable, __file__, json.dumps(request(overrides, resume))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU"} | (env or {})
    return subprocess.Popen(command, env=environment, **kwargs)


def compute_in(name):
    """Compute in another floating-point type than float32, to compare the numbers of two runs.

    The gradient of a bias in front of batch norm is 0 but for rounding, and Adagrad divides it by
    itself: with its eps of 1e-10, rounding errors of 1e-17 become updates of 1e-8.
    """
    import torch

    from mshnet.training import trainer

    torch.set_default_dtype(getattr(torch, name))
    torch.Tensor.float = lambda tensor: tensor.to(torch.get_default_dtype())
    trainer.Adagrad = functools.partial(trainer.Adagrad, eps=1e-3)


def main():
    from mshnet import RequestError, api
    from mshnet.training.preemption import EXIT_CODES
    from tpuscope.engine.processes import is_reported_elsewhere
    from tpuscope.errors import Failed

    if "SMALL_DTYPE" in os.environ:
        compute_in(os.environ["SMALL_DTYPE"])
    try:
        result = api.train(*json.loads(sys.argv[1]))
    except (RequestError, Failed, OSError) as error:
        if not is_reported_elsewhere(error):
            print(error, file=sys.stderr)
        return 2 if isinstance(error, RequestError) else 1
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result))
    return EXIT_CODES.get(result["stopped"], 0)


if __name__ == "__main__":
    sys.exit(main())
