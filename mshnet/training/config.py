"""The settings of a run, checked before any long work starts."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from tpuscope.errors import RequestError

from ..choices import CACHES, DEVICES, ENGINES, FOLDS, PRECISIONS, STRATEGIES

MOST_WORKERS = 10  # that a run takes by default

# Smallest and largest value of each whole number. The upper limits are above anything useful and
# below what exhausts the machine before the first step.
LIMITS = {
    "batch_size": (1, 2**20),
    "epochs": (1, 100_000),
    "warm_epoch": (0, 100_000),
    "base_size": (16, 4096),
    "crop_size": (16, 4096),
    "num_cores": (1, 65_536),
    "workers": (0, 256),
    "seed": (0, 2**63 - 1),
}
LARGEST_LR = 1e38  # float32 holds no larger number
MOST_MINUTES = 525_600  # a year


def default_workers() -> int:
    """Return how many loader processes a run starts: one core is left for the main process.

    Eight v5e cores take at most 6,800 samples a second (``mshnet aot``, 32 images a core, bf16);
    one process made 700 to 1,100 where it was measured (``mshnet bench --only loader``).
    """
    return max(0, min(MOST_WORKERS, (os.cpu_count() or 1) - 1))


def default_batch_size(cores: int, least: int) -> int:
    """Return the smallest multiple of ``cores`` that is at least ``least``: images a step."""
    return -(-least // cores) * cores


@dataclass(frozen=True)
class Config:
    """The settings of a run; the field names are the flags of the command line.

    Defaults are the official recipe: Adagrad, learning rate 0.05, 400 epochs, batch 4, 256×256,
    warm-up up to and including epoch 5.
    """

    dataset_dir: str | None = None  # None: built-in scenes
    batch_size: int = 4  # global
    epochs: int = 400
    lr: float = 0.05
    warm_epoch: int = 5  # last epoch of the warm-up, counted from 0
    base_size: int = 256  # pixels; scale of the augmentation, and size of evaluation images
    crop_size: int = 256  # pixels; size of training samples
    device: str = "auto"
    engine: str = "auto"  # of the device tpu
    num_cores: int = 1  # of this machine
    strategy: str = "spmd"  # how several cores share the work
    precision: str = "fp32"
    space_to_depth: int | None = None  # factor, see MSHNet.fold; None: by device
    channels: int = 1  # kept of each image; one is repeated for the network's three
    cache: str = "ram"
    workers: int = dataclasses.field(default_factory=default_workers)
    seed: int = 0
    save_dir: str | None = None  # None: weight/MSHNet-<timestamp>
    weight_path: str | None = None  # test: what to load; train: where to start from
    compile_cache: str | None = None
    backup: str | None = None  # second folder for the run's files, such as one on Drive
    save_minutes: float = 10.0  # between checkpoints within an epoch
    max_minutes: float | None = None  # save and stop in time for a session's limit
    stage: bool = False  # copy the data set to the local disk first
    widths: tuple[int, ...] = (16, 32, 64, 128, 256)  # of the network, official
    depths: tuple[int, ...] = (1, 2, 2, 2, 2)

    def __post_init__(self):
        """Refuse what cannot work.

        Raises:
            RequestError: names the flag, its value and a value that would do.
        """
        for name, (least, most) in LIMITS.items():
            if getattr(self, name) < least:
                self._refuse(name, f"must be at least {least}", "out-of-range")
            if getattr(self, name) > most:
                self._refuse(name, f"must be at most {most}", "out-of-range")
        if not 0 < self.lr <= LARGEST_LR:
            rule = f"must be a positive number of at most {LARGEST_LR:g}, for example 0.05"
            self._refuse("lr", rule, "out-of-range")
        for name in ("save_minutes", "max_minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MOST_MINUTES:
                rule = f"must be a positive number of minutes, at most {MOST_MINUTES}"
                self._refuse(name, rule, "out-of-range")
        for name in ("base_size", "crop_size"):
            size = getattr(self, name)
            if size % 16:
                near = max(16, round(size / 16) * 16)
                self._refuse(name, f"must be a multiple of 16, for example {near}", "not-multiple")
        for name, choices in (
            ("device", DEVICES),
            ("engine", ENGINES),
            ("precision", PRECISIONS),
            ("strategy", STRATEGIES),
            ("cache", CACHES),
            ("channels", (1, 3)),
            ("space_to_depth", (None, *FOLDS)),
        ):
            if getattr(self, name) not in choices:
                named = (str(choice) for choice in choices if choice is not None)
                self._refuse(name, "must be one of " + ", ".join(named), "unknown-choice")

    def _refuse(self, name: str, rule: str, code: str) -> None:
        flag = "--" + name.replace("_", "-")
        raise RequestError(f"{flag} {getattr(self, name)}: {rule}", code)

    def require_even_shares(self, cores: int, noun: str = "cores") -> None:
        """Check that every core gets the same number of images of a global batch.

        Args:
            cores: that share it.
            noun: for what else shares it, such as processes.

        Raises:
            RequestError: the batch is no multiple of the cores.
        """
        if self.batch_size % cores:
            near = self.batch_size // cores * cores
            choices = " or ".join(str(n) for n in (near, near + cores) if n)
            rule = (
                f"it is the global batch, shared by {cores} {noun}, and must be a multiple of "
                f"{cores}; use {choices}"
            )
            self._refuse("batch_size", rule, "uneven-batch")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as written to ``config.json`` and into checkpoints."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """Build the settings from :meth:`as_dict`; keys that this version lacks are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {key: value for key, value in values.items() if key in known}
        for name in ("widths", "depths"):
            if name in values:
                values[name] = tuple(values[name])
        return cls(**values)
