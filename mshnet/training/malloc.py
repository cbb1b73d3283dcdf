"""Host memory of a process that computes on the CPU."""

import contextlib
import ctypes

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Let this process keep the memory that tensors free, for the next ones.

    glibc gives large blocks back to the system at once, and the system hands them out again page by
    page, cleared: a quarter of a step. Other C libraries are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 << 20)):
            mallopt(parameter, value)
