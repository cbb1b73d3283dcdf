"""The Cloud TPU service as a program meets it: a local server that answers as the service does.

Everything of the client is real: cloud-tpu-client, the discovery document, google-auth, and a
service account whose key was made here and whose login is the same server.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tpuscope import versions
from tpuscope.cli import main
from tpuscope.doctor import cloud
from tpuscope.errors import Failed, RequestError

pytest.importorskip("cloud_tpu_client", reason="the extra `cloud` is not installed")

SECRET = "ya29.this-token-must-not-be-seen"
PROJECT, ZONE = "my-project-123", "us-west4-a"
PARENT = f"projects/{PROJECT}/locations/{ZONE}"


def node(name="mine", state="READY", health="HEALTHY"):
    """As the API v1 describes a TPU."""
    described = {
        "name": f"{PARENT}/nodes/{name}",
        "acceleratorType": "v5litepod-8",
        "state": state,
        "tensorflowVersion": "v2-alpha-tpuv5-lite",
        "networkEndpoints": [{"ipAddress": "10.0.0.2", "port": 8470}],
    }
    return described | ({"health": health} if health else {})


class Service:
    """A Cloud TPU service on this machine, and its login.

    Attributes:
        answers: of nodes.get, one after the other; the last one stays. A number is a status,
            a string a body that is no JSON, None no answer at all.
        nodes: that nodes.list gives, or a status.
        login: status of the login.
        asked: paths of the API requests so far.
    """

    def __init__(self):
        self.answers, self.nodes, self.login, self.asked = [node()], [node()], 200, []
        self.released = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_POST(self):
                refused = {"error": "invalid_grant", "error_description": f"not {SECRET}"}
                granted = {"access_token": SECRET, "expires_in": 3600, "token_type": "Bearer"}
                self.reply(service.login, granted if service.login == 200 else refused)

            def do_GET(self):
                path = self.path.split("?")[0]
                if path == "/discovery":
                    return self.reply(200, service.discovery())
                service.asked.append(path)
                if self.headers.get("Authorization") != f"Bearer {SECRET}":
                    return self.reply(401, error(401))
                if path == f"/v1/{PARENT}/nodes":
                    listed = service.nodes
                    if isinstance(listed, int):
                        return self.reply(listed, error(listed))
                    return self.reply(200, {"nodes": listed})
                answer = service.answers[0]
                if len(service.answers) > 1:
                    service.answers.pop(0)
                if answer is None:
                    service.released.wait(30)
                elif isinstance(answer, int):
                    self.reply(answer, error(answer))
                else:
                    self.reply(200, answer)

            def reply(self, status, body):
                content = body if isinstance(body, str) else json.dumps(body)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(content.encode())

        def error(status):
            text = f"status {status} for {SECRET}"
            return {"error": {"code": status, "message": text, "errors": [{"reason": "x"}]}}

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def discovery(self):
        """The part of the service's discovery document that the client needs."""

        def method(name, parameter, path):
            flat = {"type": "string", "location": "path", "required": True, "pattern": "^.*$"}
            return {
                "id": f"tpu.projects.locations.nodes.{name}",
                "path": path,
                "httpMethod": "GET",
                "parameters": {parameter: flat},
                "parameterOrder": [parameter],
                "response": {"$ref": "Any"},
            }

        methods = {
            "get": method("get", "name", "v1/{+name}"),
            "list": method("list", "parent", "v1/{+parent}/nodes"),
        }
        return {
            "name": "tpu",
            "version": "v1",
            "rootUrl": f"{self.url}/",
            "servicePath": "",
            "auth": {"oauth2": {"scopes": {cloud.SCOPE: {}}}},
            "schemas": {"Any": {"id": "Any", "type": "object"}},
            "resources": {
                "projects": {
                    "resources": {"locations": {"resources": {"nodes": {"methods": methods}}}}
                }
            },
        }


