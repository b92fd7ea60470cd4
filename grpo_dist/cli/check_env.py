"""`grpo-dist check-env key=value ...`: plays a run's episodes by scripts, without Ray and weights.

What an environment does wrong shows in a run after hours, as a reward that does not rise or a machine that is full.
Here players of whom it is known what they should earn play what a run would, and each check has a line.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from grpo_dist.agents import load_agent_loop
from grpo_dist.agents.base import KEY as AGENT_KEY
from grpo_dist.assets.model_folder import load_tokenizer, overridden
from grpo_dist.checks.models import check_files, checked_models
from grpo_dist.checks.one_step import Scored, step_changes
from grpo_dist.checks.own_answers import FORMS, own_answer, sample_of, scorer_alone
from grpo_dist.checks.own_code import import_reward, resolve_names
from grpo_dist.cli.arguments import command_parser
from grpo_dist.cli.players import (
    CALLS,
    CHEAT,
    RIGHT,
    TIMEOUT,
    Company,
    Play,
    Speak,
    commanding,
    company,
    players,
    policy_of,
)
from grpo_dist.cli.rehearse import FAILED, LOOK, OK, Part, write_small_model
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.prompts import Prompt
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.model_rules import max_positions
from grpo_dist.plan.plan import make_plan
from grpo_dist.plugins.names import RM_SCORE
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.redact import redact_text
from grpo_dist.rewards.contract import Failure, RewardResult, RowNeeds
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.terminal import show
from grpo_dist.trainer.run_prompts import (
    check_template,
    image_processor,
    template_kwargs,
    tokenize_rows,
    training_rows,
    workers_agent,
)

MOST_SHOWN = 160  # characters of a prompt's end and of a response
EPISODES, PLAY_S = 100, 60.0  # that are played in all, as far as they take no longer
MOST_TIMEOUT_S, MOST_TOOL_S = 60.0, 10.0  # of an agent and of a call that hang, where a run would wait for longer
AGAIN = 4  # tokens of a turn that are put in behind it again, from which on that is no chance
# What grows by this for each episode, in both halves of them, is left behind: it may be one player in five who does it.
GROWS, LEAST, MEMORY_MIB = 0.2, 3, 8.0
LONGEST = 4096  # tokens of an episode that the small model reads
PROGRAMS = "grpo_dist.tasks.code"  # the reward that runs programs
WAITS_S = 0.5  # that episodes side by side take longer than one alone, from which on that is no chance
TOO_LONG = "did not answer within"  # of what the policy reads (agents/tools.py)


def main(arguments: Sequence[str]) -> int:
    """Check; 1 if a check failed, 2 if something is wrong with config or data."""
    parser = command_parser(
        "check-env",
        "Play episodes of a run with this config by scripted players, and check what comes of them: rewards, what is "
        "read and trained, failures, what is left behind. Rows with one turn are shown with their own answers. Exit "
        "code 1: a check failed; 2: something is wrong with the config.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="the run's config (grpo-dist train --help)")
    parser.add_argument("--rows", type=int, help="how many rows of data.train_files (3; 5 where they are only scored)")
    parser.add_argument("--row", type=int, help="this one row, counted from 1")
    parser.add_argument(
        "--episodes", type=int, default=4, help="of each player on each row, side by side (%(default)s)"
    )
    player = "a policy that plays right: what it says, by the conversation's messages; default: the rows' own answers"
    parser.add_argument("--player", metavar="FILE.py:FUNCTION", help=player)
    answer = "only score this response; several are scored together, as the group of a prompt is"
    parser.add_argument("--answer", action="append", default=[], metavar="TEXT", help=answer)
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON too")
    options = parser.parse_intermixed_args(arguments)
    config, _ = load_config(options.overrides)
    resolve_names(config)
    if options.episodes < 1 or (options.rows or 1) < 1:
        raise ConfigError(f"--episodes {options.episodes}, --rows {options.rows}: must be 1 or more")
    agent = config.actor_rollout_ref.rollout.agent
    loop = load_agent_loop(agent.default_agent_loop, agent.agent_kwargs)
    unasked = loop.rewards(agent.agent_kwargs) and not agent.reward_function_weight
    if unasked and options.answer:
        raise ConfigError(f"--answer: {AGENT_KEY}={agent.default_agent_loop} gives the reward; try --player")
    if unasked:
        import_reward(config)  # refuses a function that would not be asked
    right = policy_of(load_attribute(options.player, key="--player"), options.player) if options.player else None
    with nullcontext() if unasked else scorer_alone(config) as scorer:
        needs = RowNeeds(ground_truth=False, asked=False) if scorer is None else scorer.needs
        prompts = training_rows(config, -1, needs)
        if config.reward_model.enable:
            prompts = [replace(prompt, extra_info=prompt.extra_info | {RM_SCORE: 0.0}) for prompt in prompts]
        rows, num_failed = _rows(prompts, options.row, options.rows or (5 if options.answer else 3)), 0
        if scorer is not None and (options.answer or (agent.is_single_turn and right is None)):
            num_failed = _score(config, scorer, rows, options.answer)
        if options.answer:
            return 1 if num_failed else 0
        parts = asyncio.run(_check(config, scorer, rows, options.episodes, right))
    if options.json:
        told = [{"name": part.name, "state": part.state, "text": redact_text(part.text)} for part in parts]
        show(json.dumps(told) + "\n")
    failed = ", ".join(part.name for part in parts if part.state == FAILED)
    show(f"FAILED: {failed}\n" if failed else "nothing failed\n")
    return 1 if failed or num_failed else 0


def _rows(prompts: list[Prompt], row: int | None, most: int) -> list[Prompt]:
    if row is None:
        return prompts[:most]
    if not 1 <= row <= len(prompts):
        raise ConfigError(f"--row {row}: data.train_files has rows 1 to {len(prompts)}")
    return [prompts[row - 1]]


async def _check(
    config: RunConfig, scorer: Scorer | None, prompts: list[Prompt], n: int, right: Speak | None
) -> list[Part]:
    """Play, and check what came of it; shows a line for each check."""
    plan, policy = make_plan(config), checked_models(config)[0]
    folder = check_files(policy, weights=False)
    model = config.actor_rollout_ref.model.replaced(path=str(folder.folder))
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    check_template(config, folder, tokenizer)
    positions = max_positions(overridden(folder.config, model.override_config or {}))
    rows, _ = tokenize_rows(config, tokenizer, image_processor(config, model.path), prompts)
    if not rows:
        raise ConfigError(f"data.max_prompt_length={config.data.max_prompt_length}: all of these rows are longer")
    agent, variables = workers_agent(config), template_kwargs(config)
    kwargs = dict(agent.agent_kwargs)
    if agent.default_agent_loop == "tool_agent":
        kwargs["tool_timeout_s"] = min(kwargs.get("tool_timeout_s", MOST_TOOL_S), MOST_TOOL_S)
    limit = min(agent.timeout_s or MOST_TIMEOUT_S, MOST_TIMEOUT_S)
    agent = agent.replaced(agent_kwargs=kwargs, timeout_s=limit, max_attempts=1)
    settings = replace(plan.engine(0, agent, variables), model=model, needs_tokenizer=True)
    with _own_temporary_folder() as temporary, _ends_what_is_left():
        given = settings, plan.sampling, tokenizer, scorer, agent.reward_function_weight
        async with company(*given) as made:
            how = tokenizer, variables.get("tools", ()), variables
            right, said = (right, "--player") if right else await _own_answers(made, rows, how)
            runs_programs = PROGRAMS in str(config.custom_reward_function.path)
            cast = players(*how, right, runs_programs=runs_programs)
            plays, alone, left = await _play(made, rows, cast, n, temporary)
    first = [play for play in plays if play.row is rows[0]]
    parts = [
        _rewards(plays, said),
        _same_rewards(plays),
        _words(plays, tokenizer),
        _tokens(plays, made, positions and positions[1] - config.data.max_prompt_length),
        _failures(plays),
        *_tools(plays, tokenizer),
        left,
        _seconds(plays, n * len(rows), limit, alone),
        _learning(config, first, folder.folder),
    ]
    for part in parts:
        text = redact_text(part.text).replace("\n", "\n" + " " * 22)
        show(f"{part.name:<13} {part.state:<7} {text}".rstrip() + "\n")
    return parts


async def _own_answers(
    made: Company, rows: Sequence[TokenizedPrompt], how: tuple[Any, Sequence[Mapping[str, Any]], Mapping[str, Any]]
) -> tuple[Speak | None, str]:
    """The player of the rows' own answers in the form that earns most, and what it says; None: there are none."""
    try:
        own = {id(row): own_answer(row.prompt)[0] for row in rows}
    except ConfigError:
        return None, ""

    def saying(form: str) -> Speak:
        return lambda play, messages, turn: form.format(own[id(play.row)])

    forms: list[tuple[str, Speak | None]] = [(form, saying(form)) for form in FORMS]
    forms.append(("as a command, {0}", commanding(*how, lambda row: own[id(row)])))
    best: tuple[float, Speak | None, str] = (-math.inf, None, "")
    for form, speak in forms:
        if speak is not None:
            tried = await made.play(rows[:1], RIGHT, speak, 2)
            earned = max((play.reward for play in tried if play.reward is not None), default=-math.inf)
            if best[1] is None or earned > best[0]:
                best = earned, speak, form
            if any(play.kind == TIMEOUT for play in tried):
                break
    return best[1], f"the rows' own answers, such as {best[2].format(own[id(rows[0])])[:MOST_SHOWN]!r}"


