"""`grpo-dist rehearse key=value ...`: the whole run on this machine's CPUs, with small random weights.

Config, rows, tokenizer, template, tools, agent, rewards, roles, trackers, checkpoints and export are the user's own; a
table says what is smaller. The second step is trained on the rows' own answers; the driver is killed behind it, and the
run goes on from its checkpoint. The trained model is loaded again, and asked.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_dist.agents.episode import rendered, tool_call
from grpo_dist.assets import POLICY_KEY, resolve_model_path
from grpo_dist.assets.model_folder import has_delta_nets, load_tokenizer, read_object, text_config
from grpo_dist.checks.all_checks import check_all
from grpo_dist.checks.models import checked_models
from grpo_dist.checks.own_answers import FORMS, own_answer, sample_of
from grpo_dist.checks.own_code import import_reward, started_scorer
from grpo_dist.cli.arguments import command_parser
from grpo_dist.config.keys import as_text, config_error, flatten, value_of, with_value
from grpo_dist.config.load import load_command
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.conversations import INPUT_KEY
from grpo_dist.data.prompts import Prompt
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.errors import ConfigError, DataError, GrpoDistError
from grpo_dist.plan.commands import GRPO
from grpo_dist.plan.shrink import RESPONSE, STEPS, TURN, shrunk_config, shrunk_model
from grpo_dist.plugins.names import AGENT_LOOPS, REWARD_MODEL_FUNCTION
from grpo_dist.redact import redact_text
from grpo_dist.rewards.contract import RewardResult
from grpo_dist.terminal import show
from grpo_dist.tracking.base import TRACKER_IS_OFF
from grpo_dist.tracking.jsonl import METRICS, read_metrics
from grpo_dist.tracking.metric_names import STEP_TIME, TIMING
from grpo_dist.trainer.record import check_run_dir
from grpo_dist.trainer.run_prompts import Prompts, template_kwargs
from grpo_dist.workers.rehearsal import REPLIES

_ADDRESS = re.compile(r"https?://(?!localhost|127\.|\[::1)[^\s\"']+")
_TEACHER, _AGENT = "actor_rollout_ref.ref.", "actor_rollout_ref.rollout.agent"
_ASKING = (_TEACHER, _AGENT, "custom_reward_function.", "reward.")
_LOG = "log_{}.txt"
OK, LOOK, FAILED = "ok", "look", "FAILED"
LIMIT_S = 900.0  # of a process: it hangs
MOST_GAP = 0.1  # nats between the best token and the engine's greedy one: rounding in bfloat16
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".index.json")
UNSEEN = "not shown by a rehearsal: the memory and kernels of GPUs, NCCL, what the real weights write and learn"


@dataclass
class Part:
    """A line of the verdict."""

    name: str
    state: str = OK
    seconds: float = 0.0
    text: str = ""

    def __str__(self) -> str:
        text = self.text.replace("\n", "\n" + " " * 38)
        return f"{self.name:<19} {self.state:<7} {self.seconds:6.1f} s  {text}".rstrip()


@dataclass
class Verdict:
    """The parts so far; one that fails ends the rehearsal."""

    parts: list[Part] = field(default_factory=list)

    @contextmanager
    def part(self, name: str) -> Iterator[Part]:
        """A part that is over at the end of the block."""
        part, started = Part(name), time.monotonic()
        try:
            yield part
        except GrpoDistError as error:
            part.state, part.text = FAILED, redact_text(str(error))
            raise
        finally:
            part.seconds = time.monotonic() - started
            self.add(part)

    def add(self, part: Part) -> None:
        """Show a part that is over."""
        self.parts.append(part)
        show(f"{part}\n")


def main(arguments: Sequence[str]) -> int:
    """Rehearse; returns the exit code."""
    parser = command_parser(
        "rehearse",
        "Run the whole of a training on this machine's CPUs, with small random weights of the same architecture: three "
        "steps, a driver that is killed, a resume, validation, export and reload. Exit code 2: something is wrong with "
        "config or data; 1: another part failed.",
    )
    overrides = "the config of a run (grpo-dist train --help)"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides)
    parser.add_argument("--keep", action="store_true", help="keep the folder of the rehearsal")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON too")
    parser.add_argument("--offline", action="store_true", help="ask no services of other machines: teachers, judges")
    options = parser.parse_intermixed_args(arguments)
    config, _ = load_command([*options.overrides, "trainer.rehearse=true"], GRPO)
    return rehearse(config, keep=options.keep, as_json=options.json, offline=options.offline)


def rehearse(config: RunConfig, *, keep: bool = False, as_json: bool = False, offline: bool = False) -> int:
    """Rehearse a run in a new folder, which goes afterwards unless it is to be kept; returns the exit code."""
    folder, verdict, code = Path(tempfile.mkdtemp(prefix="grpo_dist-rehearsal-")), Verdict(), 0
    try:
        _rehearse(without_services(config, folder) if offline else config, folder, verdict)
    except GrpoDistError as error:
        code = error.exit_code
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        show(json.dumps([asdict(part) for part in verdict.parts]) + "\n")
    show(f"{UNSEEN}\n{f'kept: {folder}' if keep else 'the folder is removed; --keep keeps it'}\n")
    return code


def _rehearse(config: RunConfig, folder: Path, verdict: Verdict) -> None:
    smaller, changed = shrunk_config(config, str(folder))
    show("\n".join([f"rehearsal in {folder}; smaller than the run:", *(f"  {line}" for line in changed), ""]))
    for key, address in services(smaller).items():
        count = smaller.data.train_batch_size * smaller.actor_rollout_ref.rollout.n * STEPS
        show(f"asked outside: {key}={redact_text(address)}, for {count} responses; --offline leaves it out\n")
    with verdict.part("models") as part:
        smaller, part.text = small_models(smaller, folder / "models")
        if problems := GRPO.problems(smaller):
            raise config_error(problems)
    with verdict.part("rows and template") as part:
        check_run_dir(config.trainer.record_dir.absolute())
        ready = check_all(smaller, lambda told: None, dry_run=True)
        part.text = ready.data.counts
    with verdict.part("own answers") as part:
        part.text = write_replies(smaller, ready.data, folder / "models")
    for name, step in (("run", STEPS - 1), ("killed and resumed", STEPS)):
        with verdict.part(name) as part:
            run_until(smaller, folder, step)
            rows = read_metrics(Path(smaller.trainer.default_local_dir, METRICS))
            part.text = f"to step {step}"
    for part in _stages(rows, compared=not (config.algorithm.filter_groups.enable or config.reward_model.enable)):
        verdict.add(part)
    said = [
        line for log in sorted(folder.glob(_LOG.format("*"))) for line in log.read_text(errors="replace").splitlines()
    ]
    off = [redact_text(line) for line in said if TRACKER_IS_OFF in line]
    verdict.add(Part("trackers", LOOK if off else OK, text="\n".join([", ".join(smaller.trainer.records), *off])))
    with verdict.part("export and reload") as part:
        part.text = asyncio.run(reload(Path(smaller.trainer.default_local_dir)))


def services(config: RunConfig) -> dict[str, str]:
    """The addresses of other machines that teacher, agent and rewards ask, by key."""
    values = flatten(config.model_dump(mode="json"))
    found = ((key, _ADDRESS.search(as_text(value))) for key, value in values if key.startswith(_ASKING))
    return {key: match[0] for key, match in found if match}


def without_services(config: RunConfig, folder: Path) -> RunConfig:
    """Leave out what asks others: the policy stands for a teacher, rewards pay for length, agents just answer."""
    (folder / "reward.py").write_text("def compute_score(completions, **_):\n    return [*map(len, completions)]\n")
    rewards: dict[str, Any] = {"path": str(folder / "reward.py"), "weights": None, "reward_kwargs": {}}
    for key in services(config):
        show(f"left out: {key}\n")
        without = {f"custom_reward_function.{name}": value for name, value in rewards.items()}
        if key.startswith(_TEACHER):
            without = {key: None, f"{_TEACHER}model.path": config.actor_rollout_ref.model.path}
        elif key.startswith(_AGENT):
            without |= {f"{_AGENT}.default_agent_loop": AGENT_LOOPS[0], f"{_AGENT}.agent_kwargs": {}}
        for name, value in without.items():
            config = with_value(config, name, value)
    return config


# --- before the run --------------------------------------------------------------------------------------------------
def small_models(config: RunConfig, folder: Path) -> tuple[RunConfig, str]:
    """Write a small random model for each of the run's; returns the config with their folders, and their sizes.

    Raises:
        ConfigError: a model is not here, and cannot be downloaded.
        DataError: it has no config.json, or transformers cannot build it.
    """
    made: dict[str, str] = {}
    rows, sizes = checked_models(config), []
    for row in rows:
        path = row.settings.path
        if path not in made:
            source = Path(resolve_model_path(path, weights=False, key=row.settings.key))
            made[path] = str(folder / f"{len(made)}-{source.name}")
            trust = row.settings.model.trust_remote_code
            small_model = write_small_model(source, Path(made[path]), row.model.setting, trust=trust)
            sizes.append(f"{row.model.title} {small_model.num_parameters() / 1e6:.1f} M")
    for key in {*(row.settings.key for row in rows), INPUT_KEY}:
        value = value_of(config, key)
        small = (
            {name: made[path] for name, path in value.items()} if isinstance(value, dict) else made.get(value, value)
        )
        config = with_value(config, key, small)
    if has_delta_nets(read_object(Path(config.actor_rollout_ref.model.path, "config.json"), POLICY_KEY)):
        config = with_value(config, "actor_rollout_ref.rollout.dtype", "bfloat16")  # of engines on CPU
    return config, f"{', '.join(sizes)} random parameters"


def write_small_model(source: Path, target: Path, setting: str, *, trust: bool) -> Any:
    """Write a small random model of the architecture of a folder, with its other files; returns the model."""
    import transformers

    small = shrunk_model(read_object(source / "config.json", setting))
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS):
            shutil.copy(file, target)
    (target / "config.json").write_text(json.dumps(small, indent=1))
    try:
        transformers.utils.logging.disable_progress_bar()
        transformers.set_seed(0)
        read = transformers.AutoConfig.from_pretrained(target, trust_remote_code=trust)
        model: Any = _auto_class(small).from_config(read, trust_remote_code=trust)
        model.save_pretrained(target)
    except Exception as error:  # of many kinds
        raise DataError(f"{setting}: transformers cannot build a small model of it: {error}") from error
    (target / "config.json").write_text(json.dumps(small, indent=1))
    return model


def _auto_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that loads all of a model, by its config.json."""
    import transformers

    name: str = next(iter(config.get("architectures") or ()), "")
    for kind in (transformers.AutoModelForSequenceClassification, transformers.AutoModelForTokenClassification):
        if name.endswith(kind.__name__.removeprefix("AutoModel")):
            return kind
    has_parts = text_config(config) is not config
    return transformers.AutoModelForImageTextToText if has_parts else transformers.AutoModelForCausalLM


