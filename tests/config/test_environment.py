"""What a config takes from its surroundings: values of the environment, folders, an adapter, and the processor."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_dist.config import processor
from grpo_dist.config.command import AnyCommand
from grpo_dist.config.load import load_command, readable_config, run_folder, saved_values, with_overrides
from grpo_dist.config.processor import cpu_flags, has_bf16, is_wsl, physical_cores
from grpo_dist.errors import CheckpointError, ConfigError
from grpo_dist.plan import commands
from grpo_dist.plan.commands import GRPO, SFT, load_config
from grpo_dist.plan.text import format_plan
from grpo_dist.redact import redact_text
from grpo_dist.trainer.checkpoint.config_changes import check_changes, digest_code, read_config, saved_config
from grpo_dist.trainer.checkpoint.folder import CONFIG, RunState
from tests.adapters import write_adapter
from tests.messages import refuses, says
from tests.tiers import covering

KWARGS = "custom_reward_function.reward_kwargs"
REFERENCES = {
    "plain": "${oc.env:JUDGE}",
    "api_key": "${oc.env:JUDGE}",
    "many": "${oc.decode:${oc.env:LISTED}}",
    "usual": "${oc.env:NOT_THERE_AT_ALL,abc}",
    "number": "${oc.env:NOT_THERE_AT_ALL,3}",
}
LINE = [
    *("trainer.dry_run=config", "algorithm.adv_estimator=grpo", "custom_reward_function.path=r.py"),
    *(f"+{KWARGS}.{name}='{reference}'" for name, reference in REFERENCES.items()),
    f"+{KWARGS}.headers.Authorization='Bearer ${{oc.env:JUDGE}}'",
    f"+{KWARGS}.listed=[a,'${{oc.env:JUDGE}}']",
    f"+{KWARGS}.copied=${{{KWARGS}.plain}}",
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


def test_the_run_has_the_values_and_references_are_saved() -> None:
    config, notes = load_config(LINE)
    kwargs = config.custom_reward_function.reward_kwargs
    assert (kwargs["plain"], kwargs["api_key"], kwargs["listed"]) == (SECRET, SECRET, ["a", SECRET])
    assert (kwargs["many"], kwargs["usual"], kwargs["joined"]) == ([1, SECRET], "abc", f"{SECRET}/sums")
    assert config.data.train_files == ("/rows/train.jsonl",)
    assert config.trainer.total_epochs == 3
    for text in (saved_config(config), readable_config(config), format_plan(config, notes)):
        assert SECRET not in text
    values = saved()
    others = {"headers": {"Authorization": "Bearer ${oc.env:JUDGE}"}, "listed": ["a", "${oc.env:JUDGE}"]}
    others |= {"copied": "${oc.env:JUDGE}", "joined": "${oc.env:JUDGE}/sums"}
    assert values["custom_reward_function"]["reward_kwargs"] == REFERENCES | others
    assert values["trainer"]["total_epochs"] == 3, "numbers are no secrets"
    assert values["data"]["train_files"] == "${oc.env:ROWS}/train.jsonl"


def test_who_reads_it_back_takes_the_present_values(monkeypatch: pytest.MonkeyPatch) -> None:
    values, (config, _) = saved(), load_config(LINE)
    again = saved_values(values, GRPO)
    for section in ("custom_reward_function", "data", "trainer"):
        assert getattr(again, section) == getattr(config, section)
    monkeypatch.setenv("JUDGE", "another")
    kwargs = with_overrides(values, [f"{KWARGS}.listed=[${{oc.env:ROWS}}]"], GRPO).custom_reward_function.reward_kwargs
    assert (kwargs["api_key"], kwargs["headers"]["Authorization"]) == ("another", "Bearer another")
    assert kwargs["listed"] == ["/rows"]
    monkeypatch.delenv("JUDGE")
    with refuses(ConfigError, f"{KWARGS}.plain=${{oc.env:JUDGE}}", "JUDGE"):
        saved_values(values, GRPO)


def test_messages_show_the_reference() -> None:
    load_config(LINE)
    assert redact_text(f"the judge said no to {SECRET}") == "the judge said no to ${oc.env:JUDGE}"
    with refuses(ConfigError, "trainer.test_freq") as refused:
        load_config([*LINE, "trainer.project_name=${oc.env:JUDGE}", "trainer.test_freq=${oc.env:JUDGE}"])
    assert SECRET not in str(refused.value)


def changes(folder: Path, line: list[str], code: dict[str, str]) -> list[str]:
    config, _ = load_config(line)
    return check_changes(folder, RunState(1, 1, {}, code=code), config, {}, digest_code(config, code))


def test_another_value_is_another_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    only_secret = [each for each in LINE if not re.search("JUDGE|plain", each) or "api_key" in each]
    (tmp_path / CONFIG).write_text(saved_config(load_config(only_secret)[0]))
    assert changes(tmp_path, only_secret, {}) == [], "a password may change"


def test_another_value_that_is_not_saved_is_told(tmp_path: Path) -> None:
    line = f"+{KWARGS}={{key: answer, credentials: {{user: me}}, n: 1}}"
    had, _ = load_config([line])
    (tmp_path / CONFIG).write_text(saved_config(had))
    code = digest_code(had)
    assert list(code) == [f"{KWARGS}.key", f"{KWARGS}.credentials"]
    assert not set(code.values()) & set(digest_code(had).values()), "digests of two starts have nothing in common"
    assert digest_code(had, code) == code
    assert all(len(digest) == len("hidden 0123456789abcdef 1234") for digest in code.values())

    assert changes(tmp_path, [line], code) == []
    for changed, old, new in (("key", "answer", "other"), ("credentials", "me", "you")):
        (told,) = changes(tmp_path, [line.replace(old, new)], code)
        says(told, f"{KWARGS}.{changed}")
        assert new not in told.split()


@pytest.mark.parametrize("character", "\x85\u2028\u2029\x0b\x1c\r\n\t\x1b")
def test_any_text_is_read_back_as_it_was_saved(character: str) -> None:
    text = f"a{character}b {character}"
    config, _ = load_config([*LINE[:3], ("data.system_prompt", text)])
    assert yaml.safe_load(saved_config(config))["data"]["system_prompt"] == text


COMMANDS = pytest.mark.parametrize("command", [GRPO, SFT], ids=lambda command: command.name)


@pytest.fixture
def working_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "ray/session_1/runtime_resources/working_dir_files/_ray_pkg_0123"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return copy


@COMMANDS
def test_a_relative_run_directory_of_a_job_lies_in_the_home_folder(
    command: AnyCommand, working_copy: Path, tmp_path: Path
) -> None:
    home = f"{tmp_path}/home"
    for given, folder in (("mine", f"{home}/mine"), ("'~/mine'", f"{home}/mine"), (f"{tmp_path}/x", f"{tmp_path}/x")):
        config, notes = load_command([f"trainer.default_local_dir={given}"], command)
        assert config.trainer.default_local_dir == folder
        told = [note for note in notes if "default_local_dir" in note]
        assert len(told) == (given == "mine")
        if told:
            says(told, "trainer.default_local_dir=mine", folder, working_copy)
    assert load_command([], command)[0].trainer.default_local_dir.startswith(f"{home}/outputs/")


@COMMANDS
def test_the_home_folder(command: AnyCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    line = ["trainer.default_local_dir='~/runs/a'", "trainer.resume_mode=resume_path", "trainer.resume_from_path='~/b'"]
    trainer = load_command(["trainer.dry_run=config", *line], command)[0].trainer
    assert (trainer.default_local_dir, trainer.resume_from_path) == (f"{tmp_path}/runs/a", f"{tmp_path}/b")
    assert run_folder(line, command) == tmp_path / "runs/a"
    for path in ("./~/a", "a/~", "a~"):
        assert load_command([("trainer.default_local_dir", path)], command)[0].trainer.default_local_dir == path


KEYS = ["trainer.experiment_name", "trainer.project_name"]
OUTSIDE = "~ ~/x ../x a/../../x .. . / /tmp/x a//b a/ a/~b a\0b".split()


@pytest.mark.parametrize(("command", "key", "name"), covering(["train", "sft"], KEYS, OUTSIDE))
def test_names_that_lead_out_of_their_folder(command: str, key: str, name: str) -> None:
    with refuses(ConfigError, key):
        load_command([(key, name)], commands.COMMANDS[command])


@pytest.mark.parametrize("name", ["a", "a/b", "a b", "a..b", "...", "a~", ".a", "名"])
def test_names_of_folders(name: str) -> None:
    config, _ = load_command([("trainer.experiment_name", name)], GRPO)
    assert config.trainer.default_local_dir == f"outputs/grpo_dist/{name}"


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\0b", ["a"]])
def test_folders_that_cannot_be(path: Any) -> None:
    with refuses(ConfigError, "trainer.default_local_dir"):
        load_command([("trainer.default_local_dir", path)], GRPO)


# --- an adapter to go on from decides rank, alpha and layers ---------------------------------------------------------
MODEL = "actor_rollout_ref.model"


def test_the_adapter_decides_unless_it_cannot_be(tmp_path: Path) -> None:
    path = f"{MODEL}.lora_adapter_path={write_adapter(tmp_path)}"
    config, _ = load_config([path])
    sft, _ = load_command([path.removeprefix("actor_rollout_ref.")], SFT)
    for model in (config.actor_rollout_ref.model, sft.model):
        assert (model.lora_rank, model.lora_alpha, model.target_modules) == (4, 8.0, ("o_proj", "q_proj"))
    assert not config.needs_reference_workers, "the reference is the model without its factors"
    assert load_config([path, f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8"])[0] == config
    says(load_config([path, f"{MODEL}.target_modules=all-linear"])[1], f"{MODEL}.target_modules", path)
    assert load_config([])[0].actor_rollout_ref.model.lora_adapter_path is None
    (empty := tmp_path / "empty").mkdir()
    with refuses(ConfigError, f"model.lora_adapter_path={empty}", "adapter_config.json"):
        load_command([f"model.lora_adapter_path={empty}"], SFT)
    for override, told in ((f"{MODEL}.lora_rank=8", "r=4"), (f"{MODEL}.lora_alpha=16", "lora_alpha=8")):
        with refuses(ConfigError, path, override, told):
            load_config([path, override])
    write_adapter(tmp_path, use_dora=True)
    with refuses(ConfigError, path, "use_dora=true"):
        load_config([path])


def test_what_engines_can_compute_with() -> None:
    apart = (f"{MODEL}.lora.merge=false", f"{MODEL}.lora_rank=512", f"{MODEL}.target_modules=[q_proj]")
    assert load_config([*apart])[0].actor_rollout_ref.model.sends_factors
    others = {"lora_rank=513": [512], "target_modules=[q_proj,lm_head]": [], "target_modules=[model.lm_head]": []}
    for other, more in others.items():
        with refuses(ConfigError, f"{MODEL}.{other}", f"{MODEL}.lora.merge=false", *more):
            load_config([*apart, f"{MODEL}.{other}"])
    assert not load_config([apart[0]])[0].actor_rollout_ref.model.sends_factors


# --- the processor ---------------------------------------------------------------------------------------------------
def test_processor_and_kernel_by_their_files(tmp_path: Path) -> None:
    processors = {
        "flags\t\t: fpu avx2 avx512_bf16 sse": True,
        "flags\t\t: fpu amx_bf16": True,
        "Features\t: fp asimd bf16": True,
        "flags\t\t: fpu avx2 avx512f": False,
        "model name\t: a bf16 machine": False,
    }
    kernels = {"5.15.153.1-microsoft-standard-WSL2 (gcc)": True, "6.8.0-generic (gcc)": False}
    none = str(tmp_path / "none")
    for found, before, lines in ((has_bf16, "processor\t: 0\n", processors), (is_wsl, "Linux version ", kernels)):
        for number, (line, expected) in enumerate(lines.items()):
            (file := tmp_path / f"{before.split()[0]}{number}").write_text(f"{before}{line}\n")
            assert found(str(file)) == expected
        assert not found(none), "elsewhere than on Linux"
    assert cpu_flags(none) == frozenset()
    assert 1 <= physical_cores() <= os.cpu_count()


V2 = "0::/system.slice/job_7/step_0\n"
V1 = "5:cpu,cpuacct:/slurm/job_7\n4:memory:/slurm/job_7\n1:name=systemd:/slurm\n"


@pytest.mark.parametrize(
    ("groups", "files", "cpus", "memory"),
    [
        ("0::/", {"cpu.max": "150000 100000", "memory.max": "4096"}, 2, 4096),
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, 64, None),
        (V2, {"system.slice/job_7/cpu.max": "400000 100000", "system.slice/memory.max": "8192"}, 4, 8192),
        (V2, {"system.slice/job_7/step_0/memory.max": "9000", "system.slice/memory.max": "8192"}, 64, 8192),
        ("0::/../other", {"cpu.max": "50000 100000", "memory.max": "4096"}, 1, 4096),
        (V1, {"cpu/slurm/cpu.cfs_quota_us": "300000", "cpu/slurm/cpu.cfs_period_us": "100000"}, 3, None),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64, None),
        (V1, {"memory/slurm/job_7/memory.limit_in_bytes": "2048", "memory/memory.limit_in_bytes": "4096"}, 64, 2048),
        ("4:memory:/docker/0123", {"memory/memory.limit_in_bytes": "2048"}, 64, 2048),
        ("4:pids:/", {"pids/memory.limit_in_bytes": "1", "memory.max": "1"}, 64, None),
    ],
)  # fmt: skip
def test_what_control_groups_leave(
    groups: str, files: dict[str, str], cpus: int, memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"own": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(processor, "CGROUPS", tmp_path)
    monkeypatch.setattr(processor, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert (processor.logical_cpus(), processor.memory_gib()) == (cpus, (memory or whole) / 2**30)
