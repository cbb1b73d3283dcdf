"""Progress bars for long work: shown to people, silent in logs."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


_hidden = False


def hide_progress() -> None:
    """No bars in this process any more: another one shows them."""
    global _hidden
    _hidden = True


@contextmanager
def without_progress() -> Iterator[None]:
    """No bars in this block: one around it shows how far things are."""
    global _hidden
    before, _hidden = _hidden, True
    try:
        yield
    finally:
        _hidden = before


def someone_watches() -> bool:
    """Whether the output goes to a terminal or a notebook rather than into a file."""
    if _hidden:
        return False
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def progress(items: Iterable[T], description: str, total: int | None = None, **kwargs) -> tqdm:
    """``tqdm`` over items, disabled where nobody watches."""
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
