"""The doctor on machines that are made of files, and on this one."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from mshnet import doctor as detector
from mshnet.cli import main
from tpuscope.cli import main as general_main
from tpuscope.doctor import devices, doctor, examine, probe, resources, software, variables
from tpuscope.doctor.machine import Machine
from tpuscope.doctor.report import OK, PROBLEM, TARGETS, WARNING, Report, ok, problem
from tpuscope.engine import hardware as tpu
from tpuscope.engine import torch_xla as runtime
from tpuscope.errors import RequestError

ROOT = Path(__file__).resolve().parents[2]
V5E, V3, TPU7X = "0x0063", "0x0027", "0x0076"
COLAB, KAGGLE = {"COLAB_RELEASE_TAG": "x"}, {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}
PAIR = {"torch": "2.9.0+cpu", "torch_xla": "2.9.0"}


@pytest.fixture
def make(tmp_path):
    """Makes a machine out of files."""

    def write(path, text):
        path = tmp_path / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def make(chips=(), environ=(), packages=(), python="3.13.0", mounts="", free=8_000_000):
        for number, chip in enumerate(chips):
            write(f"root/sys/bus/pci/devices/{number}/vendor", "0x1ae0\n")
            write(f"root/sys/bus/pci/devices/{number}/device", f"{chip}\n")
            write(f"root/dev/accel{number}", "")
        write("root/sys/bus/pci/devices/network/vendor", "0x1ae0\n")
        write("root/sys/bus/pci/devices/network/device", "0x0042\n")  # Google's, but no TPU
        write("root/proc/meminfo", f"MemTotal: 16000000 kB\nMemAvailable: {free} kB\n")
        write("root/proc/self/mounts", f"/dev/sda / ext4 rw 0 0\n{mounts}")
        for name, version in dict(packages).items():
            requires = {
                "torch_xla": 'libtpu==0.0.21; extra == "tpu"',
                "torchvision": "torch==2.9.0",
            }
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            if name in requires:
                text += f"Requires-Dist: {requires[name]}\n"
            write(f"site/{name.replace('-', '_')}-{version}.dist-info/METADATA", text)
        site = [str(tmp_path / "site")]
        return Machine(tmp_path / "root", dict(environ), site, python)

    return make


needs_xla = pytest.mark.skipif(not runtime.installed(), reason="torch_xla is not installed")

# ---- which machine this is ----


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "CPU machine, no TPU"),
        ({"environ": COLAB}, "Colab, no TPU"),
        ({"packages": {"google-colab": "1.0"}}, "Colab, no TPU"),
        ({"environ": COLAB, "chips": [V5E]}, "Colab, 1 TPU v5e chip, 1 core, 16 GiB of HBM"),
        ({"environ": KAGGLE | COLAB, "chips": [V5E] * 8}, "Kaggle, 8 TPU v5e chips, 8 cores"),
        ({"chips": [V3] * 4}, "TPU VM, 4 TPU v2 or v3 chips, 8 cores, 8 or 16 GiB of HBM a core"),
        ({"chips": [TPU7X] * 4}, "TPU VM, 4 TPU 7x chips, 8 cores, 96 GiB of HBM a core"),
    ],
)
def test_the_runtime_and_its_tpu(make, given, expected):
    check = devices.place(make(**given))
    assert check.status == OK
    assert check.detail.startswith(expected)


def test_a_machine_without_a_tpu_says_how_to_get_one(make):
    assert "v5e-1 TPU" in devices.place(make(environ=COLAB)).fix
    check = devices.place(make(environ=KAGGLE), require="tpu")
    assert (check.status, check.blocks) == (PROBLEM, ("tpu",))
    assert "TPU v5e-8" in check.fix


@needs_xla
def test_the_chips_are_those_that_torch_xla_counts():
    from torch_xla._internal import tpu as theirs

    assert set(tpu.GENERATIONS) == set(theirs._TPU_PCI_DEVICE_IDS)
    assert theirs._GOOGLE_PCI_VENDOR_ID == tpu._GOOGLE


def test_every_consumer_counts_two_devices_on_a_tpu7x_chip(make, monkeypatch):
    """torch_xla 2.9.0's own table has 1; Google documents two TensorCores with half the HBM."""
    machine = make(chips=[TPU7X] * 4)
    assert machine.tpu_cores() == 8
    monkeypatch.setattr(tpu, "tpu_pci_ids", lambda *root: [TPU7X] * 4)
    monkeypatch.setattr(tpu, "tpu_nodes", lambda *root: ["/dev/vfio/0"])
    monkeypatch.setattr(runtime, "installed", lambda: True)
    monkeypatch.setattr(runtime, "require_matching_versions", lambda: None)
    assert runtime.tpu_cores() == 8
    assert runtime.possible_cores("TPU") == [1, 2, 4, 8]


