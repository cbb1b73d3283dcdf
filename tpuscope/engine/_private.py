"""The private names of torch_xla that this package uses: all of them, and only here.

They belong to one version of torch_xla (:data:`tpuscope.versions.TORCH_XLA`). :func:`check` looks
for every one of them before the first is used, so that another version ends in one line instead
of an AttributeError in the middle of a step.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor

from .. import versions

# Names of torch_xla's C++ extension, torch_xla._XLAC.
NAMES = (
    "_check_tensor_need_materialization",
    "_clear_pending_irs",
    "_get_base_seed_as_tensor",
    "_get_graph_hash",
    "_get_ir_debug",
    "_get_seed_info_id",
    "_get_stablehlo",
    "_get_tensors_xla_device_data_node",
    "_get_xla_tensor_debug_info",
    "_get_xla_tensors_hlo",
    "_run_cached_graph",
    "_set_ir_debug",
    "_set_xla_custom_op_name_prefix",
    "_unique_id_for_ir_and_data",
    "_xla_get_default_device",
    "_xla_get_tensor_id",
    "_xla_runtime_is_initialized",
    "_xla_step_marker",
    "_xla_warm_up_cache",
)
_MARKER = "_xla_step_marker"  # torch_xla.sync() calls it; xm.mark_step() and the loaders do, too

_extension: ModuleType | None = None
_observers: list[Callable] = []


class XlaUnavailable(RuntimeError):
    """torch_xla or the requested device is not available; the message says what to do."""


def check(extension: ModuleType | None = None) -> ModuleType:
    """Return torch_xla's extension after a look for every name that this module uses.

    Args:
        extension: the module to check; torch_xla's by default.

    Raises:
        XlaUnavailable: a name is missing.
    """
    if extension is None:
        import torch_xla

        extension = torch_xla._XLAC  # pyright: ignore[reportPrivateImportUsage]  # no public name
    missing = [name for name in NAMES if not hasattr(extension, name)]
    if missing:
        raise XlaUnavailable(
            f"this torch_xla has no _XLAC.{missing[0]}, which tpuscope uses; it needs torch_xla "
            f"{versions.TORCH_XLA}: {versions.install_torch_xla()}"
        )
    return extension


def _xla() -> Any:
    global _extension
    if _extension is None:
        _extension = check()
    return _extension


# -- tensors --------------------------------------------------------------------------------------


def tensor_id(tensor: Tensor) -> int:
    """Return the number of an XLA tensor; later tensors have larger numbers."""
    return _xla()._xla_get_tensor_id(tensor)


def value_id(tensor: Tensor) -> str:
    """Return what identifies the tensor's present value, computed or traced."""
    return _xla()._unique_id_for_ir_and_data(tensor)


def debug_info(tensor: Tensor) -> str:
    """Return torch_xla's description of a tensor: its pending operation, its data."""
    return _xla()._get_xla_tensor_debug_info(tensor)


def are_pending(tensors: list[Tensor]) -> list[bool]:
    """Return for each tensor whether its value is traced and not computed."""
    return _xla()._check_tensor_need_materialization(tensors)


def name_operation(tensor: Tensor, prefix: str) -> None:
    """Put a prefix before the name of the operation that makes a tensor."""
    # 1 stack frame: with 0, lowering fails in torch_xla 2.9.0 (pytorch/xla#9676).
    _xla()._set_xla_custom_op_name_prefix(tensor, prefix, 1)


# -- programs -------------------------------------------------------------------------------------


def program_inputs(outputs: list[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Return the data that a program reads: their tensors' numbers, and the values.

    -1 is the number of a Python number, :func:`seed_id` that of the random seed.
    """
    return _xla()._get_tensors_xla_device_data_node(outputs)


def program_hash(outputs: list[Tensor]) -> Any:
    """Return the key of the program that computes these tensors."""
    return _xla()._get_graph_hash(outputs)


def compile_program(outputs: list[Tensor]) -> None:
    """Compile the program that computes these tensors, and compute nothing."""
    _xla()._xla_warm_up_cache(outputs, [])


def run_program(key: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Dispatch a compiled program, by its :func:`program_hash`; return its results."""
    return _xla()._run_cached_graph(key, inputs)


def hlo(outputs: list[Tensor]) -> str:
    """Return the HLO text of the program that computes these tensors."""
    return _xla()._get_xla_tensors_hlo(outputs)


def live_stablehlo() -> str:
    """Return the StableHLO text of the program that computes all live tensors of the process."""
    xla = _xla()
    return xla._get_stablehlo([], xla._xla_get_default_device(), [], False).decode()


@contextlib.contextmanager
def named_operations() -> Iterator[None]:
    """Keep the operations' names in what is lowered inside."""
    xla = _xla()
    before = xla._get_ir_debug()
    xla._set_ir_debug(True)
    try:
        yield
    finally:
        xla._set_ir_debug(before)


def forget_pending(device: str) -> None:
    """Drop what was traced on a device and not computed."""
    _xla()._clear_pending_irs(device)


# -- runtime --------------------------------------------------------------------------------------


def is_open() -> bool:
    """Return whether this process has opened its devices."""
    return _xla()._xla_runtime_is_initialized()


def seed_id() -> int:
    """Return the number that :func:`program_inputs` gives the random seed."""
    return _xla()._get_seed_info_id()


def base_seed(device: str) -> Tensor:
    """Return the seed that the present step's random numbers start from, as data, int64 ()."""
    return _xla()._get_base_seed_as_tensor(device)


def tpu_workers() -> int:
    """Return how many machines the TPU slice has, from the cloud's metadata service.

    Raises:
        XlaUnavailable: torch_xla has no such function.
        Exception: whatever the request ends in where there is no such service.
    """
    try:
        ask = importlib.import_module("torch_xla._internal.tpu").num_tpu_workers
    except (ImportError, AttributeError) as error:
        raise XlaUnavailable(
            "this torch_xla has no _internal.tpu.num_tpu_workers, which tpuscope uses; it needs "
            f"torch_xla {versions.TORCH_XLA}: {versions.install_torch_xla()}"
        ) from error
    return ask()


@contextlib.contextmanager
def observed_steps(observer: Callable[[Callable, tuple, dict], Any]) -> Iterator[None]:
    """Call the observer in place of torch_xla's end of a step while the context is open.

    Contexts may be closed in any order; the last one that closes removes the patch.

    Args:
        observer: gets the original (or the observer that was opened before), its positional and
            its keyword arguments, and has to call it.
    """
    if not _observers:
        _patch(_xla())
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
        marker = getattr(_xla(), _MARKER)
        # Where somebody else has patched it since, theirs stays, and calls ours, which observes
        # nothing any more.
        if not _observers and hasattr(marker, "tpuscope_original"):
            setattr(_xla(), _MARKER, marker.tpuscope_original)


def _patch(extension: Any) -> None:
    original = getattr(extension, _MARKER)
    if hasattr(original, "tpuscope_original"):
        return

    def marker(*args: Any, **kwargs: Any) -> Any:
        call = original
        for observer in _observers:
            call = _bound(observer, call)
        return call(*args, **kwargs)

    marker.tpuscope_original = original
    setattr(extension, _MARKER, marker)


def _bound(observer: Callable, inner: Callable) -> Callable:
    return lambda *args, **kwargs: observer(inner, args, kwargs)
