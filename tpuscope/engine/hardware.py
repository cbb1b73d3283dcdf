"""This machine's TPU as the system shows it: nothing is opened, and torch is not needed.

Chips on the PCI bus, their device nodes, the processes that hold them, and the environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .tpu_specs import CHIPS, GIB

_GOOGLE = "0x1ae0"  # PCI vendor id
_KAGGLE = "KAGGLE_KERNEL_RUN_TYPE"  # a variable that Kaggle sets

VIRTUAL_CORES = 8  # that XLA on the CPU can be asked for: as many as one TPU machine has


@dataclass(frozen=True)
class Generation:
    """A kind of TPU chip, as its PCI device id tells.

    Attributes:
        names: generations with this id, as :data:`~tpuscope.engine.tpu_specs.CHIPS` names them.
        cores: XLA devices on a chip under torch_xla, which runs v4's two cores as one.
    """

    names: tuple[str, ...]
    cores: int = 1

    @property
    def name(self) -> str:
        """The generations, for people."""
        return " or ".join(self.names) or "of an unknown kind"

    @property
    def memory(self) -> str:
        """HBM of each core in GiB, as published; "" if no figure is known."""
        known = [CHIPS[name].hbm for name in self.names if name in CHIPS]
        return " or ".join(f"{hbm / self.cores / GIB:.0f}" for hbm in known)


# The ids are those that torch_xla 2.9.0 counts as TPUs (torch_xla/_internal/tpu.py,
# _TPU_PCI_DEVICE_IDS). Cores of a chip: its num_logical_cores_per_chip() says 2 up to v3 and 1 for
# all later ones, which is right up to v6e. A TPU7x has two TensorCores with half of the chip's HBM
# each (https://docs.cloud.google.com/tpu/docs/tpu7x), and the runtime shows each as a device.
GENERATIONS = {
    "0x0027": Generation(("v2", "v3"), 2),
    "0x005e": Generation(("v4",)),
    "0x0062": Generation(("v5p",)),
    "0x0063": Generation(("v5e",)),
    "0x006f": Generation(("v6e",)),
    "0x0076": Generation(("7x",), 2),
    "0x0056": Generation(()),
}


def tpu_pci_ids(root: Path = Path("/")) -> list[str]:
    """Return the PCI device id of every TPU chip: keys of :data:`GENERATIONS`.

    Args:
        root: where the machine's file system begins.
    """
    found = []
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        device = vendor.with_name("device")
        if vendor.read_text().strip() == _GOOGLE and device.read_text().strip() in GENERATIONS:
            found.append(device.read_text().strip())
    return found


def tpu_nodes(root: Path = Path("/")) -> list[str]:
    """Return the device nodes of a TPU's driver: ``"/dev/accel0"`` or ``"/dev/vfio/0"``."""
    nodes = [*root.glob("dev/accel*"), *root.glob("dev/vfio/[0-9]*")]
    return sorted(f"/{node.relative_to(root)}" for node in nodes)


def tpu_holders(root: Path = Path("/")) -> dict[int, str]:
    """Return the processes that have a TPU open, id → command, of those this user may see."""
    found = {}
    for files in root.glob("proc/[0-9]*/fd"):
        try:
            targets = [str(link.readlink()) for link in files.iterdir()]
            command = (files.parent / "comm").read_text().strip()
        except OSError:  # it has ended, or is another user's
            continue
        if any(target.startswith(("/dev/accel", "/dev/vfio/")) for target in targets):
            found[int(files.parent.name)] = command
    return found


def stale_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables that a larger slice left in Kaggle's environment.

    With them the TPU answers "Expected 4 worker addresses, got 1"
    (https://github.com/huggingface/transformers/issues/28204).
    """
    if _KAGGLE not in environ:
        return []  # on a pod slice they are intended
    return [name for name in ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID") if name in environ]


def version_fault(torch: str, torch_xla: str) -> str | None:
    """Return why these versions do not match and what to do; None if they match.

    The two packages are bound by a C++ ABI: with different minor versions the import ends in a
    missing symbol.
    """
    minor = ".".join(torch_xla.split(".")[:2])
    if torch.split(".")[:2] == torch_xla.split(".")[:2]:
        return None
    return (
        f"torch {torch} and torch_xla {torch_xla} do not belong together; "
        f"pip install 'torch=={minor}.*' (in Colab: Runtime > Disconnect and delete runtime)"
    )