async def _play(
    made: Company, rows: Sequence[TokenizedPrompt], cast: Mapping[str, Speak], n: int, temporary: Path
) -> tuple[list[Play], Play, Part]:
    """Play each row alone, a single episode, and all side by side in two halves; count what each has left behind."""
    plays, size = list[Play](), n * len(rows)
    known = set(psutil.Process().children(recursive=True))

    async def some(groups: Sequence[tuple[Sequence[TokenizedPrompt], str, int]], most: int, seconds: float) -> int:
        started, count = time.monotonic(), 0
        while (
            count < most
            and not any(play.kind == TIMEOUT for play in plays[-size:])
            and (count < len(cast) or time.monotonic() < started + seconds)
        ):
            played, name, number = groups[count % len(groups)]
            plays.extend(await made.play(played, name, cast[name], number))
            count += 1
        return count

    alone = [([row], name, n) for row in rows for name in cast] + [(rows[:1], next(iter(cast)), 1)]
    await some(alone, len(alone), math.inf)
    single, together = plays[-1], [(rows, name, n) for name in cast]
    counts = [_census(known, temporary)]
    half = math.ceil(max(EPISODES - len(plays), 2 * size * len(cast)) / size / 2)
    half = await some(together, half, PLAY_S / 2)
    counts.append(_census(known, temporary))
    await some(together, half, math.inf)
    counts.append(_census(known, temporary))
    return plays, single, _left_behind(counts, half * size, len(plays))


