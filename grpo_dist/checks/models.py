"""Checks of a job's models before anything starts, by one table: a row for each model, and what is asked of it.

Of all of them: a folder with intact files, a head or none, an adapter that fits, heads that split over ranks. Of those
that read the policy's tokens: that they have them all. Imports neither Ray nor vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_dist.assets import POLICY_KEY, REWARD_MODEL_KEY, TEACHER_KEY, model_folder, resolve_model_path
from grpo_dist.assets.model_folder import ModelFolder, load_tokenizer, read_model_config
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.config.schema_roles import ADAPTER_KEY
from grpo_dist.data.conversations import INPUT_KEY, ConversationRenderer, padding_id
from grpo_dist.data.step_tokens import JUDGING_KEYS, StepRenderer, judging_token, step_form
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.plan import make_plan
from grpo_dist.plan.roles import Model, held_by, roles_of
from grpo_dist.rewards.http_reward import read_headers
from grpo_dist.rewards.teacher_endpoint import SECTION as TEACHER_ENDPOINT

REWARD_MODEL = "reward model"  # the title of the one that reads conversations
_HEAD = "score.weight"  # of a classifier


@dataclass(frozen=True)
class CheckedModel:
    """A row of the table of models with what ranks load it by.

    Attributes:
        settings: how ranks load it. With `num_labels` it is of a class of transformers' own, whatever code comes with
            it; with `new_head_seed` a head that is missing is drawn.
    """

    model: Model
    settings: ModelSettings


def checked_models(config: JobConfig) -> list[CheckedModel]:
    """Return the models of a run, the one that is trained and has the tokenizer first."""
    plan = make_plan(config)
    held = [(row, model) for row in roles_of(plan.config) for model in held_by(plan.config, row)]
    return [CheckedModel(model, plan.model(row, model)) for row, model in held]


def check_files(row: CheckedModel, *, weights: bool = True) -> ModelFolder:
    """Find a model's folder, download it if it is a hub model, and check its files; with `weights` the largest too."""
    settings = row.settings
    folder = resolve_model_path(settings.path, weights=weights, key=settings.key)
    trust = settings.model.trust_remote_code or settings.num_labels > 0
    return model_folder.check_model_folder(folder, setting=row.model.setting, trust_remote_code=trust, weights=weights)


def check_use(row: CheckedModel, model: ModelFolder) -> str:
    """Check that a model with intact files can be used as its row says; returns it in a few words, for a dry run.

    Raises:
        ConfigError: it is another kind of model, has logits of which the exact KL cannot be computed, or its
            sequences cannot be split over ranks.
        DataError: its config.json cannot be read, or its adapter is unusable.
    """
    files = f"{len(model.shapes)} tensors in {model.num_files} file" + ("s" if model.num_files > 1 else "")
    weights = files if model.shapes else "its weights are downloaded when the run starts"
    size, said = row.settings.sequence_parallel_size, [f"{model.model_type}, {weights}"]
    if row.model.outputs:
        said.append(check_classifier(row, model))
    else:
        _check_causal(row, model)
    if row.model.exact_kl:
        _check_logits(row, model)
    if row.settings.lora is not None and row.settings.lora.lora_adapter_path is not None:
        said.append(_check_adapter(row.settings.section, row.settings.lora.lora_adapter_path, model))
    if size > 1:
        # slow imports, which other runs do without
        from grpo_dist.engines.train.attention import check_split
        from grpo_dist.engines.train.model_loading import read_config

        check_split(read_config(replace(row.settings, path=str(model.folder))), row.settings)
        said.append(f"sequences are split over {size} ranks")
    return "; ".join(filter(None, said))


def _check_adapter(section: str, path: str, model: ModelFolder) -> str:
    setting = f"{section}.{ADAPTER_KEY}={path}"
    adapter = model_folder.read_adapter_folder(path, setting)
    if model.shapes:
        model_folder.check_base(adapter, model.shapes, setting)
    return f"goes on from {path}: rank {adapter.rank}, alpha {adapter.alpha:g}, {len(adapter.layers)} layers"


