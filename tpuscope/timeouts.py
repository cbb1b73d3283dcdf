"""Call with a timeout in a daemon thread: for a drive, a service, a metadata server."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


def call_with_timeout(seconds: float, act: Callable[[], Answer]) -> Answer:
    """Return what a function returns within a time limit.

    Args:
        seconds: the limit.
        act: runs in a daemon thread, which does not keep the process alive.

    Raises:
        TimeoutError: no answer in time; the thread goes on.
        BaseException: what the function raises.
    """
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(act())
        except BaseException as error:
            answer.set_exception(error)

    # Not an executor: Python waits for its threads at exit.
    threading.Thread(target=run, daemon=True).start()
    return answer.result(seconds)
