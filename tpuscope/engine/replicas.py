"""Data-parallel replicas, one on every core: start, reduce, end them together.

On a TPU this is ``torch_xla.launch``: a process a chip, collectives inside the compiled program.

Without a TPU the replicas are processes with a one-device XLA client each, and what a TPU reduces
inside the program is reduced between the programs, on the host, by torch.distributed's gloo. That
emulation is the class :class:`VirtualReplicas`: code that uses :class:`Replicas` is the same on
both. (torch_xla's own replicas on the CPU are threads of one process, whose collectives deadlock.)
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import Failed
from . import torch_xla as runtime
from .processes import quiet_stdout


class ReplicaFailed(Failed):
    """A replica raised or died, and all were ended; the message holds its traceback."""

    def __str__(self) -> str:
        return f"a replica failed, all were ended:\n{super().__str__()}"


class Replicas(ABC):
    """Communication of one replica with the others; all must call the same methods in turn.

    Attributes:
        ordinal: of this replica, from 0.
        count: of all replicas.
    """

    def __init__(self, ordinal: int, count: int, control: Path):
        self.ordinal = ordinal
        self.count = count
        self._control = control

    @abstractmethod
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Replace the tensors on the device by replica 0's values, in place."""

    @abstractmethod
    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Replace every gradient by its mean over the replicas, then update."""

    def gather(self, values: Tensor) -> Tensor:
        """Return the vectors of all replicas, (count, N), on the host, bit for bit.

        Args:
            values: (N,), on the host, of 4 or 8 bytes an element, the same N everywhere.
        """
        # As 32-bit integers: a TPU has no 64-bit arithmetic, but bits travel unharmed.
        bits = self._gather_bits(values.contiguous().view(torch.int32))
        return bits.view(values.dtype)

    @abstractmethod
    def _gather_bits(self, bits: Tensor) -> Tensor:
        """int32 (N,) of each replica → (count, N)."""

    def stop_requested(self) -> str | None:
        """Return why the launching process asks to stop, such as ``"SIGTERM"``, or None."""
        try:
            return (self._control / "stop").read_text() or None
        except FileNotFoundError:
            return None


class TpuReplicas(Replicas):
    """Replicas on TPU cores, one thread or process each, as ``torch_xla.launch`` makes them."""

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        import torch_xla.core.xla_model as xm

        xm.collective_broadcast(list(tensors))
        runtime.sync()

    def optimizer_step(self, optimizer: Optimizer) -> None:
        import torch_xla.core.xla_model as xm

        xm.optimizer_step(optimizer)  # one all-reduce of the gradients, inside the step's program

    def _gather_bits(self, bits: Tensor) -> Tensor:
        import torch_xla.core.xla_model as xm

        # Without pin_layout: with it every replica pads by its ordinal, in a program of its own.
        gathered = xm.all_gather(bits.to(runtime.device()), pin_layout=False)
        return gathered.cpu().view(self.count, -1)


class VirtualReplicas(Replicas):
    """Replicas without a TPU: processes that reduce on the host.

    The difference that remains: the step is cut in two programs, because the gradients leave the
    device between backward and update.
    """

    def __init__(self, ordinal: int, count: int, control: Path):
        super().__init__(ordinal, count, control)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meeting = f"file://{control / 'meeting'}"
        with quiet_stdout():  # gloo says of each rank that it is connected
            torch.distributed.init_process_group("gloo", meeting, rank=ordinal, world_size=count)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        self._through_host(tensors, lambda flat: torch.distributed.broadcast(flat, 0))

    def optimizer_step(self, optimizer: Optimizer) -> None:
        runtime.sync()
        self._through_host(_gradients(optimizer), self._mean)
        optimizer.step()

    def leave(self) -> None:
        """Wait until all are done, then end this process.

        A replica that closes its connections while another still reads its last message makes
        that one fail, so they wait for each other by files. XLA's and gloo's threads are not shut
        down in order, because they sometimes crash on the way.
        """
        (self._control / f"done-{self.ordinal}").touch()
        while len(list(self._control.glob("done-*"))) < self.count:
            time.sleep(0.02)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _mean(self, flat: Tensor) -> None:
        torch.distributed.all_reduce(flat)
        flat /= self.count

    def _gather_bits(self, bits: Tensor) -> Tensor:
        parts = [torch.empty_like(bits) for _ in range(self.count)]
        torch.distributed.all_gather(parts, bits)
        return torch.stack(parts)

    @staticmethod
    @torch.no_grad()
    def _through_host(tensors: Iterable[Tensor], change: Callable[[Tensor], Any]) -> None:
        tensors = list(tensors)
        flat = torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])
        change(flat)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [p.grad for p in parameters if p.grad is not None]


def launch(
    function: Callable[..., Any],
    args: tuple,
    cores: int,
    platform: str,
    stop_requested: Callable[[], str | None] = lambda: None,
    tpu_flags: Mapping[str, str] | None = None,
) -> Any:
    """Run ``function(replicas, *args)`` on every core, and wait until all have ended.

    This process never opens the device.

    Args:
        function: defined in a module, so that other processes can import it.
        args: for the function; pickled.
        cores: replicas on this machine.
        platform: ``"TPU"`` or ``"CPU"``.
        stop_requested: asked several times a second; a reason to stop that it gives is passed on
            to :meth:`Replicas.stop_requested`. What it raises ends all replicas at once.
        tpu_flags: see :func:`tpuscope.engine.torch_xla.select_platform`.

    Returns:
        What the function returned on replica 0 (pickled).

    Raises:
        ReplicaFailed: one of them raised or died. All have been ended.
    """
    runtime.select_platform(platform, cores, processes=cores, tpu_flags=tpu_flags)
    # Of replicas that were killed Python says, at the very end, that they left semaphores.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    with tempfile.TemporaryDirectory(prefix="replicas-") as folder:
        control = Path(folder)
        start = _start_tpu if platform == "TPU" else _start_virtual
        replicas: list[BaseProcess] = []
        starter = threading.Thread(
            target=_start, args=(start, function, args, cores, control, replicas), daemon=True
        )
        starter.start()
        _supervise(starter, control, stop_requested, replicas)
        return pickle.loads((control / "result").read_bytes())


def _start(
    start: Callable,
    function: Callable,
    args: tuple,
    cores: int,
    control: Path,
    replicas: list[BaseProcess],
) -> None:
    """Start the replicas and wait for them, in a thread of its own.

    Processes inherit the blocked signals of the thread that starts them. Ctrl-C goes to all
    processes of a terminal, and only the launching process may receive it.
    """
    # Python's tracker of shared resources clears the mask of the thread that first needs it.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        start(function, args, cores, control, replicas)
    except Exception:  # a replica's own failure is on record already, with more to read
        _record_failure(control, "launch")


def _start_tpu(
    function: Callable, args: tuple, cores: int, control: Path, replicas: list[BaseProcess]
) -> None:
    import torch_xla

    torch_xla.launch(_tpu_replica, args=(function, args, control))


def _start_virtual(
    function: Callable, args: tuple, cores: int, control: Path, replicas: list[BaseProcess]
) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_virtual_replica, args=(ordinal, cores, function, args, control))
        for ordinal in range(cores)
    ]
    for process in processes:
        process.start()
        replicas.append(process)
    for process in processes:
        process.join()


def _tpu_replica(ordinal: int, function: Callable, args: tuple, control: Path) -> None:
    import torch_xla.runtime as xr

    _replica(lambda: TpuReplicas(ordinal, xr.world_size(), control), function, args, control)


def _virtual_replica(
    ordinal: int, count: int, function: Callable, args: tuple, control: Path
) -> None:
    torch.set_num_threads(1)  # the replicas share the CPU's cores
    replicas = _replica(lambda: VirtualReplicas(ordinal, count, control), function, args, control)
    replicas.leave()


def _replica(make: Callable[[], Any], function: Callable, args: tuple, control: Path) -> Any:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        (control / f"replica-{os.getpid()}").touch()
        if (control / "ended").exists():
            os._exit(1)  # it was started while the others were ended
        replicas = make()
        result = function(replicas, *args)
        if replicas.ordinal == 0:
            (control / "result").write_bytes(pickle.dumps(result))
        return replicas
    except BaseException:
        # The others wait in a collective that this one will never join: nothing may be waited for.
        _record_failure(control, str(os.getpid()))
        sys.stdout.flush()
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _record_failure(control: Path, name: str) -> None:
    part = control / f"part-{name}"
    with contextlib.suppress(OSError):  # the folder is gone with the launching process
        part.write_text(traceback.format_exc())
        part.rename(control / f"failed-{name}")


def _supervise(
    starter: threading.Thread,
    control: Path,
    stop_requested: Callable[[], str | None],
    replicas: list[BaseProcess],
) -> None:
    """Wait for the replicas, pass on a request to stop; when one fails, end the others.

    Args:
        starter: the thread that starts the replicas and waits for them.
        control: the folder that all of them share.
        stop_requested: see :func:`launch`.
        replicas: their processes, as the starter adds them; those that torch_xla has started are
            found by the files in the folder.

    Raises:
        ReplicaFailed: with the traceback of the first that failed.
    """
    try:
        while starter.is_alive():
            starter.join(0.2)
            _add_registered(replicas, control)
            reason = stop_requested()
            if reason and not (control / "stop").exists():
                (control / "stop").write_text(reason)
            failure = _failure(replicas, control)
            if failure:
                raise ReplicaFailed(failure)
        failure = _failure(replicas, control)
        if failure:
            raise ReplicaFailed(failure)
    finally:
        (control / "ended").touch()
        give_up = time.monotonic() + 30
        while starter.is_alive() and time.monotonic() < give_up:
            _add_registered(replicas, control)  # those, too, that have been started only now
            for process in replicas:
                process.kill()
            starter.join(0.2)


def _add_registered(replicas: list[BaseProcess], control: Path) -> None:
    """Add the child processes that have said in the folder that they are replicas.

    This process may have children of another purpose, such as a loader's workers.
    """
    for process in multiprocessing.active_children():
        if process not in replicas and (control / f"replica-{process.pid}").exists():
            replicas.append(process)


def _failure(replicas: list[BaseProcess], control: Path) -> str | None:
    """Return what happened to the first replica that failed, or None."""
    if not any(control.glob("failed-*")) and (
        not any(p.exitcode for p in replicas) or (control / "result").exists()
    ):
        return None  # with a result, a process that crashes while it ends takes nothing away
    time.sleep(0.2)  # a replica that is dying writes its reason first; let the first one be there
    # The first is the cause; others lose their connection to it and fail after it.
    written = sorted(control.glob("failed-*"), key=lambda path: path.stat().st_mtime_ns)
    if written:
        return written[0].read_text().rstrip()
    codes = [p.exitcode for p in replicas if p.exitcode]
    how = f"signal {-codes[0]}" if codes[0] < 0 else f"exit code {codes[0]}"
    return f"a replica's process ended with {how} and without a traceback (out of memory?)"