# --- checks ----------------------------------------------------------------------------------------------------------
def _rewards(plays: Sequence[Play], said: str) -> Part:
    """What each player earns: who plays right more than the others, on each row."""
    earned: dict[str, list[float]] = {}
    of_row: dict[tuple[str, str], list[float]] = {}
    for play in plays:
        if play.reward is not None:
            earned.setdefault(play.player, []).append(play.reward)
            of_row.setdefault((play.row.prompt.location, play.player), []).append(play.reward)
    lines = [
        f"{name:<8} mean {statistics.fmean(values):.4g}, from {min(values):.4g} to {max(values):.4g}"
        for name, values in earned.items()
    ]
    lines += [f"right says {said}"] if said else []
    if RIGHT not in {play.player for play in plays}:
        what = "nobody knows what is right: give a policy of yours, --player FILE.py:FUNCTION"
        return Part("rewards", LOOK, text="\n".join([*lines, what]))
    wrong = [
        f"{row}: {name} earns {got:.4g}, and right {best:.4g}"
        for (row, name), values in of_row.items()
        if name not in (RIGHT, CALLS)
        and (best := statistics.fmean(of_row.get((row, RIGHT), [-math.inf])))
        <= (got := max(values) if name == CHEAT else statistics.fmean(values))
    ]
    return Part("rewards", FAILED if wrong or RIGHT not in earned else OK, text="\n".join([*lines, *wrong[:3]]))


