"""What ``make colab`` reports as a fault, and what it ignores; without the lessons."""

import base64
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]

_spec = importlib.util.spec_from_file_location("colab_tool", ROOT / "tools" / "colab.py")
colab = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(colab)

ADDRESS = "https://example.invalid/someone/something"


def install(site: Path, name: str, version: str, when: int = 1) -> None:
    """Write the metadata that an installer writes, with the time `when`."""
    for old in site.glob(f"{name}-*.dist-info/*"):
        old.unlink()
        if not any(old.parent.iterdir()):
            old.parent.rmdir()
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n")
    os.utime(folder / "RECORD", (when, when))


def reported(site: Path, before: dict) -> tuple[list[str], list[str]]:
    """Return all changes since `before`, and the forbidden ones, as text."""
    changed = colab.changes(before, colab.inventory(site))
    return [str(change) for change in changed], [str(c) for c in colab.forbidden(changed)]


@pytest.fixture
def site(tmp_path):
    for name in ("numpy", "torch_xla", "tqdm"):
        install(tmp_path / "site", name, "2.0")
    return tmp_path / "site"


def test_a_replaced_package_is_reported_with_both_versions_and_forbidden_if_guarded(site):
    before = colab.inventory(site)
    install(site, "torch_xla", "2.1")
    install(site, "tqdm", "2.1")
    replaced = "torch-xla 2.0 → 2.1"
    assert reported(site, before) == ([replaced, "tqdm 2.0 → 2.1"], [replaced])


def test_the_same_version_installed_again_is_noticed(site):
    before = colab.inventory(site)
    install(site, "numpy", "2.0", when=2)
    again = "numpy 2.0 → 2.0 (installed again)"
    assert reported(site, before) == ([again], [again])


def test_a_removed_package_is_noticed(site):
    before = colab.inventory(site)
    for file in (site / "numpy-2.0.dist-info").iterdir():
        file.unlink()
    assert reported(site, before) == (["numpy 2.0 → removed"], ["numpy 2.0 → removed"])


def test_an_added_package_is_reported_and_allowed(site):
    before = colab.inventory(site)
    install(site, "mshnet", "0.1")
    assert reported(site, before) == (["mshnet 0.1"], [])


def test_nothing_is_reported_where_nothing_changed(site):
    assert reported(site, colab.inventory(site)) == ([], [])


