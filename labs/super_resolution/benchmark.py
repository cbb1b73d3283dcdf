"""Time a GAN step and a frame on every device here, as ratios to eager PyTorch on the CPU.

Each device is tried in a process of its own: which one XLA opens is settled once a process. Whoever
holds a TPU must let go of it first. The step is the whole of it: both networks, both updates. Its
time is from dispatch to the end on the device, with the crops there already; the first two steps,
which trace and compile, are reported apart.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from mshnet.training.backend import Backend
from tpuscope.engine import torch_xla as runtime
from tpuscope.errors import RequestError

from .tiles import Upscaler
from .training import LOSSES, Gan, Settings, open_backend

ROOT = Path(__file__).resolve().parents[2]
BASE = "cpu, eager"
# By name: the flag's value, and what the environment says.
PLACES = {
    BASE: ("cpu", {}),
    "cpu, XLA": ("tpu", {"PJRT_DEVICE": "CPU"}),
    "cuda, eager": ("cuda", {}),
    "TPU, XLA": ("tpu", {"PJRT_DEVICE": "TPU"}),
}


def run(overrides: dict, steps: int = 5) -> list[dict]:
    """Measure on each device.

    Args:
        overrides: sizes, by the field names of :class:`.training.Settings`.
        steps: timed ones.

    Returns:
        For each place ``place``, and ``absent`` (why), ``error``, or what :func:`measure` gives.

    Raises:
        RequestError: a size is wrong.
    """
    if steps < 1:
        raise RequestError(f"--steps {steps}: must be at least 1")
    Settings.from_dict(overrides)
    return [{"place": place} | _in_a_process(place, overrides, steps) for place in PLACES]


def absent(place: str) -> str | None:
    """Return the reason why a device cannot be measured here, or None."""
    if place == "cuda, eager":
        return None if torch.cuda.is_available() else "PyTorch finds no CUDA GPU"
    if place != BASE and not runtime.installed():
        return "torch_xla is not installed"
    if place == "TPU, XLA":
        return None if runtime.tpu_chips() else "this machine has no TPU"
    return None


def _in_a_process(place: str, overrides: dict, steps: int) -> dict:
    missing = absent(place)
    if missing:
        return {"absent": missing}
    device, variables = PLACES[place]
    request = json.dumps({"overrides": overrides | {"device": device}, "steps": steps})
    done = subprocess.run(
        [sys.executable, "-m", "labs.super_resolution.benchmark", request],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def measure(overrides: dict, steps: int) -> dict:
    """Measure in this process.

    Returns:
        ``label`` of the device; ``first_seconds`` of the first two steps together, ``step_seconds``
        and ``frame_seconds`` (the median), ``losses`` of the last step, ``compilations`` of all.
    """
    settings = Settings.from_dict(overrides)
    backend = open_backend(settings.device)
    gan = Gan(settings, backend)
    _, step = gan.compiled_steps()
    random = torch.Generator().manual_seed(0)
    shape = (settings.batch_size, 1, settings.crop, settings.crop)
    high = backend.to_device(torch.randint(0, 256, shape, generator=random, dtype=torch.uint8))
    times = []
    for _ in range(2 + steps):
        sums = backend.to_device(torch.zeros(len(LOSSES)))
        _wait(backend)
        began = time.perf_counter()
        [sums] = step(high, sums)
        _wait(backend)
        times.append(time.perf_counter() - began)
    losses = sums.cpu().tolist()
    enlarge = Upscaler(gan.generator.eval(), backend)
    side = settings.size // settings.scale
    frame = torch.randint(0, 256, (side, side), generator=random, dtype=torch.uint8).numpy()
    for _ in range(2):
        enlarge(frame)
    frames = []
    for _ in range(steps):
        began = time.perf_counter()
        enlarge(frame)
        frames.append(time.perf_counter() - began)
    return {
        "label": backend.label,
        "first_seconds": sum(times[:2]),
        "step_seconds": _median(times[2:]),
        "frame_seconds": _median(frames),
        "losses": losses,
        "compilations": backend.counters().compilations,
    }


def table(results: list[dict]) -> str:
    """Return a text table: a line for each device, as ratios to the first."""
    base = next((r for r in results if r["place"] == BASE and "step_seconds" in r), None)
    lines = [f"{'':<13}{'step':>9}{'speed':>8}{'frame':>10}{'speed':>8}{'first two steps':>18}"]
    for r in results:
        if "step_seconds" not in r:
            lines.append(f"{r['place']:<13}{r.get('absent') or 'failed: ' + r['error']}")
            continue
        speed = [
            f"{base[k] / r[k]:.2f}×" if base else "" for k in ("step_seconds", "frame_seconds")
        ]
        lines.append(
            f"{r['place']:<13}{1e3 * r['step_seconds']:6.0f} ms{speed[0]:>8}"
            f"{1e3 * r['frame_seconds']:7.0f} ms{speed[1]:>8}{r['first_seconds']:16.1f} s"
        )
    return "\n".join(lines)


def _wait(backend: Backend) -> None:
    if backend.device.type == "xla":
        runtime.wait()
    elif backend.device.type == "cuda":
        torch.cuda.synchronize()


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    print(json.dumps(measure(request["overrides"], request["steps"])))
