"""A training of a narrow network as a process of its own: ``python small.py '{"overrides": …}'``.

For what the command line cannot be asked for (other widths) and a test cannot do to itself.
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


def arguments(overrides, resume=None):
    """The command of a training; ``overrides`` as for ``jobs.train``."""
    overrides = overrides if resume not in (None, "auto") else NARROW | overrides
    return [sys.executable, __file__, json.dumps({"overrides": overrides, "resume": resume})]


def environment(**variables):
    """One thread: beside other work, two that wait for each other are slower."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU"} | variables


def start(overrides, resume=None, **kwargs):
    """Begin a training; the process, with its standard output in a pipe unless told otherwise."""
    kwargs = {"stdout": subprocess.PIPE, "text": True} | kwargs
    return subprocess.Popen(arguments(overrides, resume), env=environment(), **kwargs)


def run(overrides, resume=None, **kwargs):
    """Train to the end; the finished process with its output."""
    return subprocess.run(
        arguments(overrides, resume), capture_output=True, text=True, env=environment(), **kwargs
    )


def main():
    from mshnet import RequestError, api
    from mshnet.training.preemption import EXIT_CODES
    from tpuscope.engine.replicas import ReplicaFailed

    request = json.loads(sys.argv[1])
    try:
        result = api.train(request["overrides"], request["resume"])
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
