"""What `RUN_OR_MODEL` names: runs, checkpoints and folders, and how each is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.usage import FILE, Usage, read_usage
from grpo_dist.cli.trained import base_of, engine_for, find_trained
from grpo_dist.errors import ConfigError, DataError
from tests.cli.test_export import TINY, checkpoint
from tests.messages import refuses, says


def test_a_run_is_asked_as_it_validates(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    whole = checkpoint(run_dir, "grpo")
    last = find_trained(str(run_dir))
    assert last.folder == run_dir / "huggingface_step_4"
    assert last.name == "run step 4"
    assert last.usage.step == 4
    assert last.usage.sampling == {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 64, "stop": ()}
    assert read_usage(last.folder).sampling == dict(last.usage.sampling) | {"stop": []}
    assert last.config.actor_rollout_ref.model.path == str(last.folder)
    mine, theirs = (load_file(path / "model.safetensors") for path in (last.folder, whole))
    assert all(mine[name].equal(theirs[name]) for name in theirs)

    base = base_of(last)
    assert base.folder == Path(resolve_model_path(TINY))
    assert base.name == f"base {TINY}"
    assert base.usage.step is None
    assert base.usage.sampling == last.usage.sampling

    written = (last.folder / "model.safetensors").stat().st_mtime_ns
    again = find_trained(str(run_dir / "global_step_4"), ["data.system_prompt=Be brief.", "data.max_response_length=8"])
    assert (again.folder, again.usage.system_prompt) == (last.folder, "Be brief.")
    assert again.usage.sampling["max_tokens"] == 8
    assert (last.folder / "model.safetensors").stat().st_mtime_ns == written  # not exported once more
    with refuses(ConfigError, "--step 3", run_dir, "steps 2, 4"):
        find_trained(str(run_dir), step=3)


def test_the_model_of_a_fine_tuned_run_is_asked_with_its_template(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    checkpoint(run_dir, "sft")
    found = find_trained(str(run_dir))
    assert found.usage == Usage(4)
    assert found.base is None
    with refuses(ConfigError, "--base", found.name):
        base_of(found)


def test_a_folder_says_how_it_is_asked(tmp_path: Path) -> None:
    usage = Usage(3, "Be brief.", {"enable_thinking": False}, {"temperature": 0.7, "stop": ["end"]})
    folder = tmp_path / "model"
    usage.write(folder)
    assert not folder.exists()  # it is on another machine
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 100}')
    usage.write(folder)
    found = find_trained(str(folder))
    assert found.usage == usage
    assert found.name == str(folder)
    assert engine_for(found).max_model_len == 100
    assert engine_for(found, 50).max_model_len == 50
    with refuses(ConfigError, "--max-model-len 101", "max_position_embeddings", "100"):
        engine_for(found, 101)

    (folder / FILE).write_text(json.dumps({"steps": 3}))
    with refuses(DataError, folder / FILE, "steps"):
        find_trained(str(folder))


def test_what_is_neither(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        find_trained(str(tmp_path / "gone"))
    says(error, tmp_path / "gone", "trainer.default_local_dir", "builtin:tiny-qwen3")
    with refuses(ConfigError, "--step 1", "trainer.save_freq"):
        find_trained(TINY, step=1)