@pytest.fixture(scope="module")
def private_key():
    """A key of our own, in the form of a service account's."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.PKCS8
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, plain).decode()


@pytest.fixture
def service(monkeypatch, tmp_path, private_key):
    service = Service()
    account = tmp_path / "account.json"
    account.write_text(
        json.dumps(
            {
                "type": "service_account",
                "project_id": PROJECT,
                "client_email": "me@my-project-123.iam.gserviceaccount.com",
                "private_key_id": "1",
                "private_key": private_key,
                "token_uri": f"{service.url}/token",
            }
        )
    )
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(account))
    monkeypatch.setenv("TPU_API_DISCOVERY_URL", f"{service.url}/discovery")
    monkeypatch.setattr(cloud, "POLL", 0.01)
    yield service
    service.released.set()
    service.server.shutdown()
    service.server.server_close()


def ask(capsys, *flags, name="mine"):
    """Exit code and everything that was printed, without a secret in it."""
    code = main(["doctor", "--cloud", name, "--zone", ZONE, "--project", PROJECT, *flags])
    printed = capsys.readouterr()
    text = printed.out + printed.err
    for secret in (SECRET, "PRIVATE KEY", "gserviceaccount"):
        assert secret not in text
    return code, printed.out, printed.err


def test_a_healthy_tpu_is_described(service, capsys):
    code, out, _ = ask(capsys)
    assert code == 0
    for part in ("READY, HEALTHY", "v5litepod-8", "v2-alpha-tpuv5-lite", "10.0.0.2:8470"):
        assert part in out
    assert service.asked == [f"/v1/{PARENT}/nodes/mine"], "asked once, by its full name"
    code, out, _ = ask(capsys, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["usable"]
    assert answer["node"]["endpoints"] == ["10.0.0.2:8470"]


@pytest.mark.parametrize(
    ("state", "health", "expected"),
    [
        ("PREEMPTED", None, "tpu-vm delete mine --zone=us-west4-a --project=my-project-123"),
        ("TERMINATED", None, "--accelerator-type=v5litepod-8"),
        ("STOPPED", None, "tpu-vm start mine --zone=us-west4-a"),
        ("CREATING", None, "--wait 20"),
        ("READY", "UNHEALTHY_MAINTENANCE", "tpu-vm stop mine"),
        ("DELETING", None, "tpu-vm describe mine"),
    ],
)
def test_a_tpu_that_cannot_be_used_comes_with_the_command(service, capsys, state, health, expected):
    service.answers = [node(state=state, health=health)]
    code, out, _ = ask(capsys)
    assert code == 1
    assert f"not usable: {state}" in out
    assert expected in out


def test_waiting_ends_when_the_tpu_is_healthy(service, capsys):
    service.answers = [node(state="CREATING", health=None), node(health=None), node()]
    code, out, err = ask(capsys, "--wait", "1")
    assert code == 0
    assert "CREATING" in err
    assert "READY, HEALTHY" in out


def test_waiting_survives_a_service_that_is_out_of_order_for_a_while(service):
    service.answers = [503, node()]
    assert cloud.wait("mine", ZONE, PROJECT, 30).usable
    assert len(service.asked) == 2


def test_waiting_has_an_end_and_does_not_wait_for_what_never_comes(service):
    service.answers = [node(state="CREATING", health=None)]
    assert cloud.wait("mine", ZONE, PROJECT, 0.2).state == "CREATING"
    service.answers, service.asked = [node(state="PREEMPTED", health=None)], []
    assert cloud.wait("mine", ZONE, PROJECT, 600).state == "PREEMPTED"
    assert len(service.asked) == 1


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (401, 1, "does not accept the credentials (401); gcloud auth application-default login"),
        (403, 1, "gcloud services enable tpu.googleapis.com --project=my-project-123"),
        (404, 2, "in this zone are: mine"),
        (400, 2, "zone and project are ids"),
        (500, 1, "answered 500"),
        (429, 1, "answered 429"),
        ("<html>a proxy's page</html>", 1, "does not understand"),
    ],
)
def test_refusals_are_one_line_with_the_fix(service, capsys, status, code, expected):
    service.answers = [status]
    given, out, err = ask(capsys, name="yours")
    assert given == code
    assert expected in err
    assert err.count("\n") == 1
    assert not out


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([], "has none of this project"),
        (403, "check name, zone and project with: gcloud compute tpus tpu-vm list"),
    ],
)
def test_a_name_that_is_not_there_where_nothing_else_is(service, capsys, listed, expected):
    service.answers, service.nodes = [404], listed
    code, _, err = ask(capsys, name="yours")
    assert code == 2
    assert expected in err


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (401, Failed, "credentials"),
        (403, Failed, "permission"),
        (404, RequestError, "no-such-tpu"),
        (503, cloud.ServiceSilent, "service"),
    ],
)
def test_a_program_tells_refusals_apart_by_type_and_code(service, status, kind, code):
    service.answers = [status]
    with pytest.raises(kind) as error:
        cloud.wait("yours", ZONE, PROJECT, 0)
    assert error.value.code == code


def test_credentials_that_are_refused_at_the_login(service, capsys):
    service.login = 400
    code, _, err = ask(capsys)
    assert code == 1
    assert "refused or have expired; gcloud auth application-default login" in err


def test_no_credentials(service, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    code, out, err = ask(capsys, "--json")
    assert code == 1
    assert "no Google credentials on this machine" in err
    assert json.loads(out) == {"usable": False, "error": err.removeprefix("tpuscope: ")[:-1]}


def test_a_service_that_does_not_answer_or_is_not_there(service, monkeypatch):
    service.answers = [None]
    with pytest.raises(cloud.ServiceSilent) as silent:
        cloud.wait("mine", ZONE, PROJECT, 0, limit=1.5)
    assert silent.value.code == "network"
    service.released.set()
    monkeypatch.setenv("TPU_API_DISCOVERY_URL", "http://127.0.0.1:9/discovery")
    with pytest.raises(cloud.ServiceSilent) as silent:
        cloud.wait("mine", ZONE, PROJECT, 0, limit=10)
    assert silent.value.code == "network"


def test_without_the_extra_one_line_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(cloud.importlib.util, "find_spec", lambda name: None)
    code, _, err = ask(capsys)
    assert code == 2
    assert f"pip install cloud-tpu-client=={versions.CLOUD_TPU_CLIENT}" in err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--cloud", "mine"], "--zone is missing"),
        (["--cloud", "mine", "--zone", ZONE], "--project is missing"),
        (["--cloud", "", "--zone", ZONE, "--project", PROJECT], "--cloud is missing"),
        (["--cloud", "a", "--zone", "b", "--project", "c", "--wait", "-1"], "--wait -1.0"),
        (["--zone", ZONE], "--zone us-west4-a"),
    ],
)
def test_half_a_request(capsys, flags, expected):
    assert main(["doctor", *flags]) == 2
    assert expected in capsys.readouterr().err
