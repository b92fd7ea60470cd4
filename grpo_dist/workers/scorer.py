"""What reward processes score responses by: the reward function, and rewards of episodes, their steps and agents.

With them go the prompts of a policy that teaches itself. They show how the question is answered: with another response
of the group that has earned enough, or feedback on the response itself (SDPO, arXiv 2601.20802), or a demonstration
that comes with the row (SDFT, 2601.19897).
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpo_dist.algorithms.validation import pred_ids
from grpo_dist.config.schema import TEXT, RunConfig, SelfDistillationConfig
from grpo_dist.config.schema_roles import TeacherEndpointConfig
from grpo_dist.data.prompts import Prompt
from grpo_dist.data.step_tokens import split_steps, step_ends
from grpo_dist.data.tokenize import prompt_ids
from grpo_dist.errors import RewardError
from grpo_dist.plan.plan import Plan
from grpo_dist.plugins.names import OVERLONG_PENALTY, RM_STEP_SCORES
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.fields import EXTRA, UNPENALISED, columns_for
from grpo_dist.protocol.sequences import TEACHER_MASK, TEACHER_PROMPTS, scored_branches
from grpo_dist.rewards.contract import STEPS_OF, RewardResult, shown_prompt
from grpo_dist.rewards.teacher_endpoint import TeacherEndpoint
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.process import Process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = tuple[str, Sequence[int]]
TEXT_CONTEXT = 4  # tokens before one that can change how it is written


@dataclass(frozen=True)
class OverlongPenalty:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), lengths in tokens.

    Nothing up to `max_length - buffer`, then linearly down to `-factor` at `max_length`.
    """

    max_length: int
    buffer: int
    factor: float

    def __call__(self, lengths: torch.Tensor) -> torch.Tensor:
        """(N,) lengths -> (N,) float32, at most 0."""
        excess = (lengths - (self.max_length - self.buffer)).clamp_min(0)
        return -self.factor * excess.float() / self.buffer


@dataclass(frozen=True)
class RewardSettings:
    """What a reward worker is built from: the tokenizer's folder, and the reward function (path None: built-in).

    A response that the function fails on earns `failure_score` (None: it has no score, and does not train). Where an
    episode brings a reward of its own, `function_weight` of the function's score is added to it; at 0 the function is
    not called. Steps between separators have rewards of their own, with `by_turn` the turns of an episode, with
    `by_agent` its agents. `label` names the value of the function that says which responses, or steps of them, are
    good: for a reward model that is retrained. `max_steps` is the number of the run's steps, where it is known.
    """

    tokenizer_path: str
    trust_remote_code: bool
    function_path: str | None
    function_name: str
    reward_kwargs: dict[str, Any]
    timeout_s: float = 60.0
    failure_score: float | None = None
    function_weight: float = 0.0
    overlong_penalty: OverlongPenalty | None = None
    step_separator: str | None = None
    by_turn: bool = False
    by_agent: bool = False
    label: str | None = None
    self_distillation: SelfDistillationConfig | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    teacher: TeacherEndpointConfig | None = None
    max_steps: int | None = None

    @classmethod
    def of(cls, plan: Plan[RunConfig], template_kwargs: Mapping[str, Any]) -> RewardSettings:
        """Return the settings of a run; the template's variables count where the policy teaches itself."""
        config, needs = plan.config, plan.targets.needs
        model, buffer = config.actor_rollout_ref.model, config.reward.overlong_buffer
        penalty = OverlongPenalty(config.data.max_response_length, config.overlong_buffer_len, buffer.penalty_factor)
        teaching = config.algorithm.self_distillation
        return cls(
            model.path,
            model.trust_remote_code,
            *config.reward_code,
            timeout_s=config.reward.timeout_s,
            failure_score=config.reward.failure_score,
            overlong_penalty=penalty if buffer.enable else None,
            function_weight=config.actor_rollout_ref.rollout.agent.reward_function_weight,
            step_separator=config.reward.step_separator if "step_mask" in needs else None,
            by_turn="turn_rewards" in needs,
            by_agent=config.algorithm.credit == "agent",
            label=config.reward_model.retrain.label if config.reward_model.is_retrained else None,
            self_distillation=teaching if teaching.enable else None,
            template_kwargs=template_kwargs if teaching.enable else {},
            teacher=config.actor_rollout_ref.ref.model.endpoint if config.teacher_is_elsewhere else None,
            max_steps=plan.steps or None,
        )


