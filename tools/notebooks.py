"""Build the notebooks and README's table of lessons: ``python tools/notebooks.py [--check]``.

``notebooks/NN_name.py`` (jupytext percent format) is the source, ``NN_name.ipynb`` is what Colab
opens. Cell ids come from the cells' text, so a rebuild changes only the cells that changed.
``{{repository}}`` and ``{{badges}}`` stand for what pyproject.toml names in one place.
"""

import argparse
import hashlib
import re
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


def lesson_table() -> str:
    """README's table: number, title and promise of each lesson, and its badges."""
    rows = ["| lesson | | open |", "|---|---|---|"]
    for source in _sources():
        text = source.read_text()
        number, title = re.search(r"^# # (\d\d) · (.+)$", text, re.M).groups()
        promise = re.search(r"^# \*\*(.+?)\*\*$", text, re.M | re.S).group(1)
        promise = promise.replace("\n# ", " ")
        link = f"[{number} · {title}](notebooks/{source.stem}.ipynb)"
        rows.append(f"| {link} | {promise} | {badges(source.stem)} |")
    return "\n".join(rows)


def with_table(readme: str) -> str:
    """README with the table between its two markers replaced."""
    head, rest = readme.split("<!-- lessons -->\n")
    tail = rest.split("<!-- end of lessons -->")[1]
    return f"{head}<!-- lessons -->\n{lesson_table()}\n<!-- end of lessons -->{tail}"


def _sources() -> list[Path]:
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say which notebooks are stale")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    wanted = {source.with_suffix(".ipynb"): build(source) for source in _sources()}
    wanted[readme] = with_table(readme.read_text())
    stale = {p: text for p, text in wanted.items() if not p.exists() or p.read_text() != text}
    for path, text in stale.items():
        print(f"{path.name} {'is stale: run make notebooks' if check else 'written'}")
        if not check:
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
