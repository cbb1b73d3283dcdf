"""Programs for a TPU, compiled by its own compiler: tiny ones, each in a second or two."""

import dataclasses
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from tpuscope import aot, versions
from tpuscope.aot import compiler, file_step
from tpuscope.aot.report import size
from tpuscope.cli import main
from tpuscope.engine import torch_xla as runtime
from tpuscope.engine.tpu_specs import CHIPS, UnknownTopology
from tpuscope.errors import RequestError
from tpuscope.monitor import layers

if not runtime.installed():
    pytest.skip("torch_xla is not installed on this system", allow_module_level=True)

KEYS = {
    "topology",
    "cores",
    "hbm_bytes",
    "hbm_limit_bytes",
    "fits",
    "bytes_accessed",
    "flops",
    "roofline_seconds",
    "bound",
    "collectives",
    "compile_seconds",
    "rooflines",
    "layers",
    "buffers",
    "padding",
    "program",
    "libtpu",
    "effort",
    "cached",
}


@pytest.fixture(autouse=True, scope="module")
def answers(tmp_path_factory):
    """A cache folder of these tests' own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "torch_xla_aot"


@pytest.fixture
def no_compiler(monkeypatch):
    """Whatever would start the compiler fails."""

    def refuse(*args, **kwargs):
        raise AssertionError("the compiler was started")

    monkeypatch.setattr(compiler.subprocess, "Popen", refuse)


def training(device):
    """One convolution's training step, and its input."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 16, 3, padding=1).to(device)
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        loss = conv(batch["images"]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, [{"images": torch.zeros(8, 3, 32, 32)}]


@pytest.fixture(scope="module")
def report(xla):
    return aot.estimate(*training(xla.device), topology="v5e:1x1")


def test_a_training_step_compiles_and_everything_is_reported(report):
    values = json.loads(json.dumps(report.as_dict()))
    assert set(values) >= KEYS
    assert report.fits and not report.cached
    assert report.hbm_limit_bytes == CHIPS["v5e"].usable
    # At least the images, and twice as many operations backward as forward, but for the images'
    # own gradient.
    assert report.arguments_bytes >= 8 * 3 * 32 * 32 * 4
    forward = 2 * 8 * 16 * 32 * 32 * 27
    assert 1.5 * forward < report.flops < 3.5 * forward
    assert report.collectives == []
    assert set(values["rooflines"]) == set(CHIPS)
    assert values["rooflines"]["v5e"]["seconds"] == report.roofline_seconds
    assert report.roofline_seconds == CHIPS["v5e"].roofline(report.flops, report.bytes_accessed)[0]


def test_parameters_that_are_updated_in_place_count_once(report):
    assert report.aliased_bytes > 0
    assert report.hbm_bytes == (
        report.arguments_bytes
        + report.outputs_bytes
        + report.temporaries_bytes
        + report.code_bytes
        - report.aliased_bytes
    )


def test_bytes_by_layer_are_the_compilers_bytes(report):
    by_name = {layer["layer"]: layer for layer in report.layers}
    assert {"Conv2d", "SGD"} <= set(by_name)
    counted = sum(layer["bytes"] for layer in report.layers)
    assert counted == pytest.approx(report.bytes_accessed, rel=0.01)
    assert sum(layer["cycles"] for layer in report.layers) == report.cycles > 0
    # 3 channels of 8 images fill a small part of a tile.
    assert report.padding > 2
    assert report.buffers[0]["bytes"] >= 8 * 16 * 32 * 32 * 4


def test_the_table_says_what_it_is_and_names_layers(report):
    text = report.table()
    assert "an estimate by the TPU's compiler, not a run" in text
    for part in ("fits", "Conv2d", "SGD", "padding", "v6e", "exchanged   nothing"):
        assert part in text


def test_the_same_step_again_is_answered_without_the_compiler(report, xla, no_compiler):
    again = aot.estimate(*training(xla.device), topology="v5e:1x1")
    assert again.cached
    assert dataclasses.replace(again, cached=False) == report


@pytest.mark.parametrize(
    "change", [{"topology": "v6e:1x1"}, {"effort": "full"}, {"use_cache": False}]
)
def test_another_question_is_not_answered_from_the_cache(report, xla, no_compiler, change):
    with pytest.raises(AssertionError, match="the compiler was started"):
        aot.estimate(*training(xla.device), **{"topology": "v5e:1x1"} | change)


def test_an_answer_that_was_cut_off_is_asked_for_again(report, xla, answers, no_compiler):
    kept = {path: path.read_text() for path in answers.iterdir()}
    for path, text in kept.items():
        path.write_text(text[: len(text) // 2])
    with pytest.raises(AssertionError, match="the compiler was started"):
        aot.estimate(*training(xla.device), topology="v5e:1x1")
    for path, text in kept.items():
        path.write_text(text)


def test_layers_names_change_neither_the_program_nor_its_costs(report, xla, monkeypatch):
    monkeypatch.setattr(layers.LayerLabels, "label", lambda *_: None)
    plain = aot.estimate(*training(xla.device), topology="v5e:1x1", use_cache=False)
    assert "Conv2d" not in {layer["layer"] for layer in plain.layers}
    assert plain.program == report.program
    for name in ("flops", "bytes_accessed", "temporaries_bytes", "aliased_bytes", "cycles"):
        assert getattr(plain, name) == getattr(report, name)


class Outer(nn.Module):
    """65,536² products of float32: 16 GiB, where 15.75 are usable."""

    def forward(self, x):
        return (x @ x.T).relu() + 1


class Reduced(Outer):
    """The same, and only its column sums are kept."""

    def forward(self, x):
        products = super().forward(x)
        return products @ x + products.T @ x


def test_a_program_that_does_not_fit_is_refused_with_amounts_and_its_largest_array(xla):
    report = aot.estimate(Reduced(), [torch.zeros(65536, 8)], topology="v5e:1x1")
    assert (report.compiles, report.fits) == (False, False)
    assert report.hbm_bytes > report.hbm_limit_bytes == 15.75 * 2**30
    assert report.bytes_accessed is None and report.roofline_seconds is None
    assert report.buffers[0]["bytes"] == 65536**2 * 4
    assert report.buffers[0]["operation"].startswith("Reduced/")
    text = report.table()
    assert "DOES NOT FIT" in text and "15.75 GiB usable" in text and "Reduced/" in text
    assert json.loads(json.dumps(report.as_dict()))["rooflines"] == {}


def test_results_that_do_not_fit_are_noticed_although_the_compiler_does_not(xla):
    report = aot.estimate(Outer(), [torch.zeros(65536, 8)], topology="v5e:1x1")
    assert (report.compiles, report.fits) == (True, False)
    assert report.hbm_bytes > report.outputs_bytes == 65536**2 * 4 > report.hbm_limit_bytes
    assert "DOES NOT FIT: 16.00 GiB needed" in report.table()


SPMD = """
import pickle, sys
import torch
from torch import nn
from tpuscope import aot; from tpuscope.engine import torch_xla as runtime
from tpuscope.engine.spmd import DataMesh
runtime.select_platform("CPU", 8)
mesh = DataMesh()
device = runtime.device()
model = nn.Linear(4, 2, bias=False).to(device)
mesh.replicate(model.parameters())
images = mesh.split(2)
import torch_xla.core.xla_model as xm
[images] = xm.send_cpu_data_to_device([torch.zeros(16, 4)], device, images)
def step(images):
    loss = model(images).square().mean()
    loss.backward()
    return loss
with open(sys.argv[1], "wb") as file:
    pickle.dump(aot.trace(step, [images]), file)
"""


def test_eight_cores_reduce_the_loss_and_the_gradient(tmp_path):
    file = tmp_path / "program"
    environment = os.environ | {"PJRT_DEVICE": "CPU"}
    subprocess.run([sys.executable, "-c", SPMD, str(file)], check=True, env=environment)
    program = pickle.loads(file.read_bytes())
    assert program.cores == 8
    report = aot.compile_program(program, "v5e:2x4")
    assert report.cores == 8
    [reduced] = report.collectives
    assert reduced["kind"] == "all-reduce"
    assert reduced["bytes"] == (1 + 8) * 4  # a loss, and a gradient of 2 × 4
    with pytest.raises(UnknownTopology, match="v5e:2x2 has 4 cores"):
        aot.compile_program(program, "v5e:2x2")


def test_an_unknown_topology_is_refused_before_anything_is_traced(no_compiler):
    with pytest.raises(UnknownTopology, match="v5e:2x4"):
        aot.estimate(pytest.fail, topology="v9:1x1")


def test_an_unknown_effort_is_refused(no_compiler):
    with pytest.raises(RequestError, match="much") as error:
        aot.compile_program(b"", effort="much")
    assert error.value.code == "range"


@pytest.mark.parametrize("missing", ["jax", "libtpu"])
def test_without_the_compiler_it_says_what_to_install(monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    with pytest.raises(aot.CompilerUnavailable, match=f"needs {missing}, ") as error:
        aot.estimate(pytest.fail)
    assert error.value.code == "not-installed"
    assert "pip install jax==" in str(error.value)


CUTS = {
    "item": lambda y: y.sum().item(),
    "a decision": lambda y: bool((y > 0).all()),
    "cpu": lambda y: y.cpu(),
    "copy": lambda y: torch.zeros(4).copy_(y),
    "print": str,
    "sync": lambda y: torch_xla_sync(),
    "shape by values": lambda y: (y > 0).nonzero().shape,
}


def torch_xla_sync():
    import torch_xla

    torch_xla.sync()


@pytest.mark.parametrize("cut", CUTS)
def test_a_step_that_is_more_than_one_program_is_refused(xla, cut):
    def step(x):
        y = x + 1
        CUTS[cut](y)
        return y * 2

    with pytest.raises(aot.StepIsCut, match=r"reads a value|ran a part of itself"):
        aot.trace(step, [torch.zeros(4)])
    assert (torch.ones(2, device=xla.device) + 1).sum().item() == 4, "the device works as before"


def test_a_step_that_needs_the_host_is_refused(xla):
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Upsample(scale_factor=2, mode="bilinear"))
    net.to(xla.device)
    with pytest.raises(aot.StepIsCut, match="runs on the host"):
        aot.trace(lambda x: net(x).sum().backward(), [torch.zeros(1, 1, 4, 4)])


def test_a_step_that_leaves_nothing_to_compute_is_refused(xla):
    with pytest.raises(aot.StepIsCut, match="must be on the XLA device"):
        aot.trace(lambda: torch.ones(2) + 1)


def test_results_of_two_steps_do_not_mix(xla):
    step, inputs = training(xla.device)
    first = aot.trace(step, inputs)
    second = aot.trace(*training(xla.device))
    assert second.digest == first.digest


WORKERS = {
    "killed": "import os; os.kill(os.getpid(), 9)",
    "crashed": "import sys; print('something else'); sys.exit('no such shape')",
}


@pytest.mark.parametrize(
    ("kind", "message"),
    [("killed", "runs out of memory"), ("crashed", r"exit code 1: no such shape")],
)
def test_a_compiler_that_ends_without_an_answer_is_one_clear_line(
    tmp_path, monkeypatch, kind, message
):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKERS[kind])
    monkeypatch.setattr(compiler, "_WORKER", worker)
    with pytest.raises(aot.CompilerFailed, match=message) as raised:
        aot.compile_program(b"program", use_cache=False)
    assert "\n" not in str(raised.value)


def test_a_program_that_cannot_be_read_is_a_wrong_request():
    with pytest.raises(compiler.WrongProgram, match=r"not StableHLO that jaxlib .* can read"):
        aot.compile_program(b"no program", use_cache=False)


def test_flags_reach_the_compiler_and_this_process_s_own_do_not(monkeypatch, xla):
    program = aot.trace(lambda x: x + 1, [torch.zeros(4)])
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    assert aot.compile_program(program).compiles
    with pytest.raises(aot.CompilerFailed, match="xla_no_such_flag=2"):
        aot.compile_program(program, flags={"XLA_FLAGS": "--xla_no_such_flag=2"})


def test_ctrl_c_takes_the_compiler_along(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(compiler, "_WORKER", worker)
    started = []
    popen = subprocess.Popen

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[0]

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler.subprocess, "Popen", start)
    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        aot.compile_program(b"program", use_cache=False)
    assert started[0].returncode == -9


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (15.75 * 2**30, "15.75 GiB")],
)
def test_sizes_are_in_the_compilers_units(number, text):
    assert size(number) == text