@dataclass(frozen=True)
class Task:
    """What the reward function is told about a prompt. In validation there is no overlong penalty.

    `model_scores` are the numbers of the reward model by name, (n,) each: they are part of each response's extra_info.
    Those of steps are an array of lists. `columns`, `is_text` and `is_plain` are those of the `Prompt`. `step` is the
    last one that was trained before the responses train, or are validated. `digest` names the row.
    """

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    is_text: bool = False
    is_plain: bool = False
    digest: str = ""
    validation: bool = False
    model_scores: Mapping[str, np.ndarray] = field(default_factory=dict)
    step: int = 0

    @classmethod
    def of(cls, row: Prompt, **more: Any) -> Task:
        """Return the task of a row."""
        of_row = row.data_source, row.ground_truth, row.extra_info, row.messages
        return cls(*of_row, row.columns, row.is_text, row.is_plain, row.digest, **more)


class ResponseScorer(Process):
    """Scores responses by the reward function, which is in a child process of its own."""

    components: Mapping[str, float]
    overlong_penalty: Callable[[torch.Tensor], torch.Tensor] | None

    def start(self, settings: RewardSettings) -> None:
        """Load tokenizer and reward function, the latter in a process of its own.

        Raises:
            ConfigError: the function cannot be imported.
            RewardError: importing it hangs, or ends its process.
        """
        from grpo_dist.assets.model_folder import load_tokenizer
        from grpo_dist.rewards.scorer import Scorer

        torch.set_num_threads(1)
        folder = self.find_model(settings.tokenizer_path)
        self.tokenizer = load_tokenizer(folder, trust_remote_code=settings.trust_remote_code)
        self.overlong_penalty, self.step_separator = settings.overlong_penalty, settings.step_separator
        self.label, self.function_weight = settings.label, settings.function_weight
        self.by_turn, self.by_agent = settings.by_turn, settings.by_agent
        shown, template = settings.self_distillation, settings.template_kwargs
        self.teacher_prompts = None if shown is None else TeacherPrompts(shown, self.tokenizer, template)
        self.teacher = None if settings.teacher is None else TeacherEndpoint(settings.teacher)
        self.failure_score = math.nan if settings.failure_score is None else settings.failure_score
        self.function_name, self.max_steps = settings.function_name, settings.max_steps
        named = settings.function_path, settings.function_name, settings.reward_kwargs
        self.scorer = Scorer(*named, timeout_s=settings.timeout_s)
        self.scorer.start()
        self.components = self.scorer.components

    def score(
        self, batch: DataProtoRef, sizes: Sequence[int], tasks: Sequence[Task]
    ) -> tuple[tuple[list[tuple[Label, list[str]]], tuple[list[str], int], float], DataProto]:
        """Score the groups of a batch, of these sizes one after another; tasks are all of training, or of validation.

        Returns:
            ((found, printed, seconds), data).
            found: (label, failures) of each group. The label has `score`, with a penalty for long responses what it is
                without it too, the numbers of the reward model and the function's other values as `reward_extra/NAME`,
                and for validation `failed` and, if the function finds answers, `pred_id`. Failures say why responses
                could not be scored, one text for each of them but those to which no function applies.
            printed: the first lines that the function printed, and the number of further lines.
            seconds: that it took.
            data: `token_level_scores`, with the score on the last token that trains; or, with step scores, one on the
                last token of each step, where `step_mask` is 1. With a `label` also `rule_labels`. `failure`: why the
                function failed on a response.

        Raises:
            RewardError: the function returned step scores that do not fit the steps, or no value of the name `label`.
        """
        started = time.monotonic()
        readers = ("scorer", *(("endpoint",) if self.teacher is not None else ()))
        data = batch.fetch(columns_for(batch.columns, *readers))
        given = batch.small.get("episode_reward", np.full(len(data), np.nan, np.float32))
        ends = np.cumsum(sizes)
        parts = [
            self.score_group(data.index(np.arange(end - size, end)), task, given[end - size : end])
            for size, end, task in zip(sizes, ends, tasks, strict=True)
        ]
        labels = [(label, failures) for label, failures, _ in parts]
        scored = DataProto.concat([scores for *_, scores in parts])
        return (labels, self.scorer.printed.take(), time.monotonic() - started), scored

    def score_group(self, data: DataProto, task: Task, given: np.ndarray) -> tuple[Label, list[str], DataProto]:
        """Score a group whose episodes have brought the rewards `given`, nan where one brought none; see `score`."""
        responses, mask = data["responses"], data["response_mask"]
        tokens = scored_branches(data)
        texts = decoded(self.tokenizer, tokens)
        results = self._with_rewards(texts, tokens, task, given)
        failures = [result.failure for result in results]
        scores = torch.tensor([result.score for result in results], dtype=torch.float32)
        penalties = torch.zeros_like(scores)
        names = dict.fromkeys(name for result in results for name in result.extra)
        extras = {EXTRA + name: np.array([r.extra.get(name, np.nan) for r in results], np.float32) for name in names}
        extras |= {EXTRA + name: values for name, values in task.model_scores.items() if name != RM_STEP_SCORES}
        if self.overlong_penalty is not None and not task.validation:
            penalties = self.overlong_penalty(responses.lengths)
            extras |= {EXTRA + OVERLONG_PENALTY: penalties.numpy(), UNPENALISED: scores.numpy()}
        if task.validation and any(result.pred is not None for result in results):
            extras["pred_id"] = pred_ids([result.pred for result in results])
        if task.validation:
            extras["failed"] = np.array([bool(failure) for failure in failures])
        columns: dict[str, Any] = {"score": scores + penalties}
        if self.by_agent or (self.by_turn and "episode_step_rewards" in data.columns()):
            agents = data["agent_ids"] if self.by_agent else Ragged(torch.ones_like(mask.values), mask.offsets)
            given_steps = data["episode_step_rewards"]
            columns["token_level_scores"], columns["step_mask"] = on_agents(scores, penalties, agents, given_steps)
        elif self.step_separator is None:
            columns["token_level_scores"] = on_last_token(scores + penalties, responses, mask)
        else:
            of_turns = data["episode_step_rewards"].rows() if "episode_step_rewards" in data.columns() else ()
            steps, columns["step_mask"] = self._on_steps(results, responses, of_turns)
            penalty = on_last_token(penalties, responses)
            columns["token_level_scores"] = Ragged(steps.values + penalty.values, steps.offsets)
        if self.label is not None and not task.validation:
            columns["rule_labels"] = self._labels(self.label, texts, results)
        if self.teacher_prompts is not None and not task.validation:
            said = [result.texts for result in results]
            columns |= self.teacher_prompts.columns(task, texts, scores.tolist(), said, responses)
        if self.teacher is not None and not task.validation:
            columns |= self.teacher.columns(data["prompts"], responses)
        told = [json.dumps({**r.texts, **({} if r.pred is None else {"pred": r.pred})}) for r in results]
        scored = DataProto.from_dict(columns, {"failure": failures, "said": told})
        label = Label.of(scored)
        return (
            replace(label, small=label.small | extras),
            [r.failure for r in results if r.failure and r.applies],
            scored,
        )

    def _with_rewards(self, texts: Sequence[str], tokens: Ragged, task: Task, given: np.ndarray) -> list[RewardResult]:
        """The results of the reward function, where it is asked, and of the episodes."""
        asked = [i for i in range(len(texts)) if self.function_weight or np.isnan(given[i])]
        results = [RewardResult(float(reward), {}) for reward in given]
        rows = tokens.rows()
        with_tokens = [(texts[i], array("i", rows[i].tolist())) for i in asked]
        for i, result in zip(asked, self._score_texts(with_tokens, task, asked), strict=True):
            if not np.isnan(given[i]):
                score = float(given[i])
                added = replace(result, score=score + self.function_weight * result.score)
                result = added if result.applies else RewardResult(score, {})
            results[i] = result
        return results

    def _score_texts(self, texts: Sequence[Text], task: Task, rows: Sequence[int]) -> list[RewardResult]:
        """Call the function for the texts, with their tokens, of these rows of a group."""
        if not texts:
            return []
        from grpo_dist.rewards.contract import Failure, Sample

        said = task.model_scores.items()
        model_scores = [
            {name: list(values[i]) if name == RM_STEP_SCORES else float(values[i]) for name, values in said}
            for i in rows
        ]
        of_row, steps = (task.messages, task.columns, task.is_text), (task.step, self.max_steps)
        samples = [
            Sample(text, task.data_source, task.ground_truth, task.extra_info | scores, *of_row, ids, *steps)
            for (text, ids), scores in zip(texts, model_scores, strict=True)
        ]
        asked = shown_prompt(task.messages)
        results: list[RewardResult] = []
        for result in self.scorer.score(samples):
            if isinstance(result, Failure):
                score = math.nan if result.abstained else self.failure_score
                why = f"{result.text}\n{asked}"
                result = RewardResult(score, {}, failure=why, applies=not result.abstained)
            results.append(result)
        return results

    def _labels(self, name: str, texts: Sequence[str], results: Sequence[RewardResult]) -> Ragged:
        """Return where the value `name` is above 0.5: of each step, or of the whole response; none of failures."""
        rows: list[list[bool]] = []
        for text, result in zip(texts, results, strict=True):
            labels = result.judged_steps.get(name)
            count = 1 if self.step_separator is None else len(split_steps(text, self.step_separator))
            if self.step_separator is None:
                labels = (result.extra[name],) if name in result.extra else None
            if not result.failure and (labels is None or len(labels) != count):
                what = f"{name}{STEPS_OF}" if self.step_separator is not None else name
                given = "none" if labels is None else f"{len(labels)} of them"
                raise RewardError(
                    f"reward_model.retrain.label={name}: reward function {self.function_name} must return {what!r}, "
                    f"{count} numbers for this response, and returned {given}: {text[:200]!r}"
                )
            rows.append([value > 0.5 for value in labels or ()])
        return Ragged.from_rows(rows, torch.int8)

    def _on_steps(
        self, results: Sequence[RewardResult], responses: Ragged, given: Sequence[torch.Tensor]
    ) -> tuple[Ragged, Ragged]:
        """Each step's score on its last token, and their mask; without `step_scores` the response is one step.

        `given` are the rewards that the episodes gave their steps, nan elsewhere; they stand as they are.
        """
        assert self.step_separator is not None
        scores, mask = (torch.zeros(len(responses.values), dtype=dtype) for dtype in (torch.float32, torch.int8))
        starts = responses.offsets.tolist()
        for i, (result, row, start) in enumerate(zip(results, responses.rows(), starts, strict=False)):
            if not len(row):  # no token to carry a score
                continue
            if len(given) and not given[i].isnan().all():
                rewarded = (~given[i].isnan()).nonzero().flatten()
                scores[start + rewarded], mask[start + rewarded] = given[i][rewarded], 1
                continue
            texts = self._token_texts(row.tolist())
            ends = step_ends(texts, self.step_separator) if result.step_scores is not None else [len(row) - 1]
            values = (result.score,) if result.step_scores is None else result.step_scores
            if len(ends) != len(values):
                raise RewardError(
                    f"reward function {self.function_name} returned {len(values)} step_scores for a response of "
                    f"{len(ends)} steps (reward.step_separator={self.step_separator!r}): {''.join(texts)[:200]!r}"
                )
            for end, value in zip(ends, values, strict=True):  # steps that end in one token add up
                scores[start + end] += value
                mask[start + end] = 1
        return Ragged(scores, responses.offsets), Ragged(mask, responses.offsets)

    def _token_texts(self, token_ids: list[int]) -> list[str]:
        """Return what each token adds to the text. The tokens before it decide about spaces and split characters."""
        windows = [token_ids[max(0, i - TEXT_CONTEXT) : i + 1] for i in range(len(token_ids))]
        with_token = self.tokenizer.batch_decode(windows, skip_special_tokens=True)
        without = self.tokenizer.batch_decode([window[:-1] for window in windows], skip_special_tokens=True)
        return [text[len(before) :] for text, before in zip(with_token, without, strict=True)]


