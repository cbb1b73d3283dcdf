"""Outputs of notebooks that ran: shortened so that they can be committed, searched for warnings."""

import base64
import io
import re
from collections.abc import Iterable

from nbformat import NotebookNode
from PIL import Image

LINES = 60  # kept of a text output: its head and its tail
IMAGE = 60_000  # bytes of a picture above which it is made smaller
WIDTH = 900  # pixels
OWN_WARNING = re.compile(
    r"[^\r\n]*(?:\b(?:mshnet|tpuscope|course|benchmarks|labs)/(?!\S*site-packages/)\S+\.py|/ipykernel_\d+/\S+)"
    r":\d+: \w*Warning: [^\r\n]*"
)


def small(notebook: NotebookNode, hidden: list[str]) -> None:
    """Shorten all outputs in place.

    Args:
        notebook: one that ran.
        hidden: folders of this machine whose names no reader should see.
    """
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when each cell ran: different each time
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                output.text = _short(_private(_as_a_terminal(output.text), hidden))
            for kind, content in list(output.get("data", {}).items()):
                if kind == "image/png":
                    del output.data[kind]
                    output.data |= _smaller(content)
                elif kind == "text/plain":
                    output.data[kind] = _short(_private(content, hidden))
        if cell.cell_type == "code":  # a bar that has erased itself leaves blanks
            cell.outputs = [o for o in cell.outputs if o.get("text", "shown").strip()]


def own_warnings(notebook: NotebookNode) -> list[str]:
    """Return the Python warnings that name a file or a cell of this project."""
    # `!command` merges stderr into stdout, so both are read.
    return OWN_WARNING.findall(streams(notebook.cells))


def streams(cells: Iterable[NotebookNode]) -> str:
    """Return what cells printed to stdout and stderr."""
    texts: dict[tuple[int, str], str] = {}
    for number, cell in enumerate(cells):
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":  # it comes in pieces that end anywhere in a line
                key = (number, output.name)
                texts[key] = texts.get(key, "") + output.text
    return "\n".join(texts.values())


def _joined(pieces: list[NotebookNode]) -> list[NotebookNode]:
    """Join the pieces in which a stream arrives: a progress bar has one for each step."""
    whole: list[NotebookNode] = []
    for piece in pieces:
        last = whole[-1] if whole else {}
        if piece.output_type == "stream" and last.get("name") == piece.name:
            last.text += piece.text
        else:
            whole.append(piece)
    return whole


def _as_a_terminal(text: str) -> str:
    """Return text as a terminal shows it: a progress bar in its last state only."""
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))


def _private(text: str, folders: list[str]) -> str:
    for folder in folders:
        text = text.replace(f"{folder}/", "").replace(folder, ".")
    return re.sub(r"\.venv[\w-]*/lib/python3\.\d+/site-packages/", "…/site-packages/", text)


def _short(text: str) -> str:
    lines = text.split("\n")
    if len(lines) <= LINES:
        return text
    left_out = f"… {len(lines) - LINES} more lines in a run of your own …"
    return "\n".join([*lines[: LINES * 2 // 3], left_out, *lines[-LINES // 3 :]])


def _smaller(content: str) -> dict[str, str]:
    """Return a PNG in base64 as the smallest of: itself, fewer colours, JPEG."""
    raw = base64.b64decode(content)
    kinds = {"image/png": raw}
    if len(raw) > IMAGE:
        image = Image.open(io.BytesIO(raw)).convert("RGB")
        if image.width > WIDTH:
            height = round(image.height * WIDTH / image.width)
            image = image.resize((WIDTH, height), Image.Resampling.LANCZOS)
        kinds["image/png"] = min(raw, _packed(image.quantize(128), "PNG", optimize=True), key=len)
        kinds["image/jpeg"] = _packed(image, "JPEG", quality=85)
    kind = min(kinds, key=lambda kind: len(kinds[kind]))
    return {kind: base64.b64encode(kinds[kind]).decode()}


def _packed(image: Image.Image, kind: str, **options: object) -> bytes:
    packed = io.BytesIO()
    image.save(packed, format=kind, **options)
    return packed.getvalue()
