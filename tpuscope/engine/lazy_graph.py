"""What torch_xla has traced and not yet computed: pending tensors, and the program for them."""

import contextlib
import gc
import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _private
from ._private import named_operations


@dataclass(frozen=True)
class Program:
    """A program as a compiler takes it.

    Attributes:
        stablehlo: StableHLO as a portable artifact, MLIR bytecode or MLIR text; names of layers
            are in its locations.
        aliases: pairs of an argument and the result that takes its memory, by number.
        digest: hash of what is computed; it does not depend on the layers' names.
        cores: number of cores that the program is for: 1, or those of an SPMD mesh; None for
            what the program itself says.
    """

    stablehlo: bytes
    aliases: tuple[tuple[int, int], ...] = ()
    digest: str = ""
    cores: int | None = 1

    def __post_init__(self):
        if not self.digest:
            object.__setattr__(self, "digest", _digest(self.stablehlo, self.aliases))


def pending(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return those of the tensors whose values are traced and not computed, each value once.

    They are in the order in which they were traced: the same step is the same program in every
    process.
    """
    tensors = [tensor for tensor in tensors if tensor.device.type == "xla"]
    waits = _private.are_pending(tensors)
    found = {_private.tensor_id(t): t for t, waiting in zip(tensors, waits, strict=True) if waiting}
    return [found[key] for key in sorted(found)]


def newest_tensor() -> int:
    """Return the number of a tensor that is newer than all others."""
    return _private.tensor_id(torch.zeros(1).to("xla"))


def finish_backward() -> None:
    """Wait until autograd's thread has let go of the gradients of the last backward pass.

    It does so only after ``backward()`` has returned. The thread works off one task after the
    other, so another task, which computes nothing, ends after that.
    """
    with torch.inference_mode(False):
        leaf = torch.zeros(1).to("xla").requires_grad_()
        torch.autograd.backward([leaf], [torch.zeros(1).to("xla")])


def live_pending(beside: list[Tensor]) -> list[tuple[int, ...]]:
    """Return the shapes of other values that ``torch_xla.sync()`` would compute now.

    These are the pending tensors that anything in the process still holds: Python, autograd's
    graph, another thread.

    Args:
        beside: pending tensors that are left out.
    """
    finish_backward()
    mine = Counter(tuple(tensor.shape) for tensor in beside)
    others = _live_results() - mine
    if others:
        gc.collect()  # what only a cycle of references holds is nobody's
        others = _live_results() - mine
    return list(others.elements())


def _live_results() -> Counter[tuple[int, ...]]:
    text = _private.live_stablehlo()
    found = re.search(r"\n    return (.*?) : (.*)\n", text)
    if found is None:
        return Counter()
    names, types = found[1].split(", "), re.findall(r"tensor<([^>]*)>", found[2])
    shapes = {
        name: tuple(int(size) for size in kind.split("x")[:-1])
        for name, kind in zip(names, types, strict=True)
        if not name.startswith("%arg")
    }
    return Counter(shapes.values())


def lower(outputs: list[Tensor]) -> Program:
    """Return the program that computes these tensors.

    An argument that an output replaces (a parameter that was updated in place) gives the output
    its memory, as in ``torch_xla.sync()`` on a TPU.

    Args:
        outputs: of :func:`pending`.
    """
    import torch_xla.runtime as xr

    with named_operations():
        stablehlo = _private.stablehlo(outputs)
    plain = _private.stablehlo(outputs)
    arguments, _ = _private.program_inputs(outputs)
    position = {tensor: number for number, tensor in enumerate(arguments)}
    # Only the first output may take the memory: a tensor has one successor.
    successor: dict[int, int] = {}
    for number, output in enumerate(outputs):
        argument = position.get(_replaces(output))
        if argument is not None:
            successor.setdefault(argument, number)
    aliases = tuple(sorted(successor.items()))
    cores = xr.global_runtime_device_count() if xr.is_spmd() else 1
    return Program(stablehlo, aliases, _digest(plain, aliases), cores)


def _replaces(output: Tensor) -> int:
    """Return the number of the tensor that this one was before it was changed in place."""
    found = re.search(r"AliasID: (\d+)", _private.debug_info(output))
    assert found, "torch_xla's description of a tensor has no AliasID"
    return int(found[1])


def hlo(outputs: list[Tensor], named: bool = True) -> str:
    """Return the HLO of the program that computes these tensors, as text.

    Args:
        outputs: of :func:`pending`.
        named: with the names that its operations were given.
    """
    with named_operations() if named else contextlib.nullcontext():
        return _private.hlo(outputs)


def _digest(stablehlo: bytes, aliases: tuple) -> str:
    return hashlib.sha256(stablehlo + repr(aliases).encode()).hexdigest()[:16]
