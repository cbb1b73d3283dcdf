"""The machine as the checks see it; tests give it another root, environment and packages."""

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from ..engine import hardware as tpu
from ..host_memory import host_memory


@dataclass
class Machine:
    """Where to look.

    Attributes:
        root: where the machine's file system begins.
        environ: the environment that a program would have.
        search: folders with installed packages; None for Python's own path.
        python: version of Python.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    search: list[str] | None = None
    python: str = platform.python_version()

    def version(self, distribution: str) -> str | None:
        """Return the version of an installed package; nothing is imported."""
        found = self.distribution(distribution)
        return found.version if found else None

    def distribution(self, name: str) -> metadata.Distribution | None:
        """Return an installed package's metadata."""
        path = sys.path if self.search is None else self.search
        return next(iter(metadata.distributions(name=name, path=path)), None)

    def place(self) -> str:
        """Return the kind of machine: a notebook service's, a TPU VM, or another."""
        if "KAGGLE_KERNEL_RUN_TYPE" in self.environ:  # first: Kaggle may have Colab's packages
            return "Kaggle"
        if "COLAB_RELEASE_TAG" in self.environ or self.version("google-colab"):
            return "Colab"
        if self.chips():
            return "TPU VM"
        return "GPU machine" if list(self.root.glob("dev/nvidia[0-9]*")) else "CPU machine"

    def chips(self) -> list[str]:
        """Return the PCI device id of every TPU chip."""
        return tpu.tpu_pci_ids(self.root)

    def tpu_cores(self) -> int:
        """Return the number of cores on all chips."""
        return sum(tpu.GENERATIONS[chip].cores for chip in self.chips())

    def cpus(self) -> int:
        """Return the number of CPU cores."""
        return os.cpu_count() or 1

    def memory(self) -> tuple[int, int] | None:
        """Return total and available bytes of RAM; None where the system does not tell."""
        return host_memory(self.root)

    def free(self, folder: Path) -> int:
        """Return the free bytes of the disk that a folder is on, or would be on."""
        return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest parent that exists."""
    folder = Path(folder).absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
