"""The server: all of its routes, and which requests it refuses."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from rollgraph.view.export import STATIC
from rollgraph.view.runs import Catalog
from rollgraph.view.server import Access, access_url, find_changed_runs, is_local, make_app
from tests.view.synthetic_run import write_group, write_metrics, write_run

LOCAL = Access("127.0.0.1", 7117)
GUARDED = Access("0.0.0.0", 7117, "secret")


class Client:
    """Calls the ASGI application with exactly these paths and headers, which a client library would normalize."""

    def __init__(self, folder: Path, access: Access = LOCAL) -> None:
        self.catalog = Catalog([folder])
        self._app = make_app(self.catalog, access)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        path, _, query = path.partition("?")
        all_headers = {"host": "127.0.0.1:7117", **{name.replace("_", "-"): value for name, value in headers.items()}}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 7117),
        }
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(self._app(scope, receive, send))
        head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], head, b"".join(message.get("body", b"") for message in sent[1:])

    def json(self, path: str, **headers: str) -> tuple[int, Any]:
        status, _, body = self.get(path, **headers)
        return status, json.loads(body)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_folder = write_run(tmp_path / "runs" / "mine", steps=6)
    write_group(run_folder, 5, 0)
    return run_folder


ADDRESSES = [
    "runs",
    "runs/mine/names",
    "runs/mine/series?names=reward%0Anothing&x=time&from=0&to=9&points=3",
    "runs/mine/phases",
    "runs/mine/samples?q=sample",
    "runs/mine/samples/5.train.0.1",
    "runs/mine/prompts",
    "runs/mine/diagnosis",
    "runs/mine/machine",
    "compare?ids=mine",
]


def test_every_route_answers_with_notes(folder: Path) -> None:
    client = Client(folder)
    for address in ADDRESSES:
        status, answer = client.json(f"/api/{address}")
        assert status == 200, address
        assert isinstance(answer["notes"], list)
    _, names = client.json("/api/runs/mine/names")
    described = {entry["name"]: entry for entry in names["names"]}
    assert described["policy/kl"]["topic"] == "policy"
    assert described["policy/kl"]["description"] == "KL divergence from the reference policy."


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/api/runs/other/names", 404),
        ("/api/runs/mine/secrets", 404),
        ("/api/runs/mine/samples/5.train.0.9", 404),
        ("/api/runs/mine/prompts/0", 404),
        ("/api/runs/mine/samples?step=soon", 400),
        ("/api/runs/mine/series?names=reward&x=moon", 400),
        ("/api/compare?ids=other", 404),
        ("/api", 404),
        ("/api/runs/../../../etc/passwd", 404),
        ("/static/../routes.py", 404),
        ("/static/%2e%2e/routes.py", 404),
        ("/static//etc/passwd", 404),
        ("/../../etc/passwd", 404),
    ],
)
def test_missing_resources_are_errors_with_a_sentence(folder: Path, address: str, status: int) -> None:
    actual, answer = Client(folder).json(address)
    assert actual == status
    assert answer["error"]
    assert "root:" not in answer["error"]


def test_an_exception_is_raised_after_the_response(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgraph.view.answers.list_runs", lambda catalog: 1 / 0)
    client = Client(folder)
    with pytest.raises(ZeroDivisionError):  # raised after the response, to be shown in the terminal
        client.get("/api/runs")


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:7117", True),
        ("localhost:7117", True),
        ("[::1]:7117", True),
        ("evil.example", False),  # DNS rebinding: a name that resolves to this machine
        ("127.0.0.1.evil.example:7117", False),
        ("", False),
        ("[", False),
    ],
)
def test_the_host_must_be_this_machine(folder: Path, host: str, allowed: bool) -> None:
    assert (Client(folder).get("/api/runs", host=host)[0] == 200) == allowed


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://127.0.0.1:7117"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:8000"}, 403),  # another server on this machine
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-origin"}, 200),
    ],
)
def test_requests_of_other_origins_are_refused(folder: Path, headers: dict[str, str], status: int) -> None:
    assert Client(folder).get("/api/runs", **headers)[0] == status


def test_only_get_requests_are_allowed(folder: Path) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert Client(folder).get("/api/runs", method=method)[0] == 405


def test_every_response_has_a_strict_content_security_policy(folder: Path) -> None:
    for address in ("/api/runs", "/nothing", "/static/nothing.js"):
        _, headers, _ = Client(folder).get(address)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    assert "content-security-policy" in Client(folder).get("/api/runs", host="evil.example")[1]


def test_a_token_is_required_and_becomes_a_cookie(folder: Path) -> None:
    client = Client(folder, GUARDED)
    assert client.get("/api/runs", host="192.168.1.7:7117")[0] == 401
    for wrong in ("wrong", "", "%00", "%ed%a0%80"):
        assert client.get(f"/?token={wrong}")[0] == 401
    assert client.get("/api/runs?token=secret")[0] == 200
    assert client.get("/api/runs", cookie=f"{GUARDED.cookie}=wrong")[0] == 401
    status, headers, _ = client.get("/?token=secret", host="192.168.1.7:7117")
    assert (status, headers["location"]) == (303, "./")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert client.get("/api/runs", host="192.168.1.7:7117", cookie=cookie.partition(";")[0])[0] == 200


def test_servers_on_different_ports_have_different_cookies() -> None:
    """Cookies ignore ports: with one name for both, the last server would end the session of the first."""
    first, second = Access("0.0.0.0", 7117, "a"), Access("0.0.0.0", 7118, "b")
    assert first.cookie != second.cookie
    assert access_url(Access("127.0.0.1", 7117, "a&b=ü")) == "http://127.0.0.1:7117/?token=a%26b%3D%C3%BC"


def test_a_run_whose_folder_is_gone_is_not_found(folder: Path) -> None:
    client = Client(folder)
    assert client.json("/api/runs/mine/samples")[0] == 200
    shutil.rmtree(folder)
    assert client.json("/api/runs/mine/samples") == (404, {"error": "there is no run 'mine'", "notes": []})


def test_only_this_machine_is_local() -> None:
    assert all(map(is_local, ("localhost", "127.0.0.1", "127.1.2.3", "::1")))
    assert not any(map(is_local, ("0.0.0.0", "::", "192.168.1.7", "example.com", "")))


def test_hostile_text_arrives_as_it_is(folder: Path) -> None:
    hostile = "<script>alert(1)</script>&amp;\u202e\u2028\0" + "\ud800"
    write_group(folder, 5, 1, size=1, completion=hostile)
    _, headers, body = Client(folder).get("/api/runs/mine/samples/5.train.1.0")
    assert headers["content-type"] == "application/json"
    assert json.loads(body)["completion"] == hostile


def test_each_change_of_a_run_is_reported_once(folder: Path) -> None:
    catalog = Catalog([folder.parent])
    known: dict[str, Any] = {}

    def size_of(run: Path) -> int:
        return sum((run / name).stat().st_size for name in ("metrics.jsonl", "samples.jsonl") if (run / name).exists())

    def changes() -> list[tuple[str, int, str]]:
        return [(change["run"], change["size"], change["status"]) for change in find_changed_runs(catalog, known)]

    assert changes() == [("runs-mine", size_of(folder), "stopped")]
    assert changes() == []
    write_metrics(folder, {"reward": lambda step: 0.0}, range(6, 7))
    assert changes() == [("runs-mine", size_of(folder), "stopped")]
    metrics = folder / "metrics.jsonl"
    (folder / "part").write_text(metrics.read_text().replace('"step": 6, "reward": 0.0', '"step": 6, "reward": 1.0'))
    (folder / "part").replace(metrics)  # another file of the same size
    assert changes() == [("runs-mine", size_of(folder), "stopped")]
    (folder / "run.lock").write_text("process 1 on another.machine")
    assert changes() == [("runs-mine", size_of(folder), "running")]
    new_run = write_run(folder.parent / "new", steps=2)
    assert [run for run, _, _ in changes()] == ["runs-new"]
    shutil.rmtree(new_run)
    assert changes() == [("runs-new", 0, "gone")]
    assert changes() == []


def test_concurrent_requests_while_the_run_grows(folder: Path) -> None:
    """Four threads request every route."""
    client = Client(folder)
    failures: list[object] = []

    def request_all() -> None:
        for address in ADDRESSES:
            status, _, _ = client.get(f"/api/{address}")
            if status != 200:
                failures.append((address, status))

    threads = [threading.Thread(target=request_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    write_metrics(folder, {"reward": lambda step: 0.0}, range(6, 200))
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_page_is_served_if_it_is_built(folder: Path) -> None:
    if not (STATIC / "index.html").is_file():
        pytest.skip("the page is not in this checkout")
    status, headers, body = Client(folder).get("/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert b'<script type="module"' in body


def test_a_file_that_disappears_while_read_is_status_503(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: Any) -> bytes:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("rollgraph.view.index.SamplesIndex.read_group", read)
    status, answer = Client(folder).json("/api/runs/mine/samples")
    assert (status, answer["error"]) == (503, "a file of the run disappeared while it was read")
