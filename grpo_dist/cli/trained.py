"""What `RUN_OR_MODEL` names in the commands that use a model, and asking it as its run asked it.

A checkpoint is exported first, by this process alone: on CPU, without Ray. Then an engine of this process answers.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import shlex
import sys
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from jinja2 import Template

from grpo_dist import assets
from grpo_dist.assets import BUILTIN, POLICY_KEY, expanded, resolve_model_path
from grpo_dist.assets.model_folder import ADAPTER_FOLDER, FILE, Usage, load_tokenizer, read_usage, some
from grpo_dist.checks.own_answers import sample_of
from grpo_dist.config.data_files import HUB, SUFFIXES
from grpo_dist.config.environment import from_environment
from grpo_dist.config.keys import shown, value_of, with_value
from grpo_dist.config.load import with_overrides
from grpo_dist.config.run_code import ENGINE, REWARD, TRUST_KEY, code_of_run, hidden, refusal, require_trust
from grpo_dist.config.schema import DataConfig, RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.data.images import ImageProcessor
from grpo_dist.data.prompts import Prompt, add_system_prompt
from grpo_dist.data.tokenize import TokenizedPrompt, named_rows, tokenize_prompts
from grpo_dist.engines.base import Response, RolloutEngine, rollout_backend
from grpo_dist.engines.rendezvous import alone
from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.engines.train.checkpoint import load_training_state
from grpo_dist.engines.train.fsdp_model import load_sharded_model
from grpo_dist.engines.train.hf_export import export_adapter, export_hf_model
from grpo_dist.errors import CheckpointError, ConfigError, DataError, did_you_mean
from grpo_dist.plan.commands import GRPO, command_of
from grpo_dist.plan.model_rules import max_positions
from grpo_dist.plan.plan import Plan, make_plan
from grpo_dist.plan.roles import held_by, roles_of
from grpo_dist.plan.text import changed_keys
from grpo_dist.rewards.contract import Failure, RewardResult, RowNeeds
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.runs import named_checkpoint, no_checkpoint, saved_run
from grpo_dist.terminal import show
from grpo_dist.tracking import summary
from grpo_dist.tracking.jsonl import METRICS, read_metrics
from grpo_dist.trainer.checkpoint.config_changes import read_config
from grpo_dist.trainer.checkpoint.folder import checkpoints, is_model_of, is_model_of_run, step_of
from grpo_dist.trainer.checkpoint.manifest import damage, versions
from grpo_dist.trainer.loop import exported_usage, model_usage
from grpo_dist.trainer.record import EXPORTED, RESOLVED_CONFIG
from grpo_dist.trainer.rollout.job import VALIDATION_STEP, group_seed
from grpo_dist.trainer.run_prompts import image_processor, overlong_note, read_prompts

AGENT_KEY, SINGLE_TURN = "actor_rollout_ref.rollout.agent.default_agent_loop", "single_turn_agent"
ASKED = "data.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout.engine_kwargs."  # what asking a model needs
MAX_TOKENS = 512  # of a response, where neither the run nor the user says how long it may be
NO_ANSWERS = RowNeeds(ground_truth=False, taken=None, asked=False)  # of rows that are not scored
MOST_TOKENS = 8192  # of a sequence, where nobody asks for more: memory of the KV cache


@dataclass(frozen=True)
class TrainedModel:
    """A model to use.

    Attributes:
        name: for tables: the run's folder and the step, or what was named.
        config: of the run, with the overrides, and `folder` as the model's path; for a model of no run the defaults.
        base: path or name of the model that its run began with; None: it is of no run that trains a policy.
        unscored: why the run's reward function is not to be loaded; "": it may be.
    """

    name: str
    folder: Path
    config: RunConfig
    usage: Usage
    base: str | None = None
    unscored: str = ""

    @functools.cached_property
    def plan(self) -> Plan[RunConfig]:
        """The plan of that run, on this machine."""
        return make_plan(self.config)


def find_trained(
    named: str, overrides: Sequence[str] = (), step: int | None = None, *, trust: bool = False
) -> TrainedModel:
    """Find a model; a checkpoint that has not been exported yet is exported into the run's folder.

    The last one is taken without a `step`; with `trust` the run's folder may name code to run.
    """
    run_dir = expanded(named)
    checkpoint = named_checkpoint(run_dir, step)
    if checkpoint is None:
        usage = read_usage(run_dir / EXPORTED)
        if not is_model_of_run(run_dir / EXPORTED, run_dir) or step not in (None, usage.step):
            if step is not None or (run_dir / RESOLVED_CONFIG).is_file() or checkpoints(run_dir):
                raise ConfigError(no_checkpoint(run_dir, step))
            return _model(named, overrides)
        source, step = run_dir, usage.step  # of a run that was to write no checkpoint
    else:
        run_dir, source, step = checkpoint.parent, checkpoint, step_of(checkpoint)
    name, values = f"{run_dir.name or run_dir} step {step}", read_config(source)
    given, folder = with_overrides({}, overrides, GRPO), run_dir / EXPORTED
    if "actor_rollout_ref" not in values:  # of another command, whose keys are not those of a policy in training
        if checkpoint is not None:
            folder = exported(checkpoint, saved_run(checkpoint, trust=trust))
        return TrainedModel(name, folder, _config_of(str(folder), folder, overrides), read_usage(folder))
    config = with_overrides(values, overrides, GRPO)
    lacking, unscored = (hidden(source / RESOLVED_CONFIG, config, keys, given) for keys in (ASKED, REWARD))
    if lacking:
        raise ConfigError(lacking)
    if not trust:
        require_trust(source / RESOLVED_CONFIG, code_of_run(config, ENGINE, given))
        if code := code_of_run(config, REWARD, given):
            unscored = refusal(source / RESOLVED_CONFIG, code)
    if checkpoint is not None:
        own = with_value(saved_run(checkpoint, trust=True), TRUST_KEY, value_of(config, TRUST_KEY))
        folder = exported(checkpoint, own)
    base = from_environment(values["actor_rollout_ref"]["model"]["path"], (POLICY_KEY,))
    config = _with_model(config, folder)
    return TrainedModel(name, folder, config, model_usage(make_plan(config), step), base, unscored)


def base_of(model: TrainedModel) -> TrainedModel:
    """The model that a run began with, to be asked as the run asked it."""
    if model.base is None:
        raise ConfigError(f"--base: {model.name} is not of a run that trains a policy; name its base model too")
    base = replace(_model(model.base, ()), name=f"base {model.base}", usage=replace(model.usage, step=None))
    return replace(base, config=_with_model(model.config, base.folder), unscored=model.unscored)


def exported(checkpoint: Path, config: RunConfig | SupervisedConfig) -> Path:
    """Return the folder of a checkpoint's model: the run's end's, or `huggingface_step_N`, which is written then."""
    if is_model_of(checkpoint.parent / EXPORTED, checkpoint):
        return checkpoint.parent / EXPORTED
    folder = checkpoint.parent / f"{EXPORTED}_step_{step_of(checkpoint)}"
    if folder.exists():
        if not is_model_of(folder, checkpoint):
            raise ConfigError(
                f"{folder / FILE} does not say that the model is that of {checkpoint}: it is of a checkpoint that was "
                "there before, or an older version of grpo_dist wrote it. Move the folder away, or remove it, and ask "
                "again: the checkpoint is then exported in its place"
            )
        return folder
    show(f"exporting {checkpoint} to {folder}\n", sys.stderr)
    export_checkpoint(checkpoint, config, folder.absolute(), config.export_dtype)
    return folder