def write_replies(config: RunConfig, prompts: Prompts, folder: Path) -> str:
    """Write the replies of rows for the engines: with tools a call of each, then the row's own answer."""
    policy, agent = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.agent
    tokenizer = load_tokenizer(policy.path, trust_remote_code=policy.trust_remote_code)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    variables, replies = template_kwargs(config), {}
    tools = variables.get("tools", []) if agent.default_agent_loop == "tool_agent" else []
    form = _best_form(config, prompts.train[0].prompt)
    for row in prompts.train:
        calls = (made_up_call(tokenizer, row, tool["function"], variables) for tool in tools)
        texts = [*calls, form.format(*_answer(row.prompt))]
        ids = (tokenizer.encode(text, add_special_tokens=False)[-(RESPONSE // 2) :] for text in texts)
        replies[str(row.prompt.index)] = [[*each, *end] for each in ids]
    first = 1 if config.algorithm.filter_groups.enable else 2  # random text alone never makes groups that differ
    (folder / REPLIES).write_text(json.dumps([first, RESPONSE if agent.is_single_turn else TURN, replies]))
    answer, source = _answer(prompts.train[0].prompt)
    called = f", behind a call of each of {len(tools)} tools" if tools else ""
    return f"{source}, such as {form.format(answer)[-60:]!r}{called}"


def _answer(prompt: Prompt) -> tuple[str, str]:
    """A row's own answer, and where it is from."""
    try:
        return own_answer(prompt)
    except ConfigError:
        return "42", "made up, since rows have no answers of their own"


def _best_form(config: RunConfig, prompt: Prompt) -> str:
    """Return the first of `FORMS` in which a row's own answer earns most, or on which the function fails."""
    if REWARD_MODEL_FUNCTION in config.reward_paths or not import_reward(config).asked:
        return FORMS[0]
    with started_scorer(config) as scorer:
        scored = scorer.score([sample_of(prompt, form.format(_answer(prompt)[0])) for form in FORMS])
    scores = [result.score if isinstance(result, RewardResult) else math.inf for result in scored]
    return FORMS[scores.index(max(scores))]


def made_up_call(
    tokenizer: Any, row: TokenizedPrompt, schema: Mapping[str, Any], variables: Mapping[str, Any], **given: Any
) -> str:
    """A call of a tool as the chat template writes it, with made-up arguments of the right types beside those given."""
    call = tool_call(0, schema["name"])
    call["function"]["arguments"] = _example(schema["parameters"]) | given
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked = rendered(tokenizer, row.prompt.messages, variables)
    whole = rendered(tokenizer, [*row.prompt.messages, turn], variables, goes_on=False)
    text = whole[len(os.path.commonprefix([asked, whole])) :]
    return text.partition(tokenizer.eos_token or "\0")[0]


def _example(schema: Mapping[str, Any]) -> Any:
    match schema.get("enum") or schema.get("type"):
        case list(values):
            return values[0]
        case "array":
            return [_example(schema.get("items", {}))]
        case "object":
            return {name: _example(each) for name, each in schema.get("properties", {}).items()}
        case kind:
            return {"integer": 1, "number": 1.5, "boolean": True, "null": None}.get(str(kind), "text")


# --- the run ---------------------------------------------------------------------------------------------------------
def run_until(config: RunConfig, folder: Path, step: int) -> None:
    """Start the run, whose driver is killed behind a step that is not the last.

    Raises:
        GrpoDistError: the run's message, with its exit code.
    """
    failure, log, killed = folder / "failure.json", folder / _LOG.format(step), step if step < STEPS else 0
    command = [sys.executable, "-m", "grpo_dist.run.rehearsed", str(failure), str(killed)]
    env, given, end = os.environ | {"WANDB_MODE": "offline"}, config.model_dump_json().encode(), -signal.SIGALRM
    with log.open("w") as out, suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, input=given, stdout=out, stderr=out, env=env, timeout=LIMIT_S, check=False)
        end = done.returncode
    if failure.is_file():
        text, code = json.loads(failure.read_text())
        error = ConfigError(text) if code == ConfigError.exit_code else GrpoDistError(text)
        raise error
    if end != (-signal.SIGKILL if killed else 0):
        said = log.read_text(errors="replace").splitlines()[-30:]
        raise GrpoDistError("\n".join([f"it ended with {end}, or hung for {LIMIT_S:.0f} s:", *said]))


def _stages(rows: Sequence[Mapping[str, float]], *, compared: bool) -> Iterator[Part]:
    """The stages of the run with their seconds; what the first two steps say of engine, rewards and tools.

    `compared`: not where the first step has the rows' own answers too, nor where a model of random weights scores.
    """
    for name in dict.fromkeys(name for row in rows for name in row if name.startswith(TIMING) and name != STEP_TIME):
        yield Part(f"  {name.removeprefix(TIMING)}", seconds=sum(row.get(name, 0.0) for row in rows))
    first, second = rows[0], rows[1]
    if (apart := first.get("training/agreement/of_limit")) is not None:
        yield Part("engine and trainer", text=f"differ by {apart:.2g} of what rounding explains")
    if failed := sum(value for row in rows for name, value in row.items() if name.startswith("agent/failures/")):
        yield Part(
            "episodes", LOOK, text=f"{failed:.0f} attempts failed, as random weights make them fail (--keep: log)"
        )
    best = [row.get("critic/score/max", math.nan) for row in (first, second)]
    text = f"the best response of the first step has {best[0]:.3g}, the rows' own answers up to {best[1]:.3g}"
    yield Part("reward", LOOK if compared and best[1] <= best[0] else OK, text=text)
    if (calls := second.get("tool_call_counts/max")) is not None:
        errors = second["reward_extra/tool_errors/mean"]
        text = f"{calls:.3g} calls in an episode, {errors:.3g} in the mean are answered by an error"
        why = "" if calls else "; the template's form is not read: agent_kwargs.tool_parser"
        yield Part("tools", LOOK if errors or why else OK, text=text + why)


# --- afterwards ------------------------------------------------------------------------------------------------------
async def reload(run_dir: Path) -> str:
    """Ask the exported model by the engine, and compare with transformers.

    Raises:
        DataError: transformers cannot load it, or gives the engine's greedy tokens less than it gives others.
    """
    import torch

    from grpo_dist.cli.trained import asking, find_trained, prompt_of

    model = find_trained(str(run_dir), trust=True)
    greedy = replace(model.plan.val_sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1, seed=None, max_tokens=16)
    async with asking(model, greedy) as asker:
        [asked] = asker.tokenized([prompt_of([{"role": "user", "content": "What is 17 + 25?"}])])
        (response,), ids = await asker.answer(0, asked), asked.token_ids.tolist()
    trust = model.config.actor_rollout_ref.model.trust_remote_code
    try:
        whole = _auto_class(read_object(Path(model.folder, "config.json"), str(model.folder)))
        loaded: Any = whole.from_pretrained(model.folder, trust_remote_code=trust)
    except Exception as error:  # of many kinds
        raise DataError(f"{model.folder}: transformers cannot load the exported model: {error}") from error
    tokens = torch.tensor([[*ids, *response.token_ids]])
    with torch.no_grad():
        logits = loaded(tokens).logits[0, len(ids) - 1 : -1].float()
    gap = float((logits.max(1).values - logits.gather(1, tokens[0, len(ids) :, None])[:, 0]).max())
    if not gap <= MOST_GAP:
        raise DataError(f"{model.folder}: transformers and the engine disagree on greedy tokens, by {gap:.3g} nats")
    return f"{len(response.token_ids)} greedy tokens of the engine are transformers' (largest gap {gap:.2g} nats)"