def test_who_holds_the_tpu(make, tmp_path):
    machine = make(chips=[V5E])
    assert devices.driver(machine)[0].status == OK
    for pid, opened in ((4242, "/dev/accel0"), (4343, "/dev/null")):
        (tmp_path / f"root/proc/{pid}/fd").mkdir(parents=True)
        (tmp_path / f"root/proc/{pid}/comm").write_text("python3\n")
        (tmp_path / f"root/proc/{pid}/fd/7").symlink_to(opened)
    [check] = devices.driver(machine)
    assert (check.status, check.blocks) == (PROBLEM, ("tpu", "xla"))
    assert "process 4242 (python3)" in check.detail
    assert "4343" not in check.detail
    assert "kill 4242" in check.fix


def test_this_notebook_holds_the_tpu(make, tmp_path):
    machine = make(chips=[V5E], environ=COLAB)
    (tmp_path / f"root/proc/{os.getpid()}/fd").mkdir(parents=True)
    (tmp_path / f"root/proc/{os.getpid()}/comm").write_text("python3\n")
    (tmp_path / f"root/proc/{os.getpid()}/fd/7").symlink_to("/dev/vfio/0")
    [check] = devices.driver(machine)
    assert "held by this notebook" in check.detail
    assert check.fix == "Runtime > Restart session"


def test_chips_without_a_device_node(make, tmp_path):
    machine = make(chips=[V5E])
    (tmp_path / "root/dev/accel0").unlink()
    assert "no /dev/accel*" in devices.driver(machine)[0].detail


@pytest.mark.parametrize(
    ("node", "build", "require", "text"),
    [
        (False, "12.8", None, None),
        (False, "12.8", "cuda", "no NVIDIA GPU"),
        (True, None, None, "built without CUDA"),
        (True, "12.8", None, "(built for CUDA 12.8) finds none"),
    ],
)
def test_why_torch_finds_no_gpu(make, tmp_path, node, build, require, text):
    machine = make()
    if node:
        (tmp_path / "root/dev").mkdir()
        (tmp_path / "root/dev/nvidia0").write_text("")
    known = {"torch": "2.9.0", "cuda_build": build, "gpus": []}
    checks, works = devices.cuda(machine, known, 1, print, require)
    assert works == {}
    assert [check.blocks for check in checks] == [("cuda",)] * (text is not None)
    assert all(text in check.detail for check in checks)


# ---- packages ----


