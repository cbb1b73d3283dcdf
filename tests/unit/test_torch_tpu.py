"""What is said where TorchTPU, or the plugin that runs it on a CPU, is missing or is another."""

import importlib.util
import sys
from importlib import metadata

import pytest

from mshnet import RequestError, cli
from mshnet.training.devices import resolve_device
from tpuscope.cli import main as tpuscope
from tpuscope.engine import cpu_plugin, torch_tpu

without = pytest.mark.skipif(torch_tpu.installed(), reason="TorchTPU is installed here")


@without
@pytest.mark.parametrize("device", ["tpu", "auto"])
def test_the_engine_is_not_installed(monkeypatch, device):
    monkeypatch.setattr(torch_tpu, "tpu_chips", lambda: 1)
    with pytest.raises(RequestError, match="torch_tpu is not installed"):
        resolve_device(device, engine="torch_tpu")


@without
def test_the_command_line_says_it_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert cli.main_tpu(["--use-tpu", "--engine", "torch_tpu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "torch_tpu is not installed" in line


def test_an_engine_is_that_of_a_tpu():
    with pytest.raises(RequestError, match="--engine torch_tpu --device cpu"):
        resolve_device("cpu", engine="torch_tpu")


@pytest.mark.parametrize("version", ["2.9.0", "2.16.1+cpu"])
def test_a_torch_that_does_not_belong_to_it(monkeypatch, version):
    monkeypatch.setattr(torch_tpu, "installed", lambda: True)
    monkeypatch.setattr(torch_tpu.torch, "__version__", version)
    monkeypatch.setattr(metadata, "version", lambda name: "0.2.0")
    with pytest.raises(RequestError, match=r"needs torch 2\.11 to 2\.15"):
        torch_tpu.require()


def test_both_engines_in_one_environment(monkeypatch):
    monkeypatch.setattr(torch_tpu, "installed", lambda: True)
    monkeypatch.setattr(torch_tpu.torch, "__version__", "2.15.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(RequestError, match="keep one of them"):
        torch_tpu.require()


class _File:
    def __init__(self, path):
        self.path, self.name = path, path.name

    def locate(self):
        return self.path


def test_a_plugin_that_is_missing_or_another_one(monkeypatch, tmp_path):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(RequestError, match=r"lammps-jax-pjrt-cpu, which is not installed"):
        cpu_plugin.path()
    monkeypatch.setattr(metadata, "files", lambda name: [])
    with pytest.raises(RequestError, match="it has no pjrt_c_api_cpu_plugin"):
        cpu_plugin.path()
    file = tmp_path / "pjrt_c_api_cpu_plugin.so"
    file.write_bytes(b"another program")
    monkeypatch.setattr(metadata, "files", lambda name: [_File(file)])
    with pytest.raises(RequestError, match="SHA-256 differs"):
        cpu_plugin.path()


def test_a_script_to_rehearse_that_is_not_there(capsys, tmp_path):
    assert tpuscope(["rehearse", str(tmp_path / "no.py")]) == 2
    assert "no.py: no such file" in capsys.readouterr().err


@without
def test_a_rehearsal_without_the_engine(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")  # it is set back after the test
    script = tmp_path / "hello.py"
    script.write_text("print('hello')")
    assert tpuscope(["rehearse", str(script)]) == 2
    output = capsys.readouterr()
    assert "torch_tpu is not installed" in output.err
    assert "hello" not in output.out
    assert sys.argv[0] != str(script)
