"""glibc's malloc, for a process that computes on the CPU."""

import contextlib
import ctypes

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Keep the memory that tensors free in this process, and reuse it.

    By default glibc returns large blocks to the system, which clears every page when it is used
    again: a quarter of a training step. It concerns the whole process, so the command line calls
    it, not a library function. Other C libraries are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 << 20)):
            mallopt(parameter, value)
