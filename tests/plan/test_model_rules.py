"""What a model's config.json rules out: heads and positions, worked out by hand."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_dist.plan.model_rules import max_positions
from tests.messages import says
from tests.plan.asked import load, notes, overrides
from tests.plan.asked import refused as refused_alone

Write = Callable[..., str]
MODEL = "actor_rollout_ref.model"
OVERRIDE = f"{MODEL}.override_config"
BATCH = "data=arithmetic  data.train_batch_size=64  actor.ppo_mini_batch_size=64"
SHAPE = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
         "intermediate_size": 2816, "vocab_size": 32000, "tie_word_embeddings": False}  # fmt: skip


def refused(*run: str) -> str:
    return refused_alone(BATCH, *run)


def taken(*run: str) -> None:
    load(BATCH, *run)


@pytest.fixture
def model(tmp_path: Path) -> Write:
    def write(**entries: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | entries))
        return f"model.path={tmp_path}"

    return write


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fits"),
    [
        (16, 16, 8, True),
        (32, 8, 4, True),
        (32, 2, 8, True),  # vLLM gives four GPUs a copy of each key-value head
        (12, 3, 2, False),  # 12 heads split, 3 key-value heads neither split over 2 nor are copied
        (14, 2, 4, False),
    ],
)
def test_tensor_parallel_divides_the_heads(model: Write, heads: int, kv_heads: int, size: int, fits: bool) -> None:
    run = ("cluster=multi_node", f"TP={size}", model(num_attention_heads=heads, num_key_value_heads=kv_heads))
    if fits:
        taken(*run)
    else:
        says(refused(*run), *overrides(f"TP={size}"), f"{heads} attention heads", f"{kv_heads} key-value heads")


def test_the_sizes_that_fit_are_named(model: Write) -> None:
    """8 does not divide 12; on CPU 9 over 3 may be 9, with copies."""
    path = model(num_attention_heads=12, num_key_value_heads=4)
    says(refused("cluster=multi_node", "TP=8", path), *overrides("TP=8"), "1 or 2 or 4")
    path = model(num_attention_heads=9, num_key_value_heads=3)
    says(refused("TP=2", path), *overrides("TP=2"), "2 processes", "1 or 3 or 9")


def test_heads_of_a_hub_model_that_is_not_here_are_known_by_its_name() -> None:
    """Qwen2.5-7B has 28 heads."""
    hub = "model.path=Qwen/Qwen2.5-7B-Instruct"
    says(refused("cluster=multi_node", "TP=8", hub), *overrides("TP=8", hub), "28 attention heads")
    taken("cluster=node8", "TP=4", hub)


POSITIONS = "max_position_embeddings"


def scaled(positions: int, **rope: object) -> dict[str, object]:
    return {"max_position_embeddings": positions, "rope_scaling": rope}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"n_positions": 1024}, ("n_positions", 1024)),
        ({"max_position_embeddings": 400, "seq_length": 300}, ("seq_length", 300)),
        ({"max_position_embeddings": 100, "model_max_length": 900}, ("model_max_length", 900)),
        ({"text_config": {"max_position_embeddings": 100}, "seq_length": 7}, (POSITIONS, 100)),
        (scaled(100, type="linear", factor=4.0), (POSITIONS, 400)),
        (scaled(100, rope_type="dynamic", factor=2), (POSITIONS, 200)),
        (scaled(400, rope_type="yarn", factor=4.0), (POSITIONS, 400)),
        (scaled(400, type="longrope", factor=4.0), (POSITIONS, 400)),
        (scaled(400, rope_type="default", factor=None), (POSITIONS, 400)),
        (scaled(100, full_attention={"rope_type": "linear", "factor": 3.0}, sliding={}), (POSITIONS, 300)),
        ({"max_position_embeddings": 400, "rope_parameters": {"rope_type": "linear", "factor": 2}}, (POSITIONS, 800)),
        ({"max_position_embeddings": "many", "rope_scaling": "x"}, None),
        ({}, None),
    ],
)
def test_positions_as_vllm_derives_them(entries: dict, expected: tuple | None) -> None:
    assert max_positions(entries) == expected


def test_a_sequence_longer_than_the_models_positions_is_refused(model: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 + 64 tokens, 100 positions."""
    path = model(max_position_embeddings=128)
    taken(path)
    asked = "rollout.max_model_len=129"
    says(refused(path, asked), *overrides(asked), "129 tokens")
    path = model(max_position_embeddings=100)
    text = refused(path)
    says(text, "data.max_prompt_length=64", "data.max_response_length=64", "128 tokens", "lower")
    says(text, "100 positions", "max_position_embeddings", "config.json")
    taken(path, "data.max_response_length=36")
    taken(path, "model.override_config.max_position_embeddings=4096")
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    taken(path)


