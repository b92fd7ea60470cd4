"""Checks of the critic before anything starts: its folder, its head, and that it reads the policy's tokens."""

from __future__ import annotations

from grpo_dist.assets import CRITIC_KEY, POLICY_KEY, resolve_model_path
from grpo_dist.assets.model_folder import ModelFolder, check_model_folder
from grpo_dist.assets.tokenizer import load_tokenizer
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError
from grpo_dist.trainer.reward_model_check import check_classifier


def check_critic(config: RunConfig, policy: ModelFolder, *, weights: bool) -> ModelFolder:
    """Find the critic's folder, download it if it is a hub model, and check its files, its head and its tokens.

    Args:
        config: the run's config, with a critic.
        policy: the policy's folder.
        weights: whether to download the weights and check their headers.

    Raises:
        ConfigError: there is no such model, its family has no linear head, its head has several outputs, or it has
            other tokens than the policy.
        DataError: a file is missing, damaged or inconsistent with the others.
    """
    path = config.critic.model.path
    setting = f"{CRITIC_KEY}={path}"
    folder = resolve_model_path(path, weights=weights, key=CRITIC_KEY)
    # whether code that comes with the model may run makes no difference: the loader runs transformers' own classes
    found = check_model_folder(folder, setting=setting, trust_remote_code=True, weights=weights)
    check_classifier(found, setting, needs_head=False)
    check_tokens(config, policy, found, "critic", setting, trust_remote_code=False)
    return found


def check_tokens(
    config: RunConfig, policy: ModelFolder, reader: ModelFolder, role: str, setting: str, *, trust_remote_code: bool
) -> None:
    """Check that a model that reads the policy's responses as they are has all of the policy's tokens.

    Args:
        config: the run's config.
        policy: the policy's folder.
        reader: the folder of the other model.
        role: what the other model is, for messages.
        setting: the key and value that name it.
        trust_remote_code: whether Python code that comes with its tokenizer may run.

    Raises:
        ConfigError: it has other tokens.
        DataError: a tokenizer cannot be loaded.
    """
    if reader.folder == policy.folder:
        return
    model = config.actor_rollout_ref.model
    key = setting.partition("=")[0]
    own = load_tokenizer(str(reader.folder), trust_remote_code=trust_remote_code, key=key).get_vocab()
    written = load_tokenizer(str(policy.folder), trust_remote_code=model.trust_remote_code).get_vocab()
    if differing := [token for token, number in written.items() if own.get(token) != number]:
        raise ConfigError(
            f"{setting}: the {role} reads the tokens of {POLICY_KEY}={model.path}, and has {len(differing)} others, "
            f"such as {differing[0]!r}; use a {role} with the policy's tokens, or leave the key out"
        )
