"""When a run saves and when it stops: signals, a session's time limit, the clock."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

GO_ON, SAVE, STOP = 0, 1, 2  # in order: several processes act on the largest of their answers

# Exit codes of a stopped run: 128 + signal, as shells have it; a limit that the user set is 0.
EXIT_CODES = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}


class Session:
    """Decides after every step: go on, save, or save and stop.

    Args:
        save_minutes: minutes between two checkpoints within an epoch.
        max_minutes: minutes after which the session ends; None is no limit.
        stop_requested: returns the name of the signal that asked to stop, or None.
        started: when the session began, in seconds of the clock; None is now.
        clock: returns seconds.
    """

    def __init__(
        self,
        save_minutes: float = 10.0,
        max_minutes: float | None = None,
        stop_requested: Callable[[], str | None] = lambda: None,
        started: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._every = 60 * save_minutes
        self._stop_requested = stop_requested
        self._clock = clock
        self._saved = clock()
        started = clock() if started is None else started
        self._end = None if max_minutes is None else started + 60 * max_minutes
        self._max_minutes = max_minutes
        self._save_seconds = 5.0  # until it has been measured

    def due(self, next_seconds: float = 0.0) -> int:
        """Return ``GO_ON``, ``SAVE`` or ``STOP``.

        Args:
            next_seconds: how long the next piece of work cannot be interrupted, roughly.
        """
        if self._stop_requested() or not self._time_for(next_seconds):
            return STOP
        return SAVE if self._clock() - self._saved >= self._every else GO_ON

    def saved(self, seconds: float) -> None:
        """Note that a checkpoint has just been written, and how many seconds it took."""
        self._saved = self._clock()
        self._save_seconds = max(self._save_seconds, seconds)

    def reason(self) -> str:
        """Return why it stops, for people: ``"SIGTERM"``, ``"--max-minutes 30"``."""
        signalled = self._stop_requested()
        if signalled:
            return signalled
        if self._end is None:
            return "another host"  # which got the signal, or has a limit
        return f"--max-minutes {self._max_minutes:g}"

    def _time_for(self, seconds: float) -> bool:
        # Twice: the machine may be busier by then, and the backup takes time as well.
        return self._end is None or self._clock() + seconds + 2 * self._save_seconds < self._end


@contextlib.contextmanager
def signals(log: Callable[[str], None] = print) -> Iterator[Callable[[], str | None]]:
    """Catch the first Ctrl-C, SIGTERM or SIGHUP; the second one ends the process as usual.

    SIGHUP comes when a terminal is closed or an SSH connection breaks, often twice: the second one
    is ignored. A process that ignores it from the start, as under ``nohup``, goes on.

    Args:
        log: takes a message for people.

    Yields:
        A function that returns the name of the signal received, or None.
    """
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # only the main thread may set handlers
        return
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup and signal.getsignal(hangup) != signal.SIG_IGN:
        before[hangup] = signal.getsignal(hangup)
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def handle(number, frame):
        received.append(signal.Signals(number).name)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        if hangup:  # the shell and the kernel send one each
            signal.signal(hangup, signal.SIG_IGN)
        _leave_closed(terminals)
        log(f"{received[0]}: saving, then stopping; a second one stops at once")

    try:
        for number in before:
            signal.signal(number, handle)
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_closed(terminals: list[int]) -> None:
    """Send output to nowhere if its terminal was closed: writing there fails, and saving must not.

    Args:
        terminals: file numbers that were terminals.
    """
    for number in terminals:
        if not os.isatty(number):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
