"""``doctor --cloud NAME``: what the Cloud TPU service knows of a TPU by its name.

Through ``cloud-tpu-client``, which speaks the service's API v1. Left alone, that client waits up to
60 s for each of two requests a question, hides the kind of an error, and knows only old kinds of
credentials. So the service object that it asks is made here, with google-auth's credentials, a time
limit for each request, and one for everything together.
"""

import contextlib
import importlib.util
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import versions
from ..errors import Failed, RequestError
from ..tables import table
from ..timeouts import call_with_timeout

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
LOGIN = "gcloud auth application-default login"
GCLOUD = "gcloud compute tpus tpu-vm"
POLL = 10.0  # seconds between two questions while waiting
_ON_ITS_WAY = ("CREATING", "RESTARTING", "REIMAGING", "REPAIRING", "STARTING")


class ServiceSilent(Failed):
    """No answer, or one that says to come back later."""


@dataclass(frozen=True)
class Node:
    """A Cloud TPU as the service describes it; "" for what it leaves out."""

    name: str
    zone: str
    project: str
    state: str = ""
    health: str = ""
    runtime_version: str = ""
    accelerator_type: str = ""
    endpoints: list[str] = field(default_factory=list)  # "address:port"; only of a READY one

    @property
    def usable(self) -> bool:
        """Whether programs can run on it."""
        return self.state == "READY" and self.health == "HEALTHY"

    @property
    def may_become_usable(self) -> bool:
        """Whether waiting can help."""
        return not self.usable and self.state in ("READY", *_ON_ITS_WAY)

    def advice(self) -> str:
        """Return what to type; "" if it is usable."""
        where = f"{self.name} --zone={self.zone} --project={self.project}"
        if self.usable:
            return ""
        if self.state in ("PREEMPTED", "TERMINATED"):
            new = f"--accelerator-type={self.accelerator_type or 'TYPE'} --version=VERSION"
            create = f"{GCLOUD} delete {where}; then {GCLOUD} create {where} {new}"
            return f"Google took it back for good: {create}"
        if self.state in ("STOPPED", "STOPPING"):
            return f"{GCLOUD} start {where}"
        if self.state in _ON_ITS_WAY:
            return "it is starting: --wait 20 waits for it"
        if self.state == "READY":
            restart = f"{GCLOUD} stop {where}; then {GCLOUD} start {where}"
            return f"--wait 20 waits until it is healthy; if it stays so: {restart}"
        return f"{GCLOUD} describe {where}"

    def describe(self) -> str:
        """Return lines for people, the verdict last."""
        state = f"{self.state or 'state unknown'}, {self.health or 'health unknown'}"
        kind, software = self.accelerator_type or "unknown", self.runtime_version or "unknown"
        rows = [
            ("ok" if self.usable else "problem", f"{self.name}  {state}"),
            ("", f"type {kind}, software {software}, zone {self.zone}"),
        ]
        if self.endpoints:
            rows.append(("", f"addresses {', '.join(self.endpoints)}"))
        if not self.usable:
            rows.append(("", f"→ {self.advice()}"))
        return f"{table(rows)}\n\n{'usable' if self.usable else f'not usable: {state}'}"


def ask(name: str, zone: str | None, project: str | None, minutes: float, as_json: bool) -> int:
    """Ask, wait as long as requested, print; return the exit code.

    Raises:
        RequestError: zone or project is missing, or there is no such TPU.
        Failed: no credentials, or no answer.
    """
    for flag, value in (("--cloud", name), ("--zone", zone), ("--project", project)):
        if not value:
            example = {"--zone": "us-west4-a", "--project": "my-project-123"}.get(flag, "NAME")
            raise RequestError(f"{flag} is missing; add {flag} {example}", "flag")
    if not 0 <= minutes < float("inf"):
        raise RequestError(f"--wait {minutes}: must be 0 or more minutes", "range")
    shown = set()

    def show(node: Node) -> None:
        state = f"{node.name}: {node.state} {node.health}".strip()
        if minutes and node.may_become_usable and state not in shown:
            shown.add(state)
            print(f"{state}; waiting, {minutes:g} min at most", file=sys.stderr, flush=True)

    try:
        node = wait(name, zone or "", project or "", 60 * minutes, show)
    except Failed as error:
        if as_json:
            print(json.dumps({"usable": False, "error": str(error)}))
        raise
    answer = {"usable": node.usable, "node": asdict(node), "fix": node.advice()}
    print(json.dumps(answer) if as_json else node.describe())
    return 0 if node.usable else 1


def wait(
    name: str,
    zone: str,
    project: str,
    seconds: float,
    watch: Callable[[Node], None] = lambda node: None,
    limit: float = 30.0,
) -> Node:
    """Ask until the TPU is READY and HEALTHY, waiting cannot help, or the time is over.

    Args:
        name: of the TPU.
        zone: such as ``"us-west4-a"``.
        project: id of the Google Cloud project.
        seconds: to wait at most; 0 asks once.
        watch: receives each answer.
        limit: seconds for one question.

    Returns:
        The last answer.

    Raises:
        RequestError: not installed, or no such TPU.
        Failed: credentials are refused, or the service is silent at the end of the time.
    """
    if importlib.util.find_spec("cloud_tpu_client") is None:
        fix = f"pip install cloud-tpu-client=={versions.CLOUD_TPU_CLIENT}"
        raise RequestError(f"cloud-tpu-client is not installed; {fix}", "not-installed")
    end = time.monotonic() + seconds
    while True:
        try:  # resolving a host's name has no limit of its own
            node = call_with_timeout(limit, lambda: _look(name, zone, project, limit))
            watch(node)
            if not node.may_become_usable or time.monotonic() + POLL > end:
                return node
        except (ServiceSilent, TimeoutError) as error:
            if time.monotonic() + POLL > end:
                if isinstance(error, ServiceSilent):
                    raise
                silent = f"the Cloud TPU service gave no answer within {limit:.0f} s"
                raise ServiceSilent(f"{silent}; check the network", "network") from error
        time.sleep(POLL)


