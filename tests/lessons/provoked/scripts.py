"""What users do, and what torch_xla 2.9.0, this package, Python and Linux answer.

``python scripts.py FOLDER`` runs every script below in a process of its own, and leaves what it
printed in ``FOLDER/NAME.txt``. To import torch_xla takes seconds, so it is imported once, and each
script runs in a fork that has not opened the device. A script that goes on after an error wraps
the call in :func:`attempt`. ``__main__`` is imported again by processes that a script spawns, so
nothing heavy may be imported at the top.
"""

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

LIMIT = 120  # seconds for a script
SCRIPTS = {}
ANONYMOUS = [lambda index: index]  # a function without a name, which cannot be pickled


def script(background=False, torch_only=False, **environ):
    """Register a function; its process has these environment variables, None removes one.

    Args:
        background: it mostly waits, so it runs beside the others.
        torch_only: its process has not imported torch_xla; it runs last.
    """

    def register(function):
        SCRIPTS[function.__name__] = (function, background, torch_only, environ)
        return function

    return register


def attempt(function, *args, **kwargs):
    """Call, and print the traceback's end if that fails."""
    try:
        function(*args, **kwargs)
    except Exception:  # of any kind: the test looks for the quoted words in what is printed
        traceback.print_exc(limit=-1)


def tiny_scenes(name="scenes"):
    """A data set of small images in the current folder."""
    from mshnet.data.scenes import write_scenes

    return str(write_scenes(Path(name), train=3, test=2, size=32))


# --- the TPU is not found ------------------------------------------------------------------------


