"""SPMD: one program, written as for one core, that the compiler splits over a mesh of cores.

The batch axis is split over all cores, everything else is held in full by each of them. With
several hosts every host runs the same script; each one loads its own slice of a batch, and the
mesh spans the cores of all.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor


class DataMesh:
    """A mesh with one axis, ``data``, over all cores of all hosts.

    Make it before anything has touched the XLA device.

    Attributes:
        cores: of all hosts together.
        hosts: processes that form the mesh.
        host: index of this one.
    """

    def __init__(self):
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        xr.use_spmd()
        self.cores = xr.global_runtime_device_count()
        self.hosts = xr.process_count()
        self.host = xr.process_index()
        self._mesh = xs.Mesh(list(range(self.cores)), (self.cores,), ("data",))
        if self.hosts > 1:
            # Core numbers are those of the board, and a host's are not in a row; the batch is cut
            # in a row. So the mesh goes through the hosts one by one: host 0 has its first slice.
            owner = self.from_every_core(self.host).tolist()
            order = sorted(range(self.cores), key=lambda core: (owner[core], core))
            self._mesh = xs.Mesh(order, (self.cores,), ("data",))

    def replicate(self, tensors: Iterable[Tensor]) -> None:
        """Say that every core holds these in full.

        Tensors without a mark get whatever layout the compiler chooses for them in the first
        step's results; as inputs of the second step they would make it another graph.
        """
        import torch_xla.distributed.spmd as xs

        for tensor in tensors:
            xs.mark_sharding(tensor, self._mesh, (None,) * tensor.dim())

    def split(self, dimensions: int) -> Any:
        """Sharding of an uploaded batch: its first axis over the cores.

        Args:
            dimensions: of the tensor.
        """
        import torch_xla.distributed.spmd as xs

        axes = ("data", *(None,) * (dimensions - 1))
        # minibatch: what a host uploads is its own slice of the batch, not the whole.
        return xs.ShardingSpec(self._mesh, axes, minibatch=self.hosts > 1)

    def largest(self, value: int) -> int:
        """The largest of the hosts' values; all hosts have to ask at the same point.

        A computation over the mesh of its own: a small graph, and one read.
        """
        return value if self.hosts == 1 else int(self.from_every_core(value).max())

    def from_every_core(self, value: int) -> Tensor:
        """The value that each core's host has given, int32 (cores,), on the host."""
        import torch_xla.core.xla_model as xm

        mine = torch.full((self.cores // self.hosts, 1), value, dtype=torch.int32)
        # Without annotation in torch_xla: it returns as many tensors as it gets.
        sent = xm.send_cpu_data_to_device([mine], xm.xla_device(), self.split(2))
        [shared] = cast(list[Tensor], sent)
        result = shared * 1
        self.replicate([result])
        return result.cpu().flatten()