def export_checkpoint(checkpoint: Path, config: RunConfig | SupervisedConfig, folder: Path, dtype: str) -> None:
    """Write the policy, or the model of a supervised run, with LoRA's factors merged; the adapter comes beside it.

    `dtype` is that of the weights in the files: "fp32" or "bf16".

    Raises:
        CheckpointError: the checkpoint is damaged or of another model, or the files cannot be written.
        DataError: the model that the run started from is not there.
    """
    if problems := damage(checkpoint):
        raise CheckpointError(f"{checkpoint}: not an intact checkpoint: {'; '.join(problems)}. Choose another step")
    plan = make_plan(config)
    row, *_ = roles_of(plan.config)
    settings = plan.model(row, held_by(plan.config, row)[0])
    path = resolve_model_path(settings.path, key=settings.key)
    settings = replace(settings, path=path, compute_dtype=settings.model_dtype, layers=None)  # one rank, on CPU
    with alone("cpu"):
        model = load_sharded_model(settings, "cpu")
        load_training_state(checkpoint / row.name, model, None, None)
        usage = exported_usage(plan, step_of(checkpoint), dtype, checkpoint)
        if settings.lora is not None:  # first: once the model is there, all is written
            export_adapter(model, settings, folder.with_name(f"{folder.name}_{ADAPTER_FOLDER}"), dtype, usage)
        export_hf_model(model, settings, folder, dtype, usage)


