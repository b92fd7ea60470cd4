"""Recorded experts in the trainer's passes, against the paper's formula in plain Python and against each other."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.router_replay import RouterReplay
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, Ragged, metric_values
from tests.engines.train.plain import weights, with_sgd
from tests.messages import refuses, says
from tests.models import EXPERTS, branching_batch, objective, random_batch, random_model, trainable_engine
from tests.ranks import run_ranks
from tests.worker_settings import lora

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0}
LAYERS, NUM_EXPERTS, CHOSEN = 2, 8, 2
KEY = "actor_rollout_ref.actor.router_replay.mode=R3"


def model(family: str = "Qwen3Moe", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | EXPERTS | changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def routes_of(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Different experts for each token and layer, of which a fifth of the tokens have none."""
    drawn = rng.random((*shape, LAYERS, NUM_EXPERTS)).argsort(-1)[..., :CHOSEN].astype(np.uint8)
    drawn[rng.random(shape) < 0.2] = 255
    return drawn


def with_recorded(data: DataProto) -> DataProto:
    """The batch with made-up experts; rows of a group have the same for their prompt."""
    rng = np.random.default_rng(5)
    by_uid = {uid: routes_of(rng, len(row)) for uid, row in zip(data["uid"], data["prompts"].rows(), strict=True)}
    columns = {
        "prompt_routes": Ragged.from_rows([by_uid[uid] for uid in data["uid"]], torch.uint8),
        "routes": Ragged.from_rows([routes_of(rng, len(row)) for row in data["responses"].rows()], torch.uint8),
    }
    return data.union(DataProto.from_dict(columns))


# --- one router ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("normalises", [True, False])
def test_weights_are_the_papers(normalises: bool) -> None:
    policy = model(norm_topk_prob=normalises)
    router = policy.model.layers[1].mlp.gate
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(3, 32)
    logits, _, own = router(hidden)
    RouterReplay(policy, "model").set(
        torch.tensor([[[[0, 0], [7, 3]], [[1, 1], [4, 5]], [[255, 255], [255, 255]]]]).byte()
    )
    _, weights, chosen = router(hidden)
    assert chosen.tolist() == [[7, 3], [4, 5], own[2].tolist()]
    for token, experts in enumerate(chosen.tolist()):
        exps = [math.exp(logit) for logit in logits[token].tolist()]
        total = sum(exps[i] for i in experts) if normalises else sum(exps)
        assert weights[token].tolist() == pytest.approx([exps[i] / total for i in experts], rel=1e-5)


def test_gradients_reach_the_router() -> None:
    """Of the recorded experts, by the derivative of the softmax over them: w_i (1 - w_i) and -w_i w_j."""
    policy = model()
    router = policy.model.layers[0].mlp.gate
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(1, 32)
    RouterReplay(policy, "model").set(torch.tensor([[[[6, 2], [0, 1]]]]).byte())
    weights = router(hidden)[1]
    weights[0, 0].backward()
    slope = (weights[0, 0] * weights[0, 1]).item()
    expected = torch.zeros(NUM_EXPERTS, 32)
    expected[6], expected[2] = slope * hidden[0], -slope * hidden[0]
    torch.testing.assert_close(router.weight.grad, expected)


@pytest.mark.deep
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "Olmoe", "Qwen2Moe"])
def test_the_routers_own_choice_changes_no_bit(family: str) -> None:
    policy = model(family)
    ids = torch.arange(3, 40).reshape(1, -1)
    before = policy(input_ids=ids, output_router_logits=True)
    own = torch.stack([layer.topk(CHOSEN).indices for layer in before.router_logits], 1)
    RouterReplay(policy, "model").set(own[None].byte())
    assert torch.equal(policy(input_ids=ids).logits, before.logits)


def test_layers_without_experts_are_passed_over() -> None:
    """Of three layers the second is an ordinary one; the engine's columns have a place for it."""
    policy = model(num_hidden_layers=3, mlp_only_layers=[1])
    replay = RouterReplay(policy, "model")
    replay.set(torch.tensor([[[[1, 2], [0, 0], [3, 4]]]]).short())
    hidden = torch.randn(1, 32)
    assert [policy.model.layers[i].mlp.gate(hidden)[2].tolist() for i in (0, 2)] == [[[1, 2]], [[3, 4]]]
    replay.set(None)
    assert policy.model.layers[0].mlp.gate(hidden)[2].tolist() != [[1, 2]]


def test_what_cannot_replay_is_refused() -> None:
    with refuses(ConfigError, KEY, "model=dense", "disabled"):
        RouterReplay(model("Qwen3"), "model=dense")
    sizes = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "num_key_value_heads": 4}
    with refuses(ConfigError, KEY, "model=sigmoids", "DeepseekV3TopkRouter", "disabled"):
        RouterReplay(model("DeepseekV3", **sizes), "model=sigmoids")


# --- whole passes --------------------------------------------------------------------------------------------------
LIMITS: dict[str, tuple[str, PassLimits]] = {
    "padded": ("padded", PassLimits("", 100)),
    "padded, 3 rows at a time": ("padded", PassLimits("", 3)),
    "packed, 60 tokens at a time": ("packed", PassLimits("", 1, 60)),
    "shared": ("shared", PassLimits("", 100)),
    "shared, 40 tokens at a time": ("shared", PassLimits("", 1, 40)),
    "shared, layers computed again": ("shared", PassLimits("", 5)),
}
LR = 0.1


def passes(
    rank: int, path: str, shards: list[list[int]], ways: Iterable[str], *, branches: bool = False, **more: Any
) -> dict[str, Any]:
    out = {}
    for way in ways:
        layout, limits = LIMITS[way]
        more |= {"layout": layout, "enable_gradient_checkpointing": "again" in way, "replays_routes": True}
        engine = with_sgd(path, LR, temperature=0.7, **more)  # whose step is the gradient
        data = with_recorded((branching_batch if branches else random_batch)(4, 5)).index(shards[rank])
        before = weights(engine)
        log_probs = engine.compute_log_probs(data, limits).values.numpy().copy()
        metrics = engine.train_mini_batch(data, objective(), limits).metrics
        gradients = {name: (before[name] - weight) / LR for name, weight in weights(engine).items()}
        out[way] = {"log_probs": log_probs, "metrics": metrics, "gradients": gradients, "report": engine.forward.report}
    return out


def compiled_passes(rank: int, path: str, shards: list[list[int]], ways: Iterable[str]) -> list[dict[str, Any]]:
    """In bfloat16, since experts in float32 are not compiled; then without a compiler."""
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        compiled = passes(rank, path, shards, ways, use_torch_compile=True, compute_dtype="bf16")
    return [compiled, passes(rank, path, shards, ways, compute_dtype="bf16")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_model("Qwen3Moe", tmp_path_factory.mktemp("experts"), head_dim=8, **EXPERTS)


ALL = list(range(20))


@pytest.fixture(scope="module")
def whole(path: str) -> dict[str, Any]:
    (out,) = run_ranks(1, passes, path, [ALL], list(LIMITS))
    return out


def assert_same_update(found: dict[str, Any], expected: dict[str, Any]) -> None:
    ours, theirs = metric_values(found["metrics"]), metric_values(expected["metrics"])
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, gradient in expected["gradients"].items():
        np.testing.assert_allclose(found["gradients"][name], gradient, atol=2e-5, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize("way", list(LIMITS)[1:])
def test_how_rows_are_laid_out_changes_nothing(whole: dict[str, Any], way: str) -> None:
    assert LIMITS[way][0] in whole[way]["report"], "it did not fall back"
    np.testing.assert_allclose(whole[way]["log_probs"], whole["padded"]["log_probs"], atol=1e-5)
    assert_same_update(whole[way], whole["padded"])


def test_experts_are_those_that_were_recorded(path: str, whole: dict[str, Any]) -> None:
    """By transformers' own layers, each token's experts put in by hand."""
    data, policy = with_recorded(random_batch(4, 5)), transformers.AutoModelForCausalLM.from_pretrained(path)
    names, expected = ("prompts", "responses", "prompt_routes", "routes"), []
    for prompt, response, *routes in zip(*(data[name].rows() for name in names), strict=True):
        chosen = torch.cat(routes).long()
        for i, layer in enumerate(policy.model.layers):
            layer.mlp.gate.forward = by_hand(layer.mlp.gate, chosen[:, i])
        with torch.no_grad():
            logits = policy(input_ids=torch.cat([prompt, response]).long()[None]).logits[0] / 0.7
        picked = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, response.long()[:, None])
        expected.append(picked.squeeze(-1))
    np.testing.assert_allclose(whole["padded"]["log_probs"], torch.cat(expected).numpy(), atol=1e-5)


def by_hand(router: Any, chosen: torch.Tensor) -> Any:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden @ router.weight.T
        rows = [own.topk(CHOSEN).indices if 255 in one else one for own, one in zip(logits, chosen, strict=True)]
        experts = torch.stack(rows)
        return logits, logits.gather(-1, experts).softmax(-1), experts

    return forward


@pytest.mark.parametrize("split", [False, True], ids=["two ranks", "one sequence on two ranks"])
def test_ranks_change_nothing(path: str, whole: dict[str, Any], split: bool) -> None:
    way = "shared, 40 tokens at a time"
    run = functools.partial(passes, sequence_parallel_size=2) if split else passes
    found = [each[way] for each in run_ranks(2, run, path, [ALL, ALL] if split else [ALL[:7], ALL[7:]], [way])]
    log_probs = np.concatenate([part["log_probs"] for part in found[: 1 if split else 2]])
    np.testing.assert_allclose(log_probs, whole["padded"]["log_probs"], atol=1e-5)
    for name, gradient in whole["padded"]["gradients"].items():
        np.testing.assert_allclose(found[0]["gradients"][name], gradient, atol=2e-5, rtol=1e-3, err_msg=name)


@pytest.mark.long
def test_compiled_layers_change_nothing(path: str) -> None:
    way = "shared, layers computed again"
    ((out, plain),) = run_ranks(1, compiled_passes, path, [ALL], [way])
    says(out[way]["report"], "shared prompts", "compiled")
    np.testing.assert_allclose(out[way]["log_probs"], plain[way]["log_probs"], atol=1e-5)
    assert_same_update(out[way], plain[way])


def test_branches_of_an_episode_have_their_own(path: str) -> None:
    ways = ["padded, 3 rows at a time", "packed, 60 tokens at a time", "shared, 40 tokens at a time"]
    (out,) = run_ranks(1, functools.partial(passes, branches=True), path, [ALL], ways)
    for way in ways[1:]:
        assert LIMITS[way][0] in out[way]["report"]
        np.testing.assert_allclose(out[way]["log_probs"], out[ways[0]]["log_probs"], atol=1e-5)
        assert_same_update(out[way], out[ways[0]])


def with_factors(rank: int, path: str) -> tuple[dict[str, Any], Any, Any]:
    data = with_recorded(random_batch(4, 5))
    engine = trainable_engine(path, lora=lora(), replays_routes=True)
    log_probs = engine.compute_log_probs(data, PassLimits("", 100)).values.numpy().copy()
    metrics = engine.train_mini_batch(data, objective(), PassLimits("", 6)).metrics
    reference = engine.compute_reference_columns(data, ("log_probs",), PassLimits("", 100))["log_probs"]
    return metric_values(metrics), log_probs, reference.values.numpy().copy()


def test_with_lora_the_reference_replays_too(path: str, whole: dict[str, Any]) -> None:
    """Factors are nothing at first, so the policy is its reference; after a step that is still what it was."""
    ((metrics, log_probs, reference),) = run_ranks(1, with_factors, path)
    np.testing.assert_allclose(log_probs, whole["shared"]["log_probs"], atol=1e-5)
    np.testing.assert_allclose(reference, log_probs, atol=1e-5)
    assert metrics["actor/grad_norm"] > 0
