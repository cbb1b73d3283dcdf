"""Python values that a step can read: numbers, flags, and which objects it works with.

A compiled program holds them as they were when the step was traced. :class:`HostValues` notes them,
and finds out in a fraction of a millisecond whether one has changed.
"""

import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .lines import is_installed, is_library

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_LARGEST = 1000  # entries of a container that are looked at
_MISSING = object()


def modes(device: str) -> tuple:
    """Return PyTorch's modes that change what a step computes on a device type."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.get_default_dtype(),
    )


def host_random_state() -> tuple:
    """Return the states of the host's global random generators."""
    numpy = sys.modules.get("numpy.random")
    of_numpy = numpy.get_state(legacy=False)["state"] if numpy else {}
    state = [v.tobytes() if hasattr(v, "tobytes") else v for v in of_numpy.values()]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), state


class _Slot(NamedTuple):
    """A value, how to read it again, and its name for people."""

    read: Callable[[], Any]
    value: Any
    name: str


class HostValues:
    """The Python values that a step reads, as they are now.

    Noticed are, from the step on and through the user's functions and methods that it names:

    * variables of enclosing functions, defaults, arguments of ``functools.partial``, globals;
    * attributes of objects and modules that this code, or a layer's ``forward``, names:
      ``self.scale``, ``training``, the ``p`` of a Dropout; and which tensors they hold;
    * every entry of optimizers' ``param_groups``;
    * entries of lists, tuples and dicts, where there are 1,000 or fewer.

    Not noticed are attributes that are read under a computed name (``getattr(self, name)``), the
    inside of C objects such as iterators and arrays, the clock and files.

    Args:
        step: the function.
        optimizers: beside those that the step's own code leads to.
        state: tensors on the device that the step may read; others are not watched, because a
            step that reads them is not repeated.
        but: host tensors whose values are left out.
    """

    def __init__(
        self,
        step: Callable,
        optimizers: Iterable[Optimizer] = (),
        state: Iterable[Tensor] = (),
        but: Iterable[Tensor] = (),
    ):
        walk = _Walk(state, but)
        found = 0
        while True:  # the names of attributes are complete when no function adds one
            walk.begin()
            walk.visit(step, getattr(step, "__name__", "step"))
            for number, optimizer in enumerate(optimizers):
                walk.visit(optimizer, f"optimizers[{number}]")
            if len(walk.names) == found:
                break
            found = len(walk.names)
        self._slots = walk.slots

    def change(self) -> str | None:
        """Return what has changed since, such as ``"lr: 0.1, then 0.01"``, or None."""
        for read, value, name in self._slots:
            now = read()
            if now is not value and not _equal(now, value):
                old, new = (_shown(one) for one in (value, now))
                return name if old == new else f"{name}: {old}, then {new}"
        return None


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return len(value) <= _LARGEST and all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _equal(now: Any, value: Any) -> bool:
    return type(now) is type(value) and _is_plain(value) and now == value


def _shown(value: Any) -> str:
    return repr(value) if _is_plain(value) else f"a {type(value).__name__}"