def _look(name: str, zone: str, project: str, limit: float) -> Node:
    from cloud_tpu_client import Client

    logging.getLogger("googleapiclient.http").setLevel(logging.ERROR)  # it logs refusals, too
    service = None
    try:
        service = _service(limit)
        client = Client(tpu=name, zone=zone, project=project, service=service)
        state, endpoints = client.state() or "", []
        if state == "READY":
            with contextlib.suppress(RuntimeError, KeyError):  # not READY any more; no addresses
                endpoints = [f"{e['ipAddress']}:{e['port']}" for e in client.network_endpoints()]
        health, version = client.health() or "", client.runtime_version() or ""
        kind = client.accelerator_type() or ""
        return Node(name, zone, project, state, health, version, kind, endpoints)
    except Exception as error:
        # The client wraps what happened in a ValueError about its own argument.
        cause = error.__context__ if type(error) is ValueError and error.__context__ else error
        raise _explain(cause, name, zone, project, service) from None


def _service(limit: float) -> Any:
    """Return the object that the client asks, made by the library that it uses itself."""
    import google.auth
    import google_auth_httplib2
    import httplib2
    from googleapiclient import discovery

    with warnings.catch_warnings():  # a user's credentials name no project for quotas
        warnings.simplefilter("ignore")
        credentials, _ = google.auth.default(scopes=[SCOPE])
    http = google_auth_httplib2.AuthorizedHttp(credentials, http=httplib2.Http(timeout=limit / 3))
    url = os.environ.get("TPU_API_DISCOVERY_URL") or discovery.DISCOVERY_URI
    return discovery.build(
        "tpu", "v1", http=_Once(http), discoveryServiceUrl=url, cache_discovery=False
    )


class _Once:
    """Requests each address once: the client repeats the request for every property."""

    def __init__(self, http: Any):
        self._http = http
        self._answers: dict[str, Any] = {}

    def request(self, uri: str, *args: Any, **kwargs: Any) -> Any:
        if uri not in self._answers:
            self._answers[uri] = self._http.request(uri, *args, **kwargs)
        return self._answers[uri]


# HTTP status → kind of error, code, message.
_REFUSALS: dict[int, tuple[type[Failed | RequestError], str, str]] = {
    400: (
        RequestError,
        "no-such-tpu",
        "the service does not understand the request for {where} (400); zone and project are ids, "
        "such as us-west4-a and my-project-123",
    ),
    401: (Failed, "credentials", f"the service does not accept the credentials (401); {LOGIN}"),
    403: (
        Failed,
        "permission",
        "the credentials may not see {where} (403); is the Cloud TPU API enabled (gcloud services "
        "enable tpu.googleapis.com --project={project}), and has the account the role TPU Viewer?",
    ),
    404: (RequestError, "no-such-tpu", "there is no TPU {where} (404); {others}"),
}


def _explain(error: BaseException, name: str, zone: str, project: str, service: Any) -> Exception:
    """Return an exception of the libraries as one line with the fix.

    Answers are not quoted whole: a library or a proxy may put anything into them, and credentials
    must not get into logs.
    """
    from google.auth import exceptions as auth
    from googleapiclient.errors import HttpError

    kind, what = type(error).__name__, "the Cloud TPU service"
    if isinstance(error, auth.DefaultCredentialsError):
        return Failed(f"no Google credentials on this machine; {LOGIN}", "credentials")
    if isinstance(error, auth.GoogleAuthError) and not isinstance(error, auth.TransportError):
        return Failed(
            f"the Google credentials were refused or have expired; {LOGIN}", "credentials"
        )
    library = type(error).__module__.partition(".")[0]
    if isinstance(error, OSError | auth.TransportError) or library == "httplib2":
        return ServiceSilent(f"{what} cannot be reached ({kind}); check the network", "network")
    if not isinstance(error, HttpError):
        check = f"{GCLOUD} list --zone={zone} --project={project}"
        unclear = f"cloud-tpu-client does not understand the service's answer ({kind})"
        return Failed(f"{unclear}; {check}", "answer")
    status, where = int(error.resp.status), f"{name} in zone {zone} of project {project}"
    if status in _REFUSALS:
        refusal, code, message = _REFUSALS[status]
        others = _others(service, zone, project) if status == 404 else ""
        return refusal(message.format(where=where, project=project, others=others), code)
    silent = ServiceSilent if status == 429 or status >= 500 else Failed
    return silent(f"{what} answered {status}; try again later", "service")


def _others(service: Any, zone: str, project: str) -> str:
    """Return which TPUs are in the zone, if the service lists them."""
    command = f"{GCLOUD} list --zone={zone} --project={project}"
    try:
        parent = f"projects/{project}/locations/{zone}"
        answer = service.projects().locations().nodes().list(parent=parent).execute()
        names = [node["name"].rsplit("/", 1)[-1] for node in answer.get("nodes", [])]
    except Exception:  # listing is not allowed, or the zone itself does not exist
        return f"check name, zone and project with: {command}"
    if not names:
        return f"zone {zone} has none of this project; another zone: {command}"
    return f"in this zone are: {', '.join(names)}"
