"""``mshnet check-data``: what a data set holds, and which faults would stop or spoil training."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path

import numpy as np

from tpuscope import tables
from tpuscope.errors import RequestError, printable
from tpuscope.progress import progress

from ..metrics import regions
from .decode import read_header
from .layout import SPLITS, DataFolder, Sample
from .sample_cache import read_sample

SHOWN = 5  # names listed for each kind of finding
# Share of an image that targets may cover without a warning: in SIRST 0.5 % is the most.
LARGE = 0.2


@dataclass
class SplitReport:
    """Findings in one split. Counters count images; names are those of the list."""

    list_file: str = ""
    images: int = 0
    sizes: Counter = field(default_factory=Counter)  # "320×240" → images
    modes: Counter = field(default_factory=Counter)  # Pillow's mode of an image → images
    mask_modes: Counter = field(default_factory=Counter)  # Pillow's mode of a mask → masks
    coloured: int = 0  # images whose channels differ
    targets: list[int] = field(default_factory=list)  # targets of each image
    areas: list[int] = field(default_factory=list)  # area of each target, pixels
    touched: list[str] = field(default_factory=list)  # masks that were not binary
    empty: list[str] = field(default_factory=list)  # masks without a target
    large: list[str] = field(default_factory=list)  # masks with more target than LARGE
    swapped: list[str] = field(default_factory=list)  # the image is binary, the mask is not
    repeated: list[str] = field(default_factory=list)  # names that the list holds twice
    missing: list[str] = field(default_factory=list)  # no image or no mask
    unusable: list[str] = field(default_factory=list)  # unreadable, or sizes differ; with reason
    mismatched: int = 0  # of the unusable, image and mask differ in size
    hashes: dict[str, list[str]] = field(default_factory=dict)  # content of the image → names

    def errors(self) -> list[str]:
        """Return what training would stop at, one line each."""
        lines = [f"missing: {name}" for name in self.missing]
        lines += [f"unusable: {reason}" for reason in self.unusable]
        if self.targets and not self.areas:
            lines.append(
                "no mask holds a target; masks stored as 0 and 1 must be multiplied by 255"
            )
        return lines

    def warnings(self) -> list[str]:
        """Return what training would accept although it is probably wrong, one line each."""
        lines = []
        if len(self.swapped) > len(self.targets) / 2:
            lines.append(
                f"images and masks look swapped: the image is black and white and the mask is not "
                f"in {_some(self.swapped)} ({len(self.swapped)} of {len(self.targets)})"
            )
        if self.large:
            lines.append(
                f"targets cover more than {LARGE:.0%} of {_some(self.large)} ({len(self.large)} "
                "masks); inverted masks, or images in place of masks?"
            )
        same = (dict.fromkeys(names) for names in self.hashes.values())
        if twins := [" = ".join(names) for names in same if len(names) > 1]:
            lines.append(f"the same picture under several names: {_some(twins)}")
        if self.repeated:
            lines.append(f"the list repeats {_some(self.repeated)}")
        return lines


@dataclass
class DataReport:
    """Findings in a data set."""

    folder: str
    splits: dict[str, SplitReport]
    problems: list[str]  # a split without a usable list
    shared_names: list[str]  # in train and test
    shared_content: list[str]  # "train name = test name": the same picture under two names

    def errors(self) -> list[str]:
        """Return everything that training would stop at."""
        return self.problems + [
            f"{name}: {line}" for name, split in self.splits.items() for line in split.errors()
        ]

    def warnings(self) -> list[str]:
        """Return everything that is probably wrong but does not stop training."""
        lines = [
            f"{name}: {line}" for name, split in self.splits.items() for line in split.warnings()
        ]
        if self.shared_names:
            lines.append(f"in train and test: {_some(self.shared_names)}")
        if self.shared_content:
            lines.append(f"same picture in train and test: {_some(self.shared_content)}")
        return lines

    def as_dict(self) -> dict:
        """Return plain values for ``--json``."""
        return {
            "folder": self.folder,
            "splits": {
                name: {key: value for key, value in vars(split).items() if key != "hashes"}
                for name, split in self.splits.items()
            },
            "shared_names": self.shared_names,
            "shared_content": self.shared_content,
            "errors": self.errors(),
            "warnings": self.warnings(),
        }


def check(folder: str | Path) -> DataReport:
    """Read everything once and report.

    Raises:
        RequestError: there is no data set at all (no folder, no ``images/``, no ``masks/``).
    """
    data = DataFolder(folder)
    splits, problems, lists = {}, [], {}
    for name in SPLITS:
        try:
            names = lists[name] = data.names(name)
        except RequestError as error:
            problems.append(str(error))
            continue
        report = splits[name] = SplitReport(list_file=str(data.list_file(name)))
        report.repeated = [n for n, count in Counter(names).items() if count > 1]
        for item in progress(names, f"check {name}"):
            _check_sample(data.locate(item), report)
    shared, twins = [], []
    if len(splits) == 2:
        shared = sorted(set.intersection(*map(set, lists.values())))
        first, second = (splits[name].hashes for name in SPLITS)
        pairs = (product(first[key], second[key]) for key in first.keys() & second.keys())
        twins = sorted({f"{a} = {b}" for a, b in chain(*pairs) if a != b})
    return DataReport(str(folder), splits, problems, shared, twins)


def _check_sample(sample: Sample, report: SplitReport) -> None:
    report.images += 1
    for kind in ("image", "mask"):
        if getattr(sample, kind) is None:
            report.missing.append(f"{sample.name} has no {kind}")
    if sample.image is None or sample.mask is None:
        return
    try:
        image, mask, touched = read_sample(sample, channels=3)
    except RequestError as error:
        report.unusable.append(str(error))
        report.mismatched += error.code == "size-mismatch"
        return
    report.modes[read_header(sample.image)[0]] += 1
    report.mask_modes[read_header(sample.mask)[0]] += 1
    report.sizes[f"{image.shape[1]}×{image.shape[0]}"] += 1
    report.coloured += int((image != image[..., :1]).any())
    content = hashlib.sha256(str(image.shape).encode() + image.tobytes()).hexdigest()
    report.hashes.setdefault(content, []).append(sample.name)
    _, areas, _ = regions(mask)
    report.targets.append(len(areas))
    report.areas += areas.tolist()
    if touched:
        report.touched.append(sample.name)
        if ((image == 0) | (image == 255)).all():
            report.swapped.append(sample.name)
    if not len(areas):
        report.empty.append(sample.name)
    if mask.mean() > LARGE:
        report.large.append(sample.name)


def table(report: DataReport) -> str:
    """Return the report as text: a table of the splits, then findings with their names."""
    names = list(report.splits)
    rows = [[report.folder, *names], ["-" * len(name) for name in (report.folder, *names)]]
    for title, cell in _ROWS:
        rows.append([title, *(cell(report.splits[name]) for name in names)])
    lines = [tables.table(rows)]
    for name, split in report.splits.items():
        lines += [f"{name}: {line}" for line in _notes(split)]
    lines += [f"warning: {line}" for line in report.warnings()]
    errors = report.errors()
    lines += [f"error: {line}" for line in errors[: 4 * SHOWN]]
    if len(errors) > 4 * SHOWN:
        lines.append(f"error: … and {len(errors) - 4 * SHOWN} more (--json lists all)")
    lines.append("training would stop at these errors" if errors else "ready for training")
    return printable("\n".join(lines))


def _notes(split: SplitReport) -> list[str]:
    """Return what a reader should know although nothing is wrong with it."""
    notes = []
    if split.touched:
        notes.append(
            "not binary, cut at half of the file type's maximum: "
            f"{_some(split.touched)} ({len(split.touched)} masks)"
        )
    if split.empty:
        notes.append(f"no target in {_some(split.empty)} ({len(split.empty)} masks)")
    if split.coloured:
        notes.append(
            f"colour in {split.coloured} of {split.images} images; training takes their luma "
            "(--channels 3 keeps the colours)"
        )
    return notes


def _some(names: list[str]) -> str:
    more = f", … {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _most_common(counter: Counter) -> str:
    shown = ", ".join(f"{key} ({count})" for key, count in counter.most_common(3))
    return shown + (f", {len(counter) - 3} more" if len(counter) > 3 else "")


def _spread(values: list[int]) -> str:
    if not values:
        return "–"
    return f"{min(values)} / {np.median(values):g} / {max(values)}"


_ROWS = (
    ("images listed", lambda s: str(s.images)),
    ("sizes", lambda s: _most_common(s.sizes)),
    ("modes", lambda s: _most_common(s.modes)),
    ("mask modes", lambda s: _most_common(s.mask_modes)),
    ("targets", lambda s: str(len(s.areas))),
    ("targets an image (min/median/max)", lambda s: _spread(s.targets)),
    ("target area, px (min/median/max)", lambda s: _spread(s.areas)),
    ("masks not binary", lambda s: str(len(s.touched))),
    ("masks without target", lambda s: str(len(s.empty))),
    ("missing", lambda s: str(len(s.missing))),
    ("unreadable", lambda s: str(len(s.unusable) - s.mismatched)),
    ("image and mask differ in size", lambda s: str(s.mismatched)),
)
