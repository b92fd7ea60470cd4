"""`grpo-dist export --push` and `trainer.push_to_hub`, against a stand-in of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from grpo_dist.cli.entry import main
from grpo_dist.config.schema import RunConfig
from grpo_dist.main import push_at_end, run_command
from grpo_dist.plan.commands import GRPO, load_config
from tests.hub import TOKEN, Hub, reach
from tests.messages import says
from tests.trainer.checkpoints import finished_run

NAME, KEY = "me/sums", "k7-of-the-reward-server"


@pytest.fixture
def hub(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("REWARD_KEY", KEY)
    with Hub().listening() as listening:
        reach(listening, monkeypatch)
        yield listening


def finished(run_dir: Path, *overrides: str) -> RunConfig:
    """A run that has ended after step 4, with its model; and rows of a later step that it went back from."""
    secret = "+custom_reward_function.reward_kwargs.where=${oc.env:REWARD_KEY}"
    config, _ = load_config([f"trainer.default_local_dir={run_dir}", "algorithm.gamma=0.5", secret, *overrides])
    finished_run(config, 4)
    scores = ((1, 0.125), (2, 0.25), (4, 0.5), (6, 0.75))
    rows = [{"step": step, "critic/score/mean": score, "val-core/sums/acc/mean@1": score / 2} for step, score in scores]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "huggingface" / "README.md").unlink()  # of the built-in model
    return config


def pushed(run_dir: Path, *arguments: str) -> int:
    return main(["export", str(run_dir), "--push", *(arguments or (NAME,))])


def test_an_export_and_its_card_are_pushed_and_nothing_else(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finished(run_dir := tmp_path / "run", "custom_reward_function.reward_kwargs.api_key=plain-secret")
    exported = {path.name: path.read_bytes() for path in (run_dir / "huggingface").iterdir()}
    (run_dir / "huggingface" / "optimizer.pt").write_bytes(b"states")
    assert pushed(run_dir) == 0
    card = hub.files[NAME].pop("README.md").decode()
    assert hub.files[NAME] == {".gitattributes": b"", **exported}
    assert hub.private[NAME]
    told = "".join(capfd.readouterr())
    says(told, f"{hub.url}/{NAME}", "private")

    head = yaml.safe_load(card.split("---")[1])
    tags = ["grpo", "reinforcement-learning"]
    assert head == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    says(card, "builtin:tiny-qwen3", "algorithm.gamma=0.5", "builtin:arithmetic/train", f"vllm serve {NAME}", "torch")
    says(card, "| 4 | 0.25 | 0.5 |", "| `critic/score/mean` | 0.125 | 0.5 |", "${oc.env:REWARD_KEY}")
    assert str(run_dir) not in card
    assert "0.75" not in card, "of a later step"
    texts = [card, told, *(path.read_bytes().decode(errors="replace") for path in run_dir.rglob("*") if path.is_file())]
    for secret in (TOKEN, KEY, "plain-secret"):
        assert not [text for text in texts if secret in text]


def test_a_later_export_replaces_the_weights_and_keeps_what_a_user_added(hub: Hub, tmp_path: Path) -> None:
    finished(run_dir := tmp_path / "run")
    assert pushed(run_dir) == 0
    before = dict(hub.files[NAME])
    hub.files[NAME] |= {"LICENSE": b"mine", "model-00001-of-00002.safetensors": b"old", "model.safetensors": b"old"}
    assert pushed(run_dir) == 0
    assert hub.files[NAME] == before | {"LICENSE": b"mine"}


def test_a_repository_is_public_if_it_is_said(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(run_dir := tmp_path / "run")
    assert pushed(run_dir, "Team/sums", "--public") == 0
    assert not hub.private["Team/sums"]
    hub.files["Team/sums"].pop("model.safetensors")
    assert pushed(run_dir, "Team/sums") == 2  # what would be private is not put where everybody sees it
    says(capsys.readouterr().err, "Team/sums", "--public", "hub_private_repo=false")
    assert "model.safetensors" not in hub.files["Team/sums"]


@pytest.mark.parametrize("name", ["sums", "me/sums/more", "me/a--b", "me/../b", "me/", "hf.co/me/sums", "me/sums@v1"])
def test_a_name_that_is_none(name: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pushed(tmp_path, name) == 2
    says(capsys.readouterr().err, f"--push={name}:", "OWNER/NAME")
    assert hub.asked == []


def test_who_may_not_push(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    finished(run_dir := tmp_path / "run")
    hub.files |= {"me/theirs": {".gitattributes": b""}, "me/adapter": {"adapter_config.json": b"{}"}}
    hub.private |= {"me/theirs": True, "me/adapter": True}
    hub.foreign.add("me/theirs")
    for name, parts in {
        "other/sums": ["--push=other/sums", "me, Team"],
        "me/theirs": ["me/theirs", "HF_TOKEN", "403"],
        "me/adapter": ["me/adapter", "adapter_config.json"],
    }.items():
        assert pushed(run_dir, name) == 2
        says(capsys.readouterr().err, *parts)
    assert hub.files["me/adapter"] == {"adapter_config.json": b"{}"}
    monkeypatch.setenv("HF_TOKEN", "hf_" + "Zz9" * 11)
    assert pushed(run_dir) == 2
    says(capsys.readouterr().err, f"--push={NAME}", "HF_TOKEN", "login")
    monkeypatch.delenv("HF_TOKEN")
    assert pushed(run_dir) == 2
    says(capsys.readouterr().err, f"--push={NAME}", "login", "HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pushed(run_dir) == 2
    says(capsys.readouterr().err, f"--push={NAME}", "HF_HUB_OFFLINE")
    assert pushed(run_dir, NAME, "--to", "elsewhere") == 2
    says(capsys.readouterr().err, "--push", "--to")
    assert main(["export", str(run_dir), "--public"]) == 2
    says(capsys.readouterr().err, "--push")
    assert NAME not in hub.files


def test_a_push_that_broke_off_goes_on_by_the_command_that_is_told(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = finished(run_dir := tmp_path / "run", f"trainer.push_to_hub={NAME}", "trainer.hub_private_repo=false")
    hub.cut = True
    push_at_end(config)  # no error: the run has not failed
    says(told := capsys.readouterr().err, f"export {run_dir} --push {NAME} --public")
    assert hub.turned_away > 0
    assert hub.files[NAME] == {".gitattributes": b""}, "half a model can be seen"
    hub.cut = hub.away = False
    assert main(told.rpartition("grpo-dist ")[2].split()) == 0
    assert {"README.md", "model.safetensors", "config.json"} < hub.files[NAME].keys()


def test_a_run_is_checked_before_it_starts_and_pushed_when_it_is_done(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"trainer.default_local_dir={tmp_path / 'run'}", f"trainer.push_to_hub={NAME}", "trainer.dry_run=true"]
    assert run_command(GRPO, keys) == 0
    assert hub.asked == ["/api/whoami-v2"]
    assert run_command(GRPO, [*keys[::2], "trainer.push_to_hub=other/sums"]) == 2
    says(capsys.readouterr().err, "trainer.push_to_hub=other/sums")
    assert run_command(GRPO, [*keys, "trainer.export_hf_model=false"]) == 2
    says(capsys.readouterr().err, f"trainer.push_to_hub={NAME}", "export_hf_model=true")

    def run(config: RunConfig, **_: object) -> None:
        finished(tmp_path / "run")

    monkeypatch.setattr("grpo_dist.run.run.run", run)
    assert run_command(GRPO, keys[:2]) == 0
    assert "model.safetensors" in hub.files[NAME]
