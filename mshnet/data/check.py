"""``mshnet check-data``: what is in a data set, and what training would stumble over."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path

import numpy as np
from PIL import Image

from tpuscope.errors import RequestError
from tpuscope.progress import progress

from ..metrics import regions
from .layout import SPLITS, DataFolder, Sample
from .sample_cache import read_sample

SHOWN = 5  # names listed for each kind of finding


@dataclass
class SplitReport:
    """Findings in one split. Counters count images, names are those of the list."""

    list_file: str = ""
    images: int = 0
    sizes: Counter = field(default_factory=Counter)  # "320×240" → images
    modes: Counter = field(default_factory=Counter)  # Pillow's mode → images
    mask_modes: Counter = field(default_factory=Counter)
    coloured: int = 0  # images whose channels differ
    targets: list[int] = field(default_factory=list)  # targets of each image
    areas: list[int] = field(default_factory=list)  # area of each target, pixels
    touched: list[str] = field(default_factory=list)  # masks that were not binary
    empty: list[str] = field(default_factory=list)  # masks without a target
    repeated: list[str] = field(default_factory=list)  # names that the list holds twice
    missing: list[str] = field(default_factory=list)  # no image or no mask
    unusable: list[str] = field(default_factory=list)  # unreadable, or sizes differ; with reason
    mismatched: int = 0  # of these, image and mask differ in size
    hashes: dict[str, list[str]] = field(default_factory=dict)  # content of the image → names

    def errors(self) -> list[str]:
        """What training would stop at, one line each."""
        lines = [f"missing: {name}" for name in self.missing]
        lines += [f"unusable: {reason}" for reason in self.unusable]
        if self.targets and not self.areas:
            lines.append(
                "no mask holds a target; masks stored as 0 and 1 must be multiplied by 255"
            )
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
        """Everything that training would stop at."""
        found = list(self.problems)
        for name, split in self.splits.items():
            found += [f"{name}: {line}" for line in split.errors()]
        return found

    def as_dict(self) -> dict:
        """Plain values for ``--json``."""
        splits = {}
        for name, split in self.splits.items():
            values = dict(vars(split))
            del values["hashes"]
            splits[name] = values | {"sizes": dict(split.sizes), "modes": dict(split.modes)}
            splits[name]["mask_modes"] = dict(split.mask_modes)
        return {
            "folder": self.folder,
            "splits": splits,
            "shared_names": self.shared_names,
            "shared_content": self.shared_content,
            "errors": self.errors(),
        }


def check(folder: str | Path) -> DataReport:
    """Read everything once and report.

    Raises:
        RequestError: there is no data set at all (no folder, no ``images/``, no ``masks/``).
    """
    data = DataFolder(folder)
    splits, problems = {}, []
    for name in SPLITS:
        try:
            names = data.names(name)
            report = SplitReport(list_file=str(data.list_file(name)))
        except RequestError as error:
            problems.append(str(error))
            continue
        report.repeated = [n for n, count in Counter(names).items() if count > 1]
        for item in progress(names, f"check {name}"):
            _check_sample(data.locate(item), report)
        splits[name] = report
    shared, twins = [], []
    if len(splits) == 2:
        train, test = (data.names(name) for name in SPLITS)
        shared = sorted(set(train) & set(test))
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
        report.mismatched += "must have the same size" in str(error)
        return
    report.modes[_mode(sample.image)] += 1
    report.mask_modes[_mode(sample.mask)] += 1
    report.sizes[f"{image.shape[1]}×{image.shape[0]}"] += 1
    report.coloured += int((image != image[..., :1]).any())
    content = hashlib.sha256(str(image.shape).encode() + image.tobytes()).hexdigest()
    report.hashes.setdefault(content, []).append(sample.name)
    _, areas, _ = regions(mask)
    report.targets.append(len(areas))
    report.areas += areas.tolist()
    if touched:
        report.touched.append(sample.name)
    if not len(areas):
        report.empty.append(sample.name)


def table(report: DataReport) -> str:
    """The report as text: a table of the splits, then findings with their names."""
    names = list(report.splits)
    rows = [[report.folder, *names]]
    for title, cell in _ROWS:
        rows.append([title, *(cell(report.splits[name]) for name in names)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    for name, split in report.splits.items():
        lines += _findings(name, split)
    if report.shared_names:
        lines.append(f"warning: in train and test: {_some(report.shared_names)}")
    if report.shared_content:
        lines.append(f"warning: same picture in train and test: {_some(report.shared_content)}")
    errors = report.errors()
    lines += [f"error: {line}" for line in errors[: 4 * SHOWN]]
    if len(errors) > 4 * SHOWN:
        lines.append(f"error: … and {len(errors) - 4 * SHOWN} more (--json lists all)")
    lines.append("training would stop at these errors" if errors else "ready for training")
    return "\n".join(lines)


def _mode(path: Path) -> str:
    """Pillow's mode, from the file's header."""
    with Image.open(path) as image:
        return image.mode


def _findings(name: str, split: SplitReport) -> list[str]:
    notes = []
    if split.touched:
        notes.append(
            f"{name}: not binary, cut at half of the file type's maximum: "
            f"{_some(split.touched)} ({len(split.touched)} masks)"
        )
    if split.empty:
        notes.append(f"{name}: no target in {_some(split.empty)} ({len(split.empty)} masks)")
    if split.coloured:
        notes.append(
            f"{name}: colour in {split.coloured} of {split.images} images; training takes their "
            "luma (--channels 3 keeps the colours)"
        )
    same = (dict.fromkeys(names) for names in split.hashes.values())
    twins = [" = ".join(names) for names in same if len(names) > 1]
    if twins:
        notes.append(f"warning: {name}: the same picture under several names: {_some(twins)}")
    if split.repeated:
        notes.append(f"warning: {name}: the list repeats {_some(split.repeated)}")
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