def push(config: JobConfig, name: str, folder: Path | None = None, *, private: bool) -> None:
    """Push a run's export (None: that of its end), with a card, in one commit that leaves no older weights."""
    folder = folder or Path(config.trainer.default_local_dir).absolute() / EXPORTED
    card, paths = model_card(config, folder, name), [path for each in assets.MODEL_FILES for path in folder.rglob(each)]
    files = {str(path.relative_to(folder)): path for path in sorted(paths)} | {"README.md": card.encode()}
    with assets.asking_hub(name, "the token may not write there; name a repository of your own, or set HF_TOKEN"):
        url = (api := HfApi()).create_repo(name, private=private, exist_ok=True)
        info = api.model_info(name)
        there = {file.rfilename for file in info.siblings or ()}
        if FILE not in there and (others := sorted(there - {".gitattributes", "README.md"})):
            raise ConfigError(f"{name}: there is {some(others)} on the hub, of no export; push to another name")
        if private and not info.private:
            raise ConfigError(f"{name} is public on the hub; to push there say --public (hub_private_repo=false)")
        old = [each for each in sorted(there - files.keys()) if each.startswith("model") and "safetensors" in each]
        new = map(CommitOperationAdd, files, files.values())
        api.create_commit(name, [*new, *map(CommitOperationDelete, old)], commit_message=folder.parent.name)
    show(f"pushed {folder} to {url} ({'private' if info.private else 'public'})\n")


def model_card(config: JobConfig, folder: Path, name: str) -> str:
    """Return the card of an export: from what it was trained, how, its curve, and how to load it."""
    command, saved, model = command_of(config), read_config(folder.parent), (folder / "config.json").read_text()
    values: dict[str, Any] = {"name": name, "run": config, "config": saved, "assets": assets, "summary": summary}
    values |= {"shown": shown, "usage": read_usage(folder), "versions": versions(), "model": json.loads(model)}
    values |= {"typed": ["grpo-dist", command.name, *changed_keys(config, command, saved)], "join": shlex.join}
    text = Path(assets.__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8")
    rows = read_metrics(metrics) if (metrics := folder.parent / METRICS).is_file() else ()
    return Template(text, trim_blocks=True, lstrip_blocks=True).render(values, rows=rows)


def _model(named: str, overrides: Sequence[str]) -> TrainedModel:
    """A model that belongs to no run."""
    path = expanded(named)
    beside = Path(*path.parts[:1])
    gone = "/" in named and not path.exists() and beside.is_dir()  # so it is no hub name
    folder = path if gone else Path(resolve_model_path(named))
    if not (folder / "config.json").is_file():
        depths = () if beside.is_absolute() else ("*", "*/*")
        runs = [str(file.parent) for depth in depths for file in beside.glob(f"{depth}/{RESOLVED_CONFIG}")]
        raise ConfigError(
            f"{named}: neither a run's folder nor a model{did_you_mean(named, runs, '{}')}; name a run "
            "(trainer.default_local_dir), a checkpoint in it, a Hugging Face folder, a hub name such as "
            "Qwen/Qwen3-0.6B, or builtin:tiny-qwen3"
        )
    return TrainedModel(named, folder, _config_of(named, folder, overrides), read_usage(folder))


def _config_of(named: str, folder: Path, overrides: Sequence[str]) -> RunConfig:
    """The defaults for a model that is named so: those of the built-in one do for no other."""
    as_told = ("data.apply_chat_template", read_usage(folder).apply_chat_template)
    return _with_model(with_overrides({}, [(POLICY_KEY, named), as_told, *overrides], GRPO), folder)


def _with_model(config: RunConfig, folder: Path) -> RunConfig:
    return with_value(config, POLICY_KEY, str(folder.absolute()))


def engine_for(model: TrainedModel, max_model_len: int | None = None) -> EngineSettings:
    """Return the settings of an engine that serves this model alone, on the GPUs of one engine or on the CPU.

    Without `max_model_len` sequences are as long as the run has set, else as the model's config.json allows, but no
    more than `MOST_TOKENS`, or the run's prompts and responses.
    """
    config = with_value(model.config, AGENT_KEY, SINGLE_TURN)  # its code is not needed
    model_config = json.loads((model.folder / "config.json").read_text())
    known = max_positions(model_config)
    usual = config.actor_rollout_ref.rollout.max_model_len or max(config.max_model_len, MOST_TOKENS)
    longest = max_model_len or (usual if known is None else min(usual, known[1]))
    if known is not None and longest > known[1]:
        limit = f"{known[0]} of the model's config.json is {known[1]}"
        raise ConfigError(f"--max-model-len {longest}: {limit}; ask for less")
    settings = make_plan(config).engine(0)
    if problem := rollout_backend(settings.rollout.name).needs(settings.device):
        raise ConfigError(problem)
    size = settings.rollout.tensor_model_parallel_size
    if settings.device == "cuda" and (present := torch.cuda.device_count()) < size:
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}: this machine has {present} GPUs; set it to "
            "what there is, or trainer.n_gpus_per_node=0 for the CPU"
        )
    engine = rollout_backend(settings.rollout.name)
    if problem := engine.model_problem(model_config, settings.device, settings.dtype):
        raise ConfigError(f"{model.folder}: {problem}; use another model, or GPUs (trainer.n_gpus_per_node)")
    merged = settings.model.without_factors()
    return replace(settings, max_model_len=longest, model=merged, needs_tokenizer=True, shares_gpu=False)


