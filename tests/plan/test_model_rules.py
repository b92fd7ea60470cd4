"""What a model's config.json rules out: heads and positions, worked out by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from grpo_dist.plan.commands import load_config
from grpo_dist.plan.model_rules import max_positions
from tests.config.refusals import refused
from tests.messages import says

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
TP = f"{ROLLOUT}.tensor_model_parallel_size"
GPU = "cluster.gpu_memory_gib"
OVERRIDE = f"{MODEL}.override_config"
BATCH = ("data=arithmetic", "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64")
SHAPE = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
         "intermediate_size": 2816, "vocab_size": 32000, "tie_word_embeddings": False}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path):
    """Writes a config.json, and gives the override that names its folder."""

    def write(**entries: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | entries))
        return f"{MODEL}.path={tmp_path}"

    return write


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fits"),
    [
        (16, 16, 8, True),
        (32, 8, 4, True),
        (32, 2, 8, True),  # vLLM gives four GPUs a copy of each key-value head
        (12, 3, 2, False),  # 12 heads split, 3 key-value heads neither split over 2 nor are copied
        (9, 3, 2, False),
        (9, 9, 8, False),
        (14, 2, 4, False),
    ],
)
def test_tensor_parallel_divides_the_heads(model, heads: int, kv_heads: int, size: int, fits: bool) -> None:
    run = ("cluster=multi_node", f"{TP}={size}", model(num_attention_heads=heads, num_key_value_heads=kv_heads))
    if fits:
        load_config([*BATCH, *run])
        return
    text = refused(*BATCH, *run)
    says(text, f"{TP}={size}", f"{heads} attention heads", f"{kv_heads} key-value heads")


def test_the_sizes_that_fit_are_named(model) -> None:
    """12 heads over 4 key-value heads on 8 GPUs: 1, 2, 4; 8 does not divide 12."""
    path = model(num_attention_heads=12, num_key_value_heads=4)
    says(refused(*BATCH, "cluster=multi_node", f"{TP}=8", path), f"{TP}=8", "1 or 2 or 4")


def test_on_cpu_too(model) -> None:
    """9 heads over 3 key-value heads: 1 and 3, or 9 with copies of them."""
    path = model(num_attention_heads=9, num_key_value_heads=3)
    says(refused(*BATCH, f"{TP}=2", path), f"{TP}=2", "2 processes", "1 or 3 or 9")


def test_heads_of_a_hub_model_that_is_not_here_are_known_by_its_name() -> None:
    """Qwen2.5-7B has 28 heads."""
    hub = f"{MODEL}.path=Qwen/Qwen2.5-7B-Instruct"
    text = refused(*BATCH, "cluster=multi_node", f"{TP}=8", hub)
    says(text, f"{TP}=8", "Qwen/Qwen2.5-7B-Instruct", "28 attention heads")
    load_config([*BATCH, "cluster=node8", f"{TP}=4", hub])


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"max_position_embeddings": 100}, ("max_position_embeddings", 100)),
        ({"n_positions": 1024}, ("n_positions", 1024)),
        ({"max_position_embeddings": 400, "seq_length": 300}, ("seq_length", 300)),
        ({"max_position_embeddings": 100, "model_max_length": 900}, ("model_max_length", 900)),
        ({"text_config": {"max_position_embeddings": 100}, "seq_length": 7}, ("max_position_embeddings", 100)),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4.0}}, (..., 400)),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, (..., 200)),
        ({"max_position_embeddings": 400, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, (..., 400)),
        ({"max_position_embeddings": 400, "rope_scaling": {"type": "longrope", "factor": 4.0}}, (..., 400)),
        ({"max_position_embeddings": 400, "rope_parameters": {"rope_type": "default", "factor": None}}, (..., 400)),
        (
            {
                "max_position_embeddings": 100,
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 3.0}, "sliding": {}},
            },
            (..., 300),
        ),
        ({"max_position_embeddings": "many", "rope_scaling": "x"}, None),
        ({}, None),
    ],
)
def test_positions_as_vllm_derives_them(entries: dict, expected: tuple | None) -> None:
    found = max_positions(entries)
    if expected is None or found is None:
        assert found == expected
    else:
        assert found[1] == expected[1]
        assert expected[0] in (..., found[0])


def test_a_sequence_longer_than_the_models_positions_is_refused(*BATCH, model, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 + 64 tokens, 100 positions."""
    path = model(max_position_embeddings=100)
    text = refused(*BATCH, path)
    says(text, "data.max_prompt_length=64", "data.max_response_length=64", "128 tokens", "lower")
    says(text, "100 positions", "max_position_embeddings", "config.json")
    asked = refused(*BATCH, model(max_position_embeddings=128), f"{ROLLOUT}.max_model_len=129")
    says(asked, f"{ROLLOUT}.max_model_len=129", "129 tokens")
    load_config([*BATCH, path := model(max_position_embeddings=128)])
    path = model(max_position_embeddings=100)
    load_config([*BATCH, path, "data.max_response_length=36"])
    load_config([*BATCH, path, f"{MODEL}.override_config.max_position_embeddings=4096"])
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    load_config([*BATCH, path])


