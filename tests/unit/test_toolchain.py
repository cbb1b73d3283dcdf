"""Another Python's compiler: a stand-in for that Python answers in place of jax and libtpu."""

import json
import os
import sys
from pathlib import Path

import pytest

from tpuscope import versions
from tpuscope.aot import compiler, hlo, read_program, toolchain
from tpuscope.aot.toolchain import CompilerUnavailable, Toolchain
from tpuscope.cli import main
from tpuscope.errors import RequestError

FOUND = {"jax": "0.12", "jaxlib": "0.12", "libtpu": "0.0.52"}
SIZES = ("arguments", "outputs", "aliased", "temporaries", "code", "peak")
ANSWER = dict.fromkeys(SIZES, 4096) | {
    "cores": 2,
    "flops": 2e9,
    "accessed": 1e9,
    "compile_seconds": 0.5,
    "libtpu": "0.0.52",
}
TEXT = """HloModule main

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %y = f32[8,128]{1,0:T(8,128)} add(%x, %x)
}
"""
# As the compiler's process: -P -c PROBE names…, or -P WORKER FOLDER.
SCRIPT = """#!{python}
import json, os, sys
from pathlib import Path
with open({log!r}, "a") as log:
    print(json.dumps([sys.argv[1:3], "PYTHONPATH" in os.environ]), file=log)
if sys.argv[2] == "-c":
    print({found!r})
else:
    folder = Path(sys.argv[3])
    (folder / "dump").mkdir()
    (folder / "dump" / "module.after_codegen.txt").write_text({text!r})
    (folder / "answer.json").write_text({answer!r})
"""


@pytest.fixture(autouse=True)
def own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv(toolchain.VARIABLE, raising=False)
    compiler._require_slice.cache_clear()


@pytest.fixture
def python(tmp_path):
    """Return a function that writes a stand-in for a Python, and returns its path."""

    def write(found=FOUND, answer=ANSWER, name="python"):
        path = tmp_path / name
        path.write_text(
            SCRIPT.format(
                python=sys.executable,
                log=str(tmp_path / "log"),
                found=json.dumps(found),
                text=TEXT,
                answer=json.dumps(answer),
            )
        )
        path.chmod(0o755)
        return str(path)

    return write


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "step.mlir"
    path.write_text("module @step {}")
    return str(path)


def test_a_python_is_chosen_by_flag_then_variable(python, monkeypatch):
    flag, variable = python(), python(FOUND | {"libtpu": "0.0.60"}, name="other")
    monkeypatch.setenv(toolchain.VARIABLE, variable)
    assert Toolchain.find(flag) == Toolchain(flag, tuple(FOUND.items()))
    assert (Toolchain.find().python, Toolchain.find().libtpu) == (variable, "0.0.60")


def test_without_a_choice_it_is_this_python(monkeypatch):
    monkeypatch.setattr(toolchain.metadata, "version", lambda name: f"{name}'s")
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: name)
    found = Toolchain.find()
    assert (found.python, found.libtpu) == (sys.executable, "libtpu's")


@pytest.mark.parametrize("missing", [["libtpu"], ["jax", "jaxlib"], list(FOUND)])
def test_what_another_python_lacks_is_named_with_its_pip_line(python, missing):
    there = {name: version for name, version in FOUND.items() if name not in missing}
    path = python(there)
    with pytest.raises(CompilerUnavailable) as error:
        Toolchain.find(path)
    assert f"needs {' and '.join(missing)}, not installed in {path}: " in str(error.value)
    assert f"{path} -m pip install {versions.newest_compiler()}" in str(error.value)
    assert error.value.code == "not-installed"


