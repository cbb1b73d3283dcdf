"""Build, run and check the notebooks, and README's table of lessons.

``notebooks/NN_name.py`` (jupytext percent format) is the source, ``NN_name.ipynb`` is what Colab
opens. A source holds each exercise three times: a cell tagged ``exercise``, which the reader
completes, one tagged ``check``, and one tagged ``solution``. Two notebooks come from it:

* the reader's, in notebooks/: exercise, check, hidden solution;
* the solved one, which is run: exercise, its check (which has to complain), solution, check.

The reader's notebook keeps the outputs of the solved one's run, shortened. Cell ids come from the
cells' text, so a rebuild changes only the cells that changed. ``{{repository}}``, ``{{badges}}``
and ``{{time: N min on v5e-1}}`` are filled in here.
"""

import argparse
import copy
import hashlib
import re
import sys
import time
import tomllib
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from outputs import own_warnings, small

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
SOLVED = ROOT / "solved"  # beside notebooks/, so that relative paths lead where theirs lead
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
# Colab opens the notebook on a v5e-1 right away; others ignore these entries.
COLAB = {"accelerator": "TPU", "colab": {"gpuType": "V5E1", "provenance": []}}
FORM = {"cellView": "form", "jupyter": {"source_hidden": True}}
EXERCISE, CHECK, SOLUTION = "exercise", "check", "solution"
TIME = re.compile(r"\{\{time: (\d+) min on v5e-1\}\}")


def repository() -> str:
    """Return the address of the repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"]


def badges(name: str) -> str:
    """Return a lesson's two badges as Markdown. Kaggle imports the file that Colab opens."""
    address = repository()
    path = f"{address.removeprefix('https://github.com/')}/blob/main/notebooks/{name}.ipynb"
    return (
        "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
        f"(https://colab.research.google.com/github/{path}) "
        "[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]"
        f"(https://kaggle.com/kernels/welcome?src=https://github.com/{path})"
    )


def build(source: Path, solved: bool = False) -> NotebookNode:
    """Return the notebook built from a source: the solved one, or the reader's with its outputs."""
    notebook = jupytext.reads(source.read_text(), fmt="py:percent")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, **COLAB})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    _name_cells(notebook.cells)
    if solved:
        notebook.cells = _solve(notebook.cells)
        _fill_in(notebook, source.stem, seconds=None)
    else:
        _hide_solutions(notebook.cells)
        last_run = _last_run(source)
        notebook.metadata["mshnet"] = last_run.metadata.get("mshnet", {})
        _fill_in(notebook, source.stem, notebook.metadata["mshnet"].get("seconds"))
        _take_outputs(notebook, last_run)
    nbformat.validate(notebook)
    return notebook


def text_of(notebook: NotebookNode) -> str:
    """Return the text of a notebook's file."""
    return nbformat.writes(notebook) + "\n"


