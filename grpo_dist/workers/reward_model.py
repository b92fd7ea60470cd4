"""Workers of the reward model.

An outcome reward model's score is its value at the token where `conversations.without_padding` has a conversation
judged. A process reward model judges every step: sigmoid(value), the probability that the step is good; the score of
the response is that of its worst step, as in Math-Shepherd (arXiv 2312.08935).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import commonprefix
from typing import Any

import numpy as np
import torch
import transformers

from grpo_dist.algorithms.settings import TrainingSettings
from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.config.schema_roles import ProcessRewardConfig
from grpo_dist.data.conversations import INPUT_KEY, ConversationRenderer, padding_id, without_padding
from grpo_dist.data.step_tokens import JUDGING_KEYS, StepRenderer, judging_token, step_form
from grpo_dist.engines.settings import ModelSettings, RankSettings, RewardModelSettings
from grpo_dist.plan.model_rules import max_positions
from grpo_dist.plugins.names import RM_CLIPPED, RM_SCORE, RM_STEP_SCORES
from grpo_dist.protocol import DataProto, Metric, Ragged
from grpo_dist.protocol.fields import columns_for
from grpo_dist.protocol.sequences import scored_branches, with_score_token
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.call import Call
from grpo_dist.workers.gang import FrozenGroup, on_device, passes
from grpo_dist.workers.supervised import SupervisedGroup, SupervisedWorker

# The messages of a prompt, its token ids and those of a response.
Text = tuple[Sequence[Mapping[str, Any]], list[int], list[int]]


class RewardModelWorker(SupervisedWorker):
    """One rank of the reward model. Every method is collective over its ranks."""

    settings: RewardModelSettings
    render: ConversationRenderer
    judge: StepRenderer

    def start(self, settings: RankSettings, host: str, port: int) -> None:
        """See `PolicyWorker.start`; also `read_folders`."""
        self.settings = settings  # type: ignore[assignment]
        self.read_folders()
        super().start(self.settings, host, port)

    def read_folders(self) -> None:
        """Load the tokenizers that a conversation is rendered with, and read from config.json where a score may be.

        Raises:
            ConfigError: the folder of a tokenizer is not on this node.
            DataError: a tokenizer cannot be loaded.
        """
        model, theirs, path = self.settings.model, None, self.settings.section.model.input_tokenizer
        if path is not None:
            folder = self.find_model(path, INPUT_KEY, weights=False)
            theirs = load_tokenizer(folder, trust_remote_code=self.settings.trust_input_tokenizer, key=INPUT_KEY)
        folder = self.find_model(model.path, model.key)
        own = load_tokenizer(folder, trust_remote_code=model.model.trust_remote_code, key=model.key)
        config, setting = transformers.AutoConfig.from_pretrained(folder), model.setting
        form = step_form(self.settings.section.process, self.settings.step_separator)
        if form is None:
            self.render = ConversationRenderer(own, setting, theirs)
        else:
            self.judge = StepRenderer(own, setting, form, padding_id(config), theirs)
            judging = judging_model(model, config, own, self.settings.section.process)
            self.settings = replace(self.settings, model=judging)
        positions = max_positions(config.to_dict())
        self.max_length = self.settings.section.max_length or (positions and positions[1])
        self.padding_id = padding_id(config)

    @on_device(reads=True)
    def score(
        self, rows: DataProtoRef, conversations: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[str, np.ndarray]:
        """Score this rank's rows.

        Args:
            conversations: the messages of each prompt, by uid.

        Returns:
            (N,) float32 each: `rm_score`, and `rm_clipped`, 1 where the conversation was longer than `max_length`. By
            a process reward model also `rm_step_scores`, (N,) lists with a number in [0, 1] for each step.

        Raises:
            TrainingDiverged: a score is not finite.
        """
        data = rows.fetch(columns_for(rows.columns, "reward_model"))
        uids = [str(uid) for uid in data.non_tensor_batch["uid"]] if len(data) else []
        pairs = zip(data["prompts"].rows(), scored_branches(data).rows(), strict=True) if len(data) else ()
        texts = [
            (conversations[uid], prompt.tolist(), response.tolist())
            for uid, (prompt, response) in zip(uids, pairs, strict=True)
        ]
        return self._judged(texts, uids) if self.settings.section.process.enable else self._scored(texts, uids)

    def _scored(self, texts: Sequence[Text], uids: Sequence[str]) -> dict[str, np.ndarray]:
        """`rm_score` and `rm_clipped` of whole responses."""
        whole = [without_padding(self.render(*text), self.padding_id) for text in texts]
        clipped = [self._is_clipped(token_ids) for token_ids in whole]
        sequences = [without_padding(token_ids[: self.max_length], self.padding_id) for token_ids in whole]
        values_of_rows = self._values(scored_rows(sequences, uids))
        return {
            RM_SCORE: np.array([values[-1] for values in values_of_rows], np.float32),
            RM_CLIPPED: np.array(clipped, np.float32),
        }

    def _judged(self, texts: Sequence[Text], uids: Sequence[str]) -> dict[str, np.ndarray]:
        """`rm_score`, `rm_clipped` and `rm_step_scores` of responses of several steps."""
        judged = [self.judge(messages, response) for messages, _, response in texts]
        clipped = [self._is_clipped(tokens.token_ids.tolist()) for tokens, _ in judged]
        sequences = [tokens.token_ids[: self.max_length].tolist() for tokens, _ in judged]
        ends = [np.minimum(tokens.ends, len(ids) - 1) for (tokens, _), ids in zip(judged, sequences, strict=True)]
        data = scored_rows(sequences, uids, [int(ends_of_row[0]) for ends_of_row in ends])
        starts = data["prompts"].lengths.tolist() if len(data) else []
        steps = np.empty(len(texts), object)
        score = np.empty(len(texts), np.float32)
        for i, values in enumerate(self._values(data)):
            # the value at a token is read at the response token behind it
            good = 1 / (1 + np.exp(-values[ends[i] + 1 - starts[i]].astype(np.float64)))
            steps[i], score[i] = good[: judged[i][1]].tolist(), good.min()
        return {RM_SCORE: score, RM_CLIPPED: np.array(clipped, np.float32), RM_STEP_SCORES: steps}

    def _is_clipped(self, token_ids: Sequence[int]) -> bool:
        return self.max_length is not None and len(token_ids) > self.max_length

    def _values(self, data: DataProto) -> list[np.ndarray]:
        limits = self.settings.forward
        with passes(limits, "reward_model, "):
            columns = self.engine.compute_columns(data, ("values",), limits)
        return [row.numpy() for row in columns["values"].rows()]


def judging_model(model: ModelSettings, config: Any, tokenizer: Any, process: ProcessRewardConfig) -> ModelSettings:
    """A process reward model with the outputs of its head: those in its files, or two rows of its output layer.

    Raises:
        ConfigError: a text is not one token.
    """
    if process.judging_tokens is None:
        return replace(model, num_labels=config.num_labels)
    named = zip(process.judging_tokens, JUDGING_KEYS, strict=True)
    bad, good = (judging_token(tokenizer, text, key) for text, key in named)
    return replace(model, num_labels=2, judging_tokens=(bad, good))


def scored_rows(sequences: Sequence[list[int]], uids: Sequence[str], ends: Sequence[int] = ()) -> DataProto:
    """The rows whose values are the scores of sequences. What all sequences of a uid begin with is their prompt, so
    that it is computed once.

    Args:
        ends: the first position of each sequence whose value is wanted, at least 1: the prompt ends before. (): only
            the last ones are.
    """
    if not sequences:
        return DataProto()
    groups: dict[str, list[list[int]]] = {}
    for uid, sequence in zip(uids, sequences, strict=True):
        groups.setdefault(uid, []).append(sequence)
    lengths = {uid: max(1, len(commonprefix(group))) for uid, group in groups.items()}
    for uid, end in zip(uids, ends, strict=False):
        lengths[uid] = min(lengths[uid], end)
    rows = [(sequence, lengths[uid]) for uid, sequence in zip(uids, sequences, strict=True)]
    columns = {
        "prompts": Ragged.from_rows([sequence[:length] for sequence, length in rows], torch.int32),
        "responses": Ragged.from_rows([sequence[length:] for sequence, length in rows], torch.int32),
    }
    return with_score_token(DataProto.from_dict(columns, {"uid": list(uids)}))


class RewardModelGroup(FrozenGroup, SupervisedGroup):
    """The reward model. Its weights change only where it is retrained (`train`)."""

    train_stage = "update_reward_model"

    async def score(
        self, batch: DataProtoRef, conversations: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[str, np.ndarray]:
        """Return what `RewardModelWorker.score` returns of all rows, (N,) each, in the order of the batch."""
        rows, parts = self._parts(batch, columns_for(batch.columns, "reward_model"))
        asked = [{uid: conversations[uid] for uid in dict.fromkeys(part["uid"].tolist())} for part in parts]

        def send() -> list[Call]:
            calls = enumerate(zip(parts, asked, strict=True))
            return [self.workers.submit(rank, "reward_model", "score", *arguments) for rank, arguments in calls]

        async with self.turn.beside_engines:
            _, scores = await self._ask(send)
        order = np.argsort(np.concatenate(rows))
        return {name: np.concatenate([columns[name] for columns in scores])[order] for name in scores[0]}

    async def train(self, parts: Sequence[DataProto], objective: TrainingSettings, step: int) -> dict[str, Metric]:
        """Take one optimizer step. From then on only a checkpoint has the weights; see `SupervisedGroup.train`."""
        self.has_moved = True
        async with self.turn.alone():
            return await super().train(parts, objective, step)
