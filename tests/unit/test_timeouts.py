"""Calls with a time limit."""

import subprocess
import sys

import pytest

from tpuscope.timeouts import call_with_timeout


def test_an_answer_is_handed_on_and_so_is_an_error():
    assert call_with_timeout(5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(5, lambda: 1 / 0)


def test_a_process_ends_while_its_question_is_open():
    code = """
import threading
from tpuscope.timeouts import call_with_timeout
try:
    call_with_timeout(0.1, threading.Event().wait)
except TimeoutError:
    print("no answer")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "no answer\n")
