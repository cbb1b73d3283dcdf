"""Measure text generation, and compare the device's layers with the host's."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch_xla
from torch import Tensor
from transformers import PreTrainedModel

from tpuscope import watch
from tpuscope.figure import Picture
from tpuscope.monitor.layers import LayerReport
from tpuscope.monitor.watch import Report
from tpuscope.tables import table as aligned

from .ways import Way, forward, generate

COLOURS = {"growing": "#ff453a", "padded": "#ff9f0a", "static": "#0a84ff"}


@dataclass(frozen=True)
class Run:
    """One prompt continued in one way, with its counts and times.

    Attributes:
        way: its name.
        prompt: the input text.
        text: prompt and continuation.
        tokens: that were written.
        report: of the whole call; it has one step for each token, and two where the choice of the
            token is a program of its own.
    """

    way: str
    prompt: str
    text: str
    tokens: int
    report: Report


def measure(way: Way, prompts: Sequence[str], tokens: int) -> list[Run]:
    """Continue prompts one after the other, each under its own watch.

    Args:
        way: how.
        prompts: texts.
        tokens: for each.
    """
    runs = []
    for prompt in prompts:
        with watch(explain=False) as w:
            [text] = generate(way, [prompt], tokens)
        runs.append(Run(way.name, prompt, text, tokens, w.report()))
    return runs


def table(runs: Iterable[Run]) -> str:
    """Return counts and times of runs, a line each."""
    rows = [("way", "prompt", "tokens", "compilations", "host reads", "seconds", "ms a token")]
    for run in runs:
        report = run.report
        counts = (str(n) for n in (run.tokens, report.compilations, report.host_reads))
        times = f"{report.seconds:.2f}", f"{1e3 * report.seconds / run.tokens:.1f}"
        rows.append((run.way, repr(run.prompt), *counts, *times))
    return aligned(rows, "<<>>>>>")


def time_per_token(runs: Sequence[Run]) -> Picture:
    """Draw milliseconds of each token, prompt after prompt; a filled dot compiled.

    Args:
        runs: of :func:`measure`, of :data:`COLOURS`' ways with the same prompts.
    """
    figure = Picture(figsize=(8, 3.6), dpi=100, layout="constrained")
    axis = figure.subplots()
    for way in dict.fromkeys(run.way for run in runs):
        steps = [step for run in runs if run.way == way for step in run.report.steps]
        times = [1e3 * step.seconds for step in steps]
        colour = COLOURS[way]
        axis.plot(range(1, len(times) + 1), times, "-", lw=1.2, color=colour, label=way)
        compiled = [(n, t) for n, (t, s) in enumerate(zip(times, steps), 1) if s.compilations]
        axis.plot(*zip(*compiled), "o", ms=4, color=colour)
    start = 1
    prompts = dict.fromkeys(run.prompt for run in runs)
    lengths = [len(run.report.steps) for run in runs if run.way == runs[0].way]
    for prompt, length in zip(prompts, lengths, strict=True):
        if start > 1:
            axis.axvline(start - 0.5, color="#c7c7cc", lw=1)
        axis.text(start, 1.02, repr(prompt), transform=axis.get_xaxis_transform(), fontsize=9)
        start += length
    axis.set(yscale="log", xlabel="token (dots: a program was compiled)", ylabel="ms")
    axis.grid(alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


@torch.no_grad()
def hidden_states(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Return each layer's output, float32 (B, W, hidden), on the host.

    Args:
        model: on any device.
        ids: left-padded, int64 (B, W), on the host.
    """
    ids = ids.to(model.device)
    output = forward(model, ids, output_hidden_states=True)
    if ids.device.type == "xla":
        torch_xla.sync()
    states = output.hidden_states  # the last one is that of the last block, normalised
    blocks = [f"block {n}" for n in range(len(states) - 2)]
    names = ["embedding", *blocks, f"block {len(blocks)}, norm", "logits"]
    states = (*states, output.logits)
    return {name: state.cpu() for name, state in zip(names, states, strict=True)}


def differences(a: dict[str, Tensor], b: dict[str, Tensor], mask: Tensor) -> dict[str, float]:
    """Return the largest difference in each layer, relative to the layer's largest value.

    Args:
        a: of :func:`hidden_states`.
        b: of the same layers.
        mask: bool (B, W), which tokens count.
    """
    return {
        name: float((a[name] - b[name])[mask].abs().max() / a[name][mask].abs().max()) for name in a
    }


def operations(host: LayerReport, device: LayerReport) -> str:
    """Return the layers' operations on the host and on the device, a line a layer.

    A view on the host is a copy on XLA, which has no views (``aten.view`` and
    ``aten.view_copy``): they count as the same.
    """
    there = device.as_dict()
    rows = [("layer", "host", "XLA", "on XLA instead", "left to the host")]
    for name, layer in host.as_dict().items():
        here, other = _kinds(layer["operations"]), _kinds(there[name]["operations"])
        changes = [f"−{n} {op}" for op, n in (here - other).items()]
        changes += [f"+{n} {op}" for op, n in (other - here).items()]
        left = ", ".join(there[name]["on_host"]) or "–"
        counts = str(here.total()), str(other.total())
        rows.append((name, *counts, ", ".join(changes) or "the same", left))
    return aligned(rows, "<>><<")


def _kinds(operations: dict[str, int]) -> Counter[str]:
    """Shorten names: ``aten.view_copy.default`` → ``view``."""
    kinds: Counter[str] = Counter()
    for name, count in operations.items():
        kinds[name.split(".")[1].removesuffix("_copy").lstrip("_")] += count
    return kinds
