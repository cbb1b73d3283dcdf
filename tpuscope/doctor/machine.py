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


@dataclass
class Machine:
    """Where to look.

    Attributes:
        root: where the machine's file system begins.
        environ: the environment that training would have.
        search: folders with installed packages; None for Python's own path.
        python: version of Python.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    search: list[str] | None = None
    python: str = platform.python_version()

    def version(self, distribution: str) -> str | None:
        """Version of an installed package; nothing is imported."""
        found = self.distribution(distribution)
        return found.version if found else None

    def distribution(self, name: str) -> metadata.Distribution | None:
        """An installed package's metadata."""
        path = sys.path if self.search is None else self.search
        return next(iter(metadata.distributions(name=name, path=path)), None)

    def place(self) -> str:
        """Whose machine this is."""
        if "KAGGLE_KERNEL_RUN_TYPE" in self.environ:  # first: Kaggle may hold Colab's packages, too
            return "Kaggle"
        if "COLAB_RELEASE_TAG" in self.environ or self.version("google-colab"):
            return "Colab"
        if self.chips():
            return "TPU VM"
        return "GPU machine" if list(self.root.glob("dev/nvidia[0-9]*")) else "CPU machine"

    def chips(self) -> list[str]:
        """PCI device ids of TPU chips."""
        return tpu.tpu_pci_ids(self.root)

    def tpu_cores(self) -> int:
        """Cores of all chips."""
        return sum(tpu.GENERATIONS[chip].cores for chip in self.chips())

    def cpus(self) -> int:
        return os.cpu_count() or 1

    def memory(self) -> tuple[int, int]:
        """Bytes of RAM: what this machine or container has, and what is free of it."""
        table = {}
        for line in (self.root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            table[name] = int(value.split()[0]) * 1024  # kB
        total, free = table["MemTotal"], table["MemAvailable"]
        group = self.root / "sys/fs/cgroup"
        try:  # a container's limit; the text "max" means none
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return total, free
        used -= int(rows.get("inactive_file", 0))  # files' contents, given up when needed
        return min(total, limit), min(free, limit - used)

    def free(self, folder: Path) -> int:
        """Free bytes of the disk that a folder is on, or would be on."""
        return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = Path(folder).absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
