"""A training run of a narrow network: in this process, or ``python small.py '{"overrides": …}'``.

The command line has no flag for the widths, and a test cannot kill its own process.
"""

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


def start(overrides, resume=None, **kwargs):
    """Start training in a new process; its standard output goes to a pipe by default.

    It uses one thread: beside other work, two threads that wait for each other are slower.
    """
    kwargs = {"stdout": subprocess.PIPE, "text": True} | kwargs
    command = [sys.executable, __file__, json.dumps(request(overrides, resume))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU"}
    return subprocess.Popen(command, env=environment, **kwargs)


def main():
    from mshnet import RequestError, api
    from mshnet.training.preemption import EXIT_CODES
    from tpuscope.engine.replicas import ReplicaFailed

    try:
        result = api.train(*json.loads(sys.argv[1]))
    except RequestError as error:
        print(error, file=sys.stderr)
        return 2
    except (ReplicaFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return EXIT_CODES.get(result["stopped"], 0)


if __name__ == "__main__":
    sys.exit(main())
