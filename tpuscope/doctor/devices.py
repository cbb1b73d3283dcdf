"""The devices: which are there, and whether they compute the right result."""

import os
import signal
from collections import Counter
from collections.abc import Callable

from .. import versions
from ..engine import hardware as tpu
from . import probe
from .machine import Machine
from .report import Check, ok, problem, warning
from .software import XLA

GET_A_TPU = {
    "Colab": "Runtime > Change runtime type > v5e-1 TPU > Save",
    "Kaggle": "Settings > Accelerator > TPU v5e-8",
}
RESTART = {
    "Colab": "Runtime > Restart session",
    "Kaggle": "Run > Restart & clear cell outputs",
}
# Of libtpu's messages when another process has the TPU (jax-ml/jax#10192, pytorch/xla#3165).
_HELD = ("already in use", "resource busy", "operation not permitted")


def place(machine: Machine, require: str | None = None) -> Check:
    """Report the runtime, and its TPU as the PCI bus shows it."""
    name, chips = machine.place(), machine.chips()
    if not chips:
        how = GET_A_TPU.get(name, "for one: a notebook in Colab or Kaggle, or a Cloud TPU VM")
        if require == "tpu":
            return problem("runtime", f"{name}, no TPU", how, ("tpu",))
        return ok("runtime", f"{name}, no TPU", how)
    kinds = Counter(tpu.GENERATIONS[chip] for chip in chips)
    parts = []
    for kind, count in kinds.items():
        text = f"{count} TPU {kind.name} chip{'s' * (count > 1)}, {count * kind.cores} core"
        text += "s" * (count * kind.cores > 1)
        if kind.memory:
            text += f", {kind.memory} GiB of HBM a core (Google's published figure)"
        parts.append(text)
    return ok("runtime", f"{name}, {'; '.join(parts)}")


def driver(machine: Machine) -> list[Check]:
    """Check that the chips have device nodes, and that no process holds them."""
    if not machine.chips():
        return []
    if not tpu.tpu_nodes(machine.root):
        fix = "in a container: start it with --privileged; else: a machine of a TPU image"
        return [problem("TPU driver", "chips, but no /dev/accel* or /dev/vfio/*", fix, XLA)]
    holders = tpu.tpu_holders(machine.root)
    if not holders:
        return [ok("TPU driver", ", ".join(tpu.tpu_nodes(machine.root)))]
    mine = os.getpid() in holders
    named = ", ".join(f"process {pid} ({name})" for pid, name in holders.items())
    who = "this notebook" if mine else named
    kill = f"kill {' '.join(map(str, holders))}"
    restart = RESTART.get(machine.place(), "restart the kernel")
    fix = (
        restart
        if mine
        else f"let it finish, or: {kill}"
        + (f" (a notebook: {restart})" if "python" in named else "")
    )
    return [problem("TPU in use", f"held by {who}; one process at a time can open it", fix, XLA)]


def processor(
    machine: Machine, limit: float, watch: Callable[[str], None]
) -> tuple[list[Check], dict[str, int], dict]:
    """Try plain PyTorch on the CPU; learn what it knows of CUDA.

    Returns:
        Checks, cores by target, facts.
    """
    outcome = probe.compute("cpu", machine.environ, limit, watch)
    checks, works = _judge("cpu", "CPU", outcome, machine)
    facts = {name: outcome.facts.get(name) for name in ("torch", "cuda_build", "gpus")}
    return checks, {"cpu": 1} if works else {}, facts


def cuda(
    machine: Machine,
    known: dict,
    limit: float,
    watch: Callable[[str], None],
    require: str | None = None,
) -> tuple[list[Check], dict[str, int]]:
    """Try CUDA if torch finds a GPU; else report why not, if a GPU is there or required.

    Args:
        known: facts that :func:`processor` returned.
    """
    if known.get("gpus"):
        outcome = probe.compute("cuda", machine.environ, limit, watch)
        checks, works = _judge("cuda", f"CUDA ({', '.join(known['gpus'])})", outcome, machine)
        return checks, {"cuda": 1} if works else {}
    if not list(machine.root.glob("dev/nvidia[0-9]*")) or not known.get("torch"):
        if require != "cuda":
            return [], {}
        fix = "in Colab: Runtime > Change runtime type > T4 GPU > Save"
        return [problem("CUDA", "this machine has no NVIDIA GPU", fix, ("cuda",))], {}
    if not known["cuda_build"]:
        detail = f"a GPU is there, but torch {known['torch']} is built without CUDA"
        fix = f"pip install --force-reinstall torch=={versions.TORCH_XLA}"
        return [problem("CUDA", detail, fix, ("cuda",))], {}
    detail = f"a GPU is there, but torch (built for CUDA {known['cuda_build']}) finds none"
    fix = "`nvidia-smi` shows whether the driver works and is new enough; CUDA_VISIBLE_DEVICES"
    return [problem("CUDA", detail, f"{fix} may hide it", ("cuda",))], {}


