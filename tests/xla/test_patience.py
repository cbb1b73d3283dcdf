"""Waiting no longer than was said."""

import subprocess
import sys

import pytest

from mshnet.xla.patience import within


def test_an_answer_is_handed_on_and_so_is_an_error():
    assert within(5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)


def test_a_process_ends_while_its_question_is_open():
    code = """
import threading
from mshnet.xla.patience import within
try:
    within(0.1, threading.Event().wait)
except TimeoutError:
    print("no answer")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "no answer\n")