def decoded(tokenizer: PreTrainedTokenizerBase, column: Ragged) -> list[str]:
    """Return the text of each row of token ids."""
    return tokenizer.batch_decode([row.tolist() for row in column.rows()], skip_special_tokens=True)


def on_agents(
    scores: torch.Tensor, penalties: torch.Tensor, agents: Ragged, step_rewards: Ragged
) -> tuple[Ragged, Ragged]:
    """Put each agent's rewards on its tokens: those of its own steps, or the episode's on its last token.

    Args:
        scores: (N,) the episodes'.
        penalties: (N,) that each agent has too, on its last token.
        agents: the number of each token's agent, 0: of none.
        step_rewards: `episode_step_rewards`.

    Returns:
        (rewards, 0 elsewhere; 1 where one is).
    """
    own = step_rewards.values.clone()
    values, mask = torch.zeros_like(own), torch.zeros(len(own), dtype=torch.int8)
    for row, start, score, penalty in zip(agents.rows(), agents.offsets.tolist(), scores, penalties, strict=False):
        for agent in row[row > 0].unique():
            tokens = start + (row == agent).nonzero().flatten()
            rewarded = tokens[~own[tokens].isnan()]
            if not len(rewarded):
                own[tokens[-1]], rewarded = score, tokens[-1:]
            values[rewarded], mask[rewarded] = own[rewarded], 1
            values[tokens[-1]] += penalty
    return Ragged(values, agents.offsets), Ragged(mask, agents.offsets)


