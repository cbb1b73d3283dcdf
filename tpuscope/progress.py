"""Progress bars for long work: shown to people, silent in logs."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

_hidden = False


def hide_progress() -> None:
    """Show no bars in this process from now on: another process shows them."""
    global _hidden
    _hidden = True


@contextmanager
def without_progress() -> Iterator[None]:
    """Show no bars in this block: one outside it shows the progress."""
    global _hidden
    before, _hidden = _hidden, True
    try:
        yield
    finally:
        _hidden = before


def someone_watches() -> bool:
    """Return whether standard error goes to a terminal or a notebook, not to a file."""
    if _hidden:
        return False
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def progress(items: Iterable[T], description: str, total: int | None = None, **kwargs) -> tqdm:
    """Return ``tqdm`` over items, disabled unless :func:`someone_watches`."""
    return tqdm(
        items,
        desc=description,
        total=total,
        disable=not someone_watches(),
        leave=False,
        dynamic_ncols=True,
        file=sys.stderr,
        **kwargs,
    )
