"""What ``torchrun`` tells a process that it has started; imports no torch."""

import os
from dataclasses import dataclass

from .errors import RequestError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """The place of this process among those of one ``torchrun`` job.

    Attributes:
        rank: of this process, from 0, over all machines.
        count: processes of all machines.
        local_rank: of this process, from 0, on its machine.
        local_count: processes of this machine.
        machines: how many take part, one ``torchrun`` command on each.
        address: of the machine where all processes meet.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int
    machines: int
    address: str


def launch() -> Launch | None:
    """Return what torchrun's environment variables say; None if one of them is missing.

    Raises:
        RequestError: they contradict each other, or are no numbers.
    """
    if not all(os.environ.get(name) for name in VARIABLES):
        return None
    try:
        rank, count, local_rank, local_count = (int(os.environ[name]) for name in VARIABLES[:4])
        machines = int(os.environ.get("GROUP_WORLD_SIZE") or count // max(local_count, 1))
    except ValueError as error:
        raise _unusable() from error
    if not (0 <= rank < count and 0 <= local_rank < local_count <= count and machines > 0):
        raise _unusable()
    return Launch(rank, count, local_rank, local_count, machines, os.environ["MASTER_ADDR"])


def _unusable() -> RequestError:
    found = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES[:4])
    return RequestError(
        f"the variables of torchrun are not usable ({found}): start with torchrun, or unset them",
        "torchrun-variables",
    )
