"""The responses of a step, token by token; and of damaged records a message about each, and the rest of the page."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.cli.entry import main
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.parquet import write_parquet
from grpo_dist.report.charts import charts
from grpo_dist.report.page import overview
from grpo_dist.report.rollouts import TokenTexts, chosen_steps, load_token_texts, mismatch_by_depth, read_step
from grpo_dist.runs import read_run
from grpo_dist.workers.records import _write_rows
from tests.messages import says
from tests.report.runs import TINY, write_run, write_step
from tests.report.test_page import data_in
from tests.tiers import first

DEEP = "[" * 100_000
LINE_ENDS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r"  # of str.splitlines
ROWS = [{"step": 1, "critic/score/mean": 0.5, "timing_s/step": 2.0}, {"step": 2, "critic/score/mean": 0.75}]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", ROWS)
    write_step(folder, 1, ["1", "2"], [1.0, 0.0])
    return folder


def outputs(step: dict[str, Any]) -> list[str]:
    return [response["output"] for group in step["groups"] for response in group["responses"]]


def test_groups_with_their_numbers(run: Path) -> None:
    write_step(run, 3, ["1+1=2 #### 2", "#### 3", "two", "5"], [1.0, 0.0, None, 0.5])
    step = read_step(run, 3, load_token_texts(run))
    assert (step["problems"], read_run(run).problems) == ([], [])
    group, second = step["groups"]
    assert [group["uid"], group["gts"], second["uid"]] == ["step3-prompt0", "1", "step3-prompt1"]
    one, other = group["responses"]
    assert "".join(step["pieces"][piece] for piece in one["tokens"]) == "1+1=2 #### 2"
    shown = {"score": 1.0, "advantage": 0.5, "extra": {"acc": 1.0}, "truncated": True, "versions": [2, 3]}
    numbers = {"log_probs": -2.75, "mismatch": 0.25, "kl": -0.5, "mask": 1}
    assert {name: one[name] for name in shown | numbers} == shown | numbers
    assert ("truncated" in other, "branches" in one, other["branches"]) == (False, False, [2])
    assert second["responses"][0]["failure"] == "it raised"
    assert "score" not in second["responses"][0]


def test_without_tokens_there_is_the_text_without_secrets(tmp_path: Path) -> None:
    folder = write_run(tmp_path, ROWS)
    write_step(folder, 3, ["sk-" + "a1" * 12, "2"], [1.0, 0.0], tokens=False)
    assert load_token_texts(folder) is None
    step = read_step(folder, 3, None)
    assert (step["pieces"], outputs(step)[1]) == ([], "2")
    assert "a1a1" not in str(step)


def test_each_token_adds_its_text() -> None:
    tokenizer = load_tokenizer(resolve_model_path(TINY), trust_remote_code=False)
    texts = TokenTexts(tokenizer)
    for said in ("9+6=15 #### 15", " 7 ", "a é 🌈 b"):
        ids = tokenizer.encode(said, add_special_tokens=False)
        found = texts.of(ids)
        assert len(found) == len(ids)
        assert "".join(found) == tokenizer.decode(ids)
        assert texts.of(ids) == found, "the second time, from what is known"


def test_steps_are_left_out_evenly(run: Path) -> None:
    steps = [1, 2, 3, 4, 5, 6]
    for step in steps:
        write_step(run, step, ["1", "2"], [1.0, 0.0], tokens=False)
    chosen = {12: steps, 6: [1, 3, 6], 4: [1, 6], 1: [6]}  # of two responses each; the last, however many it has
    assert {most: chosen_steps(run, steps, most) for most in chosen} == chosen
    assert chosen_steps(run, [], 1) == []


@pytest.mark.parametrize("end", first([*LINE_ENDS, "\x00", "\ud800", "\ufeff"], "\x85", "\r", "\ud800"), ids=ascii)
def test_responses_with_any_character(run: Path, end: str) -> None:
    row = {"step": 1, "uid": "0", "input": f"q{end}", "output": f"{end}a{end}b", "gts": end, "score": 1.0}
    _write_rows([row, row | {"output": "c"}], str(run / "rollouts" / "2.jsonl"), "x")
    step = read_step(run, 2, None)
    (group,) = step["groups"]
    assert (step["problems"], group["input"], group["gts"]) == ([], f"q{end}", end)
    assert outputs(step) == [f"{end}a{end}b", "c"]
    assert main(["report", str(run)]) == 0


LINES = ["not json", DEEP, "[1]", '{"loss": 1}', '{"step": true}', '{"step": 1.5}', '{"step": 1, "a": [1]}', "\x00"]
LINES += ['{"step": 1, "a": 1' + "0" * 400 + "}", '{"step": 1, "x": 1']


@pytest.mark.parametrize("line", first(LINES, *LINES[:6:2], LINES[-1]))
def test_a_damaged_line_of_metrics(run: Path, line: str) -> None:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(line + "\n" + text + line + "\n")
    found = read_run(run)
    assert [row["step"] for row in found.rows] == [1, 2]
    for problem, line in zip(found.problems, ("line 1", "line 4"), strict=True):
        says(problem, run / "metrics.jsonl", line)
    shown = overview([found])
    assert shown["problems"] == found.problems
    assert shown["charts"][0]["figure"]["data"][0]["y"] == [0.5, 0.75]


def test_a_line_that_is_being_written_and_numbers_that_are_not_finite_are_no_damage(run: Path) -> None:
    line = '{"step": 3, "critic/score/mean": NaN, "timing_s/step": Infinity, "timing_s/gen": -1e999}\n'
    (run / "metrics.jsonl").write_text(line + (run / "metrics.jsonl").read_text() + '{"step": 3, "cri')
    found = read_run(run)
    assert (len(found.rows), found.problems) == (3, [])
    json.dumps(overview([found]), allow_nan=False)


@pytest.mark.deep
@pytest.mark.parametrize(
    "text", ["", "a: [", "a: 2024-99-99", DEEP, "\x00", "a: !!python/object:os.system {}", b"\xff\xfe\xff"]
)
def test_a_config_that_cannot_be_read(run: Path, text: str | bytes) -> None:
    (run / "config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    found = read_run(run)
    (problem,) = found.problems
    says(problem, run / "config.yaml")
    assert (found.name, len(found.rows), found.config) == ("run", 2, {})
    overview([found])


HEALTH = [f"trainer: {{health: {rules}}}" for rules in ("5", "{kl: 1}", "{no_rule: {}}", "{kl: {threshold: high}}")]


@pytest.mark.parametrize("text", ["trainer: [1]", "trainer: null", "actor_rollout_ref: 5", "1: 2", *HEALTH])
def test_sections_of_another_type_are_as_if_they_were_not_there_but_for_health_rules(run: Path, text: str) -> None:
    (run / "config.yaml").write_text(text)
    found = read_run(run)
    assert overview([found, found])["title"] == "run against run"
    assert ["trainer.health" in problem for problem in found.problems] == [True] * (text in HEALTH)


def test_records_that_are_folders_or_not_there(run: Path) -> None:
    (run / "config.yaml").unlink()
    (run / "rollouts" / "2.jsonl").mkdir()
    found = read_run(run)
    says(found.problems, run / "config.yaml")
    assert found.rollout_steps == [1, 2]
    for step in (2, 9):
        says(read_step(run, step, None)["problems"], f"step {step}", run / "rollouts" / f"{step}.jsonl")
    assert main(["report", str(run)]) == 0


def without(*names: str, **others: Any) -> str:
    row = {"step": 1, "uid": "0", "input": "q", "output": "a", "gts": "1", "score": 1.0} | others
    return json.dumps({name: value for name, value in row.items() if name not in names})


@pytest.mark.parametrize(
    "line",
    ["x", DEEP, "null", without("uid"), without("output"), without(output=1), without(input=None),
     without(score="high"), without(advantage={}), without(failure=3), without()[:-9]],
)  # fmt: skip
def test_a_damaged_row_keeps_the_others_with_their_tokens(run: Path, line: str) -> None:
    path = run / "rollouts" / "1.jsonl"
    _, second = path.read_text().splitlines()
    path.write_text(f"{line}\n{second}\n")
    step = read_step(run, 1, load_token_texts(run))
    assert len(step["problems"]) == 1
    says(step["problems"], path, "line 1")
    (response,) = step["groups"][0]["responses"]
    assert (response["output"], response["log_probs"]) == ("2", -1.75)
    assert "".join(step["pieces"][piece] for piece in response["tokens"]) == "2"


def test_rows_may_lack_what_they_are_shown_without(run: Path) -> None:
    line = without("gts", "score", x=float("nan"), y=float("inf"), z=[{"api_key": "hush"}])
    (run / "rollouts" / "1.jsonl").write_text(f"{line}\n\n")
    step = read_step(run, 1, None)
    assert step["problems"] == []
    response = {"output": "a", "extra": {"x": None, "y": None, "z": [{"api_key": "***"}]}}
    assert step["groups"] == [{"uid": "0", "input": "q", "gts": "null", "responses": [response]}]


# A tool wrote the first one's third token. The second begins anew twice: at its fourth token behind two tokens of the
# prompt, at its last one before the prompt.
APART = [[0.5, 0.25, 9.0, 1.0], [0.125, 0.5, 1.5, 0.75, 0.0625]]
STEP = {
    "prompt_length": torch.tensor([3, 5]),
    "responses": Ragged.from_rows([[1] * 4, [1] * 5], torch.int32),
    "response_mask": Ragged.from_rows([[1, 1, 0, 1], [1] * 5], torch.int8),
    "rollout_log_probs": Ragged.from_rows([[-2.0] * 4, [-2.0] * 5], torch.float32),
    "old_log_probs": Ragged.from_rows([[-2 + x for x in APART[0]], [-2 - x for x in APART[1]]], torch.float32),
    "predecessors": Ragged.from_rows([[-1, 0, 1, 2], [-1, 0, 0, -4, -6]], torch.int32),
}


def test_sampler_against_trainer_by_depth(run: Path) -> None:
    """Depths 3, 4, (5,) 6 and 5, 6, 6, 2, 0; of so few tokens the 99th percentile is the largest."""
    path = run / "rollouts" / "1.parquet"
    write_parquet(DataProto.from_dict(STEP), path)
    found = mismatch_by_depth(run, 1, bins=4)
    # In bins of two depths: 0.0625; 0.5 and 0.75; 0.25 and 0.125; 1, 0.5 and 1.5.
    assert [row[:3] for row in found] == [(0, 1, 0.0625), (2, 2, 0.625), (4, 2, 0.1875), (6, 3, 1.0)]
    assert [row[3] for row in found] == [0.0625, 0.75, 0.25, 1.5]
    (chart,) = [chart for chart in charts([read_run(run)]) if chart["title"].endswith("by depth")]
    mean, high = chart["figure"]["data"]
    assert (mean["x"], mean["text"]) == ([0, 2, 3, 4, 5, 6], [1, 1, 1, 1, 1, 3])
    assert mean["y"] == [0.0625, 0.75, 0.5, 0.25, 0.125, 1.0]
    assert (high["x"], high["y"][5]) == (mean["x"], 1.5)
    says(mean["name"], "step 1", "grpo_dist/run")
    go.Figure(chart["figure"])
    write_step(run, 2, ["1", "2"], [1.0, 0.0])
    lost = STEP | {"old_log_probs": Ragged.from_rows([[-math.inf] * 4, [-2.0] * 5], torch.float32)}
    del lost["predecessors"]
    write_parquet(DataProto.from_dict(lost), path.with_stem("2"))
    assert [at for at, *_ in mismatch_by_depth(run, 2)] == [3, 4, 5, 6, 7, 8, 9]
    json.dumps(charts([read_run(run)]), allow_nan=False)


NO_MASK = {"response_mask": Ragged.from_rows([[0] * 4, [0] * 5], torch.int8)}


@pytest.mark.parametrize("change", [{"old_log_probs": None}, {"rollout_log_probs": None}, NO_MASK, None])
def test_without_both_log_probs_there_is_no_chart_by_depth(run: Path, change: dict[str, Any] | None) -> None:
    path = run / "rollouts" / "1.parquet"
    path.unlink()
    if change is not None:
        columns = {name: column for name, column in (STEP | change).items() if column is not None}
        write_parquet(DataProto.from_dict(columns), path)
    assert [chart["title"] for chart in charts([read_run(run)])] == ["Reward"]


def parquet_of(**columns: Any) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.table(columns), path)


IDS = pa.array([[1, 2], [3]], pa.large_list(pa.int32()))
ONES = pa.array([[1, 1], [1]], pa.large_list(pa.int8()))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(b""),
        parquet_of(response_mask=ONES),
        parquet_of(responses=IDS),
        parquet_of(responses=pa.array([1, 2]), response_mask=ONES),
        parquet_of(responses=pa.array([[-5], [3]], pa.large_list(pa.int32())), response_mask=ONES),
        parquet_of(responses=IDS, response_mask=ONES, truncated=pa.array(["no", "yes"])),
        parquet_of(responses=IDS, response_mask=ONES, weight_version=pa.array([1, 2])),
        parquet_of(responses=IDS[:1], response_mask=ONES[:1]),
    ],
)
def test_tokens_that_cannot_be_read(run: Path, damage: Callable[[Path], None]) -> None:
    damage(run / "rollouts" / "1.parquet")
    step = read_step(run, 1, load_token_texts(run))
    says(step["problems"], "step 1")
    assert outputs(step) == ["1", "2"]
    assert all("tokens" not in response for response in step["groups"][0]["responses"])
    json.dumps(step, allow_nan=False)


def test_log_probs_that_are_not_finite(run: Path) -> None:
    inf = pa.array([[float("inf"), float("nan")], [-0.5]], pa.large_list(pa.float32()))
    parquet_of(responses=IDS, response_mask=ONES, rollout_log_probs=inf)(run / "rollouts" / "1.parquet")
    step = read_step(run, 1, load_token_texts(run))
    assert step["problems"] == []
    assert [response["log_probs"] for response in step["groups"][0]["responses"]] == [None, -0.5]


@pytest.mark.parametrize("text", first(["", "{}", DEEP, None], None))
def test_a_tokenizer_that_cannot_be_loaded(run: Path, text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "tokenizer" / "tokenizer.json"
    file.unlink() if text is None else file.write_text(text)
    assert main(["report", str(run)]) == 0
    says(capsys.readouterr().err, "warning", run / "tokenizer")
    assert outputs(data_in((run / "report.html").read_text())["step-1"]) == ["1", "2"]
