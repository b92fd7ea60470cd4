"""Values of the environment: the run has the value, what is saved and shown has the reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_dist.config.grpo import GRPO
from grpo_dist.config.load import load_config, readable_config, saved_values, with_overrides
from grpo_dist.config.plan import format_plan
from grpo_dist.errors import CheckpointError, ConfigError
from grpo_dist.redact import redact_text
from grpo_dist.trainer.checkpoint.config_changes import check_changes, digest_code, read_config, saved_config
from grpo_dist.trainer.checkpoint.folder import CONFIG, RunState
from tests.messages import refuses, says

KWARGS = "custom_reward_function.reward_kwargs"
LINE = [
    "trainer.dry_run=config",
    "algorithm.adv_estimator=grpo",
    "custom_reward_function.path=r.py",
    f"+{KWARGS}.plain=${{oc.env:JUDGE}}",
    f"+{KWARGS}.api_key=${{oc.env:JUDGE}}",
    f"+{KWARGS}.headers.Authorization='Bearer ${{oc.env:JUDGE}}'",
    f"+{KWARGS}.listed=[a,'${{oc.env:JUDGE}}']",
    f"+{KWARGS}.copied=${{{KWARGS}.plain}}",
    f"+{KWARGS}.many='${{oc.decode:${{oc.env:LISTED}}}}'",
    f"+{KWARGS}.usual='${{oc.env:NOT_THERE_AT_ALL,abc}}'",
    f"+{KWARGS}.number='${{oc.env:NOT_THERE_AT_ALL,3}}'",
    f"+{KWARGS}.joined='${{oc.env:JUDGE}}/${{trainer.project_name}}'",
    "trainer.total_epochs='${oc.decode:${oc.env:EPOCHS}}'",
    "data.train_files=${oc.env:ROWS}/train.jsonl",
    "trainer.project_name=sums",
]
SECRET = "ZQXENVVALUE"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JUDGE": SECRET, "LISTED": f"[1,{SECRET}]", "EPOCHS": "3", "ROWS": "/rows"}.items():
        monkeypatch.setenv(name, value)


def saved() -> dict[str, Any]:
    return yaml.safe_load(saved_config(load_config(LINE)[0]))


def test_the_run_has_the_values() -> None:
    config, _ = load_config(LINE)
    kwargs = config.custom_reward_function.reward_kwargs
    assert (kwargs["plain"], kwargs["api_key"], kwargs["listed"]) == (SECRET, SECRET, ["a", SECRET])
    assert (kwargs["many"], kwargs["usual"], kwargs["joined"]) == ([1, SECRET], "abc", f"{SECRET}/sums")
    assert config.data.train_files == ("/rows/train.jsonl",)
    assert config.trainer.total_epochs == 3


def test_references_are_saved() -> None:
    config, notes = load_config(LINE)
    for text in (saved_config(config), readable_config(config), format_plan(config, notes)):
        assert SECRET not in text
    values = saved()
    assert values["custom_reward_function"]["reward_kwargs"] == {
        "plain": "${oc.env:JUDGE}",
        "api_key": "${oc.env:JUDGE}",
        "headers": {"Authorization": "Bearer ${oc.env:JUDGE}"},
        "listed": ["a", "${oc.env:JUDGE}"],
        "copied": "${oc.env:JUDGE}",
        "many": "${oc.decode:${oc.env:LISTED}}",
        "usual": "${oc.env:NOT_THERE_AT_ALL,abc}",
        "number": "${oc.env:NOT_THERE_AT_ALL,3}",
        "joined": "${oc.env:JUDGE}/sums",
    }
    assert values["trainer"]["total_epochs"] == 3, "numbers are no secrets"
    assert values["data"]["train_files"] == "${oc.env:ROWS}/train.jsonl"


def test_who_reads_it_back_takes_the_present_values(monkeypatch: pytest.MonkeyPatch) -> None:
    values, (config, _) = saved(), load_config(LINE)
    again = saved_values(values, GRPO)
    for section in ("custom_reward_function", "data", "trainer"):
        assert getattr(again, section) == getattr(config, section)
    monkeypatch.setenv("JUDGE", "another")
    kwargs = with_overrides(values, [f"{KWARGS}.listed=[${{oc.env:ROWS}}]"], GRPO).custom_reward_function.reward_kwargs
    assert (kwargs["api_key"], kwargs["headers"], kwargs["listed"]) == (
        "another", {"Authorization": "Bearer another"}, ["/rows"],
    )  # fmt: skip
    monkeypatch.delenv("JUDGE")
    with refuses(ConfigError, f"{KWARGS}.plain=${{oc.env:JUDGE}}", "JUDGE"):
        saved_values(values, GRPO)


def test_messages_show_the_reference() -> None:
    load_config(LINE)
    assert redact_text(f"the judge said no to {SECRET}") == "the judge said no to ${oc.env:JUDGE}"
    with pytest.raises(ConfigError) as refused:
        load_config([*LINE, "trainer.project_name=${oc.env:JUDGE}", "trainer.test_freq=${oc.env:JUDGE}"])
    says(refused, "trainer.test_freq")
    assert SECRET not in str(refused.value)


def changes(folder: Path, line: list[str], code: dict[str, str]) -> list[str]:
    config, _ = load_config(line)
    return check_changes(folder, RunState(1, 1, {}, code=code), config, {}, digest_code(config))


def test_another_value_is_another_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A password may change, as others do that are not saved."""
    config, _ = load_config(LINE)
    (tmp_path / CONFIG).write_text(saved_config(config))
    assert read_config(tmp_path)["data"]["train_files"] == "${oc.env:ROWS}/train.jsonl"
    code = digest_code(config)
    assert f"{KWARGS}.api_key" not in code
    assert SECRET not in str(code)
    assert all(len(digest) == len("value 1234") for key, digest in code.items() if key != "custom_reward_function.path")
    assert changes(tmp_path, LINE, code) == []
    monkeypatch.setenv("JUDGE", "another judge")
    with refuses(CheckpointError, f"{KWARGS}.plain", f"{KWARGS}.listed", "${oc.env:JUDGE}"):
        changes(tmp_path, LINE, code)
    only_secret = [each for each in LINE if not {"JUDGE", "plain"} & set(re.findall(r"\w+", each)) or "api_key" in each]
    (tmp_path / CONFIG).write_text(saved_config(load_config(only_secret)[0]))
    assert changes(tmp_path, only_secret, {}) == []


@pytest.mark.parametrize("character", "\x85\u2028\u2029\x0b\x1c\r\n\t\x1b")
def test_any_text_is_read_back_as_it_was_saved(character: str) -> None:
    text = f"a{character}b {character}"
    config, _ = load_config([*LINE[:3], ("data.system_prompt", text)])
    assert yaml.safe_load(saved_config(config))["data"]["system_prompt"] == text
