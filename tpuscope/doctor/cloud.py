"""What the Cloud TPU service says of a TPU by its name: state, health, type, addresses.

Through ``cloud-tpu-client``, which speaks the service's API v1. It wants project, zone and name,
and Google credentials; on the machine that a TPU hangs on nothing of this is needed.

Left to itself that client waits up to 60 s for each of two requests a question, forgets what kind
of error it had, and knows only old kinds of credentials. So the service object that it asks is made
here, from the same libraries: with google-auth's credentials, a time limit for each request, and a
limit for everything together.
"""

import contextlib
import importlib.util
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..timeouts import call_with_timeout

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
LOGIN = "gcloud auth application-default login"
POLL = 10.0  # seconds between two questions while waiting


class CloudError(RuntimeError):
    """The service could not be asked, or refused; the message says what to do.

    Attributes:
        request_is_wrong: name, zone, project or installation have to change, not the service.
    """

    def __init__(self, message: str, request_is_wrong: bool = False):
        super().__init__(message)
        self.request_is_wrong = request_is_wrong


@dataclass(frozen=True)
class Node:
    """A Cloud TPU as the service describes it; "" for what it does not say."""

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
        return self.state == "READY" and self.health == "HEALTHY"

    @property
    def may_become_usable(self) -> bool:
        """Whether waiting can help."""
        if self.state == "READY":
            return not self.usable
        return self.state in ("CREATING", "RESTARTING", "REIMAGING", "REPAIRING", "STARTING")

    def advice(self) -> str:
        """What to type; "" if it is usable."""
        where = f"{self.name} --zone={self.zone} --project={self.project}"
        command = "gcloud compute tpus tpu-vm"
        if self.usable:
            return ""
        if self.state in ("PREEMPTED", "TERMINATED"):
            kind = self.accelerator_type or "TYPE"
            return (
                f"Google took it back, and it does not come again: {command} delete {where}; then "
                f"{command} create {where} --accelerator-type={kind} --version=VERSION"
            )
        if self.state in ("STOPPED", "STOPPING"):
            return f"{command} start {where}"
        if self.may_become_usable and self.state != "READY":
            return "it is on its way: --wait 20 waits for it"
        if self.state == "READY":
            return (
                f"--wait 20 waits until it is healthy; if it stays so: {command} stop {where}; "
                f"then {command} start {where}"
            )
        return f"{command} describe {where}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def installed() -> bool:
    """Whether cloud-tpu-client is installed."""
    return importlib.util.find_spec("cloud_tpu_client") is not None


def look(name: str, zone: str, project: str, limit: float = 30.0, credentials: Any = None) -> Node:
    """Ask once.

    Args:
        name: of the TPU.
        zone: such as ``"us-west4-a"``.
        project: id of the Google Cloud project.
        limit: seconds for everything together.
        credentials: google-auth's; None takes the machine's (application default credentials).

    Raises:
        CloudError: not installed, no or wrong credentials, no such TPU, no answer.
    """
    if not installed():
        raise CloudError(
            "cloud-tpu-client is not installed; pip install 'mshnet[cloud]'", request_is_wrong=True
        )
    try:  # looking up a host's name, log, has no limit itself
        return call_with_timeout(limit, lambda: _look(name, zone, project, credentials, limit))
    except TimeoutError as error:
        raise ServiceSilent(
            f"the Cloud TPU service gave no answer within {limit:.0f} s; check the network"
        ) from error


def wait(
    name: str,
    zone: str,
    project: str,
    seconds: float,
    watch: Callable[[Node], None] = lambda node: None,
    poll: float | None = None,
    limit: float = 30.0,
    credentials: Any = None,
) -> Node:
    """Ask until the TPU is READY and HEALTHY, waiting cannot help, or the time is over.

    A service that does not answer for a while is asked again.

    Args:
        seconds: to wait at most.
        watch: told of each answer.
        poll: seconds between two questions; None: :data:`POLL`.

    Returns:
        The last answer.

    Raises:
        CloudError: as :func:`look`; of a silent service only if it is silent at the end.
    """
    end, poll = time.monotonic() + seconds, POLL if poll is None else poll
    while True:
        try:
            node = look(name, zone, project, limit, credentials)
            watch(node)
            if node.usable or not node.may_become_usable or time.monotonic() + poll > end:
                return node
        except ServiceSilent:
            if time.monotonic() + poll > end:
                raise
        time.sleep(poll)


class ServiceSilent(CloudError):
    """No answer, or one that says to come again later."""


