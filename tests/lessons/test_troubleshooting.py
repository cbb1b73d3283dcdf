"""Every message that GUIDE.md quotes comes from torch_xla, this package, Python or Linux itself."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tpuscope.engine import torch_xla as runtime

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "GUIDE.md"
HEADING = "## Troubleshooting, by exact message"
SCRIPTS = Path(__file__).parent / "provoked" / "scripts.py"
PREPARE = {"save_on_the_device"}  # scripts that print nothing

# Quoted as they were seen once, by a part that names each; and why no test provokes them.
RECORDED = {
    "undefined symbol: _ZNK3c10": "needs torch 2.8.0 beside torch_xla 2.9.0",
    "Failed to get TPU metadata": "takes half a minute, and a network without metadata server",
}


@dataclass(frozen=True)
class Entry:
    """A bullet of the section: the messages that it quotes, and the rest of its text."""

    messages: tuple[str, ...]
    text: str

    @property
    def reported(self) -> bool:
        return bool(re.search(r"\(Reported: https://\S+", self.text))

    def recorded(self, message: str) -> bool:
        return "(Recorded " in self.text and any(part in message for part in RECORDED)


def entries() -> list[Entry]:
    """The section's bullets. A message is a bold code span at the beginning of one."""
    _, _, section = GUIDE.read_text().partition(f"{HEADING}\n")
    section = re.split(r"^## ", section, maxsplit=1, flags=re.MULTILINE)[0]
    found = []
    for line in section.splitlines():
        if line.startswith("* "):
            head = re.match(r"\* (?:\*\*(`+).+?\1\*\*(?:, )?)*", line)[0]
            spans = re.findall(r"\*\*(`+)(.+?)\1\*\*", head)
            found.append(Entry(tuple(text.strip() for _, text in spans), line[len(head) :]))
    return found


ENTRIES = entries()
PROVOKED = [
    message
    for entry in ENTRIES
    for message in entry.messages
    if not entry.reported and not entry.recorded(message)
]


def says(printed: str, message: str) -> bool:
    """Whether a message is there, word for word; … stands for anything within a line."""
    parts = (r"\s+".join(map(re.escape, part.split())) for part in message.split("…"))
    return re.search(".*?".join(parts), printed) is not None


@pytest.fixture(scope="session")
def printed(tmp_path_factory) -> dict[str, str]:
    """What each script printed, by its name."""
    if not runtime.installed() or runtime.tpu_chips():
        pytest.skip("the messages are those of torch_xla on a machine without a TPU")
    folder = tmp_path_factory.mktemp("provoked")
    # The TPU's compiler and plugins would read what other tests, or a user, have set.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "CPU_NUM", "TF_CPP"))}
    kept |= {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPTS, folder], env=kept, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return {path.stem: path.read_text(errors="replace") for path in folder.glob("*.txt")}


def test_the_guide_has_the_section():
    assert HEADING in GUIDE.read_text().splitlines()
    assert len(PROVOKED) > 80


@pytest.mark.parametrize("message", PROVOKED)
def test_a_quoted_message_is_provoked(printed, message):
    assert len(message) > 20, "too short to be told from others"
    assert any(says(text, message) for text in printed.values())


def test_every_script_is_quoted(printed):
    silent = {
        name
        for name, text in printed.items()
        if not any(says(text, message) for message in PROVOKED)
    }
    assert silent == PREPARE


def test_what_is_not_provoked_says_where_it_was_seen():
    quoted = [(entry, message) for entry in ENTRIES for message in entry.messages]
    elsewhere = [(entry, message) for entry, message in quoted if message not in PROVOKED]
    assert elsewhere
    for entry, message in elsewhere:
        assert entry.reported or entry.recorded(message), message
    for part in RECORDED:
        assert sum(part in message for _, message in elsewhere) == 1, part


def test_an_entry_without_a_message_says_what_is_seen():
    for entry in ENTRIES:
        assert entry.messages or re.match(r"\*[^*]+\* \S", entry.text), entry.text


def test_every_entry_is_one_line_and_no_message_is_quoted_twice():
    messages = [message for entry in ENTRIES for message in entry.messages]
    assert len(messages) == len(set(messages))
    bold = re.findall(r"\*\*`", GUIDE.read_text().partition(f"{HEADING}\n")[2].split("\n## ")[0])
    assert len(bold) == len(messages), "a bold code span that is not at the beginning of a bullet"
