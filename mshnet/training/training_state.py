"""Whether a checkpoint holds what training continues from, checked once, right after loading."""

import math
import types
import typing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpuscope.errors import RequestError

from .checkpoint import damaged, is_finite, position, weights_of
from .config import Config

_HINTS = typing.get_type_hints(Config)
WIDEST = 4096  # channels of a level, or blocks of it, that a recorded network may have
_HYPERPARAMETERS = ("lr", "lr_decay", "weight_decay", "eps")  # of Adagrad


def require_training_state(content: dict, path: str | Path) -> None:
    """Check every field that a resumed run reads, so that nothing fails later because of one.

    Args:
        content: of :func:`mshnet.training.checkpoint.load`.
        path: where it comes from, for messages.

    Raises:
        RequestError: weights alone, or a field of a wrong type, size or value.
    """
    if not {"net", "optimizer", "epoch", "best", "config"} <= content.keys():
        raise RequestError(
            f"{path} holds weights but no training state; start from them with "
            f"--weight-path {path}",
            code="no-training-state",
        )
    position(content, path)
    recorded_config(content, path)
    if not isinstance(content["net"], dict):
        raise damaged(path, "net", content["net"])
    net = weights_of({"net": content["net"]}, path)
    statistics = [v for k, v in net.items() if k.endswith(("running_mean", "running_var"))]
    parameters = [v for k, v in net.items() if not k.endswith(_BUFFERS)]
    fitting = {
        "optimizer": _is_adagrad(content["optimizer"], parameters),
        "best": content["best"] is None or _is_record(content["best"]),
        "loss_sum": _is_sum(content.get("loss_sum", torch.zeros(1))),
        "seconds": _is_number(content.get("seconds", 0.0)),
        "replica_state": _is_replica_state(content.get("replica_state"), statistics),
    }
    for name, fits in fitting.items():
        if not fits:
            raise damaged(path, name, content.get(name))


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # how names of buffers end


def recorded_config(content: dict, path: str | Path) -> dict:
    """Return the settings in a weight or checkpoint file; none are an empty dict.

    Raises:
        RequestError: one has another type than the field of :class:`Config`.
    """
    recorded = content.get("config", {})
    if not isinstance(recorded, dict):
        raise damaged(path, "config", recorded)
    for name, hint in _HINTS.items():
        if name in recorded and not _has_type(recorded[name], hint):
            raise damaged(path, f"config.{name}", recorded[name])
    return {name: recorded[name] for name in _HINTS if name in recorded}


def _has_type(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_has_type(value, choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:  # widths and depths of the network's five levels
        right = isinstance(value, list | tuple) and len(value) == 5
        return right and all(type(item) is int and 1 <= item <= WIDEST for item in value)
    if hint is float:
        return not isinstance(value, Tensor) and _is_number(value)
    if hint is str:
        return isinstance(value, str) and "\0" not in value
    return type(value) is hint


def _is_number(value: Any) -> bool:
    """Whether it is a finite number, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and is_finite(value, torch.float64)
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _is_adagrad(state: Any, parameters: list[Tensor]) -> bool:
    """Whether it is the ``state_dict`` of an Adagrad over these parameters."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        return False
    slots, groups = state["state"], state["param_groups"]
    return (
        isinstance(groups, list)
        and len(groups) == 1
        and isinstance(groups[0], dict)
        and _are_indices(groups[0].get("params"), len(parameters))
        and all(_is_number(groups[0].get(name)) for name in _HYPERPARAMETERS)
        and isinstance(slots, dict)
        and _are_indices(list(slots), len(parameters))
        and all(_is_slot(slots[i], parameter) for i, parameter in enumerate(parameters))
    )


def _are_indices(value: Any, count: int) -> bool:
    right = isinstance(value, list) and all(type(item) is int for item in value)
    return right and value == list(range(count))


def _is_slot(slot: Any, parameter: Tensor) -> bool:
    """Whether it is Adagrad's state of a parameter: its steps, and the sum of squared gradients."""
    return (
        isinstance(slot, dict)
        and all(isinstance(slot.get(name), Tensor) for name in ("step", "sum"))
        and slot["step"].numel() == 1
        and slot["sum"].shape == parameter.shape
        and is_finite(slot["step"], torch.float32)
        and is_finite(slot["sum"], torch.float32)
    )


def _is_record(best: Any) -> bool:
    """Whether it is a line of ``metrics.jsonl``."""
    plain = bool | int | float | str | None
    return (
        isinstance(best, dict)
        and all(isinstance(k, str) and isinstance(v, plain) for k, v in best.items())
        and type(best.get("epoch")) is int
        and isinstance(best.get("iou"), int | float)
        and best.get("phase") in ("full", "warm-up")
    )


def _is_sum(value: Any) -> bool:
    """Whether it is a sum of losses: float (1,)."""
    return isinstance(value, Tensor) and value.shape == (1,) and is_finite(value, torch.float32)


def _is_replica_state(value: Any, statistics: list[Tensor]) -> bool:
    """Whether it is None, or the batch norm statistics of each replica: float (replicas, n)."""
    if value is None:
        return True
    count = sum(tensor.numel() for tensor in statistics)
    right = isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == count
    return right and len(value) > 0 and is_finite(value, torch.float32)