def _look(name: str, zone: str, project: str, credentials: Any, limit: float) -> Node:
    # It says each refusal in the log, too.
    logging.getLogger("googleapiclient.http").setLevel(logging.ERROR)
    from cloud_tpu_client import Client

    where = f"{name} in zone {zone} of project {project}"
    service = None
    try:
        service = _service(credentials, limit)
        client = Client(tpu=name, zone=zone, project=project, service=service)
        state = client.state() or ""
        endpoints = []
        if state == "READY":
            with contextlib.suppress(RuntimeError, KeyError):  # not READY any more; no addresses
                endpoints = [f"{e['ipAddress']}:{e['port']}" for e in client.network_endpoints()]
        return Node(
            name,
            zone,
            project,
            state,
            client.health() or "",
            client.runtime_version() or "",
            client.accelerator_type() or "",
            endpoints,
        )
    except CloudError:
        raise
    except Exception as error:
        # The client wraps what happened in a ValueError about its own argument.
        cause = error.__context__ if type(error) is ValueError and error.__context__ else error
        raise _explain(cause, where, service, zone, project) from None


def _service(credentials: Any, limit: float) -> Any:
    """The object that the client asks, from the library that it uses itself."""
    import google.auth
    import google_auth_httplib2
    import httplib2
    from googleapiclient import discovery

    if credentials is None:
        with warnings.catch_warnings():  # a user's credentials would name no project for quotas
            warnings.simplefilter("ignore")
            credentials, _ = google.auth.default(scopes=[SCOPE])
    http = httplib2.Http(timeout=limit / 3)
    url = os.environ.get("TPU_API_DISCOVERY_URL") or discovery.DISCOVERY_URI
    return discovery.build(
        "tpu",
        "v1",
        http=_Once(google_auth_httplib2.AuthorizedHttp(credentials, http=http)),
        discoveryServiceUrl=url,
        cache_discovery=False,
    )


class _Once:
    """Asks for each address once: the client asks anew for each property."""

    def __init__(self, http: Any):
        self._http = http
        self._answers: dict[str, Any] = {}

    def request(self, uri: str, *args: Any, **kwargs: Any) -> Any:
        if uri not in self._answers:
            self._answers[uri] = self._http.request(uri, *args, **kwargs)
        return self._answers[uri]


def _explain(error: BaseException, where: str, service: Any, zone: str, project: str) -> CloudError:
    """An exception of the libraries, as one line that says what to do.

    Answers are not quoted whole: what a library or a proxy puts into them is not known, and
    credentials must not get into logs.
    """
    from google.auth import exceptions as auth
    from googleapiclient.errors import HttpError

    if isinstance(error, auth.DefaultCredentialsError):
        return CloudError(f"no Google credentials on this machine; {LOGIN}")
    if isinstance(error, auth.TransportError):
        return ServiceSilent("Google's login service cannot be reached; check the network")
    if isinstance(error, auth.GoogleAuthError):
        return CloudError(f"the Google credentials were refused or have expired; {LOGIN}")
    if isinstance(error, HttpError):
        return _explain_status(int(error.resp.status), where, service, zone, project)
    if isinstance(error, OSError) or type(error).__module__.startswith("httplib2"):
        return ServiceSilent(
            f"the Cloud TPU service cannot be reached ({type(error).__name__}); check the network"
        )
    return CloudError(
        f"the Cloud TPU service answered what cloud-tpu-client does not understand "
        f"({type(error).__name__}); gcloud compute tpus tpu-vm list --zone={zone} "
        f"--project={project}"
    )


def _explain_status(status: int, where: str, service: Any, zone: str, project: str) -> CloudError:
    if status == 401:
        return CloudError(f"the service does not accept the credentials (401); {LOGIN}")
    if status == 403:
        return CloudError(
            f"the credentials may not see {where} (403); is the Cloud TPU API enabled (gcloud "
            f"services enable tpu.googleapis.com --project={project}), and has the account the "
            "role TPU Viewer?"
        )
    if status == 404:
        return CloudError(
            f"there is no TPU {where} (404); {_others(service, zone, project)}",
            request_is_wrong=True,
        )
    if status == 400:
        return CloudError(
            f"the service does not understand the request for {where} (400); zone and project are "
            "ids, such as us-west4-a and my-project-123",
            request_is_wrong=True,
        )
    if status == 429 or status >= 500:
        return ServiceSilent(f"the Cloud TPU service is out of order ({status}); try again later")
    return CloudError(f"the Cloud TPU service answered {status}; try again later")


def _others(service: Any, zone: str, project: str) -> str:
    """Which TPUs there are in the zone, if the service says so."""
    command = f"gcloud compute tpus tpu-vm list --zone={zone} --project={project}"
    try:
        parent = f"projects/{project}/locations/{zone}"
        answer = service.projects().locations().nodes().list(parent=parent).execute()
        names = [node["name"].rsplit("/", 1)[-1] for node in answer.get("nodes", [])]
    except Exception:  # may not list, or the zone itself does not exist
        return f"check name, zone and project with: {command}"
    if not names:
        return f"zone {zone} has none of this project; another zone: {command}"
    return f"in this zone are: {', '.join(names)}"
