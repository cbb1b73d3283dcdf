"""Helpers of the lessons: installing extras, checking exercises, drawing menus."""

import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType

from matplotlib.patches import Circle, FancyBboxPatch
from packaging.requirements import Requirement

from tpuscope.figure import Picture

CHOSEN, PAPER, INK, LINE = "#ff9f0a", "#f2f2f7", "#1c1c1e", "#c7c7cc"

# Bound to each other or to the TPU by C++ interfaces: an installation must not change them.
KEPT = ("torch", "torch_xla", "torchvision", "libtpu", "numpy", "jax", "jaxlib")


def checkout() -> Path:
    """Return the project's folder, which holds ``labs/`` and ``benchmarks/`` beside the package.

    In a clone this is the clone. Where the package alone was installed (Colab, Kaggle), the
    repository is cloned into ``clone`` in the working folder, once.

    Raises:
        RuntimeError: git failed; the message is its last line.
    """
    here = Path(__file__).resolve().parent.parent
    if (here / "pyproject.toml").exists():
        return here
    clone = Path("clone").resolve()
    if not clone.is_dir():
        urls = dict(url.split(", ") for url in metadata.metadata("mshnet").get_all("Project-URL"))
        _run("git", "clone", "-q", "--depth", "1", urls["Repository"], str(clone))
    return clone


def install(*requirements: str) -> None:
    """Install packages that a lab needs beyond the runtime's image; skip those already there.

    Args:
        requirements: in pip's syntax, e.g. ``"torchax==0.0.13"``.

    Raises:
        RuntimeError: pip failed, for example because a requirement needs another torch than the
            runtime's; the message is pip's last line.
    """
    missing = [text for text in requirements if not _installed(Requirement(text))]
    if not missing:
        return
    print(f"Installing {', '.join(missing)}", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.writelines(f"{name}=={version}\n" for name in KEPT if (version := _version(name)))
        pins.flush()
        pip = (sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check")
        _run(*pip, "--constraint", pins.name, *missing)


def _installed(requirement: Requirement) -> bool:
    version = _version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{' '.join(command[:4])} … failed: {lines[-1]}")


class NotYet(Exception):
    """Raised when an exercise is not solved yet; the message names what is missing."""

    def _render_traceback_(self) -> list[str]:
        """Return what Jupyter and Colab show: one line instead of a traceback."""
        return [f"Not yet: {self}"]


class checking:
    """Check a reader's answers: ``with checking("well done") as expect: expect(x == 3, "…")``.

    At the end of the block it prints that the answer is right. An exception of the reader's code in
    the block becomes a `NotYet` of one line, like an expectation that is not met.

    Args:
        praise: what to print after "Right."
    """

    def __init__(self, praise: str = ""):
        self.praise = praise

    def __enter__(self) -> "checking":
        return self

    def __call__(self, right: bool, hint: str) -> None:
        """Raise `NotYet` with the hint unless the answer is right."""
        if not right:
            raise NotYet(hint)

    def answered(self, **answers: object) -> None:
        """Raise `NotYet` for the first answer that is still ``...`` or None."""
        for name, answer in answers.items():
            if answer is None or answer is ...:
                raise NotYet(f"{name} has no value. Write your answer in the cell above, run it, "
                             "then run this one again.")  # fmt: skip

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            print(f"Right. {self.praise}".strip())
        elif issubclass(kind, Exception) and not issubclass(kind, NotYet):
            what = str(error) or "no message"
            raise NotYet(f"your code raised {kind.__name__}: {what}") from None


def rejects(check: str, names: dict) -> None:
    """Run a check on an unsolved exercise, and assert that it rejects it.

    The tests put this after the empty exercise of each lesson.

    Args:
        check: source of the check's cell.
        names: the notebook's variables.

    Raises:
        AssertionError: the check accepts the empty exercise.
    """
    try:
        exec(check, names)
    except NotYet as error:
        print(f"Not yet: {error}")
        return
    raise AssertionError("the check accepts an exercise that nobody has solved")


def clicks(*panels: tuple[str, Sequence[str], str]) -> Picture:
    """Draw menus with the entries to click, from left to right.

    Args:
        panels: for each menu or dialog its title, its entries from top to bottom, and the entry to
            click.

    Raises:
        ValueError: an entry to click is not in its panel.
    """
    rows = max(len(entries) for _, entries, _ in panels)
    size = (3.1 * len(panels), 0.36 * rows + 0.75)
    figure = Picture(figsize=size, dpi=80, layout="constrained")
    for number, (axis, (title, entries, chosen)) in enumerate(
        zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True), start=1
    ):
        if chosen not in entries:
            raise ValueError(f"{chosen!r} is none of the entries {list(entries)} of {title!r}")
        axis.set(xlim=(0, 10), ylim=(-rows - 0.2, 1.4))
        axis.axis("off")
        frame = (0.2, -len(entries) - 0.1), 9.6, len(entries) + 1.4
        axis.add_patch(_box(*frame, face=PAPER, edge=LINE))
        axis.text(0.8, 0.55, title, weight="bold", va="center", fontsize=10, color=INK)
        for row, entry in enumerate(entries):
            y = -row - 0.5
            if entry == chosen:
                axis.add_patch(_box((0.5, y - 0.4), 9.0, 0.8, face=CHOSEN, edge=CHOSEN))
                axis.add_patch(Circle((8.8, y), 0.33, color="white"))
                axis.text(8.8, y, str(number), ha="center", va="center", fontsize=9, color=INK)
            short = textwrap.shorten(entry, 34, placeholder=" …")
            axis.text(0.9, y, short, va="center", fontsize=9, color=INK)
    return figure


def _box(corner: tuple[float, float], width: float, height: float, face: str, edge: str):
    style = "round,pad=0,rounding_size=0.25"
    return FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=face, edgecolor=edge)
