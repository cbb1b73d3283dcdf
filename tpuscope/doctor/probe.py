"""Does a device open and compute the right thing? Tried in a process of its own.

A runtime that hangs or aborts ends only that process, nothing is opened in the calling process (a
notebook), and the device is free afterwards.

This file is both sides: a caller imports :func:`compute` and :func:`imports`; they start this file
as a script, which prints a line of JSON for each stage it enters. What it entered last is where it
hung or crashed. As a script it needs nothing of this package, whatever is broken there.
"""

import contextlib
import copy
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MARK = "@probe "  # begins the lines that are ours; libraries print to standard output, too

# Relative error allowed against float64 on the host. A TPU rounds the factors of a float32 product
# to bfloat16 (2**-9), a GPU those of a convolution to TF32 (2**-12); sums stay in float32. Rounding
# the factors to bfloat16 on a CPU changes the product by 3e-3 and the step's gradients by 1.1e-2 at
# most. A wrong result is off by about 1.
TOLERANCE = {"xla:TPU": 5e-2, "cuda": 1e-2, "xla:CPU": 1e-4, "cpu": 1e-4}


@dataclass
class Outcome:
    """How the process ended.

    Attributes:
        stage: entered last; ``"done"`` if it completed.
        facts: everything it reported, by name.
        code: its exit code, negative for a signal; None if it was ended after the time limit.
        message: the telling line of its standard error.
        seconds: from its start to its end.
    """

    stage: str = "start"
    facts: dict[str, Any] = field(default_factory=dict)
    code: int | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        return self.stage == "done"

    def how_it_ended(self) -> str:
        """Return, for people, where and how an incomplete process ended."""
        if self.code is None:
            how = f"hung for {self.seconds:.0f} s"
        elif self.code < 0:
            how = f"crashed with {signal.Signals(-self.code).name}"
        else:
            how = f"failed with exit code {self.code}"
        return f"{how} in stage '{self.stage}'" + (f": {self.message}" if self.message else "")


def compute(
    place: str,
    environ: Mapping[str, str],
    limit: float = 120.0,
    watch: Callable[[str], None] = lambda stage: None,
) -> Outcome:
    """Compare a matrix product and two training steps of a small network with the host's.

    Args:
        place: ``"xla:TPU"``, ``"xla:CPU"``, ``"cuda"`` or ``"cpu"``.
        environ: of the process.
        limit: seconds until it is ended.
        watch: receives each stage as it is entered.

    Returns:
        With facts ``torch``, ``cuda_build`` (or None), ``gpus`` (names), and, once done,
        ``device``, ``cores``, ``product`` and ``gradients`` (relative errors), ``first_step`` and
        ``second_step`` (seconds).
    """
    extra = {"PJRT_DEVICE": place.removeprefix("xla:")} if place.startswith("xla:") else {}
    return _run(["compute", place], {**environ, **extra}, limit, watch)


def imports(names: Sequence[str], environ: Mapping[str, str], limit: float = 120.0) -> dict:
    """Import packages; one that crashes or hangs does not stop the others.

    Returns:
        name → None, or what went wrong in one line.
    """
    faults: dict[str, str | None] = {}
    while len(faults) < len(names):
        rest = [name for name in names if name not in faults]
        outcome = _run(["import", *rest], environ, limit)
        faults.update({name: outcome.facts[name] for name in rest if name in outcome.facts})
        if not outcome.done:
            crashed = next(name for name in rest if name not in outcome.facts)
            faults[crashed] = outcome.how_it_ended()
    return faults


def _run(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    limit: float,
    watch: Callable[[str], None] = lambda stage: None,
) -> Outcome:
    # It has this process's packages. -P: without the modules beside this file.
    command = [sys.executable, "-P", *(["-S"] if sys.flags.no_site else []), __file__, *arguments]
    environ = {**environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    outcome, started = Outcome(), time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process, which then ends that one
        )
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _kill(process)

        timer = threading.Timer(limit, expire)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_MARK):
                    report = json.loads(line.removeprefix(_MARK))
                    if "stage" in report:
                        outcome.stage = report.pop("stage")
                        watch(outcome.stage)
                    outcome.facts.update(report)
            process.wait()
        finally:
            timer.cancel()
            _kill(process)
            if process.stdout:
                process.stdout.close()
        outcome.code = None if expired.is_set() else process.wait()
        outcome.seconds = time.monotonic() - started
        errors.seek(0)
        outcome.message = _essence(errors.read())
    return outcome


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _essence(errors: str) -> str:
    """Return the last error line of standard error, or its last line."""
    # What follows them is a stack of addresses.
    errors = errors.split("*** Check failure stack trace")[0].split("\nStack")[0]
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or ": F " in line or " Fatal " in line]
    return " ".join((telling or lines or [""])[-1].split())[:400]


