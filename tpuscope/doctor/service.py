"""``mshnet doctor --cloud``: what the Cloud TPU service says, for people and programs."""

import json
import sys
import time

from ..errors import RequestError
from . import cloud


def ask(name: str, zone: str | None, project: str | None, minutes: float, as_json: bool) -> int:
    """Ask, wait if wanted, print; returns the exit code.

    Raises:
        RequestError: zone or project is missing, or there is no such TPU.
    """
    for flag, value in (("--cloud", name), ("--zone", zone), ("--project", project)):
        if not value:
            example = {"--zone": "us-west4-a", "--project": "my-project-123"}.get(flag, "NAME")
            raise RequestError(f"{flag} is missing; a Cloud TPU is asked for by {flag} {example}")
    if not 0 <= minutes < float("inf"):
        raise RequestError(f"--wait {minutes}: must be 0 or more minutes")
    progress = _Progress(minutes)
    try:
        node = cloud.wait(name, zone, project, 60 * minutes, progress.show)
    except cloud.CloudError as error:
        if error.request_is_wrong:
            raise RequestError(str(error)) from error
        progress.end()
        print(f"mshnet doctor: {error}", file=sys.stderr)
        if as_json:
            print(json.dumps({"usable": False, "error": str(error)}))
        return 1
    progress.end()
    if as_json:
        print(json.dumps({"usable": node.usable, "node": node.as_dict(), "fix": node.advice()}))
    else:
        print(_describe(node))
    return 0 if node.usable else 1


def _describe(node: cloud.Node) -> str:
    status = "ok" if node.usable else "problem"
    state = f"{node.state or 'state unknown'}, {node.health or 'health unknown'}"
    lines = [
        f"{status:<8} {node.name}  {state}",
        f"{'':<8} type {node.accelerator_type or 'unknown'}, software "
        f"{node.runtime_version or 'unknown'}, zone {node.zone}",
    ]
    if node.endpoints:
        lines.append(f"{'':<8} addresses {', '.join(node.endpoints)}")
    if node.advice():
        lines.append(f"{'':<8} → {node.advice()}")
    return "\n".join([*lines, "", "usable" if node.usable else f"not usable: {state}"])


class _Progress:
    """While waiting: a line that changes for people who watch, a line a change in logs."""

    def __init__(self, minutes: float):
        self._end = time.monotonic() + 60 * minutes
        self._waits = minutes > 0
        self._last = ""
        self._watched = sys.stderr.isatty() or "ipykernel" in sys.modules

    def show(self, node: cloud.Node) -> None:
        state = f"{node.state} {node.health}".strip()
        if not self._waits or node.usable or not node.may_become_usable:
            return
        left = max(0, self._end - time.monotonic())
        if self._watched:
            text = f"\r{node.name}: {state}, waiting for {left / 60:.0f} min more at most "
            print(text, end="", file=sys.stderr, flush=True)
        elif state != self._last:
            print(f"{node.name}: {state}", file=sys.stderr, flush=True)
        self._last = state

    def end(self) -> None:
        if self._watched and self._last:
            print(file=sys.stderr)
