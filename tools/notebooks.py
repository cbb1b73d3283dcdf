"""Build the notebooks from their sources: ``python tools/notebooks.py [--check]``.

``notebooks/NN_name.py`` (jupytext percent format) is the source, ``NN_name.ipynb`` is what Colab
opens. Cell ids come from the cells' text, so a rebuild changes only the cells that changed.
``{{repository}}`` and ``{{badges}}`` stand for what pyproject.toml names in one place.
"""

import argparse
import hashlib
import sys
import tomllib
from pathlib import Path

import jupytext
import nbformat

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
# Colab opens the notebook on a v5e-1 right away; others ignore these entries.
COLAB = {"accelerator": "TPU", "colab": {"gpuType": "V5E1", "provenance": []}}


def repository() -> str:
    """Address of the repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"]


def badges(name: str) -> str:
    """The two badges of a lesson, as Markdown."""
    address = repository()
    path = f"{address.removeprefix('https://github.com/')}/blob/main/notebooks/{name}.ipynb"
    return (
        "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
        f"(https://colab.research.google.com/github/{path}) "
        "[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]"
        f"(https://kaggle.com/kernels/welcome?src=https://github.com/{path})"
    )


def build(source: Path) -> str:
    """Text of the notebook made from a source."""
    text = source.read_text()
    text = text.replace("{{repository}}", repository()).replace("{{badges}}", badges(source.stem))
    notebook = jupytext.reads(text, fmt="py:percent")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, **COLAB})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: set[str] = set()
    for cell in notebook.cells:
        salt, cell_id = 0, ""
        while not cell_id or cell_id in seen:
            cell_id = hashlib.sha256(f"{salt}{cell.source}".encode()).hexdigest()[:12]
            salt += 1
        seen.add(cell_id)
        cell.id = cell_id
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say which notebooks are stale")
    check = parser.parse_args().check
    stale = 0
    for source in sorted(FOLDER.glob("[0-9][0-9]_*.py")):
        notebook, text = source.with_suffix(".ipynb"), build(source)
        if notebook.exists() and notebook.read_text() == text:
            continue
        stale += 1
        print(f"{notebook.name} {'is stale: run make notebooks' if check else 'written'}")
        if not check:
            notebook.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
