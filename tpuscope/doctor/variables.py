"""Environment variables that break or change the start of a program."""

from pathlib import Path

from ..engine import hardware as tpu
from .machine import Machine
from .report import Check, ok, problem, warning

# torch_xla 2.9.0 registers a plugin for TPU and NEURON and has the CPU built in; others, and other
# cases of letters, end in "No PjRtPlugin registered for" (seen).
PLATFORMS = ("TPU", "CPU", "NEURON")
# Of the XRT runtime, which torch_xla no longer contains: the names do not occur in 2.9.0.
XRT = ("XRT_TPU_CONFIG", "XRT_WORKERS", "XRT_DEVICE_MAP", "COLAB_TPU_ADDR")


def variables(machine: Machine) -> list[Check]:
    """Return a line for each wrong variable, or one line if none is."""
    found = [check for look in _LOOKS for check in look(machine)]
    return found or [ok("environment variables", "none that breaks a program's start")]


def _platform(machine: Machine) -> list[Check]:
    value = machine.environ.get("PJRT_DEVICE")
    if value is None:
        return []
    if value not in PLATFORMS:
        detail = (
            f"PJRT_DEVICE={value!r} is not a platform of torch_xla; programs stop when they open"
        )
        return [warning("PJRT_DEVICE", f"{detail} the device", "unset PJRT_DEVICE")]
    if value == "CPU" and machine.chips():
        detail = "PJRT_DEVICE=CPU, and this machine has a TPU: XLA programs run on the CPU"
        return [problem("PJRT_DEVICE", detail, "unset PJRT_DEVICE", ("tpu",))]
    if value == "TPU" and not machine.chips():
        detail = "PJRT_DEVICE=TPU, and this machine has no TPU: XLA programs wait for one"
        return [warning("PJRT_DEVICE", detail, "unset PJRT_DEVICE")]
    return []


def _kaggle(machine: Machine) -> list[Check]:
    stale = tpu.stale_variables(machine.environ)
    if not stale:
        return []
    detail = "left by a larger slice; the TPU then expects more workers"
    fix = f"unset {' '.join(stale)} (tpuscope's engine does it for the programs that use it)"
    return [warning(" and ".join(stale), detail, fix)]


def _xrt(machine: Machine) -> list[Check]:
    set_here = [name for name in XRT if name in machine.environ]
    if not set_here:
        return []
    detail = "set as in guides of PyTorch/XLA 1.x; it has no effect today"
    return [warning(" and ".join(set_here), detail, f"unset {' '.join(set_here)}")]


def _bfloat16(machine: Machine) -> list[Check]:
    # Still obeyed by 2.9.0 (seen: 1.001 becomes 1), which says that they are deprecated since 2.6.
    found = []
    for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        if machine.environ.get(name, "0") not in ("", "0", "false"):
            detail = "turns every float32 on the device into bfloat16, sums and weights too"
            fix = f"unset {name}; torch.autocast('xla', torch.bfloat16) keeps those in float32"
            found.append(problem(name, detail, fix, ("tpu", "xla")))
    return found


def _chips(machine: Machine) -> list[Check]:
    value = machine.environ.get("TPU_VISIBLE_CHIPS") or machine.environ.get("TPU_VISIBLE_DEVICES")
    chips = len(machine.chips())
    if not value or not chips or len(value.split(",")) >= chips:
        return []
    name = next(n for n in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES") if machine.environ.get(n))
    detail = f"{value}: torch_xla sees {len(value.split(','))} of {chips} chips"
    names = f"{name} TPU_CHIPS_PER_PROCESS_BOUNDS TPU_PROCESS_BOUNDS"
    return [warning(name, detail, f"unset {names}, unless it is intended")]


def _metadata(machine: Machine) -> list[Check]:
    # torch_xla then reads the kind of TPU from TPU_ACCELERATOR_TYPE alone, while it is imported.
    skip = machine.environ.get("TPU_SKIP_MDS_QUERY")
    if not skip or not machine.chips() or machine.environ.get("TPU_ACCELERATOR_TYPE"):
        return []
    detail = "set without TPU_ACCELERATOR_TYPE: importing torch_xla fails where a TPU is"
    return [problem("TPU_SKIP_MDS_QUERY", detail, "unset TPU_SKIP_MDS_QUERY", ("tpu", "xla"))]


def _libraries(machine: Machine) -> list[Check]:
    found = []
    preloaded = machine.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    gone = [path for path in preloaded if path.startswith("/") and not _there(machine, path)]
    if gone:
        detail = f"{', '.join(gone)} does not exist; every program prints an error about it"
        found.append(warning("LD_PRELOAD", detail, "unset LD_PRELOAD, or install the library"))
    library = machine.environ.get("TPU_LIBRARY_PATH")
    if library and not _there(machine, library):
        detail = f"{library} does not exist, and torch_xla looks for libtpu nowhere else"
        fix, blocks = "unset TPU_LIBRARY_PATH", ("tpu", "xla") if machine.chips() else ()
        found.append(problem("TPU_LIBRARY_PATH", detail, fix, blocks))
    return found


def _there(machine: Machine, path: str) -> bool:
    return (machine.root / Path(path).relative_to("/")).exists() if path[0] == "/" else True


_LOOKS = (_platform, _kaggle, _xrt, _bfloat16, _chips, _metadata, _libraries)