class _Walk:
    """One pass over everything that a step leads to."""

    def __init__(self, state: Iterable[Tensor], but: Iterable[Tensor]):
        self._state = {id(tensor) for tensor in state}
        self._left_out = {id(tensor) for tensor in but}
        self.names: set[str] = {"forward", "training"}
        self.begin()

    def begin(self) -> None:
        self.slots: list[_Slot] = []
        self._seen: dict[int, Any] = {}  # kept alive: an id stays its object's

    def visit(self, thing: Any, name: str) -> None:
        """Note what an object holds; ``name`` is how the step's code reaches it."""
        if _is_plain(thing) or isinstance(thing, (type, types.BuiltinFunctionType)):
            return
        if id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            is_number = thing.device.type == "cpu" and thing.dim() == 0
            if is_number and id(thing) not in self._left_out:
                self.slots.append(_Slot(thing.item, thing.item(), name))
        elif isinstance(thing, types.FunctionType):
            self._function(thing, name)
        elif isinstance(thing, types.MethodType):
            self._function(thing.__func__, name)
            self.visit(thing.__self__, type(thing.__self__).__name__)
        elif isinstance(thing, functools.partial):
            self.visit(thing.func, name)
            self._entries((thing.args, thing.keywords), name)
        elif isinstance(thing, (list, tuple, dict)):
            self._entries(thing, name)
        elif isinstance(thing, Optimizer):
            self._optimizer(thing, name)
        else:
            self._object(thing, name)

    def _slot(self, read: Callable[[], Any], name: str) -> None:
        value = read()
        on_device = isinstance(value, Tensor) and value.device.type != "cpu"
        if on_device and id(value) not in self._state:
            return
        self.slots.append(_Slot(read, value, name))
        self.visit(value, name)

    def _function(self, function: types.FunctionType, name: str) -> None:
        code = function.__code__
        if is_library(code.co_filename):
            return
        names = set(_names(code))
        self.names |= names
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._slot(functools.partial(_content, cell), variable)
        for default in (function.__defaults__, function.__kwdefaults__):
            self.visit(default, f"defaults of {name}")
        variables = function.__globals__
        installed = is_installed(code.co_filename)
        for variable in sorted(names & variables.keys()):
            # Of an installed package only its own functions: all that it holds is too much.
            value = variables[variable]
            if not installed or _is_plain(value) or _is_sibling(value, function):
                self._slot(functools.partial(variables.get, variable, _MISSING), variable)

    def _entries(self, container: list | tuple | dict, name: str) -> None:
        length = functools.partial(_length, container)
        self.slots.append(_Slot(length, length(), f"the length of {name}"))
        if length() > _LARGEST:
            return
        if isinstance(container, dict):
            for key in dict.keys(container):  # whatever a subclass has made of its methods
                get = functools.partial(dict.get, container, key, _MISSING)
                self._slot(get, f"{name}[{key!r}]" if isinstance(key, _PLAIN) else name)
        else:
            for index in range(length()):
                self._slot(functools.partial(_entry, container, index), f"{name}[{index}]")

    def _optimizer(self, optimizer: Optimizer, name: str) -> None:
        attributes = vars(optimizer)
        for group_name in ("param_groups", "state"):  # load_state_dict() replaces both
            self.slots.append(
                _Slot(
                    functools.partial(attributes.get, group_name),
                    attributes[group_name],
                    f"{name}.{group_name}",
                )
            )
        for number, group in enumerate(optimizer.param_groups):
            for key in group:
                entry = f"{name}.param_groups[{number}][{key!r}]"
                if key != "params":
                    self._slot(functools.partial(group.get, key, _MISSING), entry)
        for values in optimizer.state.values():
            for key, value in values.items():
                get = functools.partial(values.get, key, _MISSING)
                self.slots.append(_Slot(get, value, f"{name}.state[...][{key!r}]"))

    def _module(self, module: nn.Module, name: str) -> None:
        """Which tensors, layers and hooks a module has."""
        attributes = vars(module)
        for table in ("_parameters", "_buffers", "_modules"):
            for key in attributes[table]:
                get = functools.partial(attributes[table].get, key, _MISSING)
                self._slot(get, f"{name}.{key}")
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            self._entries(attributes[hooks], f"{name}.{hooks}")

    def _object(self, thing: Any, name: str) -> None:
        """Note the attributes and methods of an object or a Python module that the code names."""
        is_layer = isinstance(thing, nn.Module)
        kind = type(thing)
        if isinstance(thing, types.ModuleType):
            file = getattr(thing, "__file__", None) or "<frozen"
            if is_library(file) or is_installed(file):
                return
        elif not is_layer and is_library(_file(kind)):
            return
        if is_layer:
            self._module(thing, name)
        for base in kind.__mro__[:-1]:
            for key, member in vars(base).items():
                if key in self.names or (key == "__call__" and not is_layer):
                    self._member(thing, base, key, member, f"{name}.{key}")
        attributes = getattr(thing, "__dict__", {})
        for key in sorted(self.names & attributes.keys()):
            self._slot(functools.partial(attributes.get, key, _MISSING), f"{name}.{key}")

    def _member(self, thing: Any, base: type, key: str, member: Any, name: str) -> None:
        """Note a method, a property or a value of a class, or an attribute in ``__slots__``."""
        member = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(member, types.MemberDescriptorType):
            self._slot(functools.partial(getattr, thing, key, _MISSING), name)
        elif isinstance(member, _PLAIN):
            self._slot(functools.partial(vars(base).get, key, _MISSING), name)
        elif isinstance(member, types.FunctionType):
            if isinstance(thing, nn.Module) and key in ("forward", "_conv_forward"):
                # torch's own layers read their attributes here; what else they lead to is torch's.
                self.names |= set(_names(member.__code__))
            self.visit(member, name)


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function, those of functions inside included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def _base(container: list | tuple | dict) -> type:
    return next(kind for kind in (list, tuple, dict) if isinstance(container, kind))


def _length(container: list | tuple | dict) -> int:
    return _base(container).__len__(container)


def _entry(container: list | tuple, index: int) -> Any:
    return (
        _base(container).__getitem__(container, index) if index < _length(container) else _MISSING
    )


def _file(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _is_sibling(value: Any, function: types.FunctionType) -> bool:
    """Return whether a value is a function of the same package."""
    if not isinstance(value, types.FunctionType):
        return False
    first, second = (one.__module__.partition(".")[0] for one in (value, function))
    return first == second