@pytest.mark.parametrize(
    ("packages", "python", "chips", "statuses", "text"),
    [
        (PAIR | {"libtpu": "0.0.21.1"}, "3.13.1", 1, [OK, OK], "belong together"),
        (PAIR | {"libtpu": "0.0.21"}, "3.12.1", 1, [OK, OK], "0.0.21 belongs to torch_xla"),
        (PAIR | {"libtpu": "0.0.9"}, "3.13.1", 1, [OK, WARNING], "pip install libtpu==0.0.21.1"),
        (PAIR | {"libtpu": "0.0.9"}, "3.12.1", 1, [OK, WARNING], "pip install libtpu==0.0.21"),
        (PAIR, "3.13.1", 1, [OK, PROBLEM], "not installed, and this machine has a TPU"),
        (PAIR, "3.13.1", 0, [OK, OK], "only a TPU"),
        (PAIR | {"torch": "2.8.0"}, "3.13.1", 0, [PROBLEM], "torch==2.9.0 torch_xla==2.9.0"),
        (PAIR | {"torch_xla": "2.8.1"}, "3.13.1", 0, [PROBLEM], "pip install torch_xla==2.9.0"),
        ({"torch": "2.8.0", "torch_xla": "2.8.0"}, "3.13.1", 0, [WARNING, OK], "written for 2.9.0"),
        ({"torch": "2.9.0"}, "3.13.1", 0, [OK, OK], "torch_xla"),
        ({"torch": "2.9.0"}, "3.13.1", 1, [OK, PROBLEM], "this machine has a TPU"),
        ({}, "3.13.1", 0, [PROBLEM], "pip install torch==2.9.0"),
    ],
)
def test_versions_that_belong_together(make, packages, python, chips, statuses, text):
    checks = software.versions(make(packages=packages, python=python, chips=[V5E] * chips))
    assert [check.status for check in checks] == statuses
    assert text in " ".join(f"{check.name} {check.detail} {check.fix}" for check in checks)
    assert all("cpu" not in check.blocks for check in checks if check.name != "torch")


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"jax": "0.7.2", "jaxlib": "0.7.1"}, [("jax", WARNING, "pip install jaxlib==0.7.2")]),
        ({"jax": "0.7.2", "jaxlib": "0.7.2"}, [("jax", OK, "")]),
        ({"torchvision": "0.24.0"}, []),
        ({"torch": "2.8.0", "torchvision": "0.24.0"}, [("torchvision", WARNING, "uninstall")]),
    ],
)
def test_versions_of_neighbours(make, packages, expected):
    found = software.neighbours(make(packages=PAIR | packages))
    assert [(check.name, check.status) for check in found] == [row[:2] for row in expected]
    assert all(text in check.fix for check, (*_, text) in zip(found, expected, strict=True))


def test_python_versions(make):
    statuses = [software.python(make(python=p)).status for p in ("3.10.9", "3.11.0", "3.14.0")]
    assert statuses == [PROBLEM, OK, PROBLEM]