def test_what_is_no_python_is_one_line(tmp_path, capsys, program):
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 1\n")
    silent.chmod(0o755)
    for path in (tmp_path / "none", tmp_path, program, silent):
        assert main(["aot", program, "--compiler", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"--compiler {path}: no" in err


def test_the_variable_is_named_if_it_is_what_is_wrong(monkeypatch):
    monkeypatch.setenv(toolchain.VARIABLE, "/nowhere/python")
    with pytest.raises(CompilerUnavailable, match=r"^TPUSCOPE_COMPILER /nowhere/python: no such"):
        Toolchain.find()


def test_a_file_is_compiled_by_the_chosen_python_and_reported_with_its_version(
    python, program, tmp_path, capsys
):
    flags = ["--topology", "tpu7x:2x2x1", "--compiler", python(), "--json"]
    assert main(["aot", program, *flags]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["libtpu"], values["cores"], values["topology"]) == ("0.0.52", 2, "tpu7x:2x2x1")
    # A core has half of the chip's bandwidth.
    assert values["roofline_seconds"] == pytest.approx(1e9 / 3690e9)
    started = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [arguments[0] for arguments, _ in started] == ["-P", "-P"]
    assert not any(shows_ours for _, shows_ours in started), "PYTHONPATH is this Python's"
    # Again, from the cache.
    assert main(["aot", program, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["cached"]


def test_another_version_is_asked_again(python, program, capsys):
    assert main(["aot", program, "--compiler", python(), "--json"]) == 0
    newer = python(FOUND | {"libtpu": "0.0.60"}, ANSWER | {"libtpu": "0.0.60"})
    assert main(["aot", program, "--compiler", newer, "--json"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert not json.loads(second)["cached"]
    assert (json.loads(first)["libtpu"], json.loads(second)["libtpu"]) == ("0.0.52", "0.0.60")


REFUSED = {
    "slice_refused": "INVALID_ARGUMENT: Invalid TPU external name: TPU7x",
    "libtpu": "0.0.21",
}


def test_a_compiler_that_is_too_old_for_the_slice_names_the_one_that_is_needed(
    python, program, capsys
):
    flags = ["--topology", "tpu7x:2x2x1", "--compiler", python(FOUND, REFUSED)]
    assert main(["aot", program, *flags]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "tpu7x:2x2x1: libtpu 0.0.21 refuses it (INVALID_ARGUMENT: Invalid TPU" in err
    assert f"libtpu {versions.NEWEST_LIBTPU} knows it" in err and "--compiler" in err


def test_the_slice_is_asked_for_before_a_step_is_traced_and_only_where_needed(python):
    slices = [compiler.Topology.parse(name) for name in ("tpu7x:2x2x1", "v5e:1x1")]
    refuses = python(FOUND, REFUSED)
    with pytest.raises(compiler.CompilerTooOld) as error:
        compiler.require_compiler(refuses, slices[0])
    assert error.value.code == "compiler-too-old"
    assert compiler.require_compiler(refuses, slices[1]).python == refuses
    knows = python(FOUND, {"cores": 8, "libtpu": "0.0.52"}, name="newer")
    assert compiler.require_compiler(knows, slices[0]).libtpu == "0.0.52"


def test_a_program_that_the_compiler_cannot_read_is_named(python, program, capsys):
    wrong = {"wrong": "not StableHLO that jaxlib 0.7 can read", "libtpu": "0.0.21"}
    assert main(["aot", program, "--compiler", python(FOUND, wrong)]) == 2
    assert f"tpuscope: {program}: not StableHLO that" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty; expected StableHLO"),
        (b"\x7fELF\2\1\1\0\xff", "is neither bytecode nor text of MLIR; expected StableHLO"),
        (b"PK\3\4 module \xff", "is neither"),
        (b"loss = 3", "is neither"),
    ],
)
def test_a_file_that_is_no_program_says_what_was_expected(tmp_path, capsys, content, words):
    path = tmp_path / "step.bin"
    path.write_bytes(content)
    assert main(["aot", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"{path} {words}" in err


@pytest.mark.parametrize(
    "content", [b"ML\xefR\rStableHLO_v1.13.0\0", b"#loc = loc(unknown)\nmodule {}"]
)
def test_bytecode_and_text_are_programs_that_say_their_cores(tmp_path, content):
    path = tmp_path / "step"
    path.write_bytes(content)
    found = read_program(path)
    assert (found.stablehlo, found.cores, found.aliases) == (content, None, ())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_one_line(tmp_path):
    path = tmp_path / "step.mlir"
    path.write_text("module {}")
    path.chmod(0)
    with pytest.raises(RequestError, match="Permission denied"):
        read_program(path)


def test_a_saved_program_takes_no_arguments(program, capsys):
    assert main(["aot", program, "--arg", "batch_size=2"]) == 2
    assert "--arg" in capsys.readouterr().err


def test_the_newer_compilers_message_about_memory_is_read():
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (16.00G) exceeds available HBM (15.75G). HLO module: main.\n"
    )
    assert hlo.refusal(message) == hlo.Refusal(16 * 2**30, round(15.75 * 2**30), [])


def test_the_largest_arrays_come_from_the_program_if_the_message_has_none(python, program, capsys):
    error = "RESOURCE_EXHAUSTED: temporaries (16.00G) exceeds available HBM (15.75G)."
    answer = {"cores": 1, "error": error, "libtpu": "0.0.52"}
    path = python(FOUND, answer)
    script = Path(path).read_text()
    Path(path).write_text(script.replace("after_codegen", "oom_intermediate_module"))
    assert main(["aot", program, "--compiler", path, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert not values["fits"]
    assert [buffer["bytes"] for buffer in values["buffers"]] == [4096]