def _same_rewards(plays: Sequence[Play]) -> Part:
    """The same text earns the same."""
    first: dict[Any, Play] = {}
    for play in (play for play in plays if play.reward is not None):
        same = first.setdefault(
            (play.row.prompt.location, tuple(play.episode.prompt_ids + play.episode.token_ids)), play
        )
        if not math.isclose(same.reward or 0.0, play.reward or 0.0, rel_tol=1e-6, abs_tol=1e-9):
            text = f"{play.row.prompt.location}: {play.episode.text[-MOST_SHOWN:]!r} earns {same.reward:g}, and then "
            return Part("same reward", FAILED, text=f"{text}{play.reward:g}")
    return Part("same reward", text=f"{len(first)} different texts earn the same each time")


def _words(plays: Sequence[Play], tokenizer: Any) -> Part:
    """The same player on the same row reads the same words."""
    first: dict[tuple[str, str], list[list[int]]] = {}
    for play in (play for play in plays if not play.failure):
        words = play.put_in()
        same = first.setdefault((play.row.prompt.location, play.player), words)
        if same != words:
            turn = next(i for i in range(len(words) + 1) if same[i : i + 1] != words[i : i + 1])
            texts = [tokenizer.decode(each[turn] if turn < len(each) else []) for each in (same, words)]
            cut = len(os.path.commonprefix(texts)) // MOST_SHOWN * MOST_SHOWN
            shown = [f"{text[cut:][:MOST_SHOWN]!r}" for text in texts]
            where = f"{play.row.prompt.location}, {play.player}, {f'behind turn {turn}' if turn else 'in the prompt'}"
            return Part("words", FAILED, text=f"{where}: {shown[0]}, and in another episode {shown[1]}")
    return Part("words", text="the same player on the same row reads the same")


def _tokens(plays: Sequence[Play], made: Company, most: int | None) -> Part:
    """What was said trains, once and in order, and nothing else; and there is room for the right episode."""
    for play in (play for play in plays if not play.failure):
        where, ids, mask = f"{play.row.prompt.location}, {play.player}", play.episode.token_ids, play.mask
        if [token for token, sampled in zip(ids, mask, strict=True) if sampled] != [*chain(*play.said)]:
            return Part("tokens", FAILED, text=f"{where}: other tokens train than were said")
        for _, end, _ in play.episode.turns.spans:
            said = next((each for each in play.said if ids[max(end - len(each), 0) : end] == each), [])
            bare = [token for token in said if token != made.tokenizer.eos_token_id]
            if len(bare) >= AGAIN and ids[end : end + len(bare)] == bare and not any(mask[end : end + len(bare)]):
                what = f"{made.tokenizer.decode(bare)[:MOST_SHOWN]!r} was said, and is put in behind it once more"
                return Part("tokens", FAILED, text=f"{where}: {what}")
        if len(play.episode.prompt_ids) + len(ids) > made.settings.max_episode_len:
            return Part("tokens", FAILED, text=f"{where}: {len(ids)} tokens do not fit the row")
        if play.player == RIGHT and play.episode.truncated:
            limits = f"data.max_response_length={made.sampling.max_tokens}; raise it"
            if most is not None:
                limits += f", to {most} at most beside data.max_prompt_length: the model has no more positions"
            if play.episode.room > 0:
                limits = "actor_rollout_ref.rollout.agent.timeout_s, episode_timeout_s or max_assistant_turns; raise it"
            return Part("tokens", FAILED, text=f"{where}: the episode is cut short by {limits}")
    return Part("tokens", text="what was said trains, and nothing else")


def _failures(plays: Sequence[Play]) -> Part:
    failed = [play for play in plays if play.failure]
    if not failed:
        return Part("failures", text=f"none of {len(plays)} episodes")
    counts = Counter(f"{play.player} ({play.kind})" for play in failed)
    told = ", ".join(f"{count} of {name}" for name, count in counts.items())
    refused = all(play.kind == "rejected" and play.player != RIGHT for play in failed)
    return Part("failures", LOOK if refused else FAILED, text=f"{told} of {len(plays)} episodes\n{failed[0].failure}")


