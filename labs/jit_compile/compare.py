"""HLO of the same layer, and the same experiments, in TensorFlow and torch_xla side by side.

This module loads neither of them. Both halves read the same flags, XLA's own.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpuscope.aot import hlo
from tpuscope.errors import RequestError
from tpuscope.tables import table

from .programs import dumping
from .text import up_to

DTYPES = ("float32", "mixed_bfloat16")  # by Keras's names


@dataclass(frozen=True)
class Linear:
    """The HLO of a linear layer with a ReLU, before and after compilation.

    Attributes:
        before: HLO as text, before optimisation.
        after: HLO of the compiled program, as text.
        result: float32 (batch, out).
    """

    before: str
    after: str
    result: np.ndarray


def operations(text: str) -> Counter:
    """Count the operations of each kind in an HLO text's entry; a fusion is one.

    What only names data (parameters, constants, tuples) is not counted.
    """
    return Counter(instruction.kind for instruction in hlo.instructions(text))


def fused(text: str) -> Counter:
    """Count the operations inside the fusions of a compiled program."""
    names = set(re.findall(r" fusion\(.*calls=%([\w.-]+)", text))
    bodies = re.findall(r"^%(\S+) (\(.*?^\})", text, re.M | re.S)
    inside = (operations(f"ENTRY %{name} {body}") for name, body in bodies if name in names)
    return sum(inside, Counter())


def side_by_side(programs: dict[str, Counter]) -> str:
    """Return the operations of several programs as a table, a column for each program."""
    kinds = sorted(set().union(*programs.values()))
    rows = [(kind, *(str(count[kind] or "–") for count in programs.values())) for kind in kinds]
    return table([("", *programs), *rows], "<" + ">" * len(programs))


def torch_linears(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, dtypes: Sequence[str]
) -> list[Linear]:
    """Return the HLO of ``torch.nn.Linear`` on torch_xla for each dtype, from a separate process.

    Arguments as in :func:`.keras_side.keras_linear`; ``"mixed_bfloat16"`` is ``torch.autocast``.

    Raises:
        RequestError: a dtype that is none of DTYPES.
    """
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise RequestError(f"dtype is {dtype!r}; it is one of {', '.join(DTYPES)}")
    arrays = {"x": x.tolist(), "weight": weight.tolist(), "bias": bias.tolist()}
    answers = _torch_side("linear", arrays | {"dtypes": list(dtypes)})
    return [
        Linear(answer["before"], answer["after"], np.array(answer["result"], np.float32))
        for answer in answers
    ]


LENGTHS = (5, 9, 13)
NUMBERS = (1.5, 1.75, 2.25)


@dataclass(frozen=True)
class Effort:
    """Counts of a function's calls.

    Attributes:
        python: how often Python ran the function's body.
        compiled: programs.
        launched: programs run; a call of a compiled TensorFlow function is one.
    """

    python: int
    compiled: int
    launched: int


def experiments(make: Callable, tensor: Callable) -> dict[str, tuple[Callable, list[tuple]]]:
    """Return name → the function, and the arguments of its three calls.

    Args:
        make: float32 from a shape. Each experiment has its own number of rows, so that none finds
            a program of another.
        tensor: a Python number as data.
    """

    def scaled(x, factor):
        return x * factor + 1

    def raised(x, exponent):
        return x**exponent

    def cut(x, count):
        return x[:, :count] + 1

    return {
        "the same shape": (scaled, [(make((1, 16)), tensor(1.5))] * 3),
        "three shapes": (scaled, [(make((2, n)), tensor(1.5)) for n in LENGTHS]),
        "the same, padded": (scaled, [(make((3, up_to(n, 16))), tensor(1.5)) for n in LENGTHS]),
        "x * number": (scaled, [(make((4, 16)), number) for number in NUMBERS]),
        "x * tensor": (scaled, [(make((5, 16)), tensor(number)) for number in NUMBERS]),
        "x ** number": (raised, [(make((6, 16)), number) for number in NUMBERS]),
        "x ** tensor": (raised, [(make((7, 16)), tensor(number)) for number in NUMBERS]),
        "x[:, :number]": (cut, [(make((8, 16)), n) for n in LENGTHS]),
        "x[:, :tensor]": (cut, [(make((9, 16)), tensor(n)) for n in LENGTHS]),
    }


LOOP = "a loop of 3 steps"


def torch_experiments() -> dict[str, Effort]:
    """Run the experiments and a loop on torch_xla, each call a step, in a separate process."""
    return {name: Effort(**effort) for name, effort in _torch_side("experiments", {}).items()}


def comparison(ours: dict[str, Effort], theirs: dict[str, Effort]) -> str:
    """Return both as a table: Python, compiled, launched, for TensorFlow and for torch_xla."""
    head = [("", "TensorFlow", "", "", "torch_xla", "", ""), ("", *("Python", "XLA", "run") * 2)]
    rows = [
        (name, *(str(n) for e in (ours[name], theirs[name]) for n in vars(e).values()))
        for name in ours
    ]
    return table([*head, *rows], "<>>>>>>")


def _torch_side(command: str, given: dict) -> Any:
    """Run ``labs.jit_compile.torch_side`` with torch_xla on the CPU; JSON in, JSON out.

    Args:
        command: ``"linear"`` or ``"experiments"``.

    Raises:
        RuntimeError: the process failed; the message is its last line.
    """
    with tempfile.TemporaryDirectory(prefix="torch-side-") as folder:
        flags = dumping(os.environ.get("XLA_FLAGS", ""), Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", "labs.jit_compile.torch_side", command],
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | {"PJRT_DEVICE": "CPU", "XLA_FLAGS": flags, "DUMPS": folder},
            input=json.dumps(given),
            capture_output=True,
            text=True,
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"torch_xla's half failed: {lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
