"""Model folders with random damage: the driver's check or loading refuses them by name, or the model is whole."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from grpo_dist.assets.model_folder import check_model_folder
from grpo_dist.engines.train.fsdp_model import load_sharded_model
from grpo_dist.errors import DataError
from grpo_dist.plan.model_shape import model_config_at_hand, model_shape
from tests.models import random_qwen3
from tests.worker_settings import model_settings

CONFIGS, FLIPS = 60, 40
WEIGHTS = "model.safetensors"
KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "rope_parameters", "hidden_act", "tie_word_embeddings", "model_type", "architectures",
    "max_position_embeddings", "layer_types", "eos_token_id", "dtype", "attention_dropout", "initializer_range",
)  # fmt: skip
JUNK: list[Any] = [None, True, "x", "", -1, 0, 1, 3, 1.5, [], ["x"], {}, {"a": 1}, "bert", "llama", 1e30]


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(random_qwen3(tmp_path_factory.mktemp("model")))


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def load(folder: Path) -> Any:
    """What the driver and then each actor rank do with a folder."""
    check_model_folder(folder, setting=f"actor_rollout_ref.model.path={folder}", trust_remote_code=False)
    return load_sharded_model(model_settings(str(folder)), "cpu")


def load_or_refuse(folder: Path, case: str, messages: list[str]) -> Any:
    try:
        return load(folder)
    except DataError as error:
        messages.append(str(error))
        assert messages[-1].startswith(f"actor_rollout_ref.model.path={folder}: "), case
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {str(error)[:300]}") from error


@pytest.mark.deep
def test_flipped_bits_are_found_or_are_other_numbers(folder: Path) -> None:
    raw, messages = (folder / WEIGHTS).read_bytes(), []
    names = set(load_file(folder / WEIGHTS))
    for seed in range(FLIPS):
        rng = random.Random(seed)
        at = rng.randrange(8 + 3000 if seed % 2 else len(raw))
        (folder / WEIGHTS).write_bytes(raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :])
        model = load_or_refuse(folder, f"case {seed}, byte {at}", messages)
        if model is not None:
            assert names <= set(model.state_dict()), f"case {seed}"
            assert all(torch.isfinite(weight).all() for weight in model.parameters()), f"case {seed}"
    assert len(messages) >= FLIPS / 10


def test_config_json_with_junk_in_it(folder: Path) -> None:
    config, messages = json.loads((folder / "config.json").read_text()), []
    for seed in range(CONFIGS):
        rng = random.Random(seed)
        changed = dict(config)
        for _ in range(rng.choice([1, 1, 2])):
            key = rng.choice(KEYS)
            changed[key] = rng.choice(JUNK)
            if rng.random() < 0.1:
                del changed[key]
        case = f"case {seed}: { {key: changed.get(key) for key in KEYS if changed.get(key) != config.get(key)} }"
        (folder / "config.json").write_text(json.dumps(changed))
        shape = model_shape(model_config_at_hand(str(folder)) or {})
        assert shape is None or shape.num_parameters > 0, case
        load_or_refuse(folder, case, messages)
    assert len(messages) > CONFIGS / 4
