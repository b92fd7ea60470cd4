"""The column contract: every column of a batch, its meaning, who computes it and who reads it.

Shapes: N sequences; R_i response tokens, P_i prompt tokens, Q_i tokens of its teacher's prompt and S_i judged steps of
sequence i; K tokens that a teacher tells of. Ragged columns have no padding.

Readers: `forward` (a model's pass), `router` (one that replays experts) and `teacher` (one that was shown something);
`actor`, `critic` and `reward_model` (their losses, and what the last scores); `scorer`, and `endpoint` where a teacher
is elsewhere; `targets`, `diagnostics`, `samples` and `judged` of the reward processes; `driver`, whose handles carry
the column.
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
_ROW, _PROMPT, _TOKENS = "(N,)", "ragged (N, P_i)", "ragged (N, R_i)"


@dataclass(frozen=True)
class Field:
    """One column.

    Attributes:
        shape: (N,), or of ragged ones with what a row has.
        made_by: the role, or the part of one, that computes it.
        read_by: who reads it, some only where their settings ask for it.
        output: the output of a model's pass that it is, see `FSDPEngine.compute_columns`; "": of none.
        recorded: whether the record of a step has it: not what is much larger than all the rest.
    """

    shape: str
    dtype: str
    made_by: str
    read_by: str
    meaning: str
    output: str = ""
    recorded: bool = True


# fmt: off
FIELDS: dict[str, Field] = {
    "uid": Field(_ROW, "object (str)", "sampler", "forward reward_model targets diagnostics samples judged driver",
        "group id: one per prompt instance"),
    "source": Field(_ROW, "int64", "sampler", "targets", "a number of the prompt's data source, by its name"),
    "prompts": Field(_PROMPT, "int32", "data", "forward reward_model endpoint samples",
        "prompt token ids, chat template applied"),
    "responses": Field(_TOKENS, "int32", "rollout", "forward reward_model scorer targets diagnostics samples judged",
        "response token ids, end-of-sequence included"),
    "response_mask": Field(_TOKENS, "int8", "rollout", "forward scorer targets diagnostics samples",
        "1 on tokens that are trained on; 0 on tokens from an environment"),
    "rollout_log_probs": Field(_TOKENS, "float32", "rollout", "actor targets diagnostics",
        "log-probs of the sampler, with temperature; 0 on tokens that it did not sample; nats", "log_probs"),
    "weight_versions": Field(_TOKENS, "int32", "rollout", "diagnostics",
        "version of the weights that sampled the token; -1: not sampled"),
    "weight_version": Field(_ROW, "int64", "rollout", "driver", "oldest weights that sampled a token of the sequence"),
    "last_weight_version": Field(_ROW, "int64", "rollout", "driver",
        "newest weights that sampled a token of the sequence"),
    "response_length": Field(_ROW, "int64", "rollout", "driver", "R_i"),
    "prompt_length": Field(_ROW, "int64", "rollout", "driver", "P_i"),
    "num_turns": Field(_ROW, "int64", "rollout", "driver",
        "turns: how often the policy generated a part of the response"),
    "truncated": Field(_ROW, "int64", "rollout", "targets driver",
        "1 where the response was cut at max_response_length"),
    "episode_reward": Field(_ROW, "float32", "rollout", "scorer driver",
        "reward that the agent loop gave; nan: it gave none"),
    "episode_step_rewards": Field(_TOKENS, "float32", "rollout", "scorer",
        "reward that the agent loop gave a step, on its last token; nan: none"),
    "predecessors": Field(_TOKENS, "int32", "rollout", "forward reward_model scorer targets samples judged",
        "of episodes: the token that each one follows (protocol/sequences.py)"),
    "agent_ids": Field(_TOKENS, "int32", "rollout", "scorer targets",
        "of episodes: a number of the agent that sampled it, by name; 0: put in"),
    "media": Field(_ROW, "object (Media)", "rollout", "forward",
        "pictures of the prompt (protocol/media.py), None: it has none", recorded=False),
    "images": Field(_ROW, "object (list of str)", "rollout", "samples",
        "small images of these pictures, as `data:` addresses", recorded=False),
    "prompt_routes": Field("ragged (N, P_i, layers, experts)", "uint8 or uint16", "rollout", "router",
        "experts of the prompt's tokens (protocol/sequences.py)", recorded=False),
    "routes": Field("ragged (N, R_i, layers, experts)", "uint8 or uint16", "rollout", "router",
        "experts of the response's tokens, likewise", recorded=False),
    "unknown_routes": Field(_ROW, "int64", "rollout", "driver",
        "tokens whose experts were not recorded, of those that another one follows"),
    "token_level_scores": Field(_TOKENS, "float32", "reward", "targets",
        "raw reward; an outcome reward is on the last trained token"),
    "score": Field(_ROW, "float32", "reward", "targets samples driver",
        "raw reward of the sequence, whoever earned it; nan: it has none"),
    UNPENALISED: Field(_ROW, "float32", "reward", "driver", "of handles: score without the penalty for long responses"),
    "failure": Field(_ROW, "object (str)", "reward", "samples",
        "why the reward function failed on it; empty: it did not"),
    "said": Field(_ROW, "object (str)", "reward", "samples",
        "texts that the reward function returned of it by name, as JSON"),
    "token_level_rewards": Field(_TOKENS, "float32", "targets", "", "scores minus the KL penalty"),
    "old_log_probs": Field(_TOKENS, "float32", "actor", "actor targets diagnostics",
        "log-probs under the policy before the update; nats", "log_probs"),
    "ref_log_probs": Field(_TOKENS, "float32", "ref", "actor targets",
        "log-probs under the reference; nats", "log_probs"),
    "values": Field(_TOKENS, "float32", "critic", "critic targets",
        "return that the critic foresees before the token", "values"),
    "advantages": Field(_TOKENS, "float32", "targets", "actor", "advantage of each token"),
    "reward": Field(_ROW, "float32", "targets", "driver", "score minus the KL penalty: sum of token_level_rewards"),
    "advantage_mean": Field(_ROW, "float32", "targets", "driver", "mean advantage over the trained tokens"),
    "reward_baseline": Field(_ROW, "float32", "rollout", "targets", "score of the greedy response to the same prompt"),
    "pred_id": Field(_ROW, "float32", "reward", "driver",
        "equal for equal answers of a group, nan without an answer; validation only"),
    "step_mask": Field(_TOKENS, "int8", "reward", "targets", "1 on the last token of each step that has a reward"),
    "rule_labels": Field("ragged (N, S_i)", "int8", "reward", "judged",
        "1 for a good response, or for each good one of its steps, by the rule"),
    "old_entropies": Field(_TOKENS, "float32", "actor", "targets",
        "entropy of the policy before the update; nats", "entropies"),
    "old_gradient_norms": Field(_TOKENS, "float32", "actor", "targets",
        "1 - 2 p + sum p^2 of the policy before the update, for estimators", "gradient_norms"),
    "ref_top_ids": Field("ragged (N, R_i, K)", "int32", "reward", "actor",
        "the teacher's likeliest tokens at each place", recorded=False),
    "ref_top_log_probs": Field("ragged (N, R_i, K)", "float32", "reward", "actor",
        "their log-probs by the teacher; nats", recorded=False),
    "ref_hidden_states": Field("ragged (N, R_i, H)", "compute type", "ref", "actor",
        "inputs of the reference's output layer", "hidden_states", recorded=False),
    "rollout_is_weights": Field(_TOKENS, "float32", "targets", "actor", "importance weights, policy over sampler"),
    "observation_mask": Field(_TOKENS, "float32", "targets", "actor",
        "1 on tokens of tools and environments, for observation_coeff"),
    "prompt_weights": Field(_TOKENS, "float32", "targets", "actor",
        "1 / tokens of its prompt's responses, for loss_agg_mode prompt-mean"),
    "selected_tokens": Field(_TOKENS, "float32", "targets", "actor", "1 on tokens that clip_cov or kl_cov selected"),
    "teacher_prompts": Field("ragged (N, Q_i)", "int32", "reward", "teacher",
        "what the teacher reads for the prompt (empty: nothing was shown to it)"),
    "teacher_mask": Field(_TOKENS, "float32", "reward", "actor", "1 where the response has such a prompt, else 0"),
    "labels": Field(_TOKENS, "int8", "data", "reward_model",
        "what the reward model should say of the text up to the token: 1 good or chosen, 0 bad or rejected, -1 none"),
    "returns": Field(_TOKENS, "float32", "targets", "critic", "return of each token"),
}
# fmt: on


def columns_for(present: Iterable[str], *readers: str) -> tuple[str, ...]:
    """Return those of the columns that one of these readers reads."""
    return tuple(name for name in present if name in FIELDS and not {*readers}.isdisjoint(FIELDS[name].read_by.split()))


def made_by(names: Iterable[str]) -> str:
    """Name columns in words, with those who make them."""
    return ", ".join(f"{name!r} (made by {FIELDS[name].made_by})" if name in FIELDS else repr(name) for name in names)


def require(stage: str, present: Iterable[str], needed: Iterable[str]) -> None:
    """Check that a batch has the columns a stage needs."""
    have = set(present)
    if missing := [name for name in needed if name not in have]:
        there = ", ".join(sorted(have)) or "no columns"
        raise BatchError(f"stage {stage!r} needs {made_by(missing)}; the batch has {there}")