def test_a_package_that_crashes_does_not_hide_the_others(tmp_path, monkeypatch):
    for name, text in {
        "crashes": "import os; os.abort()",
        "hangs": "import time; time.sleep(60)",
        "wrong": "raise ImportError('undefined symbol: _ZN3c10')",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    faults = probe.imports(["crashes", "json", "wrong", "gone", "hangs"], os.environ, limit=3)
    assert faults["json"] is None
    assert faults["crashes"] == "crashed with SIGABRT in stage 'import crashes'"
    assert faults["wrong"] == "ImportError: undefined symbol: _ZN3c10"
    assert faults["gone"] == "ModuleNotFoundError: No module named 'gone'"
    assert "hung for 3 s in stage 'import hangs'" in faults["hangs"]


# ---- environment variables ----


@pytest.mark.parametrize(
    ("environ", "chips", "status", "text"),
    [
        ({}, 1, OK, "none"),
        ({"PJRT_DEVICE": "CPU"}, 0, OK, "none"),
        ({"PJRT_DEVICE": "CPU"}, 1, PROBLEM, "this machine has a TPU"),
        ({"PJRT_DEVICE": "TPU"}, 0, WARNING, "this machine has no TPU"),
        ({"PJRT_DEVICE": "cpu"}, 0, WARNING, "'cpu' is not a platform"),
        (KAGGLE | {"TPU_PROCESS_ADDRESSES": "a"}, 1, WARNING, "unset TPU_PROCESS_ADDRESSES"),
        ({"TPU_PROCESS_ADDRESSES": "a"}, 1, OK, "none"),  # a pod slice
        ({"XRT_TPU_CONFIG": "tpu;0;secret:8470"}, 1, WARNING, "no effect"),
        ({"COLAB_TPU_ADDR": "secret:8470"}, 0, WARNING, "unset COLAB_TPU_ADDR"),
        ({"XLA_USE_BF16": "1"}, 0, PROBLEM, "unset XLA_USE_BF16"),
        ({"XLA_USE_BF16": "0"}, 0, OK, "none"),
        ({"TPU_VISIBLE_CHIPS": "0,1"}, 4, WARNING, "2 of 4 chips"),
        ({"TPU_VISIBLE_CHIPS": "0"}, 1, OK, "none"),
        ({"TPU_SKIP_MDS_QUERY": "1"}, 1, PROBLEM, "unset TPU_SKIP_MDS_QUERY"),
        ({"TPU_SKIP_MDS_QUERY": "1"}, 0, OK, "none"),  # lesson 09 needs it
        ({"LD_PRELOAD": "/usr/lib/libtcmalloc.so.4 /gone.so"}, 0, WARNING, "/gone.so does not"),
        ({"TPU_LIBRARY_PATH": "/gone/libtpu.so"}, 1, PROBLEM, "unset TPU_LIBRARY_PATH"),
    ],
    ids=str,
)
def test_environment_variables(make, tmp_path, environ, chips, status, text):
    machine = make(environ=environ, chips=[V5E] * chips)
    (tmp_path / "root/usr/lib").mkdir(parents=True)
    (tmp_path / "root/usr/lib/libtcmalloc.so.4").write_text("")
    [check] = variables.variables(machine)
    assert check.status == status
    assert text in f"{check.detail} {check.fix}"
    assert "secret" not in f"{check.detail} {check.fix}"


# ---- memory, processors, disks ----


def test_memory_and_the_limit_of_a_container(make, tmp_path):
    assert resources.memory(make())[0].status == OK
    assert resources.memory(make(free=1_500_000))[0].status == WARNING
    machine = make()
    (tmp_path / "root/sys/fs/cgroup").mkdir(parents=True)
    for name, value in (
        ("memory.max", "4000000000\n"),
        ("memory.current", "3500000000\n"),
        ("memory.stat", "anon 3000000000\ninactive_file 500000000\n"),
    ):
        (tmp_path / "root/sys/fs/cgroup" / name).write_text(value)
    [check] = resources.memory(machine)
    assert check.status == WARNING
    assert check.detail.startswith("1.0 of 4.0 GB free")
    (tmp_path / "root/proc/meminfo").unlink()
    assert resources.memory(machine) == []


def free_space(monkeypatch, size):
    usage = shutil.disk_usage(".")._replace(free=size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def test_the_shared_memory_of_a_container(make, tmp_path, monkeypatch):
    machine = make()
    assert resources.shared_memory(machine) == []
    (tmp_path / "root/dev/shm").mkdir(parents=True)
    free_space(monkeypatch, 64_000_000)  # Docker's
    [check] = resources.shared_memory(machine)
    assert check.status == WARNING
    assert "64 MB" in check.detail
    assert "--shm-size" in check.fix
    free_space(monkeypatch, 8e9)
    assert resources.shared_memory(machine)[0].status == OK


def test_disks(make, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not/there"))
    free_space(monkeypatch, 8e9)
    assert [check.status for check in resources.disks(make())] == [OK, OK]
    free_space(monkeypatch, 3_000_000)
    disk, cache = resources.disks(make())
    assert (disk.status, cache.status) == (WARNING, WARNING)
    assert str(tmp_path) in cache.detail
    assert "XDG_CACHE_HOME" in cache.fix


# ---- Drive, folders ----

DRIVE = "drive /content/drive fuse.drive rw 0 0\n"


def test_drive_is_for_colab(make):
    assert resources.drive(make()) == []
    [check] = resources.drive(make(environ=COLAB))
    assert check.status == WARNING
    assert "drive.mount" in check.fix


def mounted(make, tmp_path):
    machine = make(environ=COLAB, mounts=DRIVE)
    folder = tmp_path / "root/content/drive/MyDrive"
    folder.mkdir(parents=True, exist_ok=True)
    return machine, folder


def test_drive_is_written_read_and_left_as_it_was(make, tmp_path):
    machine, folder = mounted(make, tmp_path)
    [check] = resources.drive(machine)
    assert check.status == OK
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOTCONN, "connection is dead"),
        (errno.EROFS, "Read-only"),
        (errno.ENOSPC, "full"),
        (None, "did not answer"),
    ],
)
def test_drive_that_is_mounted_and_cannot_be_used(make, tmp_path, monkeypatch, number, text):
    machine, _ = mounted(make, tmp_path)
    hang = threading.Event()

    def fails(*args, **kwargs):
        if number is None:
            hang.wait(10)
        raise OSError(number, os.strerror(number or 5))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", fails)
    monkeypatch.setattr(resources, "DRIVE_TIMEOUT", 0.1 if number is None else 5)
    [check] = resources.drive(machine)
    hang.set()
    assert check.status == PROBLEM
    assert text in check.detail
    assert "force_remount=True" in check.fix or number == errno.ENOSPC