YARN = "rope_type: yarn, factor: 4.0, original_max_position_embeddings: 128"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ("rope_theta: 50000", "rope_theta"),
        (f"rope_scaling: {{{YARN}}}", "rope_scaling"),
        (f"rope_theta: 50000, rope_scaling: {{{YARN}}}", "rope_theta, rope_scaling"),
    ],
)
@pytest.mark.parametrize("own", [{"rope_theta": 7000.0}, {"rope_parameters": {"rope_theta": 7000.0}}])
def test_rope_is_set_as_a_whole(model: Write, changes: str, named: str, own: dict[str, object]) -> None:
    """Elsewhere it has no effect, or ends in an error of transformers; what the message names is taken."""
    path = model(max_position_embeddings=512, **own)
    text = refused(path, f"{OVERRIDE}={{{changes}}}")
    whole = re.search(r"set (\S+rope_parameters=\{.*\}) in", text)
    assert whole is not None
    says(text, f"{OVERRIDE} has {named}:", f"rope_theta:{50000 if 'rope_theta' in named else 7000.0}")
    assert ("factor:4.0" in whole[1]) == ("yarn" in changes)
    assert set(load(BATCH, path, whole[1]).actor_rollout_ref.model.override_config) == {"rope_parameters"}


def test_rope_of_each_kind_of_layer_and_of_code_of_the_models_own_is_theirs(model: Write) -> None:
    taken(model(), f"{OVERRIDE}.rope_parameters={{full_attention: {{rope_type: default, rope_theta: 1.0}}}}")
    taken(model(), f"{OVERRIDE}.rope_theta=50000  model.trust_remote_code=true")


# --- a mixture of experts ------------------------------------------------------------------------------------------
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
RANK = "model.lora_rank=4"


def test_a_loss_of_the_router_is_neither_dropped_nor_added(model: Write) -> None:
    taken(model(**EXPERTS, output_router_logits=False, router_aux_loss_coef=0.001))
    path, off = model(**EXPERTS, output_router_logits=True), f"{OVERRIDE}.output_router_logits=false"
    says(refused(path), "output_router_logits=true", off)
    taken(path, off)
    added = f"{OVERRIDE}.router_aux_loss_coef="
    says(refused(model(**EXPERTS), f"{added}0.01"), f"{added}0.01", "router")
    taken(model(**EXPERTS), f"{added}0")


def test_lora_of_experts(model: Write) -> None:
    """Merged by engines on CPU, which compute no others; what it trains is noted."""
    targets, dense = "model.target_modules=[q_proj,gate_proj,down_proj]", "model.target_modules=[gate_proj]"
    says(refused(model(**EXPERTS), RANK, targets), *overrides(targets), "gate_proj, down_proj", "experts", "attention")
    taken(model(**EXPERTS), RANK, "model.target_modules=[q_proj,v_proj]")
    taken(model(**EXPERTS), dense)  # without LoRA it says nothing
    taken(model(), RANK, dense)
    for entry in ({"n_shared_experts": 1}, {"mlp_only_layers": [0]}):  # those are linear layers
        taken(model(**EXPERTS, **entry), RANK, dense)
    apart = "model.lora.merge=false"
    says(refused(model(**EXPERTS), RANK, apart), *overrides(apart), f"{MODEL}.path", "CPU")
    taken(model(**EXPERTS), apart)
    taken(model(), RANK, apart)
    taken("cluster=node8", model(**EXPERTS), RANK, apart)
    told = [" ".join(notes(BATCH, model(**kind), rank)) for kind, rank in ((EXPERTS, RANK), (EXPERTS, ""), ({}, RANK))]
    assert ["mixture of experts" in each for each in told] == [True, False, False]


def test_a_model_without_experts_has_none_to_replay(model: Write) -> None:
    replay = "actor.router_replay.mode=R3"
    says(refused(model(), replay), *overrides(replay), f"{MODEL}.path", "experts", "disabled")
    taken(model(**EXPERTS), replay)
    taken(model(), replay.replace("R3", "disabled"))


def test_tensor_parallel_divides_the_experts(model: Write) -> None:
    """40 wide; there are 16 attention heads."""
    run = ("cluster.rollout_world_size=16", model(**EXPERTS))
    for size in (1, 8):
        taken(*run, f"TP={size}")
    says(refused(*run, "TP=16"), *overrides("TP=16"), "experts")
