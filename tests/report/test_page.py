"""What the report reads of a run, and the page: a file, or, of a run that goes on, over HTTP."""

import base64
import functools
import gzip
import json
import math
import re
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from grpo_dist import hosts
from grpo_dist.cli.entry import main
from grpo_dist.config.schema_health import RULES
from grpo_dist.errors import ConfigError
from grpo_dist.report.charts import CHARTS, charts
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
    validated = {"step": 0, "val-core/sums/acc/mean@1": 0.25}
    rows = [validated, ROW | {"val-core/sums/acc/mean@1": 0.5, "val-core/sums/reward/mean@1": 0.5}]
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


HEAD = "reward - first | prompts | steps | equal | parted in step | last validation - first | val. prompts"
HEAD += " | val. steps | val. equal"


def test_a_run_against_another_one_on_the_prompts_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt 0 has as much in both, prompt 1 has 0 and 1 more: means of 0 and 0.5, standard error 0.25."""
    runs = [write_run(tmp_path / name, [{"step": 1}, {"step": 2}], f"trainer.experiment_name={name}") for name in "abc"]
    for folder, last in zip(runs[:2], ("fg", "xy"), strict=True):
        write_step(folder, 1, [*"abcd"], [1, 0, 0, 0], tokens=False)
        write_step(folder, 2, ["d", "e", *last], [1, 1, *[float(last == "xy")] * 2], tokens=False)
    write_step(runs[2], 2, ["1", "2"], [None, 1], tokens=False)
    for folder in runs[:2]:
        shutil.copytree(folder / "rollouts", folder / "validation")
    assert main(["report", str(runs[0]), "--compare", str(runs[1]), "--compare", str(runs[2])]) == 0
    told = capsys.readouterr().out.splitlines()
    head, *lines = (re.split("  +", line.strip()) for line in told[3:6])
    assert [line[0] for line in lines] == ["grpo_dist/b", "grpo_dist/c"]
    assert head == HEAD.split(" | ")
    assert lines[0][1:] == ["+0.25 [-0.24, +0.74]", "2", "1 to 2", "75%", "2", "+0.5 [-0.48, +1.48]", "2", "2", "50%"]
    assert "[" not in told[5], "what one of them has not scored is not compared"
    shown = data_in((runs[0] / "report.html").read_text())["overview"]
    assert [line[0] for line in shown["against"]] == ["", "grpo_dist/b", "grpo_dist/c"]
    curves = {chart["title"]: chart["figure"]["data"][0]["y"] for chart in shown["charts"]}
    assert (curves["Paired reward"], curves["Equal responses"]) == ([0, 0.5], [1, 0.5])


# --- over HTTP -----------------------------------------------------------------------------------------------------
get = functools.partial(httpx.get, timeout=60)


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
    with httpx.Client(base_url=server.url, timeout=60) as client:
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
        answer = get(host + path)
        assert (answer.status_code, "critic" in answer.text) == (403, False)
    # A page of another site can turn its name to this address.
    for name, status in (("evil.example", 403), ("localhost", 200)):
        assert get(server.url + "data/overview", headers={"Host": name}).status_code == status
    for path in ("data/step-", "data/step-..%2F..%2Fconfig", "data/other", "../config.yaml"):
        assert get(server.url + path).status_code in (403, 404)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: "])
def test_slow_connections_are_closed(run: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "REQUEST_S", 0.2)
    with served(run) as server, socket.create_connection(server.server_address[:2], timeout=30) as connection:
        connection.sendall(sent)
        assert connection.recv(1000) == b""


def test_what_cannot_be_read_is_told_and_the_server_stays(server: ReportServer, run: Path) -> None:
    assert "step 9" in get(server.url + "data/step-9").json()["problems"][0]
    (run / "metrics.jsonl").write_text('no row\n{"step": 1}\n')
    assert "line 1" in get(server.url + "data/overview").json()["problems"][0]
    (run / "metrics.jsonl").unlink()
    assert get(server.url + "data/overview").status_code == 500
    (run / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    assert get(server.url + "data/overview").status_code == 200
    port = server.server_address[1]
    with refuses(ConfigError, f"--port {port}"):
        ReportServer([run], port)


# --- figures ----------------------------------------------------------------------------------------------------------
SECONDS = "Where a step's seconds go"
EACH = {"actor/kl_loss": 1.5, "timing_s/step": 3.0, "timing_s/gen": 2.0, "perf/idle/actor": 0.25}
EACH["critic/score/max"] = 1.0
ROWS = [
    EACH | {"step": n, "critic/score/mean": n / 4, "timing_s/update_actor": 1.0 + n, "actor/grad_norm": norm}
    for n, norm in enumerate((1.0, math.nan, 1.0, 1.0), 1)
]


def drawn(folder: Path, *runs: Sequence[dict[str, float]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The charts of runs a, b, ..., and their traces by title and name."""
    named = zip("ab", runs, strict=False)
    folders = [write_run(folder / name, rows, f"trainer.experiment_name={name}") for name, rows in named]
    found = charts([read_run(each) for each in folders])
    return found, {chart["title"]: {trace["name"]: trace for trace in chart["figure"]["data"]} for chart in found}


