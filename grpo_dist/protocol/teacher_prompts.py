"""Prompts of the teacher of a policy that teaches itself: two columns, which only such runs have.

`teacher_prompts` is what the reference reads in place of a response's prompt; it is empty where there is nothing that a
teacher could be shown, and there `teacher_mask` is 0 on all tokens of the response.
"""

from __future__ import annotations

from grpo_dist.protocol.data_proto import DataProto
from grpo_dist.protocol.ragged import Ragged

TEACHER_PROMPTS, TEACHER_MASK = "teacher_prompts", "teacher_mask"


def as_teacher_reads(data: DataProto) -> DataProto:
    """Return the same responses behind the prompts of their teacher, where they have one."""
    if TEACHER_PROMPTS not in data.columns():
        return data
    prompts = data["prompts"]
    rows = [
        shown if len(shown) else own for shown, own in zip(data[TEACHER_PROMPTS].rows(), prompts.rows(), strict=True)
    ]
    _, rest = data.pop(("prompts", TEACHER_PROMPTS))
    return rest.union(DataProto.from_dict({"prompts": Ragged.from_rows(rows, prompts.values.dtype)}))
