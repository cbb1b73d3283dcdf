"""Questions that may never be answered: to a drive, a service, a metadata server."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


def call_with_timeout(seconds: float, act: Callable[[], Answer]) -> Answer:
    """What an act returns.

    Raises:
        TimeoutError: no answer in time; the act is left to itself, and keeps no process alive.
        BaseException: the act's own.
    """
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(act())
        except BaseException as error:
            answer.set_exception(error)

    # No executor: at its end Python waits for the threads of those.
    threading.Thread(target=run, daemon=True).start()
    return answer.result(seconds)
