"""The page of a run that goes on, over HTTP."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from grpo_dist import hosts
from grpo_dist.errors import ConfigError
from grpo_dist.report.page import ReportServer
from tests.messages import refuses
from tests.report.runs import write_run, write_step

ROW = {"step": 1, "critic/score/mean": 0.25}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [ROW])


@pytest.fixture
def server(run: Path) -> Iterator[ReportServer]:
    with ReportServer([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_new_steps_are_seen(server: ReportServer, run: Path) -> None:
    with httpx.Client(base_url=server.url) as client:
        assert "data-overview" not in client.get("").text.partition("<script>")[0]
        assert client.get("data/overview").json()["steps"] == []
        write_run(run, [ROW, ROW | {"step": 2}])
        write_step(run, 2, ["1", "2"], [1.0, 0.0])
        overview = client.get("data/overview").json()
        assert overview["steps"] == [2]
        assert overview["charts"][0]["figure"]["data"][0]["x"] == [1, 2]
        step = client.get("data/step-2").json()
        assert [response["score"] for response in step["groups"][0]["responses"]] == [1.0, 0.0]
        assert step["pieces"]


def test_only_those_who_know_the_address(server: ReportServer) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    host = server.url.rpartition("/")[0].rpartition("/")[0]
    for path in ("/", "/data/overview", "/wrong/data/overview", "/ü/"):
        answer = httpx.get(host + path)
        assert answer.status_code == 403
        assert "critic" not in answer.text


def test_other_names_of_the_machine_are_refused(server: ReportServer) -> None:
    """A page of another site can turn its name to this address, and knows no token; this is the second lock."""
    for host, status in (("evil.example", 403), ("localhost", 200)):
        assert httpx.get(server.url + "data/overview", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: "])
def test_slow_connections_are_closed(run: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "REQUEST_S", 0.2)
    with ReportServer([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with socket.create_connection(server.server_address[:2], timeout=30) as connection:
            connection.sendall(sent)
            assert connection.recv(1000) == b""
        server.shutdown()
        thread.join()


def test_other_paths_are_nothing(server: ReportServer) -> None:
    for path in ("data/step-", "data/step-..%2F..%2Fconfig", "data/other", "../config.yaml"):
        assert httpx.get(server.url + path).status_code in (403, 404)


def test_what_cannot_be_read_is_told_and_the_server_stays(server: ReportServer, run: Path) -> None:
    assert "step 9" in httpx.get(server.url + "data/step-9").json()["problems"][0]
    (run / "metrics.jsonl").write_text('no row\n{"step": 1}\n')
    assert "line 1" in httpx.get(server.url + "data/overview").json()["problems"][0]
    (run / "metrics.jsonl").unlink()
    assert httpx.get(server.url + "data/overview").status_code == 500
    (run / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    assert httpx.get(server.url + "data/overview").status_code == 200


def test_a_port_that_is_taken(run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with refuses(ConfigError, f"--port {port}"):
            ReportServer([run], port)
