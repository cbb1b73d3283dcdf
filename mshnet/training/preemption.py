"""When a run saves and when it stops: signals, a session's limit, the clock."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

GO_ON, SAVE, STOP = 0, 1, 2  # in order: of several processes' answers the largest holds

# What a stopped run leaves as exit code: the shell's convention for signals; a limit that the user
# set is no failure.
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


class Session:
    """Answers after every step: go on, save, or save and stop.

    Args:
        save_minutes: between two checkpoints within an epoch.
        max_minutes: after which the session ends; None is no limit.
        stop_requested: the name of the signal that asks to stop, or None.
        started: when the session began, on the clock; None is now.
        clock: seconds.
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
        """``GO_ON``, ``SAVE`` or ``STOP``.

        Args:
            next_seconds: how long what comes next cannot be interrupted, about.
        """
        if self._stop_requested() or not self._time_for(next_seconds):
            return STOP
        return SAVE if self._clock() - self._saved >= self._every else GO_ON

    def saved(self, seconds: float) -> None:
        """A checkpoint has been written, which took some seconds."""
        self._saved = self._clock()
        self._save_seconds = max(self._save_seconds, seconds)

    def reason(self) -> str:
        """Why it stops, for people: ``"SIGTERM"``, ``"--max-minutes 30"``."""
        signalled = self._stop_requested()
        if signalled:
            return signalled
        if self._end is None:
            return "another host"  # that was asked, or has a limit
        return f"--max-minutes {self._max_minutes:g}"

    def _time_for(self, seconds: float) -> bool:
        # Twice: the machine may be busier by then, and the backup wants its time as well.
        return self._end is None or self._clock() + seconds + 2 * self._save_seconds < self._end


@contextlib.contextmanager
def signals(log: Callable[[str], None] = print) -> Iterator[Callable[[], str | None]]:
    """Catch the first Ctrl-C or SIGTERM; the second one ends the process as usual.

    Yields:
        A function that tells the name of the signal received, or None.
    """
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number, frame):
        received.append(signal.Signals(number).name)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        log(f"{received[0]}: saving, then stopping; a second one stops at once")

    try:
        for number in before:
            signal.signal(number, handle)
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
