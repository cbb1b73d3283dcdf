"""torch_xla's half of the comparison, in a separate process: JSON in, JSON out."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch_xla
from torch.nn import functional as F

from tpuscope.engine import lazy_graph, metrics

from .compare import LOOP, Effort, experiments


def linears(given: dict) -> list[dict]:
    """Return HLO before and after, and result, of ``relu(linear(x))`` for each of ``dtypes``."""
    device = torch_xla.device()
    tensors = [torch.tensor(given[name]).to(device) for name in ("x", "weight", "bias")]

    def linear(dtype: str) -> dict:
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=dtype == "mixed_bfloat16"):
            result = torch.relu(F.linear(*tensors))
        before = lazy_graph.hlo([result], named=False)
        torch_xla.sync(wait=True)
        dumps = Path(os.environ["DUMPS"]).glob("*cpu_after_optimizations.txt")
        after = max(dumps, key=lambda path: path.stat().st_mtime_ns).read_text()
        return {"before": before, "after": after, "result": result.float().tolist()}

    return [linear(dtype) for dtype in given["dtypes"]]


def torch_experiments(_: dict) -> dict:
    """Run the experiments, each call a step that ends in a sync, and a loop; return counts."""
    device = torch_xla.device()

    def measured(function: Callable, arguments: list[tuple]) -> dict:
        before = metrics.now()
        for values in arguments:
            result = function(*values)
            torch_xla.sync(wait=True)
            del result  # or the next step would have it among its results
        after = metrics.now() - before
        return vars(Effort(len(arguments), after.compilations, after.executions))

    def loop() -> dict:
        x = [torch.ones(10, 16).to(device)]

        def step():
            x[0] = torch.tanh(x[0])

        return measured(step, [()] * 3)

    several = experiments(
        make=lambda shape: torch.ones(shape).to(device),
        tensor=lambda n: torch.tensor([n]).to(device),
    )
    found = {name: measured(*experiment) for name, experiment in several.items()}
    return found | {LOOP: loop()}


if __name__ == "__main__":
    halves = {"linear": linears, "experiments": torch_experiments}
    print(json.dumps(halves[sys.argv[1]](json.load(sys.stdin))))