# ---- the command ----

NET = """
import torch, torch_xla
from torch import nn

def training(batch_size=8):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 1, 3)).to(torch_xla.device())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(images):
        optimizer.zero_grad()
        loss = net(images).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    print("built")
    return step, [torch.zeros(batch_size, 1, 16, 16)]

def number():
    return 7

def fails():
    raise KeyError("mine")

def reads():
    step, inputs = training()
    return lambda images: step(images).item(), inputs
"""


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def test_a_step_of_a_file_is_compiled_for_eight_cores(net, capfd):
    flags = ["--topology", "v5e:2x4", "--arg", "batch_size=16", "--json"]
    assert main(["aot", f"{net}:training", *flags]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["cores"], answer["fits"]) == (8, True)
    assert [found["kind"] for found in answer["collectives"]] == ["all-reduce"]
    assert "Sequential.0" in {layer["layer"] for layer in answer["layers"]}
    # Again, from the cache, as a table.
    assert main(["aot", f"{net}:training", *flags[:-1]]) == 0
    out = capfd.readouterr().out
    assert "8 cores" in out and "an earlier answer" in out


def test_a_wrong_function_is_one_line(net, no_compiler_process, capfd):
    flags = ["--topology", "v5e:2x4", "--arg", "batch_size=9"]
    assert main(["aot", f"{net}:training", *flags]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    [line] = [line for line in err.splitlines() if line.startswith("tpuscope: ")]
    assert "(9, 1, 16, 16)" in line


@pytest.mark.parametrize(
    ("function", "arguments", "code", "expected"),
    [
        ("number", {}, "step-return", "not int"),
        ("fails", {}, "step-raised", "raised KeyError, line 23"),
        ("reads", {}, "step-is-cut", "reads a value"),
        ("absent", {}, "no-such-function", "no function absent"),
        ("training", {"size": 1}, "step-raised", "'size'"),
    ],
)
def test_what_is_wrong_in_a_file_has_a_code(xla, net, function, arguments, code, expected):
    with pytest.raises(RequestError) as error:
        file_step.trace_file(str(net), function, arguments, 1)
    assert error.value.code == code
    assert expected in str(error.value)


def test_a_file_that_is_no_python_is_a_wrong_request(xla, tmp_path):
    (tmp_path / "net.py").write_text("def training(:\n")
    with pytest.raises(RequestError, match=r"SyntaxError, line 1"):
        file_step.trace_file(str(tmp_path / "net.py"), "training", {}, 1)
    (tmp_path / "net.txt").write_text("")
    with pytest.raises(RequestError) as error:
        file_step.trace_file(str(tmp_path / "net.txt"), "training", {}, 1)
    assert error.value.code == "no-such-file"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["nowhere.py:training"], "nowhere.py"),
        (["nowhere.py"], "FILE.py:FUNCTION"),
        (["nowhere.mlir"], "nowhere.mlir"),
        (["{net}:training", "--compiler", "nowhere/python"], "--compiler nowhere/python"),
        (["{net}:training", "--topology", "v9"], "v9"),
        (["{net}:training", "--num-cores", "2"], "--num-cores 2"),
        (["{net}:training", "--arg", "size"], "--arg size"),
        (["{net}:training", "--effort", "much"], "much"),
    ],
)
def test_a_wrong_request_is_one_line_before_anything_is_traced(net, capsys, flags, expected):
    assert main(["aot", *(flag.format(net=net) for flag in flags)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and expected in err


@pytest.fixture
def no_compiler_process(monkeypatch):
    """The compiler fails to start; the process that traces is another."""

    def refuse(*args, **kwargs):
        raise AssertionError("the compiler was started")

    monkeypatch.setattr(compiler, "_run_worker", refuse)


# ---- saved programs, and another compiler ----

SAVED = """
module @saved attributes {mhlo.num_partitions = 1 : i32} {
  func.func public @main(%x: tensor<8x128xf32>, %y: tensor<128x256xf32>) -> tensor<8x256xf32> {
    %0 = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0]
      : (tensor<8x128xf32>, tensor<128x256xf32>) -> tensor<8x256xf32>
    return %0 : tensor<8x256xf32>
  }
}
"""
OPERATIONS = 2 * 8 * 128 * 256


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "saved.mlir"
    path.write_text(SAVED)
    return path


def compiled(capfd, path, *flags):
    assert main(["aot", str(path), "--json", *flags]) == 0
    return json.loads(capfd.readouterr().out)


def test_text_that_was_saved_is_compiled(saved, capfd):
    values = compiled(capfd, saved)
    assert (values["cores"], values["fits"]) == (1, True)
    assert values["flops"] == pytest.approx(OPERATIONS, rel=0.05)
    assert values["arguments_bytes"] == 4 * (8 * 128 + 128 * 256)


def test_an_artifact_of_torch_xla_is_the_program_that_was_traced(xla, tmp_path, capfd):
    program = aot.trace(lambda x: x @ x, [torch.zeros(128, 128)])
    path = tmp_path / "step.bc"
    path.write_bytes(program.stablehlo)
    traced, read = aot.compile_program(program), compiled(capfd, path)
    for name in ("flops", "bytes_accessed", "hbm_bytes", "cycles"):
        assert read[name] == getattr(traced, name)


def test_a_saved_program_for_more_cores_than_the_slice_has_is_refused(saved, capfd):
    saved.write_text(SAVED.replace("num_partitions = 1", "num_partitions = 4"))
    assert main(["aot", str(saved)]) == 2
    assert f"{saved}: the program is for 4 cores; v5e:1x1 has 1" in capfd.readouterr().err
    assert compiled(capfd, saved, "--topology", "v5e:2x2")["cores"] == 4


@pytest.mark.parametrize("content", [SAVED[:200], SAVED.replace("dot_general", "dots")])
def test_a_saved_program_with_a_fault_is_one_line(saved, capfd, content):
    saved.write_text(content)
    assert main(["aot", str(saved)]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and f"{saved}: not StableHLO" in err


def test_our_compiler_refuses_a_tpu7x_before_anything_is_traced(net, saved, capfd, monkeypatch):
    monkeypatch.setattr("tpuscope.aot.tracing.in_new_process", lambda *_: pytest.fail("traced"))
    for step in (f"{net}:training", str(saved)):
        assert main(["aot", step, "--topology", "tpu7x:2x2x1"]) == 2
        err = capfd.readouterr().err
        assert err.count("\n") == 1
        assert "refuses it" in err and f"libtpu {versions.NEWEST_LIBTPU} knows it" in err


@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:2x4", "tpu7x:2x2x1"])
def test_the_newest_compiler_compiles_a_saved_program(newest_compiler, saved, capfd, topology):
    flags = ("--topology", topology, "--compiler", newest_compiler)
    values = compiled(capfd, saved, *flags)
    assert values["topology"] == topology and values["fits"]
    assert values["libtpu"] == aot.Toolchain.find(newest_compiler).libtpu != ""
    assert values["flops"] == pytest.approx(OPERATIONS, rel=0.05)
    assert values["bytes_accessed"] >= 4 * (8 * 128 + 128 * 256 + 8 * 256)


def test_a_traced_step_and_a_second_compiler(newest_compiler, report, xla):
    newest = aot.estimate(*training(xla.device), compiler=newest_compiler)
    assert not newest.cached, "another compiler's answer is another answer"
    assert newest.program == report.program and newest.libtpu != report.libtpu
    assert newest.arguments_bytes == report.arguments_bytes
    assert newest.aliased_bytes == report.aliased_bytes
    assert newest.flops == pytest.approx(report.flops, rel=0.05)
    counted = sum(layer["bytes"] for layer in newest.layers)
    assert counted == pytest.approx(newest.bytes_accessed, rel=0.05)
    assert {"Conv2d", "SGD"} <= {layer["layer"] for layer in newest.layers}


def test_the_newest_compiler_says_what_does_not_fit(newest_compiler, xla):
    report = aot.estimate(Reduced(), [torch.zeros(65536, 8)], compiler=newest_compiler)
    assert (report.compiles, report.fits) == (False, False)
    assert report.hbm_bytes > report.hbm_limit_bytes == 15.75 * 2**30
    assert report.buffers[0]["bytes"] == 65536**2 * 4
