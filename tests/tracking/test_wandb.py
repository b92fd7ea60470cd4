import os
from urllib.parse import urlsplit

import pytest
import wandb

from grpo_dist.errors import ConfigError
from grpo_dist.tracking.base import check_trackers
from grpo_dist.tracking.wandb import choose_mode
from tests.messages import refuses, says
from tests.tracking.runs import SAMPLE, log, starter


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    yield home
    wandb.teardown()  # the next test has other settings


def test_offline_run_needs_no_account_and_holds_the_data(tmp_path, capfd):
    config = {"lr": 0.125, "hf_token": "do-not-keep-this", "seed": 987654}
    with starter("wandb", tmp_path / "run")(**config) as trackers:
        says(trackers.notes[1], "offline", "wandb sync ")
        trackers.log_samples([SAMPLE, SAMPLE | {"gts": [1, 2], "score": None, "failure": "it raised"}], 1)
        log(trackers, 1, 5)
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    wandb.teardown()  # W&B's process may still write
    content = file.read_bytes()
    assert all(part in content for part in (b"0.625", b"critic/score/mean", b"987654"))
    assert b"do-not-keep-this" not in content
    assert capfd.readouterr().out == ""
    (table,) = tmp_path.glob("run/wandb/offline-run-*/files/media/html/val/generations_*.html")
    assert "<td>[1, 2]</td><td>None</td><td>it raised</td>" in table.read_text()


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "x" * 40}, "online"),
        ({"WANDB_API_KEY": "x" * 40, "WANDB_MODE": "offline"}, "offline"),
    ],
)
def test_with_a_key_it_is_online_unless_told_otherwise(variables, mode, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert choose_mode() == mode


def test_stored_login_counts_only_for_its_server(no_account, monkeypatch):
    (no_account / ".netrc").write_text(f"machine wandb.example.org login user password {'x' * 40}\n")
    (no_account / ".netrc").chmod(0o600)
    assert choose_mode() == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert choose_mode() == "online"
    monkeypatch.delenv("WANDB_BASE_URL")
    settings = no_account / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert choose_mode() == "online"


def test_a_stored_key_is_found_for_the_server_that_wandb_has_by_default(no_account):
    """Also the one that was stored when W&B's server had another name."""
    for host in (urlsplit(wandb.Settings().base_url).hostname, "api.wandb.ai"):
        (no_account / ".netrc").write_text(f"machine {host} login user password {'x' * 40}\n")
        (no_account / ".netrc").chmod(0o600)
        assert choose_mode() == "online"
    (no_account / ".netrc").write_text("machine api.wandb.ai login user password short\n")
    with refuses(ConfigError, "'wandb'", "wandb login --relogin"):
        choose_mode()


@pytest.mark.parametrize(
    ("mode", "parts"), [("online", ("WANDB_MODE=online", "API key")), ("sideways", ("remove 'wandb'",))]
)
def test_a_mode_that_cannot_be_stops_the_run_instead_of_prompting(mode, parts, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", mode)
    with refuses(ConfigError, "trainer.logger", "'wandb'", *parts):
        starter("wandb", tmp_path)()


@pytest.mark.parametrize(
    ("project", "variables", "named"),
    [
        ("a/b", {}, "trainer.project_name=a/b"),
        ("x" * 129, {}, "128"),
        ("sums", {"WANDB_MODE": "Offline"}, "WANDB_MODE: "),
        ("sums", {"WANDB_BASE_URL": "nonsense", "WANDB_MODE": "offline"}, "WANDB_BASE_URL: "),
        ("sums", {"WANDB_RUN_ID": "a/b"}, "Run ID"),
    ],
)
def test_what_wandb_would_refuse_later_is_found_before_the_run(project, variables, named, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with refuses(ConfigError, "trainer.logger", "'wandb'", named):
        check_trackers(["wandb"], project)
