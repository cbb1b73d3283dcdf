"""Build the reading edition: ``python tools/build_site.py [--output build/site]``.

README, the guides, the lessons and the reference pages become one static site. Nothing is executed:
a lesson shows the outputs that its ``.ipynb`` holds. The sources are copied to ``SOURCE`` with two
changes: links fit the site, and solutions are folded. Then Sphinx runs (its settings are in
docs/conf.py), and every internal link of the result is followed.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build" / "site-source"
OUTPUT = ROOT / "build" / "site"
PICTURES = {".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp"}

# A new language or page is one line here. A file that does not exist yet is left out.
GUIDES = {"GUIDE.md": "English", "GUIDE.zh.md": "中文", "GUIDE.ko.md": "한국어"}
REFERENCE = {
    "docs/performance.md": "Performance",
    "docs/compilers.md": "Two compilers",
    "datasets/README.md": "Data sets",
    "CHANGELOG.md": "Changelog",
    "CONTRIBUTING.md": "Contributing",
    "docs/publishing.md": "Publishing this site",
}


def repository() -> str:
    """Return the address of the repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"]


def lessons() -> list[str]:
    """Return the paths of the lessons and labs, in order."""
    found = (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")
    return [path.relative_to(ROOT).as_posix() for path in sorted(found)]


def packages() -> list[str]:
    """Return what the extra `site` of pyproject.toml installs, without the project and PyTorch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"]["site"]


def pages() -> dict[str, str]:
    """Return each file that becomes a page, with the path of the page's source in the site."""
    present = [path for path in [*GUIDES, *REFERENCE] if (ROOT / path).exists()]
    return {"README.md": "index.md"} | {path: path for path in [*present, *lessons()]}


# Links


class DeadLink(Exception):
    """A source links to a file that is not in the repository."""


def link(target: str, origin: str, source: Path) -> str:
    """Return what a link in the file `origin` becomes: a page, a picture, or an address."""
    address = repository()
    inside = re.match(re.escape(address) + r"/(?:blob|tree)/main/", target)
    if target.startswith("#") or (re.match(r"[a-z]+:", target) and not inside):
        return target
    path, _, anchor = target[inside.end() if inside else 0 :].partition("#")
    folder = "" if inside else PurePosixPath(origin).parent.as_posix()
    path = os.path.normpath(os.path.join(folder, unquote(path)))  # noqa: PTH118 (a/../b is meant)
    if not (ROOT / path).exists():
        raise DeadLink(f"{origin} links to {target}, which is not in the repository")
    anchor = f"#{anchor}" if anchor else ""
    here = PurePosixPath(pages()[origin]).parent.as_posix()
    if path in pages():
        return os.path.relpath(pages()[path], here) + anchor
    if Path(path).suffix in PICTURES:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
        return os.path.relpath(path, here)
    return f"{address}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{anchor}"


def rewrite(text: str, origin: str, source: Path) -> str:
    """Return Markdown with links that fit the site; fenced code is unchanged."""
    parts = re.split(r"(^ *```.*?^ *```[ \t]*$)", text, flags=re.M | re.S)
    parts[::2] = [_rewrite_prose(part, origin, source) for part in parts[::2]]
    return "".join(parts)


def _rewrite_prose(text: str, origin: str, source: Path) -> str:
    # Badges are pictures on other servers. A link styled as a button needs none, and works in dark
    # mode and offline. README's table has room for the short name only.
    name = r"[\2]" if origin == "README.md" else r"[\1]"
    text = re.sub(r"\[!\[(Open in (\w+))\]\([^)]*\)\]\(([^)]*)\)", name + r"(\3){.button}", text)
    text = re.sub(r"(\]\()([^)\s]+)(\))", lambda m: m[1] + link(m[2], origin, source) + m[3], text)
    text = re.sub(
        r'(<img[^>]*\ssrc=")([^"]+)(")', lambda m: m[1] + link(m[2], origin, source) + m[3], text
    )
    if origin in lessons():  # they name each other by number: Colab could not follow a link
        by_number = {PurePosixPath(path).name[:2]: PurePosixPath(path).name for path in lessons()}
        own = PurePosixPath(origin).name[:2]
        text = re.sub(
            r"(?<![\[`])\b([Ll]esson|[Ll]ab)\s(\d\d)\b(?![`\]])",
            lambda m: f"[{m[0]}]({by_number[m[2]]})" if m[2] in by_number and m[2] != own else m[0],
            text,
        )
    return text


# Sources of the site


def stage(source: Path) -> None:
    """Fill the folder `source` with what Sphinx reads."""
    shutil.rmtree(source, ignore_errors=True)
    for path, page in pages().items():
        text = (ROOT / path).read_text()
        if path.endswith(".ipynb"):
            text = _notebook(text, path, source)
        else:
            text = rewrite(_own_anchors(text, path), path, source)
        if path == "README.md":
            # A class for docs/_static/site.css: on a phone the rows of this table are stacked.
            text = text.replace("| lesson |", "{.lessons}\n| lesson |", 1) + _navigation()
        (source / page).parent.mkdir(parents=True, exist_ok=True)
        (source / page).write_text(text)


def _own_anchors(text: str, path: str) -> str:
    """Return an edition with its anchors in Sphinx's form, prefixed by the language."""
    language = PurePosixPath(path).stem.partition(".")[2]
    if not language:
        return text
    text = re.sub(r'^<a id="([^"]+)"></a>$', rf"({language}-\1)=", text, flags=re.M)
    return re.sub(r"\]\(#([^)\s]+)\)", rf"](#{language}-\1)", text)


def _notebook(text: str, path: str, source: Path) -> str:
    """Return a lesson with links for the site, a download link, and folded solutions."""
    notebook = json.loads(text)
    # Only an executed notebook knows its language; without it, code would have no colours.
    notebook["metadata"].setdefault("language_info", {"name": "python"})
    notebook["metadata"]["language_info"].setdefault("pygments_lexer", "ipython3")
    copy = source / "download" / PurePosixPath(path).name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text)
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
        metadata = cell["metadata"]
        tags = metadata.setdefault("tags", [])
        if cell["cell_type"] == "markdown":
            cell["source"] = rewrite(cell["source"], path, source)
            # Beside the badges: MyST's role for a file that is handed out as it is.
            cell["source"] = re.sub(
                r"^(.*\{\.button\})$",
                rf"\1 {{download}}`Download </download/{copy.name}>`",
                cell["source"],
                count=1,
                flags=re.M,
            )
            continue
        _show_as_terminal(cell)
        for tag in ("check", "solution"):
            if tag in tags:
                tags.append("hide-cell")
                names = {"code_prompt_show": f"Show the {tag}", "code_prompt_hide": "Hide it"}
                metadata["mystnb"] = names
    return json.dumps(notebook, ensure_ascii=False)


