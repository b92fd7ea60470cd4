"""`grpo-dist export --push` and `trainer.push_to_hub`, against a stand-in of the hub."""

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

NAME, SECRETS = "me/sums", (TOKEN, "k7-of-the-reward-server", "plain-secret")
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def hub(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("REWARD_KEY", SECRETS[1])
    with Hub().listening() as listening:
        reach(listening, monkeypatch)
        yield listening


def finished(run_dir: Path, *overrides: str) -> RunConfig:
    """A run that has ended after step 4, with its model, and with a row of a step that it went back from."""
    kwargs = "+custom_reward_function.reward_kwargs={where: '${oc.env:REWARD_KEY}', api_key: plain-secret}"
    config, _ = load_config([f"trainer.default_local_dir={run_dir}", "algorithm.gamma=0.5", kwargs, *overrides])
    finished_run(config, 4)
    scores = {1: 0.125, 2: 0.25, 4: 0.5, 6: 0.75}
    rows = [{"step": n, "critic/score/mean": x, "val-core/sums/acc/mean@1": x / 2} for n, x in scores.items()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "huggingface" / "README.md").unlink()  # of the built-in model
    return config


def pushed(run_dir: Path, *arguments: str) -> int:
    return main(["export", str(run_dir), "--push", *(arguments or (NAME,))])


def test_an_export_and_its_card_are_pushed_and_nothing_else(hub: Hub, tmp_path: Path, capfd: Captured) -> None:
    finished(run_dir := tmp_path / "run")
    exported = {path.name: path.read_bytes() for path in (run_dir / "huggingface").iterdir()}
    (run_dir / "huggingface" / "optimizer.pt").write_bytes(b"states")
    assert pushed(run_dir) == 0
    card = hub.files[NAME]["README.md"].decode()
    present = {".gitattributes": b"", "README.md": card.encode(), **exported}
    assert hub.files[NAME] == present
    assert hub.private[NAME]
    says(told := "".join(capfd.readouterr()), f"{hub.url}/{NAME}", "private")
    head, tags = yaml.safe_load(card.split("---")[1]), ["grpo", "reinforcement-learning"]
    assert head == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    says(card, "builtin:tiny-qwen3", "algorithm.gamma=0.5", "builtin:arithmetic/train", f"vllm serve {NAME}", "torch")
    says(card, "| 4 | 0.25 | 0.5 |", "| `critic/score/mean` | 0.125 | 0.5 |", "${oc.env:REWARD_KEY}")
    assert str(run_dir) not in card
    assert "0.75" not in card, "of a later step"
    texts = [card, told, *(path.read_bytes().decode(errors="replace") for path in run_dir.rglob("*") if path.is_file())]
    assert not [secret for secret in SECRETS for text in texts if secret in text]

    added = {"LICENSE": b"mine", "adapter_model.safetensors": b"mine"}
    hub.files[NAME] |= added | {"model-00001-of-00002.safetensors": b"old", "model.safetensors": b"old"}
    assert pushed(run_dir) == 0  # old weights go, and what a user has added stays
    assert hub.files[NAME] == present | added


def test_a_repository_is_public_if_it_is_said(hub: Hub, tmp_path: Path, capsys: Captured) -> None:
    finished(run_dir := tmp_path / "run")
    (run_dir / "metrics.jsonl").unlink()  # of a run that was not copied whole
    assert pushed(run_dir, "Team/sums", "--public") == 0
    assert not hub.private["Team/sums"]
    assert b"Results" not in hub.files["Team/sums"]["README.md"]
    hub.files["Team/sums"].pop("model.safetensors")
    assert pushed(run_dir, "Team/sums") == 2  # what would be private is not put where everybody sees it
    says(capsys.readouterr().err, "Team/sums", "--public", "hub_private_repo=false")
    assert "model.safetensors" not in hub.files["Team/sums"]


def test_what_is_refused(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    finished(run_dir := tmp_path / "run")

    def refused(*parts: object, name: str = NAME, more: tuple[str, ...] = ()) -> None:
        assert pushed(run_dir, name, *more) == 2
        says(capsys.readouterr().err, *parts)
        assert NAME not in hub.files

    for name in ("sums", "me/sums/more", "me/a--b", "me/../b", "me/", "hf.co/me/sums", "me/sums@v1"):
        refused(f"--push={name}:", "OWNER/NAME", name=name)
    refused("--push", "--to", more=("--to", "elsewhere"))
    assert hub.asked == []
    hub.files |= {"me/theirs": {".gitattributes": b""}, "me/adapter": {"adapter_config.json": b"{}"}}
    hub.private |= {"me/theirs": True, "me/adapter": True}
    hub.foreign.add("me/theirs")
    refused("--push=other/sums", "me, Team", name="other/sums")
    refused("me/theirs", "HF_TOKEN", "403", name="me/theirs")
    refused("me/adapter", "adapter_config.json", name="me/adapter")
    assert hub.files["me/adapter"] == {"adapter_config.json": b"{}"}
    monkeypatch.setenv("HF_TOKEN", "hf_" + "Zz9" * 11)
    refused(f"--push={NAME}", "HF_TOKEN", "login")
    monkeypatch.delenv("HF_TOKEN")
    refused(f"--push={NAME}", "login", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(f"--push={NAME}", "HF_HUB_OFFLINE")


def test_a_push_that_broke_off_goes_on_by_the_command_that_is_told(hub: Hub, tmp_path: Path, capsys: Captured) -> None:
    config = finished(run_dir := tmp_path / "run", f"trainer.push_to_hub={NAME}", "trainer.hub_private_repo=false")
    hub.cut = True
    push_at_end(config)  # no error: the run has not failed
    says(told := capsys.readouterr().err, f"export {run_dir} --push {NAME} --public")
    assert hub.turned_away > 0
    assert hub.files[NAME] == {".gitattributes": b""}, "half a model can be seen"
    hub.cut = hub.away = False
    assert main(told.rpartition("grpo-dist ")[2].split()) == 0
    assert {"README.md", "model.safetensors", "config.json"} < hub.files[NAME].keys()


def test_a_run_asks_the_hub_before_it_starts_and_pushes_at_its_end(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    keys = [f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.dry_run=true", f"trainer.push_to_hub={NAME}"]
    assert run_command(GRPO, keys) == 0
    assert hub.asked == ["/api/whoami-v2"]
    assert run_command(GRPO, [*keys, "trainer.push_to_hub=other/sums"]) == 2
    says(capsys.readouterr().err, "trainer.push_to_hub=other/sums")
    assert run_command(GRPO, [*keys, "trainer.export_hf_model=false"]) == 2
    says(capsys.readouterr().err, f"trainer.push_to_hub={NAME}", "export_hf_model=true")
    monkeypatch.setattr("grpo_dist.run.run.run", lambda config, **_: finished(tmp_path / "run"))
    assert run_command(GRPO, [keys[0], keys[2]]) == 0
    assert "model.safetensors" in hub.files[NAME]