def _check_causal(row: CheckedModel, model: ModelFolder) -> None:
    """Check that a model has an output layer, by its weights, and where these are not here by its config.json."""
    if row.settings.num_labels:  # its output layer becomes a head
        from grpo_dist.engines.train.model_loading import check_family  # slow, and other runs do without

        check_family(read_model_config(model.folder, row.model.setting), row.model.setting)
    architectures = [str(name) for name in model.config.get("architectures") or ()]
    if _HEAD in model.shapes:
        what = f"a head of its own ({_HEAD})"
    elif any(name.endswith("Classification") for name in architectures):
        what = f"architectures={architectures} in its config.json"
    else:
        return
    raise ConfigError(
        f"{row.model.setting}: a causal LM is needed, and this is a classifier: it has {what}; {row.model.instead}"
    )


def check_classifier(row: CheckedModel, model: ModelFolder) -> str:
    """Check that a model has a linear head, or may get one; returns where it is from if there are two ways, else ""."""
    from grpo_dist.engines.train.model_loading import check_family, check_head  # slow, and other runs do without

    outputs, setting, may_be_new = row.model.outputs, row.model.setting, row.settings.new_head_seed is not None
    read = read_model_config(model.folder, setting)
    check_family(read, setting)
    if may_be_new and _HEAD not in model.shapes:
        return "it gets a new head" if model.shapes else ""
    if model.shapes:
        own = model.shapes.get(_HEAD, outputs)[0]
        check_head(model.shapes, num_labels=own if own in outputs else outputs[0], setting=setting)
    elif read.num_labels not in outputs or not any(
        name.endswith("Classification") for name in read.architectures or ()
    ):
        raise ConfigError(
            f"{setting}: by its config.json (architectures={read.architectures}, num_labels={read.num_labels}) it is "
            f"no classifier with {' or '.join(map(str, outputs))} outputs; use a reward model"
        )
    return "its head is trained on" if may_be_new else ""


def _check_logits(row: CheckedModel, model: ModelFolder) -> None:
    """Check that logits are hidden states times the output layer, of which the exact KL is made."""
    from grpo_dist.engines.train.lm_head import CHANGES_LOGITS  # a slow import, which other runs do without

    entries = model_folder.text_config(model_folder.overridden(model.config, row.settings.model.override_config))
    if changes := [name for name in CHANGES_LOGITS if entries.get(name)]:
        raise ConfigError(
            f"actor_rollout_ref.actor.kl_loss_type=full, {row.model.setting}: the exact KL needs logits that are the "
            f"hidden states times the output layer, and the {row.model.title} changes them after that ({changes[0]} "
            "in its config.json); choose another KL, such as k2"
        )


def check_tokens(config: RunConfig, row: CheckedModel, model: ModelFolder, policy: ModelFolder) -> None:
    """Check that a model that reads the policy's responses as they are has all of the policy's tokens.

    Raises:
        ConfigError: it has other tokens, or fewer outputs.
        DataError: a tokenizer cannot be loaded.
    """
    policy_path, named = config.actor_rollout_ref.model.path, row.model
    if model.folder != policy.folder:
        trust = row.settings.model.trust_remote_code
        own = load_tokenizer(str(model.folder), trust_remote_code=trust, key=row.settings.key)
        if differing := _other_tokens(config, policy, own.get_vocab()):
            raise ConfigError(
                f"{named.setting}: the {named.title} reads the tokens of {POLICY_KEY}={policy_path}, and has "
                f"{len(differing)} others, such as {differing[0]!r}; use a {named.title} with the policy's tokens, or "
                "leave the key out"
            )
    knows, samples = model.vocab_size, policy.vocab_size
    if not named.outputs and knows is not None and samples is not None and knows < samples:
        raise ConfigError(
            f"{named.setting}: the {named.title} knows tokens below {knows} (vocab_size of its config.json), and "
            f"{POLICY_KEY}={policy_path} may sample tokens below {samples}; use a {named.title} whose vocabulary is "
            "padded to at least as many"
        )