def _show_as_terminal(cell: dict) -> None:
    """Change text outputs to what a terminal shows: a progress bar in its last state only."""
    shown: list[dict] = []
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            output["text"] = "".join(output["text"])
            # A bar arrives in pieces, and what is printed between them has a stream of its own.
            # A figure stays between what was printed before and after it.
            recent = itertools.takewhile(lambda o: o["output_type"] == "stream", reversed(shown))
            same = next((o for o in recent if o["name"] == output["name"]), None)
            if same:
                same["text"] += output["text"]
                continue
        shown.append(output)
    for output in shown:
        if output["output_type"] == "stream":
            output["text"] = overwritten(output["text"])
    cell["outputs"] = [o for o in shown if o["output_type"] != "stream" or o["text"].strip()]


def overwritten(text: str) -> str:
    """Return text after carriage returns, each of which goes back to the start of the line."""
    lines = []
    for line in text.split("\n"):
        left = ""
        for piece in line.split("\r"):
            left = piece + left[len(piece) :]
        lines.append(left.rstrip())
    return "\n".join(lines)


def _navigation() -> str:
    """Return the groups of the sidebar, as hidden tables of contents for the end of the index."""
    numbered = {path: int(PurePosixPath(path).name[:2]) for path in lessons()}
    titles = GUIDES | REFERENCE
    groups = {
        "Start": ["About the course <self>"],
        "Lessons": [path for path, number in numbered.items() if number < 10],
        "Labs": [path for path, number in numbered.items() if number >= 10],
        "Guide": [f"{titles[path]} </{path}>" for path in GUIDES if path in pages()],
        "Reference": [
            *(f"{titles[path]} </{path}>" for path in REFERENCE if path in pages()),
            f"Source code <{repository()}>",
        ],
    }
    text = ""
    for caption, entries in groups.items():
        if entries:
            lines = "\n".join(entries)
            text += f"\n\n```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{lines}\n```\n"
    return text


# Result


class _Page(HTMLParser):
    """A page's anchors, and the targets of its links and pictures."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        self.targets |= {values[key] for key in ("href", "src") if values.get(key)}


def dead_links(folder: Path) -> list[str]:
    """Return internal links, pictures and anchors of a built site that are dead; no network."""
    read = {path: _Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    dead = []
    for path, page in read.items():
        report = partial("{}: {}".format, path.relative_to(folder))
        for target in sorted(page.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if file.is_dir():
                file /= "index.html"
            anchor = unquote(parts.fragment)
            if not file.exists() or (anchor and file in read and anchor not in read[file].anchors):
                dead.append(report(target))
    return dead


def build(output: Path, source: Path = SOURCE) -> list[str]:
    """Build the site into the folder `output`; return its dead links."""
    stage(source)
    shutil.rmtree(output, ignore_errors=True)  # a page that is gone must not stay
    sphinx = [sys.executable, "-m", "sphinx", "--builder", "html", "--quiet"]
    strict = ["--fail-on-warning", "--keep-going"]
    places = ["--conf-dir", str(ROOT / "docs"), "--doctree-dir", f"{source}-doctrees"]
    subprocess.run([*sphinx, *strict, *places, "--fresh-env", source, output], check=True)
    return dead_links(output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the site")
    parser.add_argument("--packages", action="store_true", help="only print what it needs, for pip")
    arguments = parser.parse_args()
    if arguments.packages:
        print(*packages())
        return 0
    output = arguments.output.resolve()
    try:
        dead = build(output)
    except DeadLink as error:
        print(error)
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode  # Sphinx has printed the reason
    for target in dead:
        print(f"dead link in {target}")
    print(f"{len(list(output.rglob('*.html')))} pages; open {output / 'index.html'}")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