def on_last_token(scores: torch.Tensor, responses: Ragged, mask: Ragged | None = None) -> Ragged:
    """Put each response's score on its last token; the other tokens get 0.

    With a mask the score goes on the last token that trains, since estimators that pass rewards from token to token
    skip the others. Where no token trains it stays on the last one, and still counts in the mean of its group.
    """
    positions = torch.arange(len(responses.values))
    nonempty = responses.lengths > 0
    last = responses.offsets[1:] - 1
    if mask is not None:
        rows = torch.repeat_interleave(torch.arange(len(responses.lengths)), responses.lengths)
        trained = positions.where(mask.values.bool(), -1)
        last_trained = torch.full_like(last, -1).scatter_reduce(0, rows, trained, "amax")
        last = last_trained.where(last_trained >= 0, last)
    values = torch.zeros(len(responses.values), dtype=torch.float32)
    values[last[nonempty]] = scores[nonempty]
    return Ragged(values, responses.offsets)


@dataclass(frozen=True)
class TeacherPrompts:
    """Makes the prompts of a group's teacher by the section of the config, which says how long they may be."""

    section: SelfDistillationConfig
    tokenizer: Any
    template_kwargs: Mapping[str, Any]

    def columns(
        self, task: Any, texts: Sequence[str], scores: Sequence[float], said: Sequence[Mapping[str, str]], of: Ragged
    ) -> dict[str, Ragged]:
        """Return the columns of protocol/sequences.py for a group.

        Args:
            task: with `messages`, behind the user's last one of which is shown what is, and `extra_info`.
            texts: the responses. One is shown the first success behind it in the group, and never itself.
            scores: nan: none.
            said: what the reward function has said of each, by name; where it has not, `extra_info` may.
            of: the responses as tokens.
        """
        section, count, prompts = self.section, len(texts), []
        for i in range(count):
            others = [(i + step) % count for step in range(1, count)]
            good = [] if (least := section.success_threshold) is None else [k for k in others if scores[k] >= least]
            parts = [(section.success_template, texts[k]) for k in good[:1]]
            feedback = str(said[i].get(section.feedback_name or "") or task.extra_info.get(section.feedback_name) or "")
            parts += [(section.feedback_template, feedback)] * bool(feedback.strip())
            prompts.append(self._rendered(task, "".join(form.replace(TEXT, text) for form, text in parts)))
        mask = torch.tensor([float(bool(prompt)) for prompt in prompts]).repeat_interleave(of.lengths)
        return {TEACHER_PROMPTS: Ragged.from_rows(prompts, torch.int32), TEACHER_MASK: Ragged(mask, of.offsets)}

    def _rendered(self, task: Any, shown: str) -> list[int]:
        asked = [i for i, message in enumerate(task.messages) if message["role"] == "user"]
        if not (shown and asked):
            return []
        changed = [dict(message) for message in task.messages]
        changed[asked[-1]]["content"] += shown
        row = Prompt(0, "", changed, None, {}, "the prompt of a teacher", is_plain=task.is_plain)
        token_ids = prompt_ids(row, self.tokenizer, self.template_kwargs)
        return token_ids if len(token_ids) <= (self.section.longest_prompt or len(token_ids)) else []
