"""What a dry run looks at: model folder, first rows, reward file; and what it says of things that are not here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.config.load import load_config
from grpo_dist.errors import ConfigError, DataError, GrpoDistError, RewardError
from grpo_dist.main import main
from grpo_dist.trainer.preflight import FIRST_ROWS, check_model, preflight

TINY = Path(resolve_model_path("builtin:tiny-qwen3"))
PATH, REWARD = "actor_rollout_ref.model.path", "custom_reward_function.path"


def checks(*overrides: str) -> list[str]:
    config, _ = load_config(["trainer.dry_run=true", *overrides])
    return list(preflight(config))


def refused(*overrides: str, kind: type[GrpoDistError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        checks(*overrides)
    assert caught.value.exit_code == (1 if kind is RewardError else 2)
    return str(caught.value)


def rows(*texts: str, **changes: Any) -> str:
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "2"}} | changes
    return "".join(json.dumps(row | {"prompt": text}) + "\n" for text in texts)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(rows("1+1?", "2+2?"))
    return tmp_path / "rows.jsonl"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def test_the_built_in_job() -> None:
    model, train, val = checks()
    assert model.startswith("checked: builtin:tiny-qwen3: qwen3, ")
    assert model.endswith(" tensors in 1 file, tokenizer")
    assert train.startswith("checked: builtin:arithmetic/train: the first 100 rows, none longer than data.max_prompt_")
    assert val.startswith("checked: builtin:arithmetic/validation: ")


def test_own_model_rows_and_reward(file: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info): raise ValueError"
    )
    lines = checks(
        f"{PATH}={model}",
        f"data.train_files={file}",
        f"{REWARD}={tmp_path}/mine.py",
        "custom_reward_function.name=score",
    )
    assert lines[0].startswith(f"checked: {model}: qwen3")
    assert lines[1:] == [
        f"checked: {file}: 2 rows, none longer than data.max_prompt_length=512 tokens",
        f"checked: {tmp_path}/mine.py: score can be called",
    ]


def test_what_is_not_on_this_machine_is_said(tmp_path: Path) -> None:
    lines = checks("model=qwen3_8b", "data.train_files=[no.parquet,hf:a/b]", f"{REWARD}=no.py", "data.val_files=null")
    assert [line.partition(": ")[0] for line in lines] == ["not checked"] * 4
    assert "nothing is downloaded" in lines[0]
    assert lines[1].startswith("not checked: no.parquet: no such file")
    assert lines[2] == "not checked: hf:a/b: nothing is downloaded"
    assert lines[3] == "not checked: no.py: no such file"


def test_rows_of_a_model_that_is_not_here_are_checked_all_the_same(file: Path) -> None:
    assert checks("model=qwen3_8b", f"data.train_files={file}")[1] == f"checked: {file}: 2 rows"
    file.write_text(rows("", "x"))
    assert f"data.train_files: {file}, line 1: prompt is empty" in refused(f"data.train_files={file}", "model=qwen3_8b")


def test_broken_things_are_refused(file: Path, model: Path, tmp_path: Path) -> None:
    train = f"data.train_files={file}"
    (tmp_path / "mine.py").write_text("import nothing_of_the_kind")
    assert "nothing_of_the_kind" in refused(train, f"{REWARD}={tmp_path}/mine.py", kind=ConfigError)
    (tmp_path / "mine.py").write_text("import os; os._exit(3)")
    assert "exit code 3" in refused(train, f"{REWARD}={tmp_path}/mine.py", kind=RewardError)
    file.write_text(rows("x", data_source="unknown"))
    assert "no built-in scorer for data_source 'unknown'" in refused(train, kind=ConfigError)
    file.write_text("")
    assert f"data.train_files={file}: the file holds no rows" in refused(train)
    (model / "tokenizer.json").write_text("{")
    assert "cannot load the tokenizer" in refused(f"{PATH}={model}", train)
    (model / "model.safetensors").write_bytes(b"")
    assert f"{PATH}={model}: model.safetensors: damaged" in refused(f"{PATH}={model}", train)


def test_only_the_first_rows_are_read(file: Path) -> None:
    good = rows(*["1+1?"] * FIRST_ROWS)
    file.write_text(good + "no JSON\n")
    assert "line 101: not valid JSON" in refused(f"data.train_files={file}")
    file.write_text(good + rows("2+2?") + "no JSON\n")
    assert f"checked: {file}: the first 100 rows, none longer" in checks(f"data.train_files={file}")[1]


def test_overlong_rows_are_counted_as_a_run_would(file: Path) -> None:
    file.write_text(rows("x" * 600, "1+1?"))
    limit = "data.max_prompt_length=512 tokens"
    assert checks(f"data.train_files={file}")[1].endswith(f"2 rows, 1 longer than {limit}")
    file.write_text(rows("x" * 600))
    assert checks(f"data.train_files={file}")[1].endswith(f"1 rows, 1 longer than {limit}"), "later ones may be short"
    assert "has 6" in refused(f"data.train_files={file}", "data.filter_overlong_prompts=false")


def test_a_tokenizer_of_another_model(file: Path, model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {text: number + 1000 * (text == "+") for text, number in vocab.items()}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refused(f"{PATH}={model}", f"data.train_files={file}")
    assert f"{PATH}={model}: the prompt at {file}, line 1 has the token " in message
    assert "its tokenizer is that of another model" in message


def test_check_model_names_the_key(model: Path) -> None:
    config, _ = load_config([f"{PATH}={model}", "data=arithmetic"])
    assert check_model(config).folder == model
    (model / "model.safetensors").unlink()
    with pytest.raises(DataError, match=f"{PATH}={model}: no weights in the folder"):
        check_model(config)


def test_the_command_tells_it_in_one_message(model: Path, capsys: pytest.CaptureFixture) -> None:
    (model / "config.json").write_text("{")
    assert main([f"{PATH}={model}", "data=arithmetic", "trainer.dry_run=true"]) == 2
    shown = capsys.readouterr()
    assert "32 prompts * n=8" in shown.out, "the plan comes first"
    assert shown.err == f"\nerror: {PATH}={model}: config.json is not JSON: " + shown.err.partition("JSON: ")[2]


def test_a_run_finds_it_before_ray_starts(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\0" * 100)
    code = (
        "import sys; from grpo_dist.main import main;"
        f"code = main(['{PATH}={model}', 'data=arithmetic', 'trainer.default_local_dir={tmp_path}/run']);"
        "import ray; sys.exit(10 * code + ray.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 20, done.stderr
    assert "model.safetensors: damaged" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
