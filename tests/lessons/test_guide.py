"""GUIDE.md: links, code, the two scripts as printed, and the translations' structure."""

import math
import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from tpuscope.engine import torch_xla as runtime

ROOT = Path(__file__).resolve().parents[2]
EDITIONS = ("GUIDE.zh.md", "GUIDE.ko.md")
SCRIPTS = ("one_core.py", "eight_cores.py")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def fences(text: str) -> list[tuple[str, str]]:
    """Language and text of every fenced block."""
    return re.findall(r"^ *```(\w*)[ \t]*\n(.*?)^ *```[ \t]*$", text, flags=re.M | re.S)


def prose(text: str) -> str:
    """What stands outside of fenced blocks."""
    return re.sub(r"^ *```.*?^ *```[ \t]*$", "", text, flags=re.M | re.S)


def headings(text: str) -> list[tuple[int, str]]:
    """Level and title of every heading."""
    return [(len(m[1]), m[2]) for m in re.finditer(r"^(#+) (.+)$", prose(text), flags=re.M)]


def anchors(text: str) -> set[str]:
    """What a link can lead to: headings by GitHub's rule, and explicit ids."""
    found = set(re.findall(r'<a id="([^"]+)"', text))
    seen: dict[str, int] = {}
    for _, title in headings(text):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        number = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{number}" if number else slug)
    return found


def targets(text: str) -> list[str]:
    """Of all links in square and round brackets."""
    without_code = re.sub(r"(`+).+?\1", "", prose(text))
    return re.findall(r"\]\(([^)\s]+)\)", without_code)


def addresses(text: str) -> set[str]:
    """Of the web, linked or bare, outside of fenced blocks."""
    return {found.rstrip(".,;:") for found in re.findall(r"https?://[!-&*-_a-~]+", prose(text))}


def rows(text: str) -> list[int]:
    """Lines of tables below each heading, in turn; the first is before all headings."""
    counts = [0]
    for line in prose(text).splitlines():
        if re.match(r"#+ ", line):
            counts.append(0)
        counts[-1] += line.lstrip().startswith("|")
    return counts


def script(name: str) -> str:
    """A script of the guide, by the mark above its block."""
    mark = rf"^<!-- run: {re.escape(name)} -->\n```python\n(.*?)^```$"
    [code] = re.findall(mark, read("GUIDE.md"), flags=re.M | re.S)
    return code


# Links and code


