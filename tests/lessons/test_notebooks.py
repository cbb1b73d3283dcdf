"""The lessons as text: built from their sources, complete, with working links.

``make test`` runs their cells with nbmake.
"""

import base64
import io
import re
from pathlib import Path

import nbformat
import numpy as np
import outputs
import pytest
from PIL import Image

import notebooks as tool

ROOT = Path(__file__).resolve().parents[2]
SOURCES = tool.sources()
KEPT = 400_000  # bytes of a lesson with its outputs, at most

each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def test_there_are_lessons():
    assert [path.stem[:2] for path in SOURCES][:4] == ["01", "02", "03", "04"]


@each_lesson
def test_the_notebook_is_built_from_its_source_and_a_rebuild_changes_nothing(source):
    assert source.with_suffix(".ipynb").read_text() == tool.text_of(tool.build(source))


@each_lesson
def test_the_outputs_are_those_of_the_code_that_is_shown(source):
    assert not tool.is_stale(source)


@each_lesson
def test_the_outputs_are_small_and_name_no_folder_of_the_machine_they_come_from(source):
    text = source.with_suffix(".ipynb").read_text()
    assert len(text) < KEPT
    assert str(ROOT) not in text
    assert not re.search(r"/(home|root|Users)/", text)


@each_lesson
def test_a_cell_that_ends_in_a_picture_shows_it(source):
    for cell in tool.build(source).cells:
        last = cell.source.rstrip().rpartition("\n\n")[2]
        if cell.cell_type == "code" and re.match(r"(clicks|plots\.\w+|show|timeline)\(", last):
            kinds = [kind for output in cell.outputs for kind in output.get("data", {})]
            assert {"image/png", "image/jpeg"} & set(kinds), cell.source


@each_lesson
def test_an_edit_keeps_the_ids_of_the_other_cells(source, tmp_path):
    edited = tmp_path / source.name
    edited.write_text(source.read_text() + "\n# %%\nprint('one more cell')\n")
    before, after = tool.build(source).cells, tool.build(edited).cells
    assert [cell.id for cell in after][:-1] == [cell.id for cell in before]


@each_lesson
def test_the_reader_finds_an_empty_exercise_then_a_check_then_a_hidden_solution(source):
    notebook = tool.build(source)
    parts = [part for cell in notebook.cells for part in cell.metadata.get("tags", ())]
    assert parts[:3] == ["exercise", "check", "solution"]
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", ())
        if tags and cell.cell_type == "code":
            assert not cell.outputs, "what an exercise prints tells the answer"
            assert cell.metadata.get("cellView") == (None if "exercise" in tags else "form")
        elif tags:
            assert cell.source.startswith("<details>")


@each_lesson
def test_the_solved_lesson_tries_the_check_on_the_empty_exercise_first(source):
    cells = tool.build(source, solved=True).cells
    tags = [(cell.metadata.get("tags") or ["–"])[0] for cell in cells if cell.cell_type == "code"]
    first = tags.index("exercise")
    assert tags[first : first + 4] == ["exercise", "check", "solution", "check"]
    check = [cell for cell in cells if "check" in cell.metadata.get("tags", ())]
    assert check[0].source.startswith("from course import rejects")
    assert "checking(" in check[1].source


def test_progress_bars_private_folders_and_long_texts_are_cut(tmp_path):
    long = "\n".join(f"line {number}" for number in range(500))
    texts = ["50%\r100%\ndone", f"refused: {tmp_path}/drive/half.zip", long]
    cells = [
        nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", text=text)])
        for text in texts
    ]
    cells[0].outputs.insert(0, nbformat.v4.new_output("stream", text="10%\r"))  # its first piece
    notebook = nbformat.v4.new_notebook(cells=cells)
    outputs.small(notebook, hidden=[str(tmp_path)])
    bar, path, cut = (cell.outputs[0].text for cell in notebook.cells)
    assert bar == "100%\ndone"
    assert path == "refused: drive/half.zip"
    assert len(cut.split("\n")) == outputs.LINES + 1
    assert cut.startswith("line 0\n") and cut.endswith("line 499") and "440 more lines" in cut


def test_a_large_picture_is_kept_once_and_small():
    noise = np.random.default_rng(0).integers(0, 255, (600, 1200, 3), dtype=np.uint8)
    packed = io.BytesIO()
    Image.fromarray(noise).save(packed, format="PNG")
    data = {"image/png": base64.b64encode(packed.getvalue()).decode(), "text/plain": "<Figure>"}
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", data)])
    outputs.small(nbformat.v4.new_notebook(cells=[cell]), hidden=[])
    kept = cell.outputs[0].data
    assert set(kept) == {"image/jpeg", "text/plain"}
    assert Image.open(io.BytesIO(base64.b64decode(kept["image/jpeg"]))).width == outputs.WIDTH


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("/x/mshnet/loss.py:12: UserWarning: no target\n", True),
        ("/tmp/ipykernel_81/12.py:3: DeprecationWarning: old\n", True),
        ("/x/site-packages/mshnet/loss.py:12: UserWarning: no target\n", True),
        ("/x/tpuscope/monitor/watch.py:12: UserWarning: ours\n", True),
        ("/x/course/__init__.py:12: UserWarning: ours\n", True),
        ("/x/labs/text_generation/ways.py:12: UserWarning: ours\n", True),
        ("/x/site-packages/torch_xla/runtime.py:201: UserWarning: theirs\n", False),
        ("/x/mshnet/.venv-labs/lib/site-packages/tqdm/auto.py:21: TqdmWarning: theirs\n", False),
        ("mshnet says: no warning\n", False),
    ],
)
def test_warnings_of_our_code_are_found_even_in_pieces(text, ours):
    pieces = [nbformat.v4.new_output("stream", name="stderr", text=t) for t in (text[:9], text[9:])]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=pieces)])
    assert bool(outputs.own_warnings(notebook)) == ours


@each_lesson
def test_a_lesson_has_all_its_parts(source):
    text = source.read_text()
    parts = (
        f"# # {source.stem[:2]} · ",
        "# {{badges}}",
        "# {{time: ",
        "# **You will be able to**",
        "# **You need**",
        "# ## Setup",
        "**What just happened.**",
        "# ## Exercise",
        "# @title Check",
        "# @title Solution",
        "# ## Recap",
        "# **Next:**",
    )
    assert [part for part in parts if part not in text] == []


@each_lesson
def test_objectives_and_recap_mirror_each_other(source):
    text = source.read_text()
    objectives = text.split("**You will be able to**")[1].split("**You need**")[0]
    recap = text.split("# ## Recap")[1].split("**Next:**")[0]
    assert len(re.findall(r"^# \*", objectives, re.M)) == len(re.findall(r"^# \*", recap, re.M))


@each_lesson
def test_badges_name_this_notebook_and_the_repository_of_pyproject(source):
    text = source.with_suffix(".ipynb").read_text()
    path = tool.repository().removeprefix("https://github.com/")
    notebook = f"{path}/blob/main/notebooks/{source.stem}.ipynb"
    assert f"https://colab.research.google.com/github/{notebook}" in text
    assert f"https://kaggle.com/kernels/welcome?src=https://github.com/{notebook}" in text
    assert path not in source.read_text(), "the repository is named in pyproject.toml alone"


@pytest.mark.parametrize(
    "page",
    [*SOURCES, *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "datasets" / "README.md"],
    ids=lambda path: path.name,
)
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [link for link in links if not re.match(r"[a-z]+:|\{\{", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []
