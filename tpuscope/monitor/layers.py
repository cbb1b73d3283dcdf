"""Which layer an operation belongs to, in the forward and in the backward pass.

Each operation of a step gets the name of the module that called it: ``ResNet.layer1.0.conv1``, its
gradient ``ResNet.layer1.0.conv1/grad``, an optimizer's update ``SGD``, and what no module called
``(step)``. On an XLA device the name is written to the operation, and the compiled program still
has it.
"""

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import TensorWeakRef

from ..engine import _private, lazy_graph
from ..tables import table

OUTSIDE = "(step)"  # operations that no module and no optimizer called
GRADIENT = "/grad"  # ends the name of a layer whose gradient is computed

# These return what they were given, which has its name already.
_aten = torch.ops.aten
_SAME = {
    _aten.alias.default,
    _aten.alias_copy.default,
    _aten.copy_.default,
    _aten.detach.default,
    _aten.detach_copy.default,
}


def layer_of(op_name: str) -> str:
    """Return the layer in an instruction's ``op_name``.

    >>> layer_of("ResNet.layer1.0.conv1/grad/aten__convolution_backward")
    'ResNet.layer1.0.conv1/grad'
    >>> layer_of("aten__add")
    '(step)'
    """
    return op_name.rpartition("/")[0] or OUTSIDE


class LayerLabels(TorchDispatchMode):
    """While entered, give every operation the name of its layer.

    Hooks of modules and optimizers give the layer in the forward pass. In the backward pass
    autograd gives the running node, and a node has the number that its forward operation left.

    The name is written on an XLA operation. It changes neither what is computed nor whether two
    graphs are the same; HLO shows it, as ``op_name="ResNet.conv1/aten__convolution"``,
    where it is lowered under :func:`tpuscope.engine.lazy_graph.named_operations`.
    """

    def __init__(self):
        super().__init__()
        self.modules: list[tuple[str, nn.Module]] = []  # of all models that ran, named
        self._names: dict[int, str] = {}  # id of a module → its name
        self._running: list[str] = []
        self._forward: dict[int, str] = {}  # number of an autograd node → layer
        self._made: list[TensorWeakRef] = []
        self._hooks = contextlib.ExitStack()

    def __enter__(self):
        for handle in (
            module_hooks.register_module_forward_pre_hook(self._begin),
            module_hooks.register_module_forward_hook(self._end, always_call=True),
            register_optimizer_step_pre_hook(self._begin_update),
            register_optimizer_step_post_hook(self._end),
        ):
            self._hooks.callback(handle.remove)
        return super().__enter__()

    def __exit__(self, *error):
        self._hooks.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        layer = self.current()
        result = function(*args, **kwargs)
        for tensor in _on_xla((result, _written(function, args, kwargs))):
            self._made.append(TensorWeakRef(tensor))
        for tensor in () if function in _SAME else _on_xla(result):
            self.label(tensor, layer)
        self.done(layer, function, args, kwargs, result)
        return result

    def label(self, tensor: Tensor, layer: str) -> None:
        """Write a layer's name on the operation that makes an XLA tensor."""
        _private.name_operation(tensor, layer + "/")

    def pending(self) -> list[Tensor]:
        """Return what was traced inside and would be computed by a sync now, in order.

        These are the tensors that somebody still holds, gradients included. What only autograd
        has saved for a backward pass counts, too: let a step finish its backward pass, or run
        under ``torch.no_grad()``.
        """
        if not self._made:
            return []
        lazy_graph.finish_backward()
        made = (reference() for reference in self._made)
        return lazy_graph.pending(tensor for tensor in made if tensor is not None)

    def done(self, layer: str, function: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Take note of an operation after it; for subclasses."""

    def current(self) -> str:
        """Return the layer of the operation that is about to run."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self._forward.get(_number(node), OUTSIDE) + GRADIENT
        layer = self._running[-1] if self._running else OUTSIDE
        # Autograd made the node of this operation just before; one that has none sees the number of
        # an earlier node, which is taken.
        self._forward.setdefault(_autograd._get_sequence_nr() - 1, layer)
        return layer

    def _begin(self, module: nn.Module, inputs: tuple) -> None:
        if id(module) not in self._names:
            self._name(module)
        self._running.append(self._names[id(module)])

    def _begin_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self._running.append(type(optimizer).__name__)

    def _end(self, *_: Any) -> None:
        self._running.pop()

    def _name(self, root: nn.Module) -> None:
        """Name a module that has no name yet, and all below it."""
        kind = type(root).__name__
        same = sum(name == kind or name.startswith(f"{kind}#") for name, _ in self.modules)
        kind += f"#{same + 1}" if same else ""
        for path, module in root.named_modules():
            if id(module) not in self._names:
                name = f"{kind}.{path}" if path else kind
                self._names[id(module)] = name
                self.modules.append((name, module))  # kept alive: its id stays its own


_autograd: Any = torch.autograd  # the number of a node is a private name


def _number(node: Any) -> int:
    return node._sequence_nr()


def _on_xla(values: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.device.type == "xla":
            yield leaf


def _written(function: Any, args: tuple, kwargs: dict) -> list[Any]:
    """Return the arguments that an operation changes in place; foreach operations return none."""
    return [
        kwargs[argument.name] if argument.name in kwargs else args[position]
        for position, argument in enumerate(function._schema.arguments)
        if argument.is_write and (argument.name in kwargs or position < len(args))
    ]


@dataclass
class Layer:
    """What one layer contributes, forward and backward, without the layers below it.

    Attributes:
        name: of the layer.
        result: of its last operation in the forward pass, such as ``"8x16x64x64 float32"``.
        parameters: numbers that it holds.
        operations: how often each operation was called, by aten name.
        flops: of matrix products and convolutions, by PyTorch's formulas.
        instructions: in the HLO that was traced; None where nothing was.
        on_host: operations that ran on the host, and reads of values, by aten name.
    """

    name: str
    result: str = ""
    parameters: int = 0
    operations: Counter = field(default_factory=Counter)
    flops: int = 0
    instructions: int | None = None
    on_host: Counter = field(default_factory=Counter)

    def add(self, other: "Layer") -> None:
        """Add what another layer contributes."""
        self.parameters += other.parameters
        self.operations = self.operations + other.operations
        self.flops += other.flops
        self.on_host = self.on_host + other.on_host
        if other.instructions is not None:
            self.instructions = (self.instructions or 0) + other.instructions


@dataclass(frozen=True)
class LayerReport:
    """The layers of a step, in the order in which they first ran."""

    layers: list[Layer]

    def total(self) -> Layer:
        """Return all layers together."""
        total = Layer("together")
        for layer in self.layers:
            total.add(layer)
        return total

    def at_depth(self, depth: int) -> list[Layer]:
        """Return the layers, each with everything below it.

        Args:
            depth: parts that a name keeps: 1 is the model, 2 its children.
        """
        groups: dict[str, Layer] = {}
        for layer in self.layers:
            name = ".".join(layer.name.split(".")[:depth])
            group = groups.setdefault(name, Layer(name))
            group.add(layer)
            group.result = layer.result or group.result
        return list(groups.values())

    def table(self, depth: int | None = None) -> str:
        """Return a table for people, one line a layer.

        Args:
            depth: see :meth:`at_depth`; None shows each layer by itself.
        """
        layers = self.layers if depth is None else self.at_depth(depth)
        rows: list[tuple[str, ...]] = [_HEAD]
        for layer in [*layers, self.total()]:
            on_host = ", ".join(f"{count}× {name}" for name, count in layer.on_host.items())
            numbers = (layer.parameters, layer.operations.total(), layer.flops, layer.instructions)
            cells = ("–" if number is None else f"{number:,}" for number in numbers)
            rows.append((layer.name, layer.result, *cells, on_host or "–"))
        return table(rows, "<<>>>><")

    def as_dict(self) -> dict[str, dict]:
        """Return plain values, by the layers' names."""
        counted = ("operations", "on_host")
        return {
            layer.name: asdict(layer) | {name: dict(getattr(layer, name)) for name in counted}
            for layer in self.layers
        }


_HEAD = ("layer", "result", "parameters", "operations", "flops", "HLO", "on the host")


class _Recorder(LayerLabels):
    """Count what the layers do."""

    def __init__(self):
        super().__init__()
        self.layers: dict[str, Layer] = {}
        self._on_host = _host_operations()

    def record(self, name: str) -> Layer:
        """Return the record of a layer; a gradient is counted with its layer."""
        name = name.removesuffix(GRADIENT)
        return self.layers.setdefault(name, Layer(name))

    def done(self, layer: str, function: Any, args: tuple, kwargs: dict, result: Any) -> None:
        record = self.record(layer)
        record.operations[str(function)] += 1
        flops = flop_registry.get(function._overloadpacket)
        if flops:
            record.flops += flops(*args, **kwargs, out_val=result)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if tensors and not layer.endswith(GRADIENT):
            kind = str(tensors[0].dtype).removeprefix("torch.")
            record.result = f"{'x'.join(map(str, tensors[0].shape))} {kind}"
        before, self._on_host = self._on_host, _host_operations()
        record.on_host += self._on_host - before


def _host_operations() -> Counter[str]:
    """Count what torch_xla has run on the host since the process started, by aten name."""
    if "torch_xla" not in sys.modules:
        return Counter()
    import torch_xla.debug.metrics as met

    names = [name for name in met.counter_names() if name.startswith("aten::")]
    return Counter({name: met.counter_value(name) for name in names})


def track(step: nn.Module | Callable, *inputs: Any, backward: bool = True) -> LayerReport:
    """Run a step once, and report what each layer contributes.

    On an XLA device it is traced and not computed; like every step it leaves gradients and
    changed parameters behind.

    Args:
        step: a module, or a function that does a whole step: forward, loss, backward, update.
        *inputs: for it. A module's are moved to the device of its parameters.
        backward: also compute the gradients of the sum of a module's results.
    """
    is_module = isinstance(step, nn.Module)
    if is_module:
        home = next((p.device for p in step.parameters()), torch.device("cpu"))
        inputs = tree_map_only(Tensor, lambda t: t.to(home), inputs)
    recorder = _Recorder()
    with recorder:
        result = step(*inputs)
        if is_module and backward:
            leaves = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            total: Any = sum(leaf.sum() for leaf in leaves if leaf.requires_grad)
            total.backward()
            del total  # or it would be a result of the traced program
    for name, module in recorder.modules:
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own:
            recorder.record(name).parameters = own
    traced = recorder.pending() if "torch_xla" in sys.modules else []
    if traced:
        counts = Counter(
            layer_of(found[1]).removesuffix(GRADIENT)
            for found in re.finditer(r'op_name="([^"]*)"', lazy_graph.hlo(traced))
        )
        for name in {*counts, *recorder.layers}:
            recorder.record(name).instructions = counts[name]
    return LayerReport(list(recorder.layers.values()))
