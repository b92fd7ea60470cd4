"""What the report reads of a run, and the page: one file, in which nothing of a model or a user is code; of a run that
goes on, over HTTP.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from plotly.offline import get_plotlyjs

from grpo_dist import hosts
from grpo_dist.errors import ConfigError
from grpo_dist.report.page import ReportServer, config_table, overview, page
from grpo_dist.report.rollouts import read_step
from grpo_dist.runs import read_run
from tests.messages import refuses, says
from tests.report.runs import write_run, write_step

EVIL = "</script><script>alert(1)</script>{{ data }}"
ROW = {"step": 1, "critic/score/mean": 0.25}


def data_in(text: str) -> dict[str, Any]:
    found = re.findall(r'id="data-([\w-]+)">([A-Za-z0-9+/=]*)</script>', text)
    return {name: json.loads(gzip.decompress(base64.b64decode(packed))) for name, packed in found}


def test_a_run(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "val-core/sums/acc/mean@1": 0.25},
        {"step": 1, "critic/score/mean": 0.5, "val-core/sums/acc/mean@1": 0.5, "val-core/sums/reward/mean@1": 0.5},
    ]
    folder = write_run(tmp_path / "run", rows, "trainer.project_name=sums", "trainer.experiment_name=first")
    write_step(folder, 1, ["1", "2"], [1.0, 0.0], tokens=False)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("reward_kwargs: {}", "reward_kwargs: {api_key: hush}"))
    assert "hush" in (folder / "config.yaml").read_text()
    run = read_run(folder)
    assert (run.name, len(run.rows), run.rollout_steps) == ("sums/first", 2, [1])
    assert (run.validation, run.alarms) == (["val-core/sums/acc/mean@1"], [])
    assert "hush" not in str(run.config)
    with refuses(ConfigError, tmp_path, "metrics.jsonl", "trainer.default_local_dir"):
        read_run(tmp_path)


def test_alarms_are_those_of_the_run(tmp_path: Path) -> None:
    """KL above 1 for three steps in a row, by the run's own threshold above 2."""
    rows = [{"step": step, "actor/kl_loss": kl} for step, kl in enumerate((0.1, 1.5, 1.5, 0.1, 1.5, 1.6, 1.7, 1.8), 1)]
    (alarm,) = read_run(write_run(tmp_path / "run", rows)).alarms
    assert (alarm.step, alarm.rule) == (7, "kl")
    says(alarm.text, "actor/kl_loss", "1.7", "actor.kl_loss_coef")
    assert read_run(write_run(tmp_path / "other", rows, "trainer.health.kl.threshold=2")).alarms == []


@pytest.mark.parametrize(("last", "ended"), [(0.95, True), (0.85, False)])
def test_why_a_run_ended_early_is_said(tmp_path: Path, last: float, ended: bool) -> None:
    rows = [{"step": step, "val-core/x": value} for step, value in ((0, 0.5), (5, last))]
    run = read_run(write_run(tmp_path, rows, "trainer.stop_at={metric: val-core/x, value: 0.9}"))
    told = [text for name, text in overview([run])["facts"] if name == "ended"]
    assert bool(told) is ended
    if ended:
        says(told, "val-core/x", "0.95", "trainer.stop_at.value=0.9")


def test_which_role_waited_is_said_of_a_run_with_idle_shares(tmp_path: Path) -> None:
    rows = [{"step": n, "timing_s/step": 1.0, "perf/idle/actor": 0.5, "perf/idle/rollout": 0.25} for n in (1, 2, 3)]
    run = read_run(write_run(tmp_path / "run", rows))
    says(run.waited, "step 3", "ranks 50%", "engines 25%")
    assert overview([run])["waited"] == run.waited
    assert read_run(write_run(tmp_path / "short", rows[:2])).waited == ""