@pytest.mark.parametrize("suffix", ["", ".git"])
def test_git_answers_the_address_from_the_local_checkout(tmp_path, suffix):
    checkout = tmp_path / "checkout"
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@example.invalid"]
    subprocess.run(["git", "init", "--quiet", str(checkout)], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "first"], check=True)
    head = colab._output([*git, "rev-parse", "HEAD"])
    variables = colab.redirect(ADDRESS, colab.freeze(checkout, tmp_path))
    answer = subprocess.run(
        ["git", "ls-remote", ADDRESS + suffix, "HEAD"],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert answer.stdout.split() == [head, "HEAD"]


def test_a_session_has_none_of_a_developers_variables(tmp_path, monkeypatch):
    for name in ("PJRT_DEVICE", "PYTHONPATH", "CPU_NUM_DEVICES", "GIT_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/x {colab.QUICK_FLAG}")
    variables = colab.session_variables(tmp_path / "venv", tmp_path / "home", {"GIT_X": "1"})
    assert variables.keys() & {"PJRT_DEVICE", "PYTHONPATH", "CPU_NUM_DEVICES", "GIT_DIR"} == set()
    assert "XDG_CACHE_HOME" not in variables
    assert variables["XLA_FLAGS"] == colab.QUICK_FLAG
    assert variables["JAX_PLATFORMS"] == "cpu" and variables["GIT_X"] == "1"
    assert variables["PATH"].startswith(str(tmp_path / "venv" / "bin") + os.pathsep)
    assert variables["HOME"] == str(tmp_path / "home")


def notebook_with(*outputs: tuple[str, str]) -> nbformat.NotebookNode:
    cell = nbformat.v4.new_code_cell("print()")
    cell.outputs = [nbformat.v4.new_output("stream", name=n, text=text) for n, text in outputs]
    return nbformat.v4.new_notebook(cells=[cell])


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_a_warning_of_mshnet_is_found_in_either_stream(stream):
    line = "/usr/lib/mshnet/data/read.py:12: UserWarning: mask is empty"
    notebook = notebook_with((stream, f"before\n{line}\n  warn()\n"))
    assert colab.own_warnings(notebook) == [line]


def test_a_warning_is_found_that_came_in_pieces_between_others_and_after_a_bar():
    line = "/usr/lib/mshnet/data/read.py:12: UserWarning: mask is empty"
    pieces = [("stderr", "\repoch 1: 50%\r" + line[:20]), ("stdout", "a\n"), ("stderr", line[20:])]
    assert colab.own_warnings(notebook_with(*pieces)) == [line]


@pytest.mark.parametrize(
    "text",
    [
        "/usr/lib/torch/nn.py:3: UserWarning: used by mshnet/model.py\n",
        "warning  tpuscope/doctor/report.py: memory\n",
    ],
)
def test_warnings_of_other_code_are_ignored(text):
    assert colab.own_warnings(notebook_with(("stderr", text))) == []


def test_the_reason_is_one_line_and_exit_code_2_if_no_python_of_colab_runs(
    tmp_path, monkeypatch, capsys
):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 3.12\n")
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    monkeypatch.setattr(colab, "VENV", tmp_path / "venv")
    monkeypatch.setattr(colab, "EXECUTED", tmp_path / "executed")
    monkeypatch.setattr(sys, "argv", ["colab.py", "--only", "01"])
    assert colab.main() == 2
    said = capsys.readouterr().err
    assert "3.12" in said and "PYTHON=/path/to/python3.13" in said and said.count("\n") == 1


def test_a_second_run_at_the_same_time_is_refused(tmp_path):
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        colab._lock(first)
        with pytest.raises(colab.Refused, match="another run"):
            colab._lock(second)


def test_an_unknown_lesson_is_refused_with_the_known_ones(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["colab.py", "--only", "01", "77"])
    assert colab.main() == 2
    said = capsys.readouterr().err
    assert "no lesson 77" in said and "01 02 03" in said and said.count("\n") == 1


def test_a_lesson_is_taken_by_its_number_and_all_without_one():
    names = [path.stem for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py"))]
    assert list(colab.solved_lessons([])) == names
    assert list(colab.solved_lessons(["02"])) == [n for n in names if n.startswith("02")]


def test_the_environment_is_rebuilt_only_when_a_pin_changes(tmp_path, monkeypatch):
    pins = tmp_path / "pins.txt"
    pins.write_text("numpy==2.1.3\n")
    monkeypatch.setattr(colab, "PINS", pins)
    monkeypatch.setattr(colab, "find_python", lambda: sys.executable)
    commands = []
    monkeypatch.setattr(colab.subprocess, "run", lambda command, **_: commands.append(command))
    environment = colab.Environment(tmp_path / "venv")
    (tmp_path / "venv/lib/python3.13/site-packages").mkdir(parents=True)
    (tmp_path / "venv/bin").mkdir()
    environment.python.touch()
    environment.prepare()
    made = len(commands)
    environment.prepare()
    assert made > 0 and len(commands) == made
    pins.write_text("numpy==2.1.4\n")
    environment.prepare()
    assert len(commands) == 2 * made


# --- a real session, in a tiny environment ----------------------------------------------------


def wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel with one empty module."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{path},sha256={_hash(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.fixture
def tiny(tmp_path):
    """An environment whose numpy is an empty module. pip and the kernel are borrowed from ours."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    environment = colab.Environment(venv)
    (environment.site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with zipfile.ZipFile(wheel(tmp_path, "numpy", "1.0")) as archive:
        archive.extractall(environment.site)
    image = colab.inventory(environment.site)
    environment.baseline.write_text(json.dumps({"key": "a", "image": image}))
    return environment


def installing(*packages: Path) -> nbformat.NotebookNode:
    names = " ".join(map(str, packages))
    cell = nbformat.v4.new_code_cell(f"%pip install --quiet --no-index --no-deps {names}")
    return nbformat.v4.new_notebook(cells=[cell])


def session(tmp_path: Path, environment, notebook):
    (tmp_path / "session").mkdir()
    return colab.run_lesson("00_lesson", notebook, environment, tmp_path / "session", {})


def test_a_lesson_that_installs_another_numpy_is_failed_and_its_work_taken_back(
    tiny, tmp_path, monkeypatch
):
    other, added = wheel(tmp_path, "numpy", "99.0"), wheel(tmp_path, "something", "1.0")
    outcome = session(tmp_path, tiny, installing(other, added))
    assert outcome.problems == ["00_lesson replaces numpy 1.0 → 99.0"]
    assert [str(change) for change in outcome.installed] == ["numpy 1.0 → 99.0", "something 1.0"]
    made = []
    monkeypatch.setattr(tiny, "_make", made.append)
    tiny.restore()
    assert made == ["a"], "a replaced package is not taken back piece by piece"


def test_a_lesson_may_add_a_package_and_the_next_one_does_not_find_it(tiny, tmp_path):
    image = colab.inventory(tiny.site)
    outcome = session(tmp_path, tiny, installing(wheel(tmp_path, "something", "1.0")))
    assert outcome.problems == []
    assert [str(change) for change in outcome.installed] == ["something 1.0"]
    tiny.restore()
    assert colab.inventory(tiny.site) == image


def test_a_failing_cell_is_shown_with_its_source_and_its_error(tiny, tmp_path):
    cells = ["import os\nassert os.listdir() == []", "wrong = 1 / 0", "print('never')"]
    code = [nbformat.v4.new_code_cell(cell) for cell in cells]
    outcome = session(tmp_path, tiny, nbformat.v4.new_notebook(cells=code))
    (problem,) = outcome.problems
    assert problem.startswith("cell 2 of 3:\n    wrong = 1 / 0\n")
    assert problem.endswith("ZeroDivisionError: division by zero")


def test_a_kernel_that_dies_fails_its_lesson(tiny, tmp_path):
    cell = nbformat.v4.new_code_cell("import os\nos._exit(1)")
    outcome = session(tmp_path, tiny, nbformat.v4.new_notebook(cells=[cell]))
    (problem,) = outcome.problems
    assert problem.startswith("the kernel died\ncell 1 of 1:\n    import os")


def test_an_interrupt_ends_the_run_and_the_kernel(tiny, tmp_path):
    source = """import os, signal, time
open("pid", "w").write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGINT)  # as Ctrl-C does
time.sleep(60)"""
    cell = nbformat.v4.new_code_cell(source)
    with pytest.raises(KeyboardInterrupt):
        session(tmp_path, tiny, nbformat.v4.new_notebook(cells=[cell]))
    kernel = int((tmp_path / "session" / "content" / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)