@pytest.mark.parametrize("name", ("GUIDE.md", *EDITIONS))
def test_every_link_within_the_repository_leads_somewhere(name):
    text = read(name)
    dead = []
    for target in targets(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = text if not path else None
        if path and not (ROOT / path).exists():
            dead.append(target)
            continue
        if anchor and (not path or path.endswith(".md")):
            there = text if there is not None else (ROOT / path).read_text()
            if anchor not in anchors(there):
                dead.append(target)
    assert not dead, f"{name} links to what is not there: {dead}"


def test_anchors_that_others_have_linked_still_exist():
    known = {
        "several-cores", "one-core-or-several", "kaggle-eight-cores", "one-tpu-vm", "a-pod-slice",
        "the-two-strategies", "stopping-saving-resuming", "what-to-expect-an-estimate",
        "what-was-checked-and-how", "before-you-book-a-tpu-mshnet-aot",
        "when-the-host-cannot-keep-up-compiledstep", "something-does-not-work-mshnet-doctor",
        "troubleshooting-by-exact-message", "starting-several-cores",
    }  # fmt: skip
    assert known <= anchors(read("GUIDE.md"))


def test_the_table_of_contents_names_the_sections_in_order():
    text = read("GUIDE.md")
    head, *_ = re.split(r"^## ", text, flags=re.M)
    listed = re.findall(r"^\d+\. \[(.+)\]\(#[^)]+\)$", head, flags=re.M)
    assert listed == [title for level, title in headings(text) if level == 2]


def test_every_python_block_is_python():
    blocks = [code for language, code in fences(read("GUIDE.md")) if language == "python"]
    assert len(blocks) >= len(SCRIPTS)
    for code in blocks:
        compile(code, "GUIDE.md", "exec")


# The scripts


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Start all scripts at once: each waits much of its time for one core."""
    if not runtime.installed():
        pytest.skip("the scripts train on XLA, and torch_xla exists for Linux only")
    folder = tmp_path_factory.mktemp("scripts")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CPU_NUM", "XLA_", "TPU_"))}
    kept |= {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    kept |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # the same graphs, sooner
    started = {}
    for name in SCRIPTS:
        (folder / name).write_text(script(name))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started[name] = subprocess.Popen([sys.executable, name], cwd=folder, env=kept, **pipes)
    yield folder, started
    for process in started.values():
        process.kill()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_as_it_stands(name, running):
    folder, started = running
    printed, errors = started[name].communicate(timeout=800)
    assert started[name].returncode == 0, errors[-4000:]

    counters = r"Counters\(compilations=(\d+), fallbacks=(\d+), host_reads=(\d+)\)"
    epochs = re.findall(rf"^epoch \d+: loss (\S+), {counters}$", printed, flags=re.M)
    losses = [float(loss) for loss, *_ in epochs]
    assert all(map(math.isfinite, losses)), printed
    assert losses[-1] < losses[1], printed  # from the first epoch of the full phase on
    counted = [tuple(map(int, numbers)) for _, *numbers in epochs]
    assert counted == [(1, 0, 1), (1, 0, 1), (0, 0, 1), (0, 0, 1)], printed
    if name == "one_core.py":
        assert re.search(rf"^IoU \S+, Pd \S+, {counters}$", printed, flags=re.M)[1] == "1"
        # The evaluation reads the logits and masks of each batch, and nothing else.
        evaluated = re.search(rf"^IoU \S+, Pd \S+, {counters}$", printed, flags=re.M)
        assert int(evaluated[2]) == 0 and 0 < int(evaluated[3]) <= 2 * 8, printed
    else:
        assert "8 cores, 1 images each\n" in printed

    saved = torch.load(folder / Path(name).with_suffix(".pkl"), weights_only=True)
    for key, tensor in saved["state_dict"].items():
        assert tensor.device.type == "cpu" and tensor.isfinite().all(), key


# The editions


@pytest.mark.parametrize("name", EDITIONS)
def test_an_edition_has_all_that_the_english_guide_has(name):
    english, edition = read("GUIDE.md"), read(name)
    faults = []

    def compare(what, ours, theirs):
        for number, (a, b) in enumerate(zip_longest(ours, theirs), start=1):
            if a != b:
                faults.append(f"{what} {number}: GUIDE.md has {a!r}, {name} has {b!r}")
                return  # what follows is out of step

    titles = ["(before all headings)", *(title for _, title in headings(english))]
    compare(
        "heading",
        [level for level, _ in headings(english)],
        [level for level, _ in headings(edition)],
    )
    compare("fenced block", fences(english), fences(edition))
    if not faults:
        for title, ours, theirs in zip(titles, rows(english), rows(edition), strict=True):
            if ours != theirs:
                faults.append(f"table lines below “{title}”: {ours} in GUIDE.md, {theirs} here")
    for address in sorted(addresses(english) - addresses(edition)):
        faults.append(f"not linked: {address}")
    for address in sorted(addresses(edition) - addresses(english)):
        faults.append(f"linked, and not in GUIDE.md: {address}")
    ours, theirs = (
        {t.partition("#")[0] for t in targets(text) if not re.match(r"[a-z]+:", t)}
        - {"", "GUIDE.md", *EDITIONS}  # they name each other
        for text in (english, edition)
    )
    if ours != theirs:
        faults.append(f"files linked by one of the two only: {sorted(ours ^ theirs)}")
    assert not faults, f"{name}:\n" + "\n".join(faults)
