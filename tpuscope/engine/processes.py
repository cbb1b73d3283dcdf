"""Data parallelism over processes and machines by torch.distributed, as ``torchrun`` starts them.

:func:`joined` connects the processes of a job. Outside torchrun it gives :data:`ALONE`, one process
that communicates with nobody, so that a program needs no second code path.

Two process groups: gloo carries what is on the host (decisions, errors, counts), and for other
devices a second one carries tensors (:data:`PROCESS_GROUPS`).
"""

import contextlib
import datetime
import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from .. import torchrun
from ..errors import Failed, RequestError

# Device type → backend of torch.distributed that carries its tensors.
PROCESS_GROUPS = {"cpu": "gloo", "cuda": "nccl", "tpu": "tpu_dist"}

# How long a process waits for another one that is alive but does not answer. Long, because the
# others wait while one copies a data set; a process that has ended is noticed at once.
TIMEOUT = datetime.timedelta(minutes=30)

_ELSEWHERE = "_reported_elsewhere"  # attribute of exceptions

Value = TypeVar("Value")


class Processes:
    """One process alone; the base of :class:`TorchProcesses`.

    All processes must call the same methods in the same order.

    Attributes:
        rank: of this process, from 0, over all machines.
        count: of all processes.
        local_rank: of this process on its machine.
        local_count: processes of this machine.
        machines: how many take part.
    """

    rank = local_rank = 0
    count = local_count = machines = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes and reports for all."""
        return self.rank == 0

    def together(self, make: Callable[[], Value]) -> Value:
        """Call a function in every process and return what it returns in this one.

        Raises:
            Exception: in all processes the one of the first that failed; only the main process
                reports it, see :func:`is_reported_elsewhere`.
        """
        return make()

    def from_main(self, make: Callable[[], Value]) -> Value:
        """Call a function in the main process only and return its result in all (pickled).

        Raises:
            Exception: as in :meth:`together`.
        """
        return make()

    def first_on_each_machine(self, make: Callable[[], Value]) -> Value:
        """Call a function in one process of each machine, and then in the others.

        For work whose result stays on the machine's disk: the others find it done.

        Raises:
            Exception: as in :meth:`together`.
        """
        return make()

    def gather(self, values: Tensor) -> Tensor:
        """Return the host vectors (N,) of all processes, (count, N); the same N everywhere."""
        return values[None]

    def mean(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the means of tensors over the processes; differentiable, one message for all."""
        return values


ALONE = Processes()


class TorchProcesses(Processes):
    """One of the processes of a torchrun job.

    What another process's end does to a collective is raised as :class:`~tpuscope.errors.Failed`.

    Args:
        launch: the place of this process.
        store: key-value store of the job.
        timeout: for one collective.
    """

    def __init__(self, launch: torchrun.Launch, store: Store, timeout: datetime.timedelta):
        self.rank, self.count = launch.rank, launch.count
        self.local_rank, self.local_count = launch.local_rank, launch.local_count
        self.machines = launch.machines
        self._store = store
        self._timeout = timeout
        self._groups: dict[str, dist.ProcessGroup | None] = {"cpu": None}  # None: the default one
        interface = _interface_to(launch.address)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        with self._connection(), quiet_stdout():
            dist.init_process_group(
                PROCESS_GROUPS["cpu"],
                store=PrefixStore("host", store),
                rank=self.rank,
                world_size=self.count,
                timeout=timeout,
            )

    def open(self, device: torch.device) -> None:
        """Connect the processes' devices; after that tensors on them can be exchanged."""
        if device.type not in self._groups:
            backend = PROCESS_GROUPS[device.type]
            with self._connection(), quiet_stdout():
                self._groups[device.type] = cast(
                    dist.ProcessGroup, dist.new_group(backend=backend, timeout=self._timeout)
                )

    def together(self, make: Callable[[], Value]) -> Value:
        result, failure = None, None
        try:
            result = make()
        except Exception as error:
            failure = error
        self._agree(failure)
        return cast(Value, result)

    def from_main(self, make: Callable[[], Value]) -> Value:
        box = [self.together(make if self.is_main else lambda: None)]
        with self._connection():
            dist.broadcast_object_list(box, 0)
        return cast(Value, box[0])

    def first_on_each_machine(self, make: Callable[[], Value]) -> Value:
        first = self.together(make if self.local_rank == 0 else lambda: None)
        others = self.together(make if self.local_rank > 0 else lambda: None)
        return cast(Value, first if self.local_rank == 0 else others)

    def gather(self, values: Tensor) -> Tensor:
        parts = [torch.empty_like(values) for _ in range(self.count)]
        with self._connection():
            dist.all_gather(parts, values.contiguous())
        return torch.stack(parts)

    def mean(self, *values: Tensor) -> tuple[Tensor, ...]:
        flat = torch.cat([value.flatten() for value in values])
        pieces = cast(Tensor, _Mean.apply(flat, self)).split([value.numel() for value in values])
        return tuple(p.view(v.shape) for p, v in zip(pieces, values, strict=True))

    def largest(self, value: int) -> int:
        """Return the largest of the processes' values."""
        return int(self.gather(torch.tensor([value])).max())

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over the processes, in place."""
        self._replace(tensors, self._mean)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by the main process's, in place."""

        def act(flat: Tensor) -> None:
            with self._connection():
                dist.broadcast(flat, 0, group=self._groups[flat.device.type])

        self._replace(tensors, act)

    def _mean(self, flat: Tensor) -> None:
        with self._connection():
            dist.all_reduce(flat, group=self._groups[flat.device.type])
        flat /= self.count

    @torch.no_grad()
    def _replace(self, tensors: Iterable[Tensor], act: Callable[[Tensor], None]) -> None:
        """Change tensors, those of one type and device as one vector."""
        kinds: dict[tuple, list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for alike in kinds.values():
            flat = torch.cat([tensor.detach().flatten() for tensor in alike])
            act(flat)
            pieces = flat.split([tensor.numel() for tensor in alike])
            for tensor, piece in zip(alike, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))

    def _agree(self, failure: Exception | None) -> None:
        """Raise in all processes what the first of those that failed raised.

        Args:
            failure: this process's, or None.
        """
        failures: list[Any] = [None] * self.count
        with self._connection():
            dist.all_gather_object(failures, _portable(failure))
        for rank, first in enumerate(failures):
            if first is None:
                continue
            if rank > 0 and isinstance(first, RequestError | Failed):
                first = type(first)(f"process {rank} of {self.count}: {first}", first.code)
            first = failure if failure is not None and rank == self.rank == 0 else first
            setattr(first, _ELSEWHERE, not self.is_main)
            raise first from failure

    def reports(self) -> bool:
        """Return whether this process is the first to fail; the others fail because of it."""
        try:
            return self._store.add("failures", 1) == 1
        except RuntimeError:  # the process that had the store has ended, without a word
            return True

    def leave(self) -> None:
        """Wait until all processes have done their last collective, then disconnect.

        A process that closes its connections while another still reads its last message makes
        that one fail. They wait by the store, which is not a collective.
        """
        with contextlib.suppress(RuntimeError):  # another one has ended: nobody reads anything
            self._store.set(f"left-{self.rank}", "")
            self._store.wait([f"left-{rank}" for rank in range(self.count)], self._timeout)
        dist.destroy_process_group()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[None]:
        """Translate what torch.distributed raises when another process has ended or hangs.

        Raises:
            Failed: says what to do.
        """
        try:
            yield
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].strip(" .")
            raise Failed(
                f"process {self.rank} of {self.count} lost another one, which has ended or does "
                f"not answer ({reason[:300]}): look for its message above; `torchrun "
                "--max-restarts 3` starts all of them again",
                "process-lost",
            ) from error