# ---- from here on: the process itself ----


def _tell(**values: Any) -> None:
    print(_MARK + json.dumps(values), flush=True)


def _main(arguments: Sequence[str]) -> None:
    if arguments[0] == "import":
        for name in arguments[1:]:
            _tell(stage=f"import {name}")
            try:
                importlib.import_module(name)
                _tell(**{name: None})
            except Exception as error:
                _tell(**{name: f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
    else:
        _compute(arguments[1])
    _tell(stage="done")


def _compute(place: str) -> None:
    _tell(stage="import torch")
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    _tell(torch=torch.__version__, cuda_build=torch.version.cuda)
    _tell(gpus=[torch.cuda.get_device_name(i) for i in range(gpus)])
    device, label, cores = torch.device("cpu"), "", 1
    if place == "cuda":
        _tell(stage="open cuda")
        device, cores = torch.device("cuda"), gpus
        torch.zeros(1, device=device)
    elif place.startswith("xla:"):
        _tell(stage="import torch_xla")
        import torch_xla

        _tell(stage=f"open {place}")
        device, label, cores = _open_xla(torch_xla, place)
    _tell(stage="matrix product", device=label, cores=cores)
    product = _product_error(torch, device)
    _tell(stage="training step", product=product)
    _tell(**_training_step(torch, device))


def _open_xla(torch_xla, place: str) -> tuple[Any, str, int]:
    """Return the device, its kind, and how many of its cores this process has."""
    import torch_xla.runtime as xr

    if place == "xla:TPU":
        from torch_xla._internal import tpu

        with contextlib.suppress(Exception):  # not every machine has the metadata service
            if tpu.num_tpu_workers() > 1:
                # One machine of a slice: all of it would wait for the others.
                tpu.configure_one_chip_topology()
    device = torch_xla.device()
    name = ""
    with contextlib.suppress(Exception):
        name = torch_xla._XLAC._xla_device_kind(str(device))  # such as "TPU v5 lite"
    return device, name, xr.addressable_device_count()


def _relative_error(value, reference) -> float:
    """Return the norm of the difference over that of the reference (float64, on the host)."""
    value = value.detach().cpu().double()
    return ((value - reference).norm() / reference.norm()).item()


def _product_error(torch, device) -> float:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    return _relative_error(a.to(device) @ b.to(device), a.double() @ b.double())


def _training_step(torch, device) -> dict:
    """Time two steps, of which XLA compiles the first, and compare the results."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(8, track_running_stats=False),  # a count would make two graphs
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 1, 3, padding=1),
    )
    images = torch.randn(4, 1, 32, 32)
    targets = (torch.rand(4, 1, 32, 32) > 0.9).float()

    def step(net, images, targets):
        net.zero_grad(set_to_none=True)
        logits = net(images)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
        loss.backward()
        if device.type == "xla":
            import torch_xla

            torch_xla.sync()
        return [loss.detach().cpu(), *(p.grad.cpu() for p in net.parameters())]

    # XLA counts its devices at the first backward pass of a process: the host comes second.
    theirs = copy.deepcopy(net).to(device)
    seconds, got = [], []
    for _ in range(2):
        started = time.perf_counter()
        got = step(theirs, images.to(device), targets.to(device))
        seconds.append(time.perf_counter() - started)
    expected = step(net.double(), images.double(), targets.double())
    errors = [_relative_error(value, right) for value, right in zip(got, expected)]
    worst = torch.tensor(errors).max().item()  # unlike Python's max it keeps NaN
    return {"gradients": worst, "first_step": seconds[0], "second_step": seconds[1]}


if __name__ == "__main__":
    _main(sys.argv[1:])