YARN = "rope_type: yarn, factor: 4.0, original_max_position_embeddings: 128"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ("rope_theta: 50000", "rope_theta"),
        (f"rope_scaling: {{{YARN}}}", "rope_scaling"),
        (f"rope_parameters: {{{YARN}}}", "rope_parameters"),
        (f"rope_theta: 50000, rope_scaling: {{{YARN}}}", "rope_theta, rope_scaling"),
    ],
)
@pytest.mark.parametrize("own", [{"rope_theta": 7000.0}, {"rope_parameters": {"rope_theta": 7000.0}}])
def test_rope_is_set_as_a_whole(model, changes: str, named: str, own: dict) -> None:
    """Elsewhere it has no effect, or ends in an error of transformers; what the message names is taken."""
    path = model(max_position_embeddings=512, **own)
    text = refused(*BATCH, path, f"{OVERRIDE}={{{changes}}}")
    whole = re.search(r"set (\S+rope_parameters=\{.*\}) in", text)
    assert whole is not None
    says(text, f"{OVERRIDE} has {named}:", f"rope_theta:{50000 if 'rope_theta' in named else 7000.0}")
    assert ("factor:4.0" in whole[1]) == ("yarn" in changes)
    config, _ = load_config([*BATCH, path, whole[1]])
    assert set(config.actor_rollout_ref.model.override_config) == {"rope_parameters"}


def test_rope_of_each_kind_of_layer_and_of_code_of_the_models_own_is_theirs(model) -> None:
    nested = f"{OVERRIDE}.rope_parameters={{full_attention: {{rope_type: default, rope_theta: 1.0}}}}"
    load_config([*BATCH, model(), nested])
    load_config([*BATCH, model(), f"{OVERRIDE}.rope_theta=50000", f"{MODEL}.trust_remote_code=true"])


def test_the_memory_of_gpus_says_nothing_about_a_run_without_them(model) -> None:
    assert load_config([*BATCH, model(), f"{GPU}=0.001"])[0].device == "cpu"


# --- a mixture of experts ------------------------------------------------------------------------------------------
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
TARGETS = f"{MODEL}.target_modules"


def test_a_loss_of_the_router_is_neither_dropped_nor_added(model) -> None:
    load_config([*BATCH, model(**EXPERTS, output_router_logits=False, router_aux_loss_coef=0.001)])
    path = model(**EXPERTS, output_router_logits=True)
    text = refused(*BATCH, path)
    says(text, "output_router_logits=true", f"{OVERRIDE}.output_router_logits=false")
    load_config([*BATCH, path, f"{OVERRIDE}.output_router_logits=false"])
    text = refused(*BATCH, model(**EXPERTS), f"{OVERRIDE}.router_aux_loss_coef=0.01")
    says(text, f"{OVERRIDE}.router_aux_loss_coef=0.01", "router")
    load_config([*BATCH, model(**EXPERTS), f"{OVERRIDE}.router_aux_loss_coef=0"])


def test_lora_of_experts(model) -> None:
    rank = f"{MODEL}.lora_rank=4"
    text = refused(*BATCH, model(**EXPERTS), rank, f"{TARGETS}=[q_proj,gate_proj,down_proj]")
    says(text, f"{TARGETS}=[q_proj,gate_proj,down_proj]", "gate_proj, down_proj", "experts", "attention")
    load_config([*BATCH, model(**EXPERTS), rank, f"{TARGETS}=[q_proj,v_proj]"])
    load_config([*BATCH, model(**EXPERTS), f"{TARGETS}=[gate_proj]"])  # without LoRA it says nothing
    load_config([*BATCH, model(), rank, f"{TARGETS}=[gate_proj]"])
    for entry in ({"n_shared_experts": 1}, {"mlp_only_layers": [0]}):  # those are linear layers
        load_config([*BATCH, model(**EXPERTS, **entry), rank, f"{TARGETS}=[gate_proj]"])


def test_engines_on_cpu_compute_experts_with_merged_factors_only(model) -> None:
    rank, apart = f"{MODEL}.lora_rank=4", f"{MODEL}.lora.merge=false"
    says(refused(*BATCH, model(**EXPERTS), rank, apart), apart, f"{MODEL}.path", "CPU")
    load_config([*BATCH, model(**EXPERTS), rank])
    load_config([*BATCH, model(**EXPERTS), apart])
    load_config([*BATCH, model(), rank, apart])
    load_config([*BATCH, "cluster=node8", model(**EXPERTS), rank, apart])


REPLAY = "actor_rollout_ref.actor.router_replay.mode=R3"


def test_a_model_without_experts_has_none_to_replay(model) -> None:
    says(refused(*BATCH, model(), REPLAY), REPLAY, f"{MODEL}.path", "experts", "disabled")
    load_config([*BATCH, model(**EXPERTS), REPLAY])
    load_config([*BATCH, model(), REPLAY.replace("R3", "disabled")])


def test_lora_says_what_of_a_mixture_of_experts_it_trains(model) -> None:
    note = "mixture of experts"
    for entries, lora, expected in ((EXPERTS, 4, True), (EXPERTS, 0, False), ({}, 4, False)):
        _, notes = load_config([*BATCH, model(**entries), f"{MODEL}.lora_rank={lora}"])
        assert any(note in each for each in notes) == expected


@pytest.mark.parametrize(("size", "fits"), [(1, True), (8, True), (16, False)])
def test_tensor_parallel_divides_the_experts(model, size: int, fits: bool) -> None:
    """40 wide; there are 16 attention heads."""
    run = (*BATCH, f"{TP}={size}", "cluster.rollout_world_size=16", model(**EXPERTS))
    if fits:
        load_config([*run])
        return
    says(refused(*run), f"{TP}=16", "experts")
