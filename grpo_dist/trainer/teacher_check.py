"""Checks of the teacher before anything starts: its folder, its output layer, and that it has the policy's tokens."""

from __future__ import annotations

from grpo_dist.assets import POLICY_KEY, TEACHER_KEY, resolve_model_path
from grpo_dist.assets.model_folder import ModelFolder, check_model_folder
from grpo_dist.config.model_shape import text_config
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError
from grpo_dist.trainer.critic_check import check_tokens


def check_teacher(config: RunConfig, policy: ModelFolder, *, weights: bool) -> ModelFolder:
    """Find the teacher's folder, download it if it is a hub model, and check its files, its outputs and its tokens.

    Args:
        config: the run's config, with a teacher.
        policy: the policy's folder.
        weights: whether to download the weights and check their headers.

    Raises:
        ConfigError: there is no such model, it is no causal LM, it lacks tokens of the policy's, or the KL over the
            vocabulary is asked for and its logits are more than hidden states times output layer.
        DataError: a file is missing, damaged or inconsistent with the others.
    """
    model, policy_path = config.actor_rollout_ref.ref.model, config.actor_rollout_ref.model.path
    assert model.path is not None, "its caller asks"
    setting = f"{TEACHER_KEY}={model.path}"
    folder = resolve_model_path(model.path, weights=weights, key=TEACHER_KEY)
    found = check_model_folder(folder, setting=setting, trust_remote_code=model.trust_remote_code, weights=weights)
    architectures = [str(name) for name in found.config.get("architectures") or ()]
    if "score.weight" in found.shapes or any(name.endswith("Classification") for name in architectures):
        raise ConfigError(
            f"{setting}: a teacher is a causal LM, and this is a classifier (architectures={architectures} in its "
            "config.json); its score is of use as a reward: reward_model.model.path"
        )
    check_tokens(config, policy, found, "teacher", setting, trust_remote_code=model.trust_remote_code)
    if found.vocab_size is not None and policy.vocab_size is not None and found.vocab_size < policy.vocab_size:
        raise ConfigError(
            f"{setting}: the teacher knows tokens below {found.vocab_size} (vocab_size of its config.json), and "
            f"{POLICY_KEY}={policy_path} may sample tokens below {policy.vocab_size}; use a teacher whose vocabulary "
            "is padded to at least as many"
        )
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss and actor.kl_loss_type == "full":
        _check_linear({**text_config(found.config), **model.override_config}, setting)
    return found


def _check_linear(model_config: dict[str, object], setting: str) -> None:
    from grpo_dist.engines.train.lm_head import CHANGES_LOGITS  # a slow import, which other runs do without

    if changes := [name for name in CHANGES_LOGITS if model_config.get(name)]:
        raise ConfigError(
            f"actor_rollout_ref.actor.kl_loss_type=full, {setting}: the exact KL needs logits that are the hidden "
            f"states times the output layer, and the teacher changes them after that ({changes[0]} in its "
            "config.json); choose another KL, such as k2"
        )
