"""What a policy that teaches itself is shown: the prompt, and in it how the question is answered.

SDPO (arXiv 2601.20802): another response of the group that has earned enough, or feedback on the response itself. SDFT
(2601.19897): a demonstration that comes with the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_dist.config.schema_algorithm import TEXT, SelfDistillationConfig
from grpo_dist.data.prompts import Prompt
from grpo_dist.data.tokenize import prompt_ids
from grpo_dist.protocol import Ragged
from grpo_dist.protocol.sequences import TEACHER_MASK, TEACHER_PROMPTS


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
            scores: of the responses; nan: none.
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