def test_a_page_holds_everything_and_what_users_and_models_write_is_no_html(tmp_path: Path) -> None:
    rows = [ROW | {"timing_s/step": 2.0}, {"step": 2, "critic/score/mean": 0.5}]
    run = write_run(tmp_path / "run", rows, f"trainer.experiment_name='{EVIL}'")
    write_step(run, 1, ["1", EVIL], [1.0, 0.0], tokens=False)
    text = page([read_run(run)], {1: read_step(run, 1, None)})
    data = data_in(text)
    assert data.keys() == {"overview", "step-1"}, "and what looks like a place for data is none"
    assert data["overview"]["charts"][0]["figure"]["data"][0]["y"] == [0.25, 0.5]
    assert ["training time", "2.0 s, 2.0 s a step"] in data["overview"]["facts"]
    assert data["step-1"]["groups"][0]["responses"][1]["output"] == EVIL
    assert get_plotlyjs() in text
    own = text.replace(get_plotlyjs(), "")
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", own), "nothing is loaded from elsewhere"
    assert """content="default-src 'none'; """ in own, "nor by Plotly"
    assert "alert(1)</script>" not in text
    assert "&lt;script&gt;" in text, "in the title"
    assert data_in(page([read_run(run)], None)) == {}, "without steps the page asks the server"


def test_two_runs_differ_in_these_keys(tmp_path: Path) -> None:
    key = "actor_rollout_ref.rollout.n"
    named = [(name, f"trainer.experiment_name={name}", f"{key}={n}") for name, n in (("a", 4), ("b", 8))]
    runs = [read_run(write_run(tmp_path / name, [ROW], *overrides)) for name, *overrides in named]
    found = data_in(page(runs, {}))["overview"]["config"]
    assert found["runs"] == ["grpo_dist/a", "grpo_dist/b"]
    assert {"key": "trainer.experiment_name", "values": ["a", "b"]} in found["keys"]
    assert dict(config_table(runs))[key] == ["4", "8"]
    assert "algorithm.adv_estimator" not in dict(config_table(runs))
    assert dict(config_table(runs[:1]))["algorithm.adv_estimator"] == ["grpo"], "a single run shows all of its keys"


# --- over HTTP -----------------------------------------------------------------------------------------------------
@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [ROW])


@contextmanager
def served(run: Path) -> Iterator[ReportServer]:
    with ReportServer([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def server(run: Path) -> Iterator[ReportServer]:
    with served(run) as server:
        yield server


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
    """Under another name of the machine not even they: a page of another site can turn its name to this address."""
    assert server.url.startswith("http://127.0.0.1:")
    host = server.url.rpartition("/")[0].rpartition("/")[0]
    for path in ("/", "/data/overview", "/wrong/data/overview", "/ü/"):
        answer = httpx.get(host + path)
        assert (answer.status_code, "critic" in answer.text) == (403, False)
    for name, status in (("evil.example", 403), ("localhost", 200)):
        assert httpx.get(server.url + "data/overview", headers={"Host": name}).status_code == status
    for path in ("data/step-", "data/step-..%2F..%2Fconfig", "data/other", "../config.yaml"):
        assert httpx.get(server.url + path).status_code in (403, 404)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: "])
def test_slow_connections_are_closed(run: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "REQUEST_S", 0.2)
    with served(run) as server, socket.create_connection(server.server_address[:2], timeout=30) as connection:
        connection.sendall(sent)
        assert connection.recv(1000) == b""


def test_what_cannot_be_read_is_told_and_the_server_stays(server: ReportServer, run: Path) -> None:
    assert "step 9" in httpx.get(server.url + "data/step-9").json()["problems"][0]
    (run / "metrics.jsonl").write_text('no row\n{"step": 1}\n')
    assert "line 1" in httpx.get(server.url + "data/overview").json()["problems"][0]
    (run / "metrics.jsonl").unlink()
    assert httpx.get(server.url + "data/overview").status_code == 500
    (run / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    assert httpx.get(server.url + "data/overview").status_code == 200
    port = server.server_address[1]
    with refuses(ConfigError, f"--port {port}"):
        ReportServer([run], port)