def xla(
    machine: Machine, limit: float, watch: Callable[[str], None]
) -> tuple[list[Check], dict[str, int]]:
    """Try XLA on the TPU if there is one, else on the CPU."""
    name = "TPU" if machine.chips() else "CPU"
    environ = dict(machine.environ)
    for stale in tpu.stale_variables(environ):  # as select_platform of the engine does
        del environ[stale]
    if name == "CPU":
        environ["CPU_NUM_DEVICES"] = "1"
    outcome = probe.compute(f"xla:{name}", environ, limit, watch)
    checks, works = _judge(f"xla:{name}", f"XLA on {name}", outcome, machine)
    if not works:
        return checks, {}
    if name == "CPU":
        return checks, {"xla": tpu.VIRTUAL_CORES}
    cores = machine.tpu_cores()
    return checks, {"xla": cores, "tpu": cores}


def _judge(
    place: str, name: str, outcome: probe.Outcome, machine: Machine
) -> tuple[list[Check], bool]:
    """Return the lines for a probe's outcome, and whether the device can be used."""
    blocks = {"cpu": ("cpu",), "cuda": ("cuda",)}.get(place, XLA)
    if not outcome.done:
        fix = _way_out(place, outcome, machine)
        return [problem(name, outcome.how_it_ended(), fix, blocks)], False
    facts, limit = outcome.facts, probe.TOLERANCE[place]
    numbers = f"product off by {facts['product']:.0e}, gradients by {facts['gradients']:.0e}"
    if not all(facts[name] <= limit for name in ("product", "gradients")):  # nor is NaN
        detail = f"the results differ from the host's: {numbers} (at most {limit:.0e})"
        fix = "see the variables above; otherwise reinstall the packages, or take another machine"
        return [problem(name, detail, fix, blocks)], False
    kind = f"{facts['device']}, " if facts["device"] and place == "xla:TPU" else ""
    first, second = facts["first_step"], facts["second_step"]
    steps = f"first step {first:.1f} s, second {1000 * second:.0f} ms"
    detail = f"{kind}agrees with the host: {numbers} (at most {limit:.0e}); {steps}"
    if place == "xla:TPU" and facts["cores"] < machine.tpu_cores():
        opened = f"{facts['cores']} of {machine.tpu_cores()} cores"
        fix = "expected on a slice, where one chip is tried; otherwise see the variables above"
        return [warning(name, f"{detail}; opened {opened}", fix)], True
    return [ok(name, detail)], True


def _way_out(place: str, outcome: probe.Outcome, machine: Machine) -> str:
    """Return the fix for a probe that did not come to its end."""
    text = outcome.message.lower()
    restart = RESTART.get(machine.place(), "restart the machine")
    if outcome.code is None:
        return f"{restart}; if the first start is only slow: --timeout 600"
    if outcome.code == -signal.SIGKILL:
        return "it was killed, as happens when the machine is out of memory: end other programs"
    if "xla_flags" in text:
        return "unset XLA_FLAGS"
    if place == "xla:TPU" and any(sign in text for sign in _HELD):
        return (
            "another process holds the TPU: restart the notebook that uses it, or find it with "
            "`sudo lsof -w /dev/accel* /dev/vfio/*` and kill it"
        )
    if place == "cpu":
        return f"pip install --force-reinstall torch=={versions.TORCH_XLA}"
    if place == "cuda":
        return "`nvidia-smi` shows whether the driver works; meanwhile: use the CPU"
    if "import" in outcome.stage or place == "xla:CPU":
        return f"pip install --force-reinstall {versions.pair()}; meanwhile: use the CPU"
    return f"{restart}; meanwhile: use the CPU"