def test_the_compile_cache(tmp_path):
    assert resources.compile_cache(None, on_tpu=True) == []
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "program").write_bytes(bytes(2_000_000))
    [check] = resources.compile_cache(str(folder), on_tpu=True)
    assert check.status == OK
    assert "2.0 MB in 1 files" in check.detail
    assert resources.compile_cache(str(folder), on_tpu=False)[0].status == WARNING
    assert list(folder.iterdir()) == [folder / "program"]
    [check] = resources.compile_cache("/proc/cache", on_tpu=True)
    assert (check.status, check.blocks) == (PROBLEM, ("tpu", "xla"))


# ---- the detector's own checks ----


def test_the_loader_is_compared_with_the_guides_number(make, monkeypatch):
    """One number: what a v5e core can take, in GUIDE.md and in the doctor (once 873 and 360)."""
    [row] = re.findall(r"^\| 1 \| 32 \| 32 \|.*$", (ROOT / "GUIDE.md").read_text(), re.MULTILINE)
    guide = int(row.strip("| ").split(" | ")[-1])
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert detector.samples_per_second(0.01) > 0
    monkeypatch.setattr(detector, "samples_per_second", lambda: 400.0)
    assert detector.loader(make())[0].status == OK
    assert detector.loader(make(chips=[V5E]))[0].status == OK
    [check] = detector.loader(make(chips=[V5E] * 8))
    assert check.status == WARNING
    assert "1,200 samples/s" in check.detail
    assert f"8 TPU cores may take {8 * guide:,}" in check.detail


def test_memory_and_room_for_training(make, monkeypatch, tmp_path):
    assert detector.training_memory(make()) == []
    [check] = detector.training_memory(make(free=2_000_000))
    assert check.status == WARNING
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not/there"))
    free_space(monkeypatch, 8e9)
    assert detector.data_cache(make()) == []
    free_space(monkeypatch, 3_000_000)
    [check] = detector.data_cache(make())
    assert check.status == WARNING
    [check] = detector.run_folder(make(), str(tmp_path / "new/run"))
    assert (check.status, check.blocks) == (PROBLEM, TARGETS)


def test_the_data_set(tiny_dataset, tmp_path):
    assert detector.data_set(None)[0].status == OK
    data = tiny_dataset(folder=tmp_path / "data")
    [check] = detector.data_set(str(data))
    assert check.status == OK
    assert "4 train, 2 test images" in check.detail
    path = data / "images" / "train_1.png"
    path.write_bytes(path.read_bytes()[:-200])
    [check] = detector.data_set(str(data))
    assert (check.status, check.blocks) == (PROBLEM, TARGETS)
    assert "train_1.png cannot be read" in check.detail
    assert check.fix == f"mshnet check-data {data}"
    [check] = detector.data_set(str(tmp_path / "gone"))
    assert check.status == PROBLEM
    assert check.detail.endswith("gone does not exist")
    (tmp_path / "data.zip").write_bytes(b"")
    assert "--stage" in detector.data_set(str(tmp_path / "data.zip"))[0].fix


def test_the_folder_of_a_run(make, tmp_path):
    machine = make()
    assert detector.run_folder(machine, str(tmp_path / "new/run"))[0].status == OK
    assert not (tmp_path / "new").exists()
    (tmp_path / "checkpoint.pkl").write_bytes(b"")
    assert "--resume" in detector.run_folder(machine, str(tmp_path))[0].fix
    assert detector.run_folder(machine, str(tmp_path / "checkpoint.pkl"))[0].status == PROBLEM
    assert detector.run_folder(machine, "/proc/run")[0].status == PROBLEM


# ---- the report ----


@pytest.mark.parametrize(
    ("require", "cores", "usable", "text"),
    [
        (None, 1, True, "usable: training can run on xla, cpu (1 problem above)"),
        (None, 8, True, "usable for --cores 8: training can run on xla"),
        (None, 9, False, "not usable for --cores 9: at most 8 cores can be used; "),
        ("cpu", 1, True, "usable for --require cpu"),
        ("tpu", 1, False, "not usable for --require tpu: driver, no node; training can run on xla"),
    ],
)
def test_the_verdict(require, cores, usable, text):
    checks = [ok("Python", "3"), problem("driver", "no node", "fix it", ("tpu",))]
    works = {"tpu": 8, "xla": 8, "cpu": 1}
    report = Report(checks, works, {}, require, cores)
    assert report.usable is usable
    assert report.verdict().startswith(text)
    lines = report.table().splitlines()
    assert lines[:3] == ["ok       Python  3", "problem  driver  no node", f"{'':17}→ fix it"]
    assert lines[-1] == report.verdict()


