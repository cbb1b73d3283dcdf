"""``course``: installations, checks of exercises, pictures of menus."""

import subprocess
import tomllib
from pathlib import Path

import pytest

import course
from course import NotYet, checking, clicks, rejects
from tpuscope.engine import torch_xla as runtime

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_there_is_not_installed_again(monkeypatch):
    monkeypatch.setattr(course, "_run", lambda *command: pytest.fail(f"ran {command}"))
    course.install("numpy>=2", "torch", "scikit_image>=0.25")


def test_an_installation_leaves_torch_and_its_partners_as_they_are(monkeypatch):
    commands, pins = [], []

    def run(*command):
        commands.append(command)
        pins.extend(Path(command[command.index("--constraint") + 1]).read_text().splitlines())

    monkeypatch.setattr(course, "_run", run)
    course.install("numpy", "no-such-package==1.0", "tqdm<1")
    assert commands[0][-2:] == ("no-such-package==1.0", "tqdm<1")
    kept = ["torch", "numpy", *(["torch_xla"] if runtime.installed() else [])]
    assert {pin.split("==")[0] for pin in pins} >= set(kept)


def test_a_failed_installation_is_one_line_of_pip_s(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match=r"pip install … failed: .*no-such-package") as error:
        course.install("no-such-package==1.0")
    assert "\n" not in str(error.value)


def test_a_clone_is_its_own_checkout():
    assert course.checkout() == ROOT


def test_where_the_package_alone_is_installed_the_repository_is_cloned_once(tmp_path, monkeypatch):
    origin = tmp_path / "origin"
    subprocess.run(["git", "init", "-q", origin], check=True)
    (origin / "a file").touch()
    subprocess.run(["git", "-C", origin, "add", "."], check=True)
    author = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    subprocess.run(["git", "-C", origin, *author, "commit", "-q", "-m", "all"], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, value in (
        ("COUNT", "1"),
        ("KEY_0", f"url.{origin.as_uri()}.insteadOf"),
        ("VALUE_0", project["urls"]["Repository"]),
    ):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    monkeypatch.setattr(course, "__file__", str(tmp_path / "site-packages/course/__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert (course.checkout() / "a file").exists()
    monkeypatch.setattr(course, "_run", lambda *command: pytest.fail(f"ran {command}"))
    assert course.checkout() == tmp_path / "clone"


def test_a_right_answer_is_praised(capsys):
    with checking("Well done.") as expect:
        expect.answered(size=3)
        expect(3 == 3, "three")
    assert capsys.readouterr().out == "Right. Well done.\n"


@pytest.mark.parametrize("empty", [None, ...])
def test_an_empty_answer_is_named(empty):
    with pytest.raises(NotYet, match=r"^size has no value"), checking() as expect:
        expect.answered(length=0, size=empty)


def test_a_wrong_answer_raises_its_hint_and_nothing_is_praised(capsys):
    with pytest.raises(NotYet, match=r"^not 4$"), checking("Well done.") as expect:
        expect(2 + 2 != 4, "not 4")
    assert capsys.readouterr().out == ""


def test_an_exception_of_the_readers_code_is_one_line():
    line = r"^your code raised ZeroDivisionError: division by zero$"
    with pytest.raises(NotYet, match=line), checking():
        raise ZeroDivisionError("division by zero")


def test_an_interruption_is_passed_on():
    with pytest.raises(KeyboardInterrupt), checking():
        raise KeyboardInterrupt


def test_a_notebook_shows_one_line_and_no_traceback():
    assert NotYet("write it first")._render_traceback_() == ["Not yet: write it first"]


def test_a_check_that_accepts_an_empty_exercise_is_a_failure(capsys):
    check = "from course import checking\nwith checking() as expect: expect.answered(x=x)"
    rejects(check, {"x": ...})
    assert capsys.readouterr().out.startswith("Not yet: x has no value")
    with pytest.raises(AssertionError, match="accepts"):
        rejects(check, {"x": 1})


def test_a_picture_of_clicks_shows_every_entry_and_numbers_the_chosen():
    picture = clicks(
        ("Runtime", ["Run all", "Change runtime type"], "Run all"), ("", ["Save"], "Save")
    )
    texts = [text.get_text() for axis in picture.axes for text in axis.texts]
    assert texts == ["Runtime", "1", "Run all", "Change runtime type", "", "2", "Save"]
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_a_click_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"'Stop' is none of the entries"):
        clicks(("Runtime", ["Run all"], "Stop"))
