"""Workers of the reward model, which has one output: its value at the last token of a conversation is the score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import numpy as np
import torch
import transformers

from grpo_dist.config.model_rules import max_positions
from grpo_dist.data.conversations import INPUT_KEY, ConversationRenderer, without_padding
from grpo_dist.data.tokenize import load_tokenizer
from grpo_dist.engines.train.memory_errors import smaller_passes
from grpo_dist.engines.train.value_forward import with_score_token
from grpo_dist.errors import TrainingDiverged
from grpo_dist.names import RM_CLIPPED, RM_SCORE
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.policy import PolicySettings, PolicyWorker, on_device


@dataclass(frozen=True)
class RewardModelSettings(PolicySettings):
    """What a worker of the reward model is built from.

    Attributes:
        input_tokenizer: the folder or hub name of the responses' tokenizer; None: the reward model has the same tokens.
        trust_input_tokenizer: whether Python code that comes with it may run.
        max_length: longest conversation in tokens; None: the positions of the reward model.
    """

    input_tokenizer: str | None = None
    trust_input_tokenizer: bool = False
    max_length: int | None = None


class RewardModelWorker(PolicyWorker):
    """One rank of the reward model. Every method is collective over its ranks."""

    settings: RewardModelSettings
    render: ConversationRenderer

    def start(self, settings: PolicySettings, host: str, port: int) -> None:
        """See `PolicyWorker.start`; also `read_folders`."""
        super().start(settings, host, port)
        self.read_folders()

    def read_folders(self) -> None:
        """Load the tokenizers that a conversation is rendered with, and read from config.json where a score may be.

        Raises:
            ConfigError: the folder of a tokenizer is not on this node.
            DataError: a tokenizer cannot be loaded.
        """
        model, theirs, path = self.settings.model, None, self.settings.input_tokenizer
        if path is not None:
            folder = self.find_model(path, INPUT_KEY, weights=False)
            theirs = load_tokenizer(folder, trust_remote_code=self.settings.trust_input_tokenizer, key=INPUT_KEY)
        folder = self.find_model(model.path, model.key)
        own = load_tokenizer(folder, trust_remote_code=model.trust_remote_code, key=model.key)
        self.render = ConversationRenderer(own, f"{model.key}={model.path}", theirs)
        config = transformers.AutoConfig.from_pretrained(folder)
        positions = max_positions(config.to_dict())
        self.max_length = self.settings.max_length or (positions and positions[1])
        self.padding_id: int | None = config.get_text_config().pad_token_id

    @on_device()
    def score(
        self, rows: DataProtoRef, conversations: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[str, np.ndarray]:
        """Score this rank's rows.

        Args:
            rows: the responses.
            conversations: the messages of each prompt, by uid.

        Returns:
            (N,) float32 each: `rm_score`, and `rm_clipped`, 1 where the conversation was longer than `max_length`.

        Raises:
            TrainingDiverged: a score is not finite.
        """
        data = rows.fetch(("prompts", "responses", "uid"))
        uids = [str(uid) for uid in data.non_tensor_batch["uid"]] if len(data) else []
        pairs = zip(data["prompts"].rows(), data["responses"].rows(), strict=True) if len(data) else ()
        whole = [
            self.render(conversations[uid], prompt.tolist(), response.tolist())
            for uid, (prompt, response) in zip(uids, pairs, strict=True)
        ]
        most = self.max_length
        clipped = [most is not None and len(token_ids) > most for token_ids in whole]
        sequences = [list(without_padding(token_ids[:most], self.padding_id)) for token_ids in whole]
        return {RM_SCORE: self._scores(scored_rows(sequences, uids)), RM_CLIPPED: np.array(clipped, np.float32)}

    def _scores(self, data: DataProto) -> np.ndarray:
        size, tokens = self.settings.log_prob_micro_batch_size, self.settings.log_prob_max_token_len
        try:
            with smaller_passes("reward_model.", size, tokens, budget="forward_max_token_len"):
                found = self.engine.compute_columns(data, ("values",), micro_batch_size=size, max_token_len=tokens)
        except TrainingDiverged as error:
            raise TrainingDiverged(f"reward_model, {error}") from None
        return np.array([row[-1].item() for row in found["values"].rows()], np.float32)


def scored_rows(sequences: Sequence[list[int]], uids: Sequence[str]) -> DataProto:
    """The rows whose last value is the score of each sequence. What all sequences of a uid begin with is their prompt,
    so that it is computed once.
    """
    if not sequences:
        return DataProto()
    groups: dict[str, list[list[int]]] = {}
    for uid, sequence in zip(uids, sequences, strict=True):
        groups.setdefault(uid, []).append(sequence)
    lengths = {uid: max(1, len(commonprefix(group))) for uid, group in groups.items()}
    parts = [
        (sequence[: lengths[uid]], sequence[lengths[uid] :]) for uid, sequence in zip(uids, sequences, strict=True)
    ]
    columns = {
        "prompts": Ragged.from_rows([prompt for prompt, _ in parts], torch.int32),
        "responses": Ragged.from_rows([response for _, response in parts], torch.int32),
    }
    return with_score_token(DataProto.from_dict(columns, {"uid": list(uids)}))
