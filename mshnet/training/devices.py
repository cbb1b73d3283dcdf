"""Which device a request gets, checked without opening the device."""

import torch

from tpuscope import torchrun
from tpuscope.engine import cpu_plugin, torch_tpu
from tpuscope.engine import torch_xla as runtime
from tpuscope.errors import RequestError

WHERE_EIGHT = (
    "Colab's TPUs have 1 core; Kaggle's TPU v5e-8 has 8, and so has a Cloud TPU v5litepod-8"
)


def resolve_device(
    device: str = "auto", num_cores: int = 1, strategy: str = "spmd", engine: str = "auto"
) -> str:
    """Return where a request will run; nothing is opened.

    Args:
        device: ``"auto"`` (TPU, then CUDA, then CPU), ``"tpu"``, ``"cuda"`` or ``"cpu"``. With
            ``PJRT_DEVICE=CPU`` set, ``"tpu"`` means XLA on the CPU.
        num_cores: cores of this machine to train on.
        strategy: ``"spmd"`` or ``"launch"``.
        engine: of the device ``"tpu"``: ``"torch_xla"``, ``"torch_tpu"`` or ``"auto"``, the one
            that is installed.

    Returns:
        ``"xla:TPU"``, ``"xla:CPU"``, ``"torch_tpu:TPU"``, ``"torch_tpu:CPU"``, ``"cuda"`` or
        ``"cpu"``.

    Raises:
        RequestError: the device is not there, has fewer cores, or is none for torchrun.
    """
    launch = torchrun.launch()
    if launch and num_cores > 1:
        raise _cores(
            num_cores,
            f"torchrun has started {launch.count} processes, each with one device; use "
            "--num-cores 1",
        )
    if engine == "torch_tpu" and device in ("cpu", "cuda"):
        raise RequestError(
            f"--engine torch_tpu --device {device}: the engine is that of the device tpu; leave "
            "one of the two out",
            "engine",
        )
    if engine == "auto":
        engine = "torch_tpu" if torch_tpu.installed() else "torch_xla"
    if engine == "torch_tpu" and device in ("auto", "tpu"):
        platform = _torch_tpu_platform(device, num_cores)
        if platform:
            return f"torch_tpu:{platform}"
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # --device cpu and cuda never ask torch_xla: they are the way out where it is broken.
        chips = runtime.tpu_chips() if device in ("auto", "tpu") else 0
        if device == "auto":
            device = "tpu" if chips else "cuda" if torch.cuda.is_available() else "cpu"
        if device == "tpu":
            if launch:
                raise RequestError(
                    "--device tpu under torchrun: torch_xla drives all cores from one process "
                    "(SPMD), which needs no torchrun; start `python main_tpu.py --use-tpu "
                    "--num-cores 8`, or choose --device cpu or cuda",
                    "torchrun-xla",
                )
            platform = _platform(chips, num_cores)
            if platform == "TPU":
                _require_whole_slice(num_cores, strategy)
            return f"xla:{platform}"
    except runtime.XlaUnavailable as error:
        raise RequestError(str(error), "no-device") from error
    if num_cores > 1:
        raise _cores(
            num_cores,
            f"--device {device} trains on 1; several cores need a TPU ({WHERE_EIGHT})",
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise RequestError(
            "--device cuda: PyTorch finds no CUDA GPU; choose --device cpu, or check "
            "`nvidia-smi` and that torch is a CUDA build",
            "no-device",
        )
    if device == "cuda" and launch and launch.local_count > torch.cuda.device_count():
        raise RequestError(
            f"--device cuda: torchrun has started {launch.local_count} processes on a machine with "
            f"{torch.cuda.device_count()} GPUs; use --nproc-per-node {torch.cuda.device_count()}",
            "too-many-processes",
        )
    return device


def _torch_tpu_platform(device: str, num_cores: int) -> str | None:
    """Return where TorchTPU will run, None if ``"auto"`` finds no TPU for it."""
    chips = torch_tpu.tpu_chips()
    if device == "auto" and not chips:
        return None
    torch_tpu.require()
    if torchrun.launch():
        raise RequestError(
            "torchrun with --engine torch_tpu: several devices of TorchTPU are not supported yet; "
            "start without torchrun",
            "engine",
        )
    on_cpu = torch_tpu.on_cpu()
    if on_cpu:
        cpu_plugin.path()
    elif not chips:
        raise _no_tpu()
    if num_cores > 1:
        raise _cores(
            num_cores,
            "TorchTPU has a process for each device, and this project runs it on one; use "
            "--num-cores 1",
        )
    return "CPU" if on_cpu else "TPU"


def _no_tpu() -> RequestError:
    return RequestError(
        "--use-tpu: this machine has no TPU. In Colab: Runtime > Change runtime type > "
        "v5e-1 TPU; on Kaggle: Settings > Accelerator > TPU v5e-8. To run XLA on the CPU "
        "instead, set PJRT_DEVICE=CPU",
        "no-device",
    )


def _platform(chips: int, num_cores: int) -> str:
    runtime.require_matching_versions()
    on_cpu = runtime.requested_platform() == "CPU"
    if not chips and not on_cpu:
        raise _no_tpu()
    platform = "CPU" if on_cpu else "TPU"
    possible = runtime.possible_cores(platform)
    if num_cores > max(possible):
        there = (
            "XLA on the CPU has 8 virtual ones" if on_cpu else f"this machine has {possible[-1]}"
        )
        raise _cores(
            num_cores,
            f"{there} ({WHERE_EIGHT}; more than 8 need a pod slice, see GUIDE.md); "
            f"use --num-cores {max(possible)}",
        )
    if num_cores not in possible:
        choices = " or ".join(map(str, possible))
        raise _cores(num_cores, f"cores form a rectangle of the board; use {choices}")
    if num_cores > 1 and runtime.is_open():
        raise _cores(
            num_cores,
            "this process has opened its device already, which fixes the number of cores; train "
            "in a process of its own: `!mshnet train …` in a notebook",
        )
    return platform


def _require_whole_slice(num_cores: int, strategy: str) -> None:
    """On a slice of several machines, require all cores of each in one program.

    Raises:
        RequestError: a part of them would train alone, each machine for itself.
    """
    everything = runtime.possible_cores("TPU")[-1]
    if num_cores == everything and strategy == "spmd":
        return  # right for one machine and for many
    hosts = runtime.tpu_hosts()
    if hosts > 1 and strategy == "launch":
        raise RequestError(
            f"--strategy launch: it is for one machine, and this is one of {hosts} of a slice; "
            "use --strategy spmd",
            "slice",
        )
    if hosts > 1:
        raise RequestError(
            f"--num-cores {num_cores}: this machine is one of {hosts} of a slice, and all of its "
            f"cores take part; use --num-cores {everything}",
            "slice",
        )


def _cores(num_cores: int, rule: str) -> RequestError:
    return RequestError(f"--num-cores {num_cores}: {rule}", "cores")
