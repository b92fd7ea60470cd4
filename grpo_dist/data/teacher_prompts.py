"""What a policy that teaches itself is shown: the prompt, and in it how the question is answered.

SDPO (arXiv 2601.20802): another response of the group that has earned enough, or feedback on the response itself. SDFT
(2601.19897): a demonstration that comes with the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_dist.config.schema_algorithm import TEXT, SelfDistillationConfig
from grpo_dist.data.prompts import Prompt
from grpo_dist.data.tokenize import prompt_ids


@dataclass(frozen=True)
class TeacherPrompts:
    """Makes the prompts of a group's teacher; `section` says how long they may be."""

    section: SelfDistillationConfig
    tokenizer: Any
    template_kwargs: Mapping[str, Any]

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], texts: Sequence[str], scores: Sequence[float], said: Sequence[str]
    ) -> list[list[int]]:
        """Return the token ids of each response's teacher prompt; [] where there is nothing to show, or too much.

        Args:
            messages: of the group's prompt. What is shown is put behind its last message of the user.
            texts: of the responses. One is shown the first success behind it in the group, and never itself.
            scores: of the responses; nan: none.
            said: feedback on each response; "": there is none.
        """
        threshold, count, prompts = self.section.success_threshold, len(texts), []
        for i in range(count):
            others = [(i + step) % count for step in range(1, count)]
            good = [] if threshold is None else [texts[k] for k in others if scores[k] >= threshold]
            parts = [(self.section.success_template, text) for text in good[:1]]
            parts += [(self.section.feedback_template, said[i])] * bool(said[i].strip())
            prompts.append(self._rendered(messages, "".join(form.replace(TEXT, text) for form, text in parts)))
        return prompts

    def _rendered(self, messages: Sequence[Mapping[str, Any]], shown: str) -> list[int]:
        asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not (shown and asked):
            return []
        changed = [dict(message) for message in messages]
        changed[asked[-1]]["content"] += shown
        row = Prompt(0, "", changed, None, {}, "a prompt of algorithm.self_distillation")
        token_ids = prompt_ids(row, self.tokenizer, self.template_kwargs)
        return token_ids if len(token_ids) <= (self.section.max_prompt_length or len(token_ids)) else []
