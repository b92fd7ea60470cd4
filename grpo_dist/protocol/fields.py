"""The column contract: every column of a batch, its meaning, and the role that computes it.

Shapes: N sequences; R_i response tokens, P_i prompt tokens, Q_i tokens of its teacher's prompt and S_i judged steps of
sequence i; K tokens that a teacher tells of. Ragged columns have no padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from grpo_dist.errors import BatchError
from grpo_dist.plugins.names import REWARD_EXTRA

# Prefix of the columns for the reward function's values besides the score: (N,) float32, nan if not returned.
EXTRA = REWARD_EXTRA
SOURCE, TEACHER = "source", "teacher"  # of handles: numbers of each row's data source, and of its teacher of several
UNPENALISED = "unpenalised_score"
# In the column `labels`: a token without one.
NO_LABEL = -1


@dataclass(frozen=True)
class Field:
    """One column: its shape, dtype and meaning, and the role that computes it."""

    shape: str
    dtype: str
    meaning: str
    made_by: str


FIELDS: dict[str, Field] = {
    "uid": Field("(N,)", "object (str)", "group id: one per prompt instance", "sampler"),
    "source": Field("(N,)", "int64", "a number of the prompt's data source, by its name", "sampler"),
    "prompts": Field("ragged (N, P_i)", "int32", "prompt token ids, chat template applied", "data"),
    "responses": Field("ragged (N, R_i)", "int32", "response token ids, end-of-sequence included", "rollout"),
    "response_mask": Field(
        "ragged (N, R_i)", "int8", "1 on tokens that are trained on; 0 on tokens from an environment", "rollout"
    ),
    "rollout_log_probs": Field(
        "ragged (N, R_i)",
        "float32",
        "log-probs of the sampler, with temperature; 0 on tokens that it did not sample; nats",
        "rollout",
    ),
    "weight_versions": Field(
        "ragged (N, R_i)", "int32", "version of the weights that sampled the token; -1: not sampled", "rollout"
    ),
    "weight_version": Field("(N,)", "int64", "oldest weights that sampled a token of the sequence", "rollout"),
    "last_weight_version": Field("(N,)", "int64", "newest weights that sampled a token of the sequence", "rollout"),
    "response_length": Field("(N,)", "int64", "R_i", "rollout"),
    "prompt_length": Field("(N,)", "int64", "P_i", "rollout"),
    "num_turns": Field("(N,)", "int64", "turns: how often the policy generated a part of the response", "rollout"),
    "truncated": Field("(N,)", "int64", "1 where the response was cut at max_response_length", "rollout"),
    "episode_reward": Field("(N,)", "float32", "reward that the agent loop gave; nan: it gave none", "rollout"),
    "episode_step_rewards": Field(
        "ragged (N, R_i)", "float32", "reward that the agent loop gave a step, on its last token; nan: none", "rollout"
    ),
    "predecessors": Field(
        "ragged (N, R_i)", "int32", "of episodes: the token that each one follows (protocol/branches.py)", "rollout"
    ),
    "agent_ids": Field(
        "ragged (N, R_i)", "int32", "of episodes: a number of the agent that sampled it, by name; 0: put in", "rollout"
    ),
    "prompt_routes": Field(
        "ragged (N, P_i, layers, experts)",
        "uint8 or uint16",
        "experts of the prompt's tokens (protocol/routes.py)",
        "rollout",
    ),
    "routes": Field(
        "ragged (N, R_i, layers, experts)", "uint8 or uint16", "experts of the response's tokens, likewise", "rollout"
    ),
    "unknown_routes": Field(
        "(N,)", "int64", "tokens whose experts were not recorded, of those that another one follows", "rollout"
    ),
    "token_level_scores": Field(
        "ragged (N, R_i)", "float32", "raw reward; an outcome reward is on the last trained token", "reward"
    ),
    "score": Field("(N,)", "float32", "raw reward of the sequence, whoever earned it; nan: it has none", "reward"),
    UNPENALISED: Field("(N,)", "float32", "of handles: score without the penalty for long responses", "reward"),
    "failure": Field("(N,)", "object (str)", "why the reward function failed on it; empty: it did not", "reward"),
    "said": Field("(N,)", "object (str)", "texts that the reward function returned of it by name, as JSON", "reward"),
    "token_level_rewards": Field("ragged (N, R_i)", "float32", "scores minus the KL penalty", "targets"),
    "old_log_probs": Field("ragged (N, R_i)", "float32", "log-probs under the policy before the update; nats", "actor"),
    "ref_log_probs": Field("ragged (N, R_i)", "float32", "log-probs under the reference; nats", "ref"),
    "values": Field("ragged (N, R_i)", "float32", "return that the critic foresees before the token", "critic"),
    "advantages": Field("ragged (N, R_i)", "float32", "advantage of each token", "targets"),
    "reward": Field("(N,)", "float32", "score minus the KL penalty: sum of token_level_rewards", "targets"),
    "advantage_mean": Field("(N,)", "float32", "mean advantage over the trained tokens", "targets"),
    "reward_baseline": Field("(N,)", "float32", "score of the greedy response to the same prompt", "rollout"),
    "pred_id": Field(
        "(N,)", "float32", "equal for equal answers of a group, nan without an answer; validation only", "reward"
    ),
    "step_mask": Field("ragged (N, R_i)", "int8", "1 on the last token of each step that has a reward", "reward"),
    "rule_labels": Field(
        "ragged (N, S_i)", "int8", "1 for a good response, or for each good one of its steps, by the rule", "reward"
    ),
    "old_entropies": Field("ragged (N, R_i)", "float32", "entropy of the policy before the update; nats", "actor"),
    "old_gradient_norms": Field(
        "ragged (N, R_i)", "float32", "1 - 2 p + sum p^2 of the policy before the update, for estimators", "actor"
    ),
    "ref_top_ids": Field("ragged (N, R_i, K)", "int32", "the teacher's likeliest tokens at each place", "reward"),
    "ref_top_log_probs": Field("ragged (N, R_i, K)", "float32", "their log-probs by the teacher; nats", "reward"),
    "ref_hidden_states": Field("ragged (N, R_i, H)", "compute type", "inputs of the reference's output layer", "ref"),
    "rollout_is_weights": Field("ragged (N, R_i)", "float32", "importance weights, policy over sampler", "targets"),
    "observation_mask": Field(
        "ragged (N, R_i)", "float32", "1 on tokens of tools and environments, for observation_coeff", "targets"
    ),
    "prompt_weights": Field(
        "ragged (N, R_i)", "float32", "1 / tokens of its prompt's responses, for loss_agg_mode prompt-mean", "targets"
    ),
    "selected_tokens": Field("ragged (N, R_i)", "float32", "1 on tokens that clip_cov or kl_cov selected", "targets"),
    "teacher_prompts": Field(
        "ragged (N, Q_i)", "int32", "what the teacher reads for the prompt (protocol/teacher_prompts.py)", "reward"
    ),
    "teacher_mask": Field("ragged (N, R_i)", "float32", "1 where the response has such a prompt, else 0", "reward"),
    "labels": Field(
        "ragged (N, R_i)",
        "int8",
        "what the reward model should say of the text up to the token: 1 good or chosen, 0 bad or rejected, -1 none",
        "data",
    ),
    "returns": Field("ragged (N, R_i)", "float32", "return of each token", "targets"),
}


def require(stage: str, present: Iterable[str], needed: Iterable[str]) -> None:
    """Check that a batch has the columns a stage needs."""
    have = set(present)
    missing = [name for name in needed if name not in have]
    if missing:
        makers = ", ".join(
            f"{name!r} (made by {FIELDS[name].made_by})" if name in FIELDS else repr(name) for name in missing
        )
        raise BatchError(f"stage {stage!r} needs {makers}; the batch has {', '.join(sorted(have)) or 'no columns'}")
