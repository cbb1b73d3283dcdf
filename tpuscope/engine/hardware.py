"""What a machine shows of its TPU to who only looks: nothing is opened, and torch is not needed.

Chips on the PCI bus, their device nodes, the processes that hold them, and the environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .tpu_specs import CHIPS, GIB

_GOOGLE = "0x1ae0"  # PCI vendor id
_KAGGLE = "KAGGLE_KERNEL_RUN_TYPE"  # a variable that Kaggle sets


@dataclass(frozen=True)
class Generation:
    """What a PCI device id says of a TPU chip.

    Attributes:
        names: generations with this id, as :data:`~tpuscope.engine.tpu_specs.CHIPS` names them.
        cores: XLA devices a chip, under torch_xla (which runs v4's two cores as one).
    """

    names: tuple[str, ...]
    cores: int = 1

    @property
    def name(self) -> str:
        """For people."""
        return " or ".join(self.names) or "of an unknown kind"

    @property
    def memory(self) -> str:
        """HBM of a core in GiB, as published; "" if no figure is known."""
        known = [CHIPS[name].hbm for name in self.names if name in CHIPS]
        return " or ".join(f"{hbm / self.cores / GIB:.0f}" for hbm in known)


# The ids that torch_xla 2.9.0 counts as TPUs (torch_xla/_internal/tpu.py).
GENERATIONS = {
    "0x0027": Generation(("v2", "v3"), 2),
    "0x005e": Generation(("v4",)),
    "0x0062": Generation(("v5p",)),
    "0x0063": Generation(("v5e",)),
    "0x006f": Generation(("v6e",)),
    "0x0076": Generation(("7x",)),
    "0x0056": Generation(()),
}


def tpu_pci_ids(root: Path = Path("/")) -> list[str]:
    """PCI device ids of the TPU chips, one for each: keys of :data:`GENERATIONS`.

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
    """Device nodes that a TPU's driver makes, such as ``"/dev/accel0"`` or ``"/dev/vfio/0"``."""
    nodes = [*root.glob("dev/accel*"), *root.glob("dev/vfio/[0-9]*")]
    return sorted(f"/{node.relative_to(root)}" for node in nodes)


def tpu_holders(root: Path = Path("/")) -> dict[int, str]:
    """Processes that have a TPU open, of those whose files this user may see: id → command."""
    found = {}
    for files in root.glob("proc/[0-9]*/fd"):
        try:
            targets = [str(link.readlink()) for link in files.iterdir()]
            command = (files.parent / "comm").read_text().strip()
        except OSError:  # ended meanwhile, or another user's
            continue
        if any(target.startswith(("/dev/accel", "/dev/vfio/")) for target in targets):
            found[int(files.parent.name)] = command
    return found


def stale_variables(environ: Mapping[str, str]) -> list[str]:
    """Names of what a larger slice left in Kaggle's environment.

    With it the TPU answers "Expected 4 worker addresses, got 1"
    (https://github.com/huggingface/transformers/issues/28204).
    """
    if _KAGGLE not in environ:
        return []  # on a pod slice they are meant
    return [name for name in ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID") if name in environ]


def version_fault(torch: str, torch_xla: str) -> str | None:
    """Why these versions do not belong together and what to do; None if they do.

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