class _Mean(torch.autograd.Function):
    """The mean over the processes of (N,).

    With a loss on every process that are added up, the gradient of each process's input is the sum
    of what the processes' results contribute, divided by their number: the same mean again.
    """

    @staticmethod
    def forward(ctx, values: Tensor, processes: TorchProcesses) -> Tensor:
        ctx.processes = processes
        values = values.clone()
        processes._mean(values)
        return values

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient = gradient.clone()
        ctx.processes._mean(gradient)
        return gradient, None


_current: TorchProcesses | None = None
_store: Store | None = None
_jobs = 0  # how often this process has joined; each time has its own keys in the store


def join(timeout: datetime.timedelta = TIMEOUT) -> Processes:
    """Return the connected processes of this torchrun job; without torchrun, :data:`ALONE`.

    Raises:
        Failed: the others do not come within the timeout.
        RequestError: torchrun's variables are not usable.
    """
    global _current, _store, _jobs
    launch = torchrun.launch()
    if launch is None:
        return ALONE
    if _current is None:
        if _store is None:
            try:
                _store, _, _ = next(rendezvous("env://", timeout=timeout))
            except RuntimeError as error:
                raise Failed(
                    f"process {launch.rank} of {launch.count} does not reach {launch.address} "
                    f"({str(error).splitlines()[0][:300]}): check --master-addr, --master-port "
                    "and the firewall",
                    "no-meeting",
                ) from error
        _jobs += 1
        # The store lives as long as torchrun, and keeps the addresses of processes that a restart
        # has replaced.
        job = f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-job-{_jobs}"
        _current = TorchProcesses(launch, PrefixStore(job, _store), timeout)
    return _current


@contextlib.contextmanager
def joined(timeout: datetime.timedelta = TIMEOUT) -> Iterator[Processes]:
    """Connect the processes of a torchrun job for a block; a block inside another shares it.

    Raises:
        Failed: as :func:`join`.
        RequestError: as :func:`join`.
    """
    global _current
    inner = _current is not None
    processes = join(timeout)
    if inner or not isinstance(processes, TorchProcesses):
        yield processes
        return
    try:
        yield processes
    except Exception as error:
        if hasattr(error, _ELSEWHERE):  # all raise it
            processes.leave()
        else:
            setattr(error, _ELSEWHERE, not processes.reports())
        raise
    else:
        processes.leave()
    finally:
        _current = None


def is_reported_elsewhere(error: BaseException) -> bool:
    """Return whether another process of the job tells people about this error."""
    return getattr(error, _ELSEWHERE, False)


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Drop what C++ prints to standard output: gloo says of each rank that it is connected."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _portable(error: Exception | None) -> Exception | None:
    """Return an exception that can be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class's own reduction raises
        return Failed(f"{type(error).__name__}: {error}")
    return error


def _interface_to(address: str) -> str | None:
    """Return the network interface by which this machine reaches an address; None if unknown.

    By default gloo takes the one of the host's name, which on many machines is a loopback address
    that other machines cannot reach.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # nothing is sent
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    if _address_of(name, probe) == own or (name == "lo" and own.startswith("127.")):
                        return name
    except (OSError, ImportError):
        pass
    return None


def _address_of(interface: str, any_socket: socket.socket) -> str:
    import fcntl

    get_interface_address = 0x8915  # SIOCGIFADDR of Linux
    packed = struct.pack("256s", interface.encode()[:15])
    answer = fcntl.ioctl(any_socket.fileno(), get_interface_address, packed)
    return socket.inet_ntoa(answer[20:24])