# Without the first it asks for a metadata server for minutes; without the second, another process
# that has loaded libtpu at the moment gives another message.
@script(PJRT_DEVICE="TPU", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
def no_tpu():
    import torch_xla

    torch_xla.device()


@script(PJRT_DEVICE="TPU")
def no_libtpu():
    import torch_xla

    # What importing torch_xla sets where it finds the package libtpu.
    for name in ("TPU_LIBRARY_PATH", "PTXLA_TPU_LIBRARY_PATH"):
        os.environ.pop(name, None)
    torch_xla.device()


@script(PJRT_DEVICE="TPU", TPU_LIBRARY_PATH="/usr/lib/libtpu.so")
def libtpu_elsewhere():
    import torch_xla

    torch_xla.device()


@script(PJRT_DEVICE="GPU")
def not_a_platform():
    import torch_xla

    torch_xla.device()


@script(PJRT_DEVICE=None)
def platform_removed():
    import torch_xla

    torch_xla.device()


@script()
def device_named_tpu():
    import torch

    torch.ones(2, device="tpu")


@script(PJRT_DEVICE=None)
def use_tpu_without_one():
    from mshnet.cli import main_tpu

    main_tpu(["--use-tpu"])


@script()
def library_gone():
    import subprocess

    gone = str(Path("libtcmalloc.so.4").absolute())
    subprocess.run(["true"], env=os.environ | {"LD_PRELOAD": gone})


# --- versions ------------------------------------------------------------------------------------


@script()
def versions_out_of_step():
    import importlib.metadata

    from mshnet.cli import main_tpu

    found = importlib.metadata.version
    importlib.metadata.version = lambda name: "2.8.1" if name == "torch_xla" else found(name)
    main_tpu(["--use-tpu"])


@script()
def torch_xla_not_installed():
    import importlib.util

    from mshnet.cli import main_tpu

    importlib.util.find_spec = lambda name, *rest: None
    main_tpu(["--use-tpu"])


@script()
def removed_names():
    import torch_xla.core.xla_model as xm

    attempt(lambda: xm.xrt_world_size())
    attempt(lambda: xm.get_ordinal())
    for line in (
        "import torch_xla.experimental.xla_sharding",
        "import torch_xla.experimental.pjrt",
        "import torch_xla.distributed.xla_dist",
        "from torch_xla.runtime import using_pjrt",
        "from torch_xla.amp import GradScaler",
    ):
        attempt(exec, line)


@script(XLA_USE_BF16="1")
def bfloat16_by_variable():
    import torch
    import torch_xla

    print(torch.tensor([1.001]).to(torch_xla.device()))


@script(XLA_DOWNCAST_BF16="1")
def bfloat16_by_the_other_variable():
    bfloat16_by_variable()


@script()
def flags_of_the_original():
    from mshnet.cli import main_tpu

    main_tpu(["--multi-gpus", "False"])


# --- starting several cores ----------------------------------------------------------------------


@script()
def device_first():
    import torch_xla

    from mshnet.cli import main_tpu

    torch_xla.device()
    attempt(torch_xla.launch, print)
    main_tpu(["--use-tpu", "--num-cores", "8", "--batch-size", "8"])


@script()
def number_of_processes():
    import torch_xla
    import torch_xla.distributed.xla_multiprocessing as xmp

    attempt(xmp.spawn, print, nprocs=8)
    attempt(torch_xla.launch, print, nprocs=8)


@script()
def launch_without_a_name():
    import torch_xla

    torch_xla.launch(ANONYMOUS[0])


@script()
def launch_without_main():
    # What torch_xla.launch does in a file without `if __name__ == "__main__"`, less the import.
    import subprocess

    Path("program.py").write_text(
        "import concurrent.futures, multiprocessing\n"
        "spawn = multiprocessing.get_context('spawn')\n"
        "with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:\n"
        "    print(list(pool.map(len, ['a'])))\n"
    )
    subprocess.run([sys.executable, "program.py"])


@script()
def launch_and_spmd():
    import torch_xla
    import torch_xla.runtime as xr

    xr.use_spmd()
    torch_xla.launch(print)


@script()
def cores_from_one():
    import torch

    torch.ones(2, device="xla:1")


@script(CPU_NUM_DEVICES="4")
def some_of_the_cores():
    import torch_xla.core.xla_model as xm

    xm.xla_replication_devices(["xla:0"])


@script(CPU_NUM_DEVICES="4")
def spmd_late():
    import torch
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    x = torch.ones(8, 2, device="xla")
    mesh = xs.Mesh(list(range(4)), (4,), ("data",))
    attempt(xs.mark_sharding, x, mesh, ("data", None))
    xr.use_spmd()


@script(CPU_NUM_DEVICES="4", TF_CPP_MIN_LOG_LEVEL="1")
def meshes():
    import torch
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    attempt(xs.Mesh, list(range(8)), (8,), ("data",))
    attempt(xs.Mesh, list(range(4)), (2,), ("data",))
    mesh = xs.Mesh(list(range(4)), (4,), ("data",))
    x = torch.ones(8, 2, device="xla")
    attempt(xs.mark_sharding, x, mesh, ("data",))
    attempt(xs.mark_sharding, x, mesh, ("batch", None))
    sharding = xs.ShardingSpec(mesh, ("data", None), minibatch=True)
    loader = pl.MpDeviceLoader([[torch.ones(6, 2)]], torch_xla.device(), input_sharding=sharding)
    attempt(list, loader)
    xs.mark_sharding(x, mesh, ("data", None))
    print(x.sum().item())


@script(background=True, CPU_NUM_DEVICES="2")
def one_replica_stays_away():
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
    from torch_xla._internal import pjrt

    def replica():
        total = xm.all_reduce("sum", torch.ones(2, device=torch_xla.device()))
        if xr.global_ordinal():
            time.sleep(LIMIT)
        torch_xla.sync()
        print(total)

    pjrt._run_thread_per_device(0, 1, replica, pjrt.initialize_multiprocess)


@script()
def requests_for_cores():
    from mshnet.cli import main_tpu

    main_tpu(["--use-tpu", "--num-cores", "16"])
    main_tpu(["--use-tpu", "--num-cores", "8", "--batch-size", "36"])
    main_tpu(["--device", "cpu", "--num-cores", "8"])


# --- while training ------------------------------------------------------------------------------


@script()
def two_devices():
    import torch
    import torch_xla

    here, there = torch.ones(3), torch.ones(3, device=torch_xla.device())
    attempt(torch.nn.Linear(3, 2), there)
    attempt(torch.cat, [there, here])
    attempt(lambda: here[there.long()])


@script()
def host_libraries():
    import numpy as np
    import torch
    import torch_xla

    x = torch.ones(3, device=torch_xla.device(), requires_grad=True)
    attempt(np.asarray, x.detach())
    attempt(lambda: x.cpu().numpy())


@script()
def device_in_a_worker():
    import torch
    import torch_xla

    class OnTheDevice(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.ones(2, device=torch_xla.device())

    next(iter(torch.utils.data.DataLoader(OnTheDevice(), num_workers=1, timeout=2)))


@script()
def device_after_backward():
    import torch
    import torch_xla

    torch.ones(3, requires_grad=True).sum().backward()
    torch.ones(3, device=torch_xla.device(), requires_grad=True).sum().backward()


@script()
def autograd():
    import copy

    import torch
    import torch_xla

    device = torch_xla.device()
    weight = torch.ones(3, device=device, requires_grad=True)
    attempt(weight.add_, 1)
    y = weight.exp()
    y.add_(1)
    attempt(y.sum().backward)
    total = (weight * 2).square().sum()
    total.backward()
    attempt(total.backward)
    attempt((weight.detach() * 2).sum().backward)
    attempt(torch.optim.SGD, [torch.nn.Parameter(torch.ones(2)).to(device)], lr=0.1)
    attempt(copy.deepcopy, weight * 2)


@script()
def keep_programs():
    import torch
    import torch_xla.runtime as xr

    xr.initialize_cache("../programs", readonly=False)  # for load_programs, too
    torch.ones(2, device="xla").sum().item()
    xr.initialize_cache("../programs", readonly=False)


@script(TF_CPP_MIN_LOG_LEVEL="1")
def load_programs():
    import torch
    import torch_xla.runtime as xr

    xr.initialize_cache("../programs", readonly=False)
    torch.ones(2, device="xla").sum().item()


# --- memory --------------------------------------------------------------------------------------


@script(background=True)
def too_large_for_the_tpu():
    import torch

    from tpuscope import aot
    from tpuscope.aot import hlo

    def step(x):
        return (x[:, None] - x[None, :]).sort(0).values[0]

    refusal = hlo.refusal
    hlo.refusal = lambda message: print(message) or refusal(message)
    print(aot.compile(step, [torch.ones(1 << 16)], use_cache=False).table())


@script()
def too_large_for_the_host():
    import torch
    import torch_xla

    attempt(torch.ones, 1 << 45)
    large = torch.zeros(1 << 45, device="xla") + torch.ones(1, device="xla")
    torch_xla.sync(wait=True)
    print(large.shape, large[0].item())


@script()
def workers_that_die():
    import torch

    class Killed(torch.utils.data.Dataset):
        def __init__(self, by):
            self.by = by

        def __len__(self):
            return 2

        def __getitem__(self, index):
            os.kill(os.getpid(), self.by)

    # What Linux sends where memory, or a container's /dev/shm, is used up.
    for by in (signal.SIGKILL, signal.SIGBUS):
        attempt(list, torch.utils.data.DataLoader(Killed(by), num_workers=1))


# --- data and files ------------------------------------------------------------------------------


@script()
def data_sets():
    import shutil

    import numpy as np
    from PIL import Image

    from mshnet.cli import main

    good = tiny_scenes()
    first, *_ = names = Path(good, "trainval.txt").read_text().split()

    def check(name, spoil):
        folder = Path(shutil.copytree(good, name))
        spoil(folder)
        main(["check-data", name])

    def too_small(folder):
        Image.fromarray(np.zeros((16, 16), np.uint8)).save(folder / "masks" / f"{first}.png")

    def zeros_and_ones(folder):
        for path in [folder / "masks" / f"{name}.png" for name in names]:
            Image.fromarray((np.asarray(Image.open(path)) > 127).astype(np.uint8)).save(path)

    main(["check-data", "nowhere"])
    check("no-masks", lambda folder: shutil.rmtree(folder / "masks"))
    check("no-mask", lambda folder: (folder / "masks" / f"{first}.png").unlink())
    check("sizes", too_small)
    check("cut", lambda folder: os.truncate(folder / "images" / f"{first}.png", 200))
    check("ones", zeros_and_ones)
    check("no-list", lambda folder: (folder / "test.txt").unlink())
    check("empty-list", lambda folder: os.truncate(folder / "test.txt", 0))
    train = ["train", "--device", "cpu", "--dataset-dir"]
    main([*train, "no-mask"])
    main([*train, good, "--batch-size", "8"])
    main([*train, good, "--base-size", "250"])
    Path("set.zip").write_bytes(b"no archive")
    main([*train, "set.zip"])
    main([*train, "set.zip", "--stage"])
    main([*train, "/content/drive/MyDrive/set", "--stage"])
    main([*train, good, "--save-dir", "/content/drive/MyDrive/run"])


@script()
def loaders():
    import torch
    from torch.utils.data import DataLoader

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            raise ValueError("a broken image")

    attempt(list, DataLoader(Broken(), num_workers=1))
    attempt(list, DataLoader([torch.ones(2), torch.ones(3)], batch_size=2))
    DataLoader(range(2), num_workers=os.cpu_count() + 1)


@script()
def many_files():
    import torch

    resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
    batches = torch.utils.data.DataLoader(list(torch.arange(64.0)), num_workers=1)
    attempt(list, batches)
    with contextlib.ExitStack() as files:
        attempt(lambda: [files.enter_context(open(os.devnull)) for _ in range(32)])


# --- saving and loading --------------------------------------------------------------------------


@script()
def weight_files():
    import argparse

    import torch

    from mshnet import MSHNet
    from mshnet.cli import main

    model = MSHNet(3, widths=(1, 1, 1, 1, 1), depths=(1, 1, 1, 1, 1))
    torch.save({"net": model.state_dict(), "args": argparse.Namespace()}, "pickled.pt")
    torch.save({"weight": torch.ones(2)}, "other.pt")
    Path("cut.pt").write_bytes(Path("pickled.pt").read_bytes()[:2000])
    Path("empty.pt").touch()
    for name in ("pickled.pt", "cut.pt", "empty.pt"):
        attempt(torch.load, name)
    replicated = {f"module.{key}": value for key, value in model.state_dict().items()}
    attempt(model.load_state_dict, replicated)
    for name in ("pickled.pt", "cut.pt", "empty.pt", "none.pt", "other.pt"):
        main(["test", "--device", "cpu", "--weight-path", name])


@script()
def save_on_the_device():
    import torch

    # For load_without_torch_xla.
    torch.save(torch.nn.Linear(2, 2).to("xla").state_dict(), "../on-xla.pt")


@script(torch_only=True)
def load_without_torch_xla():
    import torch

    attempt(torch.load, "../on-xla.pt")
    attempt(torch.ones(2).to, "xla")


@script()
def full_disk():
    import torch

    def save():
        with open("/dev/full", "wb") as file:
            torch.save(torch.ones(9999), file)

    attempt(save)


@script()
def runs():
    import shutil
    from types import SimpleNamespace

    from mshnet.cli import main

    train = ["train", "--dataset-dir", tiny_scenes(), "--device", "cpu", "--workers", "0"]
    train += ["--base-size", "32", "--crop-size", "32", "--batch-size", "2", "--epochs", "1"]
    main([*train, "--save-dir", "run"])
    main([*train, "--save-dir", "run"])
    main([*train, "--save-dir", "/dev/full/run"])
    main(["train", "--resume", "run", "--batch-size", "4", "--epochs", "2"])
    main(["train", "--resume", "nowhere"])
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: SimpleNamespace(free=1_000_000)
    main([*train, "--save-dir", "small-disk"])
    shutil.disk_usage = usage
    # A file may not become larger than this: writing ends as it does on a full disk.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, limit[1]))
    main(["train", "--resume", "run", "--epochs", "2"])
    for path in Path("run").glob("*.pkl"):
        os.truncate(path, 1000)
    main(["train", "--resume", "run", "--epochs", "2"])


# --- running them --------------------------------------------------------------------------------


def start(name, folder):
    """Fork; the process of the script."""
    function, _, _, environ = SCRIPTS[name]
    process = os.fork()
    if process:
        return process
    os.setsid()
    with open(folder / f"{name}.txt", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    signal.alarm(LIMIT)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some end by aborting
    for variable, value in ({"PJRT_DEVICE": "CPU"} | environ).items():
        os.environ.pop(variable, None)
        if value is not None:
            os.environ[variable] = value
    (folder / name).mkdir()
    os.chdir(folder / name)
    attempt(function)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def finish(process):
    """Wait for a script's process, and end what it started and left behind."""
    os.waitpid(process, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def import_torch_xla(folder):
    """Import it with no platform chosen, and keep what it says."""
    os.environ.pop("PJRT_DEVICE", None)
    kept = os.dup(2)
    with open(folder / "importing.txt", "wb") as output:
        os.dup2(output.fileno(), 2)
    import torch_xla  # noqa: F401

    sys.stderr.flush()
    os.dup2(kept, 2)


def main():
    folder = Path(sys.argv[1]).resolve()
    import torch  # noqa: F401

    go, signalled = os.pipe()
    with_torch_only = os.fork()
    if not with_torch_only:
        os.close(signalled)
        os.read(go, 1)  # until the other scripts are done, and the pipe is closed
        for name, (_, _, torch_only, _) in SCRIPTS.items():
            if torch_only:
                finish(start(name, folder))
        os._exit(0)
    os.close(go)
    import_torch_xla(folder)
    import mshnet.cli  # noqa: F401

    others = [name for name, (_, _, torch_only, _) in SCRIPTS.items() if not torch_only]
    waiting = [start(name, folder) for name in others if SCRIPTS[name][1]]
    for name in others:
        if not SCRIPTS[name][1]:
            began = time.monotonic()
            finish(start(name, folder))
            print(f"{time.monotonic() - began:5.1f} s  {name}", flush=True)
    for process in waiting:
        finish(process)
    os.close(signalled)
    os.waitpid(with_torch_only, 0)


if __name__ == "__main__":
    main()
