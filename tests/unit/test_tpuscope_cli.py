"""What every command line over tpuscope shares: exit codes and one-line errors."""

import subprocess
import sys
from pathlib import Path

import pytest

from tpuscope.cli import Parser, run
from tpuscope.errors import Failed, RequestError

ROOT = Path(__file__).resolve().parents[2]


def outcome(error, capsys, *flags):
    """Exit code and standard error of a command that raises."""

    def command(args):
        raise error

    parser = Parser(prog="tool")
    parser.set_defaults(command=command)
    code = run(parser, [*flags])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RequestError("--size 0:\n must be 1"), 2, "tool: --size 0: must be 1\n"),
        (Failed("no answer"), 1, "tool: no answer\n"),
        (OSError(28, "No space left on device"), 1, "No space left"),
        (KeyboardInterrupt(), 130, "tool: interrupted\n"),
        (MemoryError(), 1, "smaller batch"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9"),
            1,
            "smaller",
        ),
        (RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm"), 1, "smaller"),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
            1,
            "fewer loader workers",
        ),
        (RequestError("no file \x1b[2J\x07"), 2, "tool: no file \\x1b[2J\\x07\n"),
    ],
    ids=repr,
)
def test_what_goes_wrong_is_one_line_and_an_exit_code(capsys, error, code, text):
    given, err = outcome(error, capsys)
    assert given == code
    assert text in err
    assert err.count("\n") == 1


def test_a_fault_of_the_program_keeps_its_traceback(capsys):
    with pytest.raises(ZeroDivisionError):
        outcome(ZeroDivisionError(), capsys)


def test_debug_shows_the_traceback_of_a_known_error_too(capsys):
    code, err = outcome(RequestError("wrong"), capsys, "--debug")
    assert code == 2
    assert "Traceback" in err and err.endswith("tool: wrong\n")


@pytest.mark.parametrize("argv", [["--unknown"], ["--numb", "1"], ["--number", "x"]])
def test_a_wrong_flag_is_a_wrong_request_and_none_is_abbreviated(argv, capsys):
    parser = Parser(prog="tool")
    parser.add_argument("--number", type=int)
    assert run(parser, argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("tool: ") and err.count("\n") == 1


def test_errors_pass_between_processes():
    import pickle

    for kind in (RequestError, Failed):
        error = pickle.loads(pickle.dumps(kind("text", "a-code")))
        assert (type(error), str(error), error.code) == (kind, "text", "a-code")


def test_a_terminal_that_shows_ascii_only_gets_escapes():
    code = """
import argparse
from tpuscope.cli import Parser, run
parser = Parser(prog="tool")
parser.set_defaults(command=lambda args: print("3×3 \\udcff") or 0)
raise SystemExit(run(parser, []))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "3\\xd73 \\udcff\n")


def test_a_reader_that_has_seen_enough_is_no_error():
    code = "from tpuscope.cli import Parser, run\nparser = Parser(prog='t')\n"
    code += "parser.set_defaults(command=lambda a: [print('x' * 99) for _ in range(9999)] and 0)\n"
    code += "raise SystemExit(run(parser, []))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout and process.stderr
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 1
    assert process.stderr.read() == b""
    process.stderr.close()
