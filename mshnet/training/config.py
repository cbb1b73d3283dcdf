"""Everything a run is made of, checked before any long work starts."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from tpuscope.errors import RequestError

from ..data.sample_cache import CACHES
from ..model import FOLDS

DEVICES = ("auto", "tpu", "cuda", "cpu")
PRECISIONS = ("fp32", "bf16")
STRATEGIES = ("spmd", "launch")
MOST_WORKERS = 10


def default_workers() -> int:
    """Loader processes: one core stays for the process that drives the device.

    Eight v5e cores take at most 6,800 samples a second (``mshnet aot``, 32 images a core, bf16);
    one process made 700 to 1,100 where it was measured (``mshnet bench --only loader``).
    """
    return max(0, min(MOST_WORKERS, (os.cpu_count() or 1) - 1))


@dataclass(frozen=True)
class Config:
    """A run's settings; the field names are the flags of the command line.

    Defaults are the official recipe: Adagrad, learning rate 0.05, 400 epochs, batch 4, 256×256,
    warm-up up to and including epoch 5.
    """

    dataset_dir: str | None = None  # None: built-in scenes
    batch_size: int = 4  # global
    epochs: int = 400
    lr: float = 0.05
    warm_epoch: int = 5  # last epoch of the warm-up, counted from 0
    base_size: int = 256  # pixels; scale of the augmentation, and size of evaluation
    crop_size: int = 256  # pixels; size of training samples
    device: str = "auto"
    num_cores: int = 1  # of this machine
    strategy: str = "spmd"  # how several cores share the work
    precision: str = "fp32"
    space_to_depth: int | None = (
        None  # columns stored as channels, see MSHNet.fold; None: by device
    )
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
        for name in ("batch_size", "epochs", "base_size", "crop_size", "num_cores"):
            if getattr(self, name) < 1:
                self._refuse(name, "must be at least 1")
        for name in ("warm_epoch", "workers", "seed"):
            if getattr(self, name) < 0:
                self._refuse(name, "must be 0 or more")
        if self.seed >= 2**63:
            self._refuse("seed", "must be below 2**63")
        if not 0 < self.lr < float("inf"):
            self._refuse("lr", "must be a positive number, for example 0.05")
        for name in ("save_minutes", "max_minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                self._refuse(name, "must be a positive number of minutes")
        for name in ("base_size", "crop_size"):
            size = getattr(self, name)
            if size % 16:
                near = max(16, round(size / 16) * 16)
                self._refuse(name, f"must be a multiple of 16, for example {near}")
        for name, choices in (
            ("device", DEVICES),
            ("precision", PRECISIONS),
            ("strategy", STRATEGIES),
            ("cache", CACHES),
            ("channels", (1, 3)),
            ("space_to_depth", (None, *FOLDS)),
        ):
            if getattr(self, name) not in choices:
                named = (str(choice) for choice in choices if choice is not None)
                self._refuse(name, "must be one of " + ", ".join(named))

    def _refuse(self, name: str, rule: str) -> None:
        flag = "--" + name.replace("_", "-")
        raise RequestError(f"{flag} {getattr(self, name)}: {rule}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as written to ``config.json`` and into checkpoints."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """The opposite of :meth:`as_dict`; keys that this version does not know are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {key: value for key, value in values.items() if key in known}
        for name in ("widths", "depths"):
            if name in values:
                values[name] = tuple(values[name])
        return cls(**values)
