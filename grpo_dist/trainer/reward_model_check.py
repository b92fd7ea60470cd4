"""Checks of the reward model before anything starts: its folder, its head, and that it can read the conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_dist.assets import POLICY_KEY, REWARD_MODEL_KEY, resolve_model_path
from grpo_dist.assets.model_folder import ModelFolder, check_model_folder
from grpo_dist.assets.tokenizer import load_tokenizer
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.conversations import INPUT_KEY, ConversationRenderer, padding_id
from grpo_dist.data.step_tokens import JUDGING_KEYS, StepRenderer, judging_token, step_form
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.errors import ConfigError, DataError


def check_reward_model(config: RunConfig, *, weights: bool) -> ModelFolder:
    """Find the reward model's folder, download it if it is a hub model, and check its files and its head.

    Args:
        config: the run's config, with a reward model.
        weights: whether to download the weights and check their headers.

    Raises:
        ConfigError: there is no such model, or it is no backbone with a linear head of one output.
        DataError: a file is missing, damaged or inconsistent with the others.
    """
    model = config.reward_model.model
    assert model.path is not None, "a rule asks for it"
    setting = f"{REWARD_MODEL_KEY}={model.path}"
    folder = resolve_model_path(model.path, weights=weights, key=REWARD_MODEL_KEY)
    # whether code that comes with the model may run makes no difference: the loader runs transformers' own classifiers
    found = check_model_folder(folder, setting=setting, trust_remote_code=True, weights=weights)
    if config.reward_model.process.judging_tokens is not None:
        check_judging_model(found, setting)
    else:
        check_classifier(
            found, setting, needs_head=True, outputs=(1, 2) if config.reward_model.process.enable else (1,)
        )
    return found


def check_judging_model(model: ModelFolder, setting: str) -> None:
    """Check that a model can judge steps by its next token: a causal LM without a head of its own.

    Args:
        model: the folder that passed the checks of its files.
        setting: the key and value that name it, for messages.

    Raises:
        ConfigError: it is another kind of model.
        DataError: its config.json cannot be read.
    """
    from grpo_dist.engines.train.classifier import HEAD, check_family

    check_family(read_model_config(model.folder, setting), setting)
    if f"{HEAD}.weight" in model.shapes:
        raise ConfigError(
            f"{setting}: it has a head of its own ({HEAD}.weight); set reward_model.process.good=null and "
            "reward_model.process.bad=null"
        )


def check_classifier(model: ModelFolder, setting: str, *, needs_head: bool, outputs: Sequence[int] = (1,)) -> None:
    """Check that a model is a backbone with a linear head, or may get one.

    Args:
        model: the folder that passed the checks of its files.
        setting: the key and value that name it, for messages.
        needs_head: whether it must have a head; else it may be a causal LM.
        outputs: how many the head may have.

    Raises:
        ConfigError: it is another kind of model.
        DataError: its config.json cannot be read.
    """
    from grpo_dist.engines.train.classifier import HEAD, check_family, check_head  # slow, and other runs do without

    read = read_model_config(model.folder, setting)
    check_family(read, setting)
    if not needs_head and f"{HEAD}.weight" not in model.shapes:
        return
    if model.shapes:
        own = model.shapes.get(f"{HEAD}.weight", outputs)[0]
        check_head(model.shapes, num_labels=own if own in outputs else outputs[0], setting=setting)
    elif read.num_labels not in outputs or not any(
        name.endswith("Classification") for name in read.architectures or ()
    ):
        raise ConfigError(
            f"{setting}: by its config.json (architectures={read.architectures}, num_labels={read.num_labels}) it is "
            f"no classifier with {' or '.join(map(str, outputs))} outputs; use a reward model"
        )


def read_model_config(folder: str | Path, setting: str) -> Any:
    """Return a model's config.json as transformers reads it.

    Args:
        folder: of the model.
        setting: the key and value that name it, for messages.

    Raises:
        DataError: it cannot be read without code that comes with the model.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # of many kinds
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise DataError(
            f"{setting}: config.json cannot be read, without code that comes with the model: {problem}"
        ) from error


def check_conversations(
    config: RunConfig, policy: ModelFolder, scorer: ModelFolder, prompts: Sequence[TokenizedPrompt]
) -> None:
    """Check that the reward model reads what the policy writes: the same tokens, or a chat template for the roles.

    Args:
        config: the run's config, with a reward model.
        policy: the policy's folder.
        scorer: the reward model's folder.
        prompts: all prompts, of which one of each sequence of roles is rendered.

    Raises:
        ConfigError: the tokenizer that reads the responses has other tokens than the policy's.
        DataError: a tokenizer cannot be loaded or is another model's, or the chat template refuses a conversation.
    """
    model, policy_path = config.reward_model.model, config.actor_rollout_ref.model.path
    setting, trust = f"{REWARD_MODEL_KEY}={model.path}", config.actor_rollout_ref.model.trust_remote_code
    own = load_tokenizer(str(scorer.folder), trust_remote_code=model.trust_remote_code, key=REWARD_MODEL_KEY)
    theirs = None
    if model.input_tokenizer is not None:
        folder = resolve_model_path(model.input_tokenizer, weights=False, key=INPUT_KEY)
        theirs = load_tokenizer(folder, trust_remote_code=trust, key=INPUT_KEY)
    reads = (own if theirs is None else theirs).get_vocab()
    written = load_tokenizer(str(policy.folder), trust_remote_code=trust).get_vocab()
    if differing := [token for token, number in written.items() if reads.get(token) != number]:
        what = setting if theirs is None else "this tokenizer"
        raise ConfigError(
            f"{INPUT_KEY}={model.input_tokenizer or 'null'}: responses are tokens of {POLICY_KEY}={policy_path}, and "
            f"{what} has {len(differing)} others, such as {differing[0]!r}; leave the key out, and conversations are "
            "rendered again for the reward model"
        )
    render = _renderer(config, own, scorer, theirs)
    by_roles = {tuple(message["role"] for message in each.prompt.messages): each for each in prompts}
    for each in by_roles.values():
        token_ids = render(each)
        if scorer.vocab_size is not None and max(token_ids) >= scorer.vocab_size:
            raise DataError(
                f"{setting}: a conversation has the token {max(token_ids)}, and the model knows tokens below "
                f"{scorer.vocab_size} (vocab_size of config.json); its tokenizer is that of another model"
            )


def _renderer(config: RunConfig, own: Any, scorer: ModelFolder, theirs: Any) -> Callable[[TokenizedPrompt], list[int]]:
    """From a prompt, with its own last token as the answer, to the tokens that the reward model reads."""
    form, setting = step_form(config), f"{REWARD_MODEL_KEY}={config.reward_model.model.path}"
    if form is None:
        render = ConversationRenderer(own, setting, theirs)
        return lambda each: render(each.prompt.messages, each.token_ids.tolist(), each.token_ids[-1:].tolist())
    for text, key in zip(config.reward_model.process.judging_tokens or (), JUDGING_KEYS, strict=False):
        judging_token(own, text, key)
    judge = StepRenderer(own, setting, form, padding_id(read_model_config(scorer.folder, setting)), theirs)
    return lambda each: judge(each.prompt.messages, each.token_ids[-1:].tolist())[0].token_ids.tolist()