def _tools(plays: Sequence[Play], tokenizer: Any) -> Iterator[Part]:
    """Whether made-up calls are read and answered."""
    called = [play for play in plays if play.player == CALLS and not play.failure]
    if not called:
        return
    made, errors = (sum(play.episode.metrics.get(name, 0) for play in called) for name in ("tool_calls", "tool_errors"))
    texts = [tokenizer.decode(words, skip_special_tokens=True) for play in called for words in play.put_in()[1:]]
    late = next((text.strip() for text in texts if TOO_LONG in text), "")
    wrong = late or next((text.strip() for text in texts if "Error:" in text), "")
    text = f"{made:.0f} made-up calls, of which {errors:.0f} are answered by an error\n{wrong[:MOST_SHOWN]}".rstrip()
    if not made:
        text = "the calls that the chat template writes are not read: agent_kwargs.tool_parser, or chat_template.jinja"
    yield Part("tools", FAILED if late else LOOK if errors or not made else OK, text=text)


def _census(known: set[psutil.Process], temporary: Path) -> dict[str, float]:
    """What there is now: of this process, of those that were there before any episode, and of all below it."""
    gc.collect()
    own = psutil.Process()
    below = set(own.children(recursive=True))
    counts: Counter[str] = Counter({"child processes": len(below)})
    for process in {own, *below}:
        with suppress(psutil.Error):  # it has just ended
            sockets = process.net_connections("inet")
            counts["listening ports"] += sum(each.status == psutil.CONN_LISTEN for each in sockets)
            if process == own or process in known:
                counts["open files"] += process.num_fds()
                counts["threads"] += process.num_threads()
                counts["MiB of memory"] += process.memory_info().rss // 2**20
    counts["temporary files"] = sum(1 for _ in temporary.rglob("*"))
    return dict(counts)


def _left_behind(counts: Sequence[Mapping[str, float]], per_half: int, number: int) -> Part:
    """What grows in both halves of the episodes; what a first episode sets up does not."""
    grown = []
    for name in dict.fromkeys(name for count in counts for name in count):
        first, middle, last = (count.get(name, 0.0) for count in counts)
        least = MEMORY_MIB if name.startswith("MiB") else max(LEAST, GROWS * per_half)
        if min(middle - first, last - middle) >= least:
            grown.append(f"{name}: {first:.0f}, {middle:.0f} and {last:.0f}, each {per_half} episodes later")
    text = "\n".join(grown) or f"nothing, by {number} episodes"
    return Part("left behind", FAILED if grown else OK, text=text)


def _seconds(plays: Sequence[Play], n: int, limit: float, single: Play) -> Part:
    """Whether episodes take long, or wait for each other."""
    seconds = [play.seconds for play in plays]
    text = f"{statistics.median(seconds):.3g} (median), {max(seconds):.3g} (most), at most {n} side by side"
    last = next(play for play in reversed(plays) if play.player == single.player)
    if waits := last.waited - single.waited > WAITS_S and last.waited > max(2, n / 2) * single.waited:
        text += f"\n{n} side by side take {last.seconds:.3g}, a single one {single.seconds:.3g}: they wait for each "
        text += "other; code that blocks belongs in a thread (asyncio.to_thread)"
    return Part("seconds", LOOK if waits or max(seconds) > limit / 2 else OK, text=text)


def _learning(config: RunConfig, plays: Sequence[Play], source: Path) -> Part:
    """One gradient step of a small random model, by the run's estimator and loss, on an episode of each player."""
    scored = {play.player: play for play in plays if play.reward is not None}
    if RIGHT not in scored or len(scored) < 2:
        return Part("learning", LOOK, text="not tried: there is no right episode beside another")
    longest = max(len(play.episode.prompt_ids) + len(play.episode.token_ids) for play in scored.values())
    if longest > LONGEST or config.data.image_key or any(play.has_branches for play in scored.values()):
        why = f"episodes with images, with branches or longer than {LONGEST} tokens are not"
        return Part("learning", LOOK, text=f"not tried: {why}")
    group = [
        Scored(play.episode.prompt_ids, play.episode.token_ids, play.mask, play.reward or 0.0)
        for play in scored.values()
    ]
    trust, key = config.actor_rollout_ref.model.trust_remote_code, "actor_rollout_ref.model.path"
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = write_small_model(source, Path(folder, "model"), key, trust=trust).eval()
        changes = dict(zip(scored, step_changes(make_plan(config), model, group), strict=True))
    except (ConfigError, DataError) as error:
        return Part("learning", LOOK, text=f"not tried: {error}")
    worst = min(scored, key=lambda name: scored[name].reward or 0.0)
    good = changes[RIGHT] > 0 and (worst == RIGHT or changes[worst] < changes[RIGHT])
    text = ", ".join(f"{name} {change:+.2g}" for name, change in changes.items())
    return Part("learning", OK if good else FAILED, text=f"log-probs of what was said, after one step: {text} nats")