def test_what_is_wrong_everywhere_makes_it_unusable():
    report = Report([problem("data set", "gone", "bring it")], {"cpu": 1})
    assert not report.usable
    assert "not usable: data set, gone" in report.verdict()


def test_a_check_that_fails_is_a_line_and_the_others_go_on(make, tmp_path):
    machine = make()  # without torch: no device is tried
    (tmp_path / "root/proc/meminfo").write_text("MemTotal: many\nMemAvailable: many\n")

    def broken(machine):
        raise ZeroDivisionError("of its own")

    def missing(machine):
        import no_such_package  # noqa: F401

    own = [
        ("mine", broken),
        ("needs", missing),
        ("last", lambda machine: ok("last", machine.python)),
    ]
    report = examine(machine, extra=own)
    found = {check.name: check for check in report.checks}
    assert [found[name].status for name in ("memory", "mine", "needs")] == [WARNING] * 3
    assert "ValueError" in found["memory"].detail
    assert "ZeroDivisionError: of its own" in found["mine"].detail
    assert "no_such_package" in found["needs"].detail
    assert found["last"] == ok("last", "3.13.0")
    assert not report.usable
    assert report.facts["memory_gb"] is None
    json.dumps(report.as_dict())


@pytest.mark.parametrize(
    "wrong", [{"require": "moon"}, {"cores": 0}, {"timeout": 0.0}, {"timeout": float("nan")}]
)
def test_wrong_requests(wrong):
    with pytest.raises(RequestError) as error:
        doctor(**wrong)
    [(name, value)] = wrong.items()
    assert error.value.code == "range"
    assert f"--{name} {value}" in str(error.value)


# ---- this machine ----


@needs_xla
def test_this_machine_from_a_notebook(tiny_dataset, tmp_path):
    """In a new process, which must not have opened a device afterwards."""
    data = tiny_dataset(folder=tmp_path / "data")
    script = f"""
import json, sys
from mshnet.doctor import doctor
report = doctor(dataset_dir={str(data)!r}, log=lambda text: print(text, file=sys.stderr))
assert "torch_xla" not in sys.modules
print(json.dumps(report.as_dict()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["usable"]
    assert answer["environment"]["versions"]["torch_xla"] == "2.9.0"
    checks = {check["name"]: check for check in answer["checks"]}
    assert all(set(check) == {"name", "status", "detail", "fix"} for check in answer["checks"])
    for name in ("CPU", "XLA on TPU" if runtime.tpu_chips() else "XLA on CPU", "imports"):
        assert checks[name]["status"] == OK, checks[name]
    assert "agrees with the host" in checks["CPU"]["detail"]
    assert "4 train, 2 test images" in checks["data set"]["detail"]
    assert done.stderr.rstrip().endswith(answer["verdict"])


@needs_xla
def test_a_device_that_computes_something_else(make):
    """Real: with this variable torch_xla computes everything in bfloat16."""
    [check], works = devices.xla(make(environ=os.environ | {"XLA_USE_BF16": "1"}), 120, print)
    assert works == {}
    assert check.status == PROBLEM
    assert "the results differ from the host's" in check.detail


@needs_xla
def test_a_runtime_that_aborts(make):
    """Real: XLA ends the process when it meets a flag that it does not know."""
    environ = os.environ | {"XLA_FLAGS": "--xla_no_such_flag=1"}
    [check], works = devices.xla(make(environ=environ), 120, print)
    assert works == {}
    assert "crashed with SIGABRT in stage 'open xla:CPU'" in check.detail
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1" in check.detail
    assert check.fix == "unset XLA_FLAGS"


@needs_xla
def test_a_runtime_that_hangs_is_ended(make):
    [check], works = devices.xla(make(environ=os.environ | COLAB), 1.0, print)
    assert works == {}
    assert "hung for 1 s" in check.detail
    assert "Runtime > Restart session" in check.fix


@pytest.mark.parametrize(
    "message",
    [
        "ABORTED: The TPU is already in use by process with pid 7",
        "open(/dev/accel0): Resource busy",
    ],
)
def test_a_tpu_that_another_user_holds(make, monkeypatch, message):
    outcome = probe.Outcome("open xla:TPU", {}, code=1, message=message)
    monkeypatch.setattr(probe, "compute", lambda *given: outcome)
    [check], _ = devices.xla(make(chips=[V5E]), 1, print)
    assert "sudo lsof -w /dev/accel* /dev/vfio/*" in check.fix
    assert check.blocks == ("tpu", "xla")


@pytest.mark.parametrize(
    ("chips", "code", "stage", "fix"),
    [
        (1, 1, "open xla:TPU", "Runtime > Restart session; meanwhile"),
        (1, -9, "training step", "out of memory"),
        (0, 1, "import torch_xla", "--force-reinstall torch==2.9.0 torch_xla==2.9.0"),
    ],
)
def test_the_way_out_fits_what_happened(make, monkeypatch, chips, code, stage, fix):
    outcome = probe.Outcome(stage, {}, code, "RuntimeError: device not found")
    monkeypatch.setattr(probe, "compute", lambda *given: outcome)
    [check], works = devices.xla(make(environ=COLAB, chips=[V5E] * chips), 1, print)
    assert works == {}
    assert fix in check.fix


def test_a_tpu_within_its_tolerance_gives_its_cores(make, monkeypatch):
    facts = {"device": "TPU v5 lite", "cores": 8, "first_step": 9.0, "second_step": 0.001}
    outcome = probe.Outcome("done", facts | {"product": 3e-3, "gradients": 1.1e-2}, 0)
    monkeypatch.setattr(probe, "compute", lambda *given: outcome)
    [check], works = devices.xla(make(chips=[V5E] * 8), 1, print)
    assert (check.status, works) == (OK, {"xla": 8, "tpu": 8})
    outcome.facts["cores"] = 1
    assert devices.xla(make(chips=[V5E] * 8), 1, print)[0][0].status == WARNING
    outcome.facts["gradients"] = float("nan")
    assert devices.xla(make(chips=[V5E] * 8), 1, print)[1] == {}


def test_where_torch_does_not_start_the_doctor_does(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    environ = dict(os.environ) | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    script = """
import runpy, sys
sys.argv = ["tpuscope.doctor", "--json"]
try:
    runpy.run_module("tpuscope.doctor", run_name="__main__")