def test_curves_of_what_is_there(tmp_path: Path) -> None:
    found, shown = drawn(tmp_path, ROWS)
    assert shown.keys() == {"Reward", "KL", "Gradient norm", SECONDS, "Idle shares"}
    assert shown["Reward"].keys() == {"mean", "best"}
    assert (shown["Reward"]["mean"]["x"], shown["Reward"]["mean"]["y"]) == ([1, 2, 3, 4], [0.25, 0.5, 0.75, 1.0])
    assert shown["Gradient norm"]["actor"]["y"] == [1.0, None, 1.0, 1.0], "a gap where there is no number"
    assert list(shown[SECONDS]) == ["update_actor", "gen"], "the longest first, without the step itself"
    assert shown[SECONDS]["update_actor"]["y"] == [2.0, 3.0, 4.0, 5.0]
    assert shown["Idle shares"]["actor"]["y"] == [0.25] * 4
    assert {chart["title"] for chart in found if chart["tab"] == "time"} == {SECONDS, "Idle shares"}
    alarm = shown["KL"]["alarm"]
    assert (alarm["x"], alarm["y"]) == ([3], [1.5])
    assert ("<br>" in alarm["text"][0], "\n" in alarm["text"][0]) == (True, False)
    for chart in found:
        go.Figure(chart["figure"])  # which raises for what Plotly does not know


def test_parts_of_the_reward_and_a_learning_rate_that_stays(tmp_path: Path) -> None:
    more = {"reward_extra/right/mean": 0.0, "reward_extra/short/mean": -0.5, "actor/lr": 1e-4, "actor/entropy": 0.5}
    found, shown = drawn(tmp_path, [row | more for row in ROWS])
    assert shown["Reward parts"].keys() == {"right", "short"}
    assert shown["Reward parts"]["short"]["y"] == [-0.5] * 4
    (rate,) = [chart["figure"]["layout"]["yaxis"] for chart in found if chart["title"] == "Learning rate"]
    assert (rate["rangemode"], rate["tickformat"]) == ("tozero", ".1e"), "not around the value, where it looks like 0"
    assert shown["Entropy"]["policy"]["line"]["color"] == shown["Reward"]["mean"]["line"]["color"]


@pytest.mark.deep
def test_a_phase_has_a_color_of_its_own_in_all_runs(tmp_path: Path) -> None:
    many = {f"timing_s/{name}": 1.0 for name in "abcdefghijklmno"}
    _, shown = drawn(tmp_path / "one", [ROWS[0] | many])
    assert len({trace["marker"]["color"] for trace in shown[SECONDS].values()}) == len(shown[SECONDS]) - 1 == 16
    phases = [{"gen": 2.0, "adv": 1.0}, {"gen": 1.0, "z": 9.0}]
    rows = [{"step": 1} | {f"timing_s/{name}": seconds for name, seconds in each.items()} for each in phases]
    _, shown = drawn(tmp_path / "two", *([row] for row in rows))
    one, other = (shown[f"{SECONDS}: grpo_dist/{name}"] for name in "ab")
    assert one["gen"]["marker"] == other["gen"]["marker"] != other["z"]["marker"]


def test_runs_are_compared_by_the_line_that_says_most(tmp_path: Path) -> None:
    _, shown = drawn(tmp_path, ROWS, ROWS)
    assert shown["Reward"].keys() == {"mean (grpo_dist/a)", "mean (grpo_dist/b)"}
    styles = [(trace["line"]["color"], trace["line"]["dash"]) for trace in shown["Reward"].values()]
    assert len({color for color, _ in styles}) == len({dash for _, dash in styles}) == 2


def test_every_health_rule_of_a_metric_can_be_marked() -> None:
    metrics = {metric for chart in CHARTS for metric, _ in chart.lines}
    unseen = {name for name, rule in RULES.items() if not metrics & {*rule.metrics, *rule.needs}}
    assert unseen <= {"agreement", "reward_failures", "no_reward", "non_finite"}, "these stand in the list of alarms"
