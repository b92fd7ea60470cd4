"""Names by which a config names code: built-in ones, and those of functions and classes in modules and files.

The config checks names before torch is imported, so those of the built-in estimators, losses and modes are listed here,
with groups of them that have common properties. What has these names is registered, or listed, beside its code; a test
keeps the two equal. Code is named as `pkg.module:name` or `path/to/file.py:name`; nothing is imported here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple, get_args

# Estimators that compare the responses of one prompt with each other ...
GROUP_ADV_ESTIMATORS = (
    *("grpo", "grpo_passk", "grpo_process", "maxrl", "lite_ppo", "scale_rl", "rl_zvp", "optimal_token_baseline"),
    *("gigpo", "a2po", "rloo", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline"),
)
# ... and all estimators.
_ALONE = ("reinforce_plus_plus", "remax", "gae", "rae", "distill")
ADV_ESTIMATORS = (*GROUP_ADV_ESTIMATORS, *_ALONE)
# Those that may give a group of equal scores an advantage too, since they compare with something else, or whiten ...
EQUAL_SCORES_ADV_ESTIMATORS = (*_ALONE, "rl_zvp", "gdpo", "reinforce_plus_plus_baseline")
# ... and those that give the tokens of a response different ones, whatever the reward is made of.
TOKEN_ADV_ESTIMATORS = ("grpo_process", "gigpo", "rl_zvp", "optimal_token_baseline", "gae", "distill")
# Those that read, of the policy before the update, more than log-probs: which column.
OLD_POLICY_ADV_ESTIMATORS = {"rl_zvp": "old_entropies", "optimal_token_baseline": "old_gradient_norms"}
SCORELESS_ADV_ESTIMATORS = ("distill",)  # those that only the KL penalty trains, not the scores
SAMPLED_KL_TYPES = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
KL_LOSS_TYPES = (*SAMPLED_KL_TYPES, *(f"{name}+" for name in SAMPLED_KL_TYPES), "unbiased_k3", "full")
LossAggMode = Literal[
    "token-mean", "token-sum", "prompt-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)
LOSS_MODES = (
    *("vanilla", "gspo", "geo_mean", "cispo", "sapo", "gpg", "dro"),
    *("dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "topr", "vespo"),
)
ROLLOUT_ENGINES = {"vllm": "grpo_dist.engines.vllm.backend:VLLMBackend"}  # a `RolloutBackend` (engines/base.py) each
LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio", "prometheus")
AGENT_LOOPS = ("single_turn_agent", "tool_agent", "external")
TOKEN_SELECTING_LOSSES = ("clip_cov", "kl_cov")  # select tokens over the whole batch, before the update
SEQUENCE_LOSSES = ("gspo", "geo_mean", "sapo")  # published as a mean over sequences
# Before the names of what a reward function tells besides the score, in columns and metrics.
REWARD_EXTRA = "reward_extra/"
# The reward functions that return the score of the reward model, a weighted sum of others, and the built-in scorer's
# score where a row has what that needs.
REWARD_MODEL_FUNCTION, WEIGHTED_FUNCTION = "grpo_dist.rewards.reward_model", "grpo_dist.rewards.weighted"
OPTIONAL_FUNCTION = "grpo_dist.rewards.optional"
# In `extra_info`: the score of the reward model, and whether the conversation was cut for it (1 or 0).
RM_SCORE, RM_CLIPPED = "rm_score", "rm_clipped"
RM_STEP_SCORES = "rm_step_scores"  # there too: the score of each step, by a process reward model
OVERLONG_PENALTY = "overlong_penalty"  # name, among the reward's values, of the penalty of reward.overlong_buffer
WeightTransport = Literal["object_store", "broadcast", "ipc"]


class CodeName(NamedTuple):
    """Where a function or class is: a module or a .py file, and the name in it; "" where none is given."""

    source: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.source}:{self.attribute}" if self.attribute else self.source


def parse_code(text: str, attribute: str = "") -> CodeName:
    """Parse `pkg.module:name` or `path/to/file.py:name`, also with verl's `pkg://` or `file://` before it; `attribute`
    is the name where the text has none.
    """
    plain = text.removeprefix("file://").removeprefix("pkg://")
    source, _, name = plain.rpartition(":")
    if not source or not name.isidentifier():
        source, name = plain, attribute
    return CodeName(os.path.expanduser(source) if source.endswith(".py") else source, name)


def absolute(spec: str) -> str:
    """Make the path in `path/to/file.py:attr` absolute, because workers run in other folders; others are unchanged."""
    code = parse_code(spec)
    return str(code._replace(source=str(Path(code.source).absolute())) if code.source.endswith(".py") else code)