finally:
    assert not {"mshnet", "torch"} & set(sys.modules)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert "undefined symbol" in answer["verdict"]
    assert "Traceback" not in done.stderr


NOTHING_ELSE = """
import sys
import tpuscope
assert not {{"mshnet", "torch"}} & set(sys.modules)
from tpuscope.cli import main
try:
    code = main({argv})
except SystemExit as exit:
    code = exit.code
assert code == 0, code
unwanted = {unwanted} & set(sys.modules)
assert not unwanted, unwanted
"""


@pytest.mark.parametrize(
    ("argv", "unwanted"),
    [
        (["--help"], {"mshnet", "torch", "numpy"}),
        (["doctor", "--help"], {"mshnet", "torch", "numpy"}),
        (["aot", "--help"], {"mshnet", "torch", "numpy"}),
    ],
)
def test_tpuscope_loads_neither_the_detector_nor_torch(argv, unwanted):
    script = NOTHING_ELSE.format(argv=argv, unwanted=unwanted)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_no_module_of_tpuscope_imports_the_detector():
    modules = "tpuscope.aot, tpuscope.aot.tracing, tpuscope.aot.file_step, tpuscope.monitor.watch"
    script = f"import sys, {modules}; assert 'mshnet' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=300)
    for path in (ROOT / "tpuscope").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) mshnet", path.read_text(), re.MULTILINE), path
    for part in ("doctor", "aot"):  # nor does a message name its flags
        for path in (ROOT / "tpuscope" / part).glob("*.py"):
            assert not re.search("mshnet|--use-tpu|--device ", path.read_text()), path


def test_both_commands_have_the_flags_of_the_general_doctor(capsys):
    for command, own in (("tpuscope", False), ("mshnet", True)):
        program = main if own else general_main
        with pytest.raises(SystemExit):
            program(["doctor", "--help"])
        text = capsys.readouterr().out
        assert f"usage: {command} doctor" in text
        assert ("--dataset-dir" in text) is own
        assert f"{command} doctor --require tpu" in text