def check_teachers(config: RunConfig, prompts: Sequence[TokenizedPrompt]) -> None:
    """Check that a server's headers are there, and that each row has a teacher where they are named (DataError)."""
    read_headers(config.actor_rollout_ref.ref.model.endpoint.headers_env, TEACHER_ENDPOINT)
    named = config.teachers
    if lacking := [row.prompt for row in prompts if named and row.prompt.data_source not in named]:
        raise DataError(
            f"{TEACHER_KEY}={named}: {len(lacking)} training rows have a data source without a teacher, first "
            f"{lacking[0].data_source!r} ({lacking[0].location}); name a teacher for it, or leave out the rows"
        )


def _other_tokens(config: RunConfig, policy: ModelFolder, reads: Mapping[str, int]) -> list[str]:
    trust = config.actor_rollout_ref.model.trust_remote_code
    written = load_tokenizer(str(policy.folder), trust_remote_code=trust, key=POLICY_KEY).get_vocab()
    return [token for token, number in written.items() if reads.get(token) != number]


def check_conversations(
    config: RunConfig, policy: ModelFolder, scorer: ModelFolder, prompts: Sequence[TokenizedPrompt]
) -> None:
    """Check that the reward model reads what the policy writes: the same tokens, or a chat template for the roles.

    Of all prompts one of each sequence of roles is rendered.

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
    if differing := _other_tokens(config, policy, reads):
        what = setting if theirs is None else "this tokenizer"
        raise ConfigError(
            f"{INPUT_KEY}={model.input_tokenizer or 'null'}: responses are tokens of {POLICY_KEY}={policy_path}, and "
            f"{what} has {len(differing)} others, such as {differing[0]!r}; leave the key out, and conversations are "
            "rendered again for the reward model"
        )
    render = _renderer(config, own, scorer, theirs)
    by_roles = {tuple(message["role"] for message in row.prompt.messages): row for row in prompts}
    for row in by_roles.values():
        token_ids = render(row)
        if scorer.vocab_size is not None and max(token_ids) >= scorer.vocab_size:
            raise DataError(
                f"{setting}: a conversation has the token {max(token_ids)}, and the model knows tokens below "
                f"{scorer.vocab_size} (vocab_size of config.json); its tokenizer is that of another model"
            )


def _renderer(config: RunConfig, own: Any, scorer: ModelFolder, theirs: Any) -> Callable[[TokenizedPrompt], list[int]]:
    """From a prompt, with its own last token as the answer, to the tokens that the reward model reads."""
    section, separator = config.reward_model, config.reward.step_separator
    form, setting = step_form(section.process, separator), f"{REWARD_MODEL_KEY}={section.model.path}"
    if form is None:
        render = ConversationRenderer(own, setting, theirs)
        return lambda row: render(row.prompt.messages, row.token_ids.tolist(), row.token_ids[-1:].tolist())
    for text, key in zip(config.reward_model.process.judging_tokens or (), JUDGING_KEYS, strict=False):
        judging_token(own, text, key)
    judge = StepRenderer(own, setting, form, padding_id(read_model_config(scorer.folder, setting)), theirs)
    return lambda row: judge(row.prompt.messages, row.token_ids[-1:].tolist())[0].token_ids.tolist()


def build_models(rows: Iterable[CheckedModel], device: str, tell: Callable[[str], None]) -> None:
    """Build each model without memory, with LoRA's factors, match it with the names in its files, and tell its size.

    A run leaves those without factors to its ranks, since it takes the model's code.

    Raises:
        ConfigError: LoRA or gradient checkpointing do not fit a model.
        DataError: a model cannot be built, or its files do not belong to it.
    """
    from grpo_dist.engines.train.attention import why_padded
    from grpo_dist.engines.train.fsdp_model import build_model  # it imports the models' code

    for settings in (row.settings for row in rows if row.model.built):
        folder = resolve_model_path(settings.path, key=settings.key)
        built = build_model(replace(settings, path=folder), device, shards=1).model
        factors = f", {built.num_parameters(only_trainable=True):,} of them LoRA's" if settings.lora else ""
        padded = "" if settings.layout == "padded" else why_padded(built)
        padded = f"; padded sequences, since {padded}" if padded else ""
        beside = f"; {len(built.carried)} tensors beside them go into exports as they are" if built.carried else ""
        size = f"{built.num_parameters():,} parameters{factors}"
        tell(f"{settings.key}: built without memory: {size}{beside}{padded}")
