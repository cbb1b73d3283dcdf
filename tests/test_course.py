"""What the lessons' exercises are checked with, and the pictures of what to click."""

import pytest

from mshnet.course import NotYet, checking, clicks, rejects


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
    check = "from mshnet.course import checking\nwith checking() as expect: expect.answered(x=x)"
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