def code_hash(source: Path) -> str:
    """Return a hash of all code that a run of the lesson executes; prose does not change it."""
    code = [cell.source for cell in build(source, solved=True).cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def run(source: Path) -> NotebookNode:
    """Run the solved lesson; return the reader's notebook with outputs and duration."""
    from nbclient import NotebookClient

    SOLVED.mkdir(exist_ok=True)
    ran = build(source, solved=True)
    started = time.monotonic()
    NotebookClient(ran, timeout=1800, resources={"metadata": {"path": str(SOLVED)}}).execute()
    seconds = round(time.monotonic() - started)
    if found := own_warnings(ran):
        raise SystemExit(f"{source.stem}: a warning of this project's code:\n{found[0]}")
    ran.metadata["mshnet"] = {"ran": code_hash(source), "seconds": seconds}
    small(ran, hidden=[str(SOLVED), str(ROOT), str(Path.home())])
    source.with_suffix(".ipynb").write_text(text_of(ran))  # build takes outputs from there
    return build(source)


def is_stale(source: Path) -> bool:
    """Return whether the outputs in the notebook come from other code than the source's."""
    return _last_run(source).metadata.get("mshnet", {}).get("ran") != code_hash(source)


def lesson_table() -> str:
    """Return README's table: number, title, promise and time; badges are in the lesson."""
    rows = ["| lesson | | time |", "|---|---|---|"]
    for source in sources():
        text = source.read_text()
        number, title = re.search(r"^# # (\d\d) · (.+)$", text, re.M).groups()
        promise = re.search(r"^# \*\*(.+?)\*\*$", text, re.M | re.S).group(1)
        promise = promise.replace("\n# ", " ")
        minutes = TIME.search(text).group(1)
        link = f"[{number} · {title}](notebooks/{source.stem}.ipynb)"
        rows.append(f"| {link} | {promise} | {minutes} min |")
    return "\n".join(rows)


def with_table(readme: str) -> str:
    """Return README with the table between its two markers replaced."""
    head, rest = readme.split("<!-- lessons -->\n")
    tail = rest.split("<!-- end of lessons -->")[1]
    return f"{head}<!-- lessons -->\n{lesson_table()}\n<!-- end of lessons -->{tail}"


def sources(only: str = "") -> list[Path]:
    """Return the sources of all notebooks in order, or ``only`` the "lessons" or the "labs"."""
    pattern = {"": "[0-9][0-9]_*.py", "lessons": "0[0-9]_*.py", "labs": "[1-9][0-9]_*.py"}[only]
    return sorted(FOLDER.glob(pattern))


def _has(cell: NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", ())


def _name_cells(cells: list[NotebookNode]) -> None:
    """Give each cell an id from its text, before placeholders are filled in."""
    seen: set[str] = set()
    for cell in cells:
        salt, cell_id = 0, ""
        while not cell_id or cell_id in seen:
            cell_id = hashlib.sha256(f"{salt}{cell.source}".encode()).hexdigest()[:12]
            salt += 1
        seen.add(cell_id)
        cell.id = cell_id


def _hide_solutions(cells: list[NotebookNode]) -> None:
    for cell in cells:
        if _has(cell, SOLUTION) and cell.cell_type == "markdown":
            cell.source = (
                f"<details><summary>Answer in words</summary>\n\n{cell.source}\n\n</details>"
            )
        elif _has(cell, SOLUTION) or _has(cell, CHECK):
            cell.metadata.update(copy.deepcopy(FORM))


def _solve(cells: list[NotebookNode]) -> list[NotebookNode]:
    """Return the cells to run: each check on the empty exercise, and again on the solution."""
    solved, waiting = [], None
    for cell in cells:
        if _has(cell, CHECK):
            waiting = cell
            source = f"from course import rejects\n\nrejects({cell.source!r}, globals())"
            solved.append(NotebookNode(cell, source=source, id=f"{cell.id}-empty"))
        elif _has(cell, SOLUTION) and cell.cell_type == "code":
            solved += [cell, waiting]
        else:
            solved.append(cell)
    return solved


def _fill_in(notebook: NotebookNode, name: str, seconds: int | None) -> None:
    for cell in notebook.cells:
        text = cell.source.replace("{{repository}}", repository())
        text = text.replace("{{badges}}", badges(name))
        cell.source = TIME.sub(
            rf"**Time** about \1 minutes on a v5e-1, reading included (an estimate). Without a TPU "
            rf"the cells compute for {_minutes(seconds)} on two CPU cores (measured).",
            text,
        )


def _minutes(seconds: int | None) -> str:
    if seconds is None:
        return "a while"
    return f"{max(seconds, 1)} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _last_run(source: Path) -> NotebookNode:
    """Return the reader's notebook from the disk, or an empty one."""
    path = source.with_suffix(".ipynb")
    return nbformat.read(path, as_version=4) if path.exists() else nbformat.v4.new_notebook()


def _take_outputs(notebook: NotebookNode, ran: NotebookNode) -> None:
    """Give cells their outputs. Exercises stay empty: their outputs would show the answer."""
    known = {cell.id: cell for cell in ran.cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        if cell.cell_type != "code" or any(_has(cell, t) for t in (EXERCISE, CHECK, SOLUTION)):
            continue
        if cell.id in known:
            cell.outputs = known[cell.id].outputs
            cell.execution_count = known[cell.id].execution_count


def _check() -> int:
    """Print which files are stale; return their number."""
    wrong = 0
    for source in sources():
        path = source.with_suffix(".ipynb")
        if not path.exists() or path.read_text() != text_of(build(source)):
            print(f"{path.name} was not built from {source.name}: run make notebooks")
            wrong += 1
        elif is_stale(source):
            print(f"{path.name} shows outputs of other code: run make notebooks")
            wrong += 1
    readme = ROOT / "README.md"
    if readme.read_text() != with_table(readme.read_text()):
        print("README.md has another table of lessons: run make notebooks")
        wrong += 1
    return wrong


def _write(chosen: list[str], build_only: bool, only: str) -> None:
    """Write the notebooks and the table; run those whose code changed, or the chosen ones."""
    for source in sources(only):
        wanted = source.stem[:2] in chosen or (not chosen and is_stale(source))
        if wanted and not build_only:
            print(f"{source.stem}: running", flush=True)
        notebook = run(source) if wanted and not build_only else build(source)
        path, text = source.with_suffix(".ipynb"), text_of(notebook)
        seconds = notebook.metadata["mshnet"].get("seconds")
        if wanted or not path.exists() or path.read_text() != text:
            print(f"{path.name} written, {len(text) / 1e3:.0f} kB, ran for {seconds} s")
            path.write_text(text)
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="only print what is stale; exit code 1"
    )
    parser.add_argument("--run", nargs="*", metavar="NN", help="run these lessons, stale or not")
    parser.add_argument("--build-only", action="store_true", help="run nothing, keep the outputs")
    parser.add_argument("--solved", type=Path, metavar="FOLDER", help="write the solved notebooks")
    warnings_help = "exit code 1 if notebooks that ran there show a warning of this project's code"
    parser.add_argument("--warnings", type=Path, metavar="FOLDER", help=warnings_help)
    only_help = "leave the other notebooks alone: each kind runs in its own environment"
    parser.add_argument("--only", choices=("lessons", "labs"), default="", help=only_help)
    args = parser.parse_args()
    if args.check:
        return 1 if _check() else 0
    if args.solved:
        args.solved.mkdir(parents=True, exist_ok=True)
        for source in sources(args.only):
            (args.solved / f"{source.stem}.ipynb").write_text(text_of(build(source, solved=True)))
        return 0
    if args.warnings:
        found = [
            f"{path.name}: {text}"
            for path in sorted(args.warnings.glob("*.ipynb"))
            for text in own_warnings(nbformat.read(path, as_version=4))
        ]
        print(*found, sep="\n", end="\n" if found else "")
        return 1 if found else 0
    _write(args.run or [], args.build_only, args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
