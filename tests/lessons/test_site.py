"""The site: its links work, and each lesson has its buttons, download and folded solution."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_spec = importlib.util.spec_from_file_location("site_tool", ROOT / "tools" / "build_site.py")
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

GITHUB = tool.repository()
FIRST, SECOND = tool.lessons()[:2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("sphinx", "myst_nb", "furo", "sphinx_copybutton"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    site = folder / "html"
    assert tool.build(site, folder / "source") == []  # dead links
    return site


def lesson_page(site, path):
    return (site / path).with_suffix(".html").read_text()


each_lesson = pytest.mark.parametrize("path", tool.lessons(), ids=lambda path: Path(path).stem)


@each_lesson
def test_a_lesson_has_a_page_with_buttons_and_a_folded_solution(site, path):
    page = lesson_page(site, path)
    assert "copybutton.js" in page
    for name in ("Open in Colab", "Open in Kaggle", "Download"):
        assert name in page
    for part in ("Check", "Solution"):
        title = page.index(f"# @title {part}")
        folded = page.rindex("<details", 0, title)
        assert "</details>" not in page[folded:title]
        assert "open" not in re.match(r"<details[^>]*>", page[folded:])[0]
        assert f"Show the {part.lower()}" in page[folded:title]


@each_lesson
def test_the_notebook_is_downloaded_unchanged(site, path):
    download = re.search(r'href="([^"]*/_downloads/[^"]+\.ipynb)"', lesson_page(site, path))[1]
    downloaded = (site / path).parent / download
    assert downloaded.read_bytes() == (ROOT / path).read_bytes()


def test_every_page_is_in_the_sidebar_of_the_first(site):
    index = (site / "index.html").read_text()
    expected = [Path(page).with_suffix(".html") for page in tool.pages().values()]
    assert [page for page in expected if f'href="{page}"' not in index] == [Path("index.html")]


def test_the_search_index_holds_words_of_lessons_and_guide(site):
    index = (site / "searchindex.js").read_text()
    assert index.startswith("Search.setIndex(")
    terms = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))["terms"]
    assert {"checkpoint", "colab", "mshnet", "xla"} <= set(terms)


def test_no_script_style_or_picture_comes_from_another_server(site):
    foreign = re.compile(r'<(?:script|img|iframe)[^>]*src="https?:|<link[^>]*href="https?:')
    assert [p.name for p in site.rglob("*.html") if foreign.search(p.read_text())] == []


@pytest.mark.parametrize(
    ("target", "origin", "expected"),
    [
        ("https://example.org/a.md", "README.md", "https://example.org/a.md"),
        ("#stopping", "GUIDE.md", "#stopping"),
        ("README.md#the-course", "GUIDE.md", "index.md#the-course"),
        (FIRST, "README.md", FIRST),
        (Path(SECOND).name, FIRST, Path(SECOND).name),
        (f"{GITHUB}/blob/main/GUIDE.md#a-pod-slice", FIRST, "../GUIDE.md#a-pod-slice"),
        (f"{GITHUB}/blob/main/datasets/README.md", FIRST, "../datasets/README.md"),
        (
            "../mshnet/space_to_depth.py",
            "docs/performance.md",
            f"{GITHUB}/blob/main/mshnet/space_to_depth.py",
        ),
        ("benchmarks", "README.md", f"{GITHUB}/tree/main/benchmarks"),
        ("LICENSE", "README.md", f"{GITHUB}/blob/main/LICENSE"),
    ],
)
def test_a_link_leads_to_a_page_where_there_is_one_and_else_to_the_repository(
    target, origin, expected, tmp_path
):
    assert tool.link(target, origin, tmp_path) == expected


def test_a_link_to_a_file_that_does_not_exist_stops_the_build(tmp_path):
    with pytest.raises(tool.DeadLink, match=r"GUIDE\.md links to mshnet/nothing\.py"):
        tool.link("mshnet/nothing.py", "GUIDE.md", tmp_path)


def test_code_keeps_what_looks_like_a_link(tmp_path):
    text = "```\n[a](nothing.md) lesson 02\n```\n"
    assert tool.rewrite(text, FIRST, tmp_path) == text


def test_lessons_that_are_named_by_number_are_linked_once(tmp_path):
    name = Path(SECOND).name
    text = f"see lesson 02, [lesson 02]({name}), `lesson 02`, lesson 01 and lesson 99"
    expected = text.replace("see lesson 02", f"see [lesson 02]({name})")
    assert tool.rewrite(text, FIRST, tmp_path) == expected  # lesson 01 is this page, 99 is none


def test_a_progress_bar_is_drawn_over():
    assert tool.overwritten("  0%|  |\r 50%|# |\r100%|##|\nnext") == "100%|##|\nnext"
    assert tool.overwritten("  0%|  |\r        \r") == ""


def test_pieces_of_a_bar_are_joined_and_a_figure_stays_where_it_was():
    def stream(name, text):
        return {"output_type": "stream", "name": name, "text": [text]}

    figure = {"output_type": "display_data", "data": {}}
    bar = [stream("stderr", "\r 0%"), stream("stdout", "one\n"), stream("stderr", "\r50%\r   \r")]
    cell = {"outputs": [*bar, stream("stdout", "two"), figure, stream("stdout", "three")]}
    tool._show_as_terminal(cell)
    assert [output.get("text") for output in cell["outputs"]] == ["one\ntwo", None, "three"]


def test_dead_links_are_found(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1>')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"></a><a href="b.html#gone"></a><a href="c.html"></a>'
        '<img src="no.png"><a href="https://example.org/x"></a><a href="#top"></a>'
    )
    dead = ["#top", "b.html#gone", "c.html", "no.png"]
    assert tool.dead_links(tmp_path) == [f"a.html: {target}" for target in dead]
