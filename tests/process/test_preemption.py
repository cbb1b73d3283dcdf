"""When a run saves and when it stops: the clock, the limit, real signals."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mshnet.training.preemption import EXIT_CODES, GO_ON, SAVE, STOP, Session, signals


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_it_saves_every_so_many_minutes(clock):
    session = Session(save_minutes=2, clock=clock)
    clock.now += 119
    assert session.due() == GO_ON
    clock.now += 1
    assert session.due() == SAVE
    session.saved(seconds=3)
    assert session.due() == GO_ON
    clock.now += 120
    assert session.due() == SAVE


def test_it_stops_in_time_to_save_before_the_limit(clock):
    session = Session(max_minutes=10, save_minutes=60, clock=clock)
    clock.now += 600 - 11
    assert session.due() == GO_ON
    clock.now += 2
    assert session.due() == STOP, "5 seconds are allowed for a save until one has been measured"
    assert session.reason() == "--max-minutes 10"


def test_slow_saves_make_it_stop_earlier(clock):
    session = Session(max_minutes=10, save_minutes=60, clock=clock)
    session.saved(seconds=60)
    clock.now += 479
    assert session.due() == GO_ON
    clock.now += 2
    assert session.due() == STOP


def test_what_cannot_be_interrupted_must_fit_into_the_time_left(clock):
    session = Session(max_minutes=10, clock=clock)
    assert session.due(next_seconds=580) == GO_ON
    assert session.due(next_seconds=595) == STOP


def test_the_limit_counts_from_the_start_of_the_command(clock):
    session = Session(max_minutes=10, started=clock.now - 595, clock=clock)
    assert session.due() == STOP


def test_a_request_to_stop_comes_before_a_save(clock):
    session = Session(save_minutes=1, stop_requested=lambda: "SIGTERM", clock=clock)
    clock.now += 3600
    assert session.due() == STOP
    assert session.reason() == "SIGTERM"


def test_without_a_limit_it_never_ends(clock):
    session = Session(clock=clock)
    session.saved(0)
    clock.now += 599
    assert session.due(next_seconds=1e9) == GO_ON


# --- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_a_request(number):
    said = []
    with signals(said.append) as stop_requested:
        assert stop_requested() is None
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert stop_requested() == signal.Signals(number).name
    assert len(said) == 1
    assert "a second one stops at once" in said[0]


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_the_second_signal_stops_at_once(number, error):
    with pytest.raises(error), signals(lambda text: None):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        os.kill(os.getpid(), number)
        time.sleep(1)
        raise AssertionError("the second signal did nothing")


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_second_hangup_is_ignored(first):
    """A closed terminal sends two, from the shell and from the kernel."""
    with signals(lambda text: None) as stop_requested:
        for number in (first, signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        assert stop_requested() == first.name


def test_under_nohup_a_hangup_is_no_request():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals(lambda text: None) as stop_requested:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
            assert stop_requested() is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_put_back():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with signals(lambda text: None):
        assert signal.getsignal(signal.SIGINT) != before[0]
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
    assert [signal.getsignal(number) for number in numbers] == before


def test_every_signal_has_the_shells_exit_code():
    assert {n.name: 128 + n for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)} == EXIT_CODES


def test_other_threads_cannot_catch_signals_and_say_nothing():
    answers = []

    def work():
        with signals() as stop_requested:
            answers.append(stop_requested())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [None]


def test_a_second_sigterm_has_the_shells_exit_code():
    code = (
        "import os, signal, time\n"
        "from mshnet.training.preemption import signals\n"
        "with signals():\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 143
