"""Draw the steps of a watched block: the host's time, and beside it the device's."""

from typing import TYPE_CHECKING

from ..figure import Picture

if TYPE_CHECKING:
    from .watch import Watch

_PARTS = (
    ("trace_seconds", "trace: data, Python, recording", "#0a84ff"),
    ("compile_seconds", "compile", "#ff9f0a"),
    ("wait_seconds", "wait for the device", "#8e8e93"),
)


def timeline(watch: "Watch", last: int = 40) -> Picture:
    """Draw two bars a step: the host's time in its parts, and the device's.

    The parts are those of :class:`~tpuscope.monitor.report.Step`. The device works in parallel to
    the host, on XLA:CPU too, so its bar is no part of the other, and may fall into the host's next
    step. A program's time begins when it is launched, so the time in the queue is included.

    Args:
        watch: after its block.
        last: steps at the end that are drawn.
    """
    steps = watch.steps[-last:]
    figure = Picture(figsize=(7, 3.2), layout="constrained")
    axis = figure.subplots()
    at = [step.number for step in steps]
    bottom = [0.0] * len(steps)
    for name, label, colour in _PARTS:
        heights = [getattr(step, name) for step in steps]
        left = [x - 0.2 for x in at]
        axis.bar(left, heights, 0.4, bottom=bottom, label=label, color=colour)
        bottom = [a + b for a, b in zip(bottom, heights)]
    device = [step.execute_seconds for step in steps]
    right = [x + 0.2 for x in at]
    axis.bar(right, device, 0.4, label="device: launch to end", color="#30d158")
    axis.set(xlabel="step", ylabel="seconds", xticks=at if len(at) <= 20 else at[::5])
    axis.legend()
    return figure