@dataclass(frozen=True)
class Answers:
    """The responses to a prompt and, where they are scored, what the reward function said of each."""

    prompt: Prompt
    texts: list[str]
    responses: list[Response]
    results: list[RewardResult | Failure]

    @property
    def scores(self) -> list[float | None]:
        """None where the function failed."""
        return [None if isinstance(result, Failure) else result.score for result in self.results]


@dataclass
class Asker:
    """A started engine that answers conversations.

    Attributes:
        sampling: how it samples; a seed is replaced by one for each prompt.
        limits: the section `data` of the run whose rows are asked; None: prompts of the user's own, asked whole.
    """

    model: TrainedModel
    engine: RolloutEngine
    tokenizer: Any
    sampling: SamplingSettings
    limits: DataConfig | None = None

    @functools.cached_property
    def image_processor(self) -> ImageProcessor | None:
        """The model's; None: it is asked without images."""
        return image_processor(self.model.config, str(self.model.folder))

    def tokenized(self, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """The prompts with the run's system prompt and template, within `limits`; those without room for a token are
        left out. What is cut or left out is told.

        Raises:
            DataError: the template refuses one, or all are too long.
        """
        limits, longest = self.limits, self.engine.settings.max_model_len
        usage = self.model.usage
        if usage.system_prompt is not None:
            prompts, _ = add_system_prompt(prompts, usage.system_prompt)
        tokenized, overlong = tokenize_prompts(
            prompts,
            self.tokenizer,
            max_prompt_length=sys.maxsize if limits is None else limits.max_prompt_length,
            truncation="error" if limits is None else limits.truncation,
            filter_overlong_prompts=limits is not None and limits.filter_overlong_prompts,
            apply_chat_template_kwargs=usage.apply_chat_template_kwargs,
            image_processor=self.image_processor,
        )
        if limits is not None and overlong:
            show(f"{self.model.name}: {overlong_note(limits, len(prompts), overlong)}\n", sys.stderr)
        if left_out := [prompt.prompt.location for prompt in tokenized if len(prompt.token_ids) >= longest]:
            reason = f"they have {longest} tokens or more (--max-model-len): {named_rows(left_out)}"
            if len(left_out) == len(tokenized):
                raise DataError(f"no prompt is left to ask: {reason}; ask for more")
            show(f"{self.model.name}: left out, since {reason}\n", sys.stderr)
        return [prompt for prompt in tokenized if len(prompt.token_ids) < longest]

    async def answer(self, index: int, prompt: TokenizedPrompt) -> list[Response]:
        """`sampling.n` responses to a prompt, with validation's seeds, so that a run's own figures come out again."""
        whole, room = self.sampling, self.engine.settings.max_model_len - len(prompt.token_ids)
        seed = None if whole.seed is None else group_seed(whole.seed, VALIDATION_STEP, index)
        sampling = replace(whole, seed=seed, max_tokens=min(whole.max_tokens, room))
        row, seen = prompt.prompt, dict[str, Any]()
        if row.images and self.image_processor is not None:
            seen["media"] = self.image_processor.media(row.images, prompt.token_ids, row.location)
        responses = await self.engine.generate(prompt.token_ids.tolist(), sampling, **seen)
        assert responses is not None, "nobody aborts it"
        return responses

    async def answers(self, prompts: Sequence[Prompt], scorer: Scorer | None = None) -> AsyncIterator[Answers]:
        """The responses to all prompts, which are asked at once; in the order of the prompts."""
        tokenized, step = self.tokenized(prompts), self.model.usage.step or 0
        most = self.model.config.trainer.total_training_steps
        tasks = [asyncio.create_task(self.answer(asked.prompt.index, asked)) for asked in tokenized]
        try:
            for asked, task in zip(tokenized, tasks, strict=True):
                prompt, responses = asked.prompt, await task
                texts = [self.text(response) for response in responses]
                results: list[RewardResult | Failure] = []
                if scorer is not None:  # which scores the responses to a prompt all together, as in a run
                    samples = [
                        sample_of(prompt, text, token_ids=response.token_ids, step=step, max_steps=most)
                        for text, response in zip(texts, responses, strict=True)
                    ]
                    results = await asyncio.to_thread(scorer.score, samples)
                yield Answers(prompt, texts, responses, results)
        finally:
            for task in tasks:
                task.cancel()

    async def chat(self, messages: list[dict[str, str]]) -> list[str]:
        """The texts of the answers to a conversation."""
        [asked] = self.tokenized([prompt_of(messages)])
        return [self.text(response) for response in await self.answer(0, asked)]

    def text(self, response: Response) -> str:
        """A response without special tokens, as reward functions get it."""
        return str(self.tokenizer.decode(response.token_ids, skip_special_tokens=True))


@asynccontextmanager
async def asking(
    model: TrainedModel, sampling: SamplingSettings, max_model_len: int | None = None, limits: DataConfig | None = None
) -> AsyncIterator[Asker]:
    """A started engine, stopped at the end of the block; see `engine_for`, and `Asker` for `limits`."""
    settings = engine_for(model, max_model_len)
    tokenizer = load_tokenizer(str(model.folder), trust_remote_code=settings.model.trust_remote_code)
    show(f"starting an engine on {settings.device} with {model.folder}\n", sys.stderr)
    warnings.simplefilter("ignore")  # what vLLM imports warns of what it imports
    engine, began = rollout_backend(settings.rollout.name).load()(settings), time.monotonic()
    await engine.start()
    show(f"engine ready after {time.monotonic() - began:.0f} s\n", sys.stderr)
    try:
        yield Asker(model, engine, tokenizer, sampling, limits)
    finally:
        engine.shutdown()


def sampling_of(model: TrainedModel, options: argparse.Namespace) -> SamplingSettings:
    """As the run validates, with the user's options; several answers are drawn, as greedy ones are all the same."""
    usual = {"max_tokens": MAX_TOKENS} | dict(model.usage.sampling)
    asked = {field.name: getattr(options, field.name, None) for field in fields(SamplingSettings)}
    given = {name: value for name, value in asked.items() if value is not None}
    chosen = replace(model.plan.val_sampling, **usual | given)
    if chosen.n > 1 and chosen.temperature == 0.0 and "temperature" not in given:
        chosen = replace(chosen, temperature=model.config.actor_rollout_ref.rollout.temperature)
    return replace(chosen, stop=tuple(chosen.stop))


PROMPTS: dict[str, Any] = {
    "action": "append",
    "default": [],
    "metavar": "FILE|TEXT",
    "help": "a file of rows (.jsonl, .json, .parquet, or as data.val_files names them), or a text; may be repeated",
}


def given_prompts(model: TrainedModel, given: Sequence[str]) -> tuple[list[Prompt], bool]:
    """Return what `--prompts` names, and whether these are rows of files."""
    files = [text for text in given if text.endswith(SUFFIXES) or text.startswith((BUILTIN, HUB))]
    if files and len(files) < len(given):
        raise ConfigError("--prompts: files of rows or texts, not both")
    if files:
        return read_prompts(model.config, "--prompts", files, -1, NO_ANSWERS), True
    texts = [[{"role": "user", "content": text}] for text in given]
    prompts = [prompt_of(messages, i, f"prompt {i + 1}") for i, messages in enumerate(texts)]
    return [replace(prompt, is_plain=not model.config.data.apply_chat_template) for prompt in prompts], False


def prompt_of(messages: list[dict[str, str]], index: int = 0, location: str = "prompt") -> Prompt:
    """A conversation as a row."""
    return Prompt(index, "", messages, None, {}, location)
