"""What torch_xla has traced and not yet computed: which tensors wait, and the program they need."""

import contextlib
import gc
import hashlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Program:
    """A program as a compiler takes it.

    Attributes:
        stablehlo: StableHLO bytecode; names of layers are in its locations.
        aliases: pairs of an argument and the result that takes its memory, by number.
        digest: of what is computed; equal programs have equal ones, whatever their layers' names.
        cores: that the program is written for; 1, or the cores of an SPMD mesh.
    """

    stablehlo: bytes
    aliases: tuple[tuple[int, int], ...] = ()
    digest: str = ""
    cores: int = 1

    def __post_init__(self):
        if not self.digest:
            object.__setattr__(self, "digest", _digest(self.stablehlo, self.aliases))


def pending(known: frozenset[str] = frozenset()) -> list[Tensor]:
    """Tensors of this process whose values are traced and not computed, each once.

    These are what ``torch_xla.sync()`` would compute and keep. Tensors that only autograd holds are
    not among them: let a step finish its backward pass, or run under ``torch.no_grad()``.

    Args:
        known: :func:`marks` of values that are somebody else's, and left out.
    """
    import torch_xla

    # Autograd's thread lets go of the last gradients after backward() has returned, and there is no
    # way to wait for it.
    time.sleep(0.1)
    things = gc.get_objects()
    # The class, not isinstance: that would run lazy attributes of strangers.
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, Tensor)}
    tensors = [thing for thing in things if type(thing) in kinds]
    # Those that only C++ owned (gradients) get a Python owner.
    for tensor in tensors:
        tensor._fix_weakref()
    found: dict[int, Tensor] = {}
    for thing in tensors:
        if _on_xla(thing):
            about = torch_xla._XLAC._get_xla_tensor_debug_info(thing)
            if re.search(r"IR: \[.*\] (?!xla::device_data)", about) and "XLAData: None" in about:
                found.setdefault(torch_xla._XLAC._xla_get_tensor_id(thing), thing)
    # In the order in which they were traced: the same step is the same program in every process.
    return [found[key] for key in sorted(found) if not marks([found[key]]) & known]


def _on_xla(tensor: Tensor) -> bool:
    try:
        return tensor.device.type == "xla"
    except RuntimeError:  # it was let go in this moment: it is nobody's
        return False


def marks(tensors: list[Tensor]) -> frozenset[str]:
    """What tells their present values from all others, also those that replace them in place."""
    import torch_xla

    return frozenset(map(torch_xla._XLAC._unique_id_for_ir_and_data, tensors))


def lower(outputs: list[Tensor]) -> Program:
    """The program that computes these tensors.

    An argument that an output replaces (a parameter that was updated in place) gives it its
    memory, as ``torch_xla.sync()`` has it on a TPU.

    Args:
        outputs: of :func:`pending`.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    with named_operations():
        stablehlo = xm.get_stablehlo_bytecode(outputs)
    plain = xm.get_stablehlo_bytecode(outputs)
    arguments, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
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
    """Identity of the tensor that this one was before it was changed in place."""
    import torch_xla

    about = torch_xla._XLAC._get_xla_tensor_debug_info(output)
    return int(re.search(r"AliasID: (\d+)", about)[1])


def hlo(outputs: list[Tensor]) -> str:
    """The HLO of the program that computes these tensors, with operations' names, as text."""
    import torch_xla

    with named_operations():
        return torch_xla._XLAC._get_xla_tensors_hlo(outputs)


@contextlib.contextmanager
def named_operations() -> Iterator[None]:
    """What is lowered here carries the names that its operations were given."""
    import torch_xla

    before = torch_xla._XLAC._get_ir_debug()
    torch_xla._XLAC._set_ir_debug(True)
    try:
        yield
    finally:
        torch_xla._XLAC._set_ir_debug(before)


def _digest(stablehlo: bytes, aliases: tuple) -> str:
    return hashlib.sha256(stablehlo + repr(aliases).encode()).hexdigest()[:16]
