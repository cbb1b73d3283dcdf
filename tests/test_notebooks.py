"""The lessons as text: built from their sources, complete, with links that lead somewhere.

That their cells run is tested by nbmake, in the second half of ``make test``.
"""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py"))

_spec = importlib.util.spec_from_file_location("notebooks_tool", ROOT / "tools" / "notebooks.py")
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def test_there_are_lessons():
    assert [path.stem[:2] for path in SOURCES][:4] == ["01", "02", "03", "04"]


@each_lesson
def test_the_notebook_is_built_from_its_source_and_a_rebuild_changes_nothing(source):
    assert source.with_suffix(".ipynb").read_text() == tool.build(source) == tool.build(source)


@each_lesson
def test_an_edit_keeps_the_ids_of_the_other_cells(source, tmp_path):
    edited = tmp_path / source.name
    edited.write_text(source.read_text() + "\n# %%\nprint('one more cell')\n")
    before = nbformat.reads(tool.build(source), as_version=4).cells
    after = nbformat.reads(tool.build(edited), as_version=4).cells
    assert [cell.id for cell in after][:-1] == [cell.id for cell in before]


@each_lesson
def test_a_lesson_has_all_its_parts(source):
    text = source.read_text()
    parts = (
        f"# # {source.stem[:2]} · ",
        "# {{badges}}",
        "# **You will be able to**",
        "# **You need**",
        "# ## Setup",
        "**What just happened.**",
        "# ## Exercise",
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
    [*SOURCES, *ROOT.glob("*.md"), ROOT / "datasets" / "README.md"],
    ids=lambda path: path.name,
)
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [link for link in links if not re.match(r"[a-z]+:|\{\{", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []
