"""Gated delta nets over segments: what a token goes on from. tests/equivalence has whole models."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from grpo_dist.engines.train.attention import check_split, why_padded
from grpo_dist.engines.train.recurrence import convolved, plan_recurrence, with_states
from grpo_dist.engines.vllm.backend import VLLMBackend
from grpo_dist.errors import ConfigError
from tests.messages import refuses, says
from tests.models import GATED_DELTA_NET, without_memory
from tests.worker_settings import model_settings

# A prompt of 2 tokens, two responses to it, one of them with two turns behind it, padding; and a sequence alone.
OWN = [0, 0, 1, 2, 2, 3, 4, -1, 5, 5, 5]
LAST = [4, 4, 1, 4, 4, 3, 4, -1, 5, 5, 5]
SEGMENTS = torch.tensor([OWN, LAST]).unsqueeze(1)
# The tokens that each one ends.
PATHS = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4], [0, 1, 3, 4, 5], [0, 1, 3, 4, 6], [], [8], [8, 9], [8, 9, 10]]


def test_a_convolution_reads_what_a_token_follows() -> None:
    """Weights of 100, 10 and 1, the last of the token itself."""
    plan, tokens = plan_recurrence(SEGMENTS), torch.arange(1.0, 12.0).view(1, 1, -1)
    out = convolved(None, plan, tokens, torch.tensor([[100.0, 10.0, 1.0]]))  # type: ignore[arg-type]
    assert out.flatten().tolist() == [1, 12, 123, 124, 245, 456, 457, 8, 9, 100, 1011]


def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule token by token, as arXiv 2412.06464 writes it, of (L, heads, D) tensors: the last token's value."""
    state, out = torch.zeros(query.shape[1], query.shape[2], value.shape[2]), value[0]
    for q, k, v, decay, rate in zip(query, key, value, g, beta, strict=True):
        state = state * decay.exp().view(-1, 1, 1)
        error = v - torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv,h->hkv", k, error, rate)
        out = torch.einsum("hkv,hk->hv", state, q) * q.shape[-1] ** -0.5
    return out


def test_a_segment_begins_with_the_state_behind_what_it_follows() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.nn.functional.normalize(torch.randn(1, 11, 2, 4, generator=random), dim=-1) for _ in range(3)
    )
    g, beta = -torch.rand(1, 11, 2, generator=random), torch.rand(1, 11, 2, generator=random)
    computed: list[int] = []

    def counted(*tensors: Tensor, **kwargs: Any) -> Any:
        computed.append(int((kwargs["beta"] > 0).any(-1).sum()))
        return torch_chunk_gated_delta_rule(*tensors, **kwargs)

    out, _ = with_states(counted, plan_recurrence(SEGMENTS), query, key, value, g=g, beta=beta)
    for token, path in enumerate(PATHS):
        alone = rule(*(x[0, path] for x in (query, key, value, g, beta))) if path else torch.zeros(2, 4)
        torch.testing.assert_close(out[0, token], alone, atol=1e-6, rtol=1e-5)
    assert sum(computed) == 10, "each token once, the prompt's too"


def test_sequences_of_a_hybrid_model_are_not_split_over_ranks() -> None:
    model = without_memory(transformers.Qwen3_5TextConfig(**GATED_DELTA_NET, num_hidden_layers=2, hidden_size=32))
    assert why_padded(model) == ""
    with refuses(ConfigError, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "linear_attention", "1"):
        check_split(model.config, model_settings("folder", sequence_parallel_size=2))


def test_engines_on_cpu_compute_them_in_bf16_alone() -> None:
    says(
        VLLMBackend().model_problem({"linear_key_head_dim": 64}, "cpu", "float32"), "rollout.dtype=float32", "bfloat16"
    )