@contextmanager
def _ends_what_is_left() -> Iterator[None]:
    """End the processes that were started in the block, and left."""
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
    finally:
        for process in set(psutil.Process().children(recursive=True)) - before:
            with suppress(psutil.Error):
                process.terminate()


@contextmanager
def _own_temporary_folder() -> Iterator[Path]:
    """A folder for what this process and those that it starts write into the folder of temporary files."""
    before, saved = os.environ.get("TMPDIR"), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="grpo_dist-check-env-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"], tempfile.tempdir = folder, folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = saved
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


# --- rows of one turn ------------------------------------------------------------------------------------------------
def _score(config: RunConfig, scorer: Scorer, prompts: Sequence[Prompt], given: Sequence[str]) -> int:
    """Score answers and show what the reward function says; returns on how many it failed."""
    max_steps, num_failed = config.trainer.total_training_steps, 0
    scores: list[float] = []
    for prompt in prompts:
        answers = [(text, "--answer") for text in given] or [own_answer(prompt)]
        results = scorer.score([sample_of(prompt, text, max_steps=max_steps) for text, _ in answers])
        scores += [result.score for result in results if isinstance(result, RewardResult)]
        num_failed += sum(isinstance(result, Failure) for result in results)
        printed, num_more = scorer.printed.take()
        printed += [f"... and {num_more} more lines"] if num_more else []
        show("\n".join(_shown(prompt, answers, results, printed)) + "\n")
    show("\n".join(_summary(config, scores, num_failed, given=bool(given))) + "\n\n")
    return num_failed


def _shown(
    prompt: Prompt, answers: Sequence[tuple[str, str]], results: Sequence[RewardResult | Failure], printed: list[str]
) -> Iterator[str]:
    text = prompt.messages[-1]["content"]
    yield f"{prompt.location}, data_source={prompt.data_source}"
    yield f"  prompt     {'...' if len(text) > MOST_SHOWN else ''}{text[-MOST_SHOWN:]!r}"
    for (text, source), result in zip(answers, results, strict=True):
        left = "..." if len(text) > MOST_SHOWN else ""
        yield f"  response   {text[:MOST_SHOWN]!r}{left} ({source})"
        if isinstance(result, Failure):
            yield "  FAILED     " + result.text.replace("\n", "\n             ")
            continue
        yield f"  score      {result.score:g}"
        values = {**result.extra, **({} if result.pred is None else {"pred": result.pred})}
        if result.step_scores is not None:
            values["step_scores"] = list(result.step_scores)
        if values:
            texts = (f"{k}={value:g}" if isinstance(value, float) else f"{k}={value}" for k, value in values.items())
            yield f"  values     {', '.join(texts)}"
    for line in printed:
        yield f"  printed    {line}"


def _summary(config: RunConfig, scores: Sequence[float], num_failed: int, *, given: bool) -> Iterator[str]:
    span = f", scores from {min(scores):g} to {max(scores):g}" if scores else ""
    yield f"\n{len(scores) + num_failed} responses: {len(scores)} scored, {num_failed} failed{span}"
    if scores and max(scores) <= 0 and not given:
        form = "a ground truth alone may lack the form that the function looks for, such as '#### 42' or '\\boxed{42}'"
        yield f"no own answer earned more than 0: {form}; try one with --answer"
    if config.reward_model.enable:
        yield f"the reward model was not asked: {RM_SCORE} was 0"
    if config.reward.overlong_buffer.enable:
        yield "without the penalty of reward.overlong_buffer, which counts tokens"
