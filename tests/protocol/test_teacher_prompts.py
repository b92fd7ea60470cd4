"""The prompts of a teacher take the place of those that have one, for the pass that reads them."""

from __future__ import annotations

import torch

from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.teacher_prompts import TEACHER_PROMPTS, as_teacher_reads


def test_a_teachers_prompt_stands_in_place_of_the_own_where_there_is_one() -> None:
    columns = {
        "prompts": Ragged.from_rows([[1, 2], [3]], torch.int32),
        "responses": Ragged.from_rows([[4], [5, 6]], torch.int32),
    }
    data = DataProto.from_dict(columns, {"uid": ["a", "b"]})
    assert as_teacher_reads(data) is data
    shown = DataProto.from_dict({TEACHER_PROMPTS: Ragged.from_rows([[], [7, 8, 9]], torch.int32)})
    read = as_teacher_reads(data.union(shown))
    assert [row.tolist() for row in read["prompts"].rows()] == [[1, 2], [7, 8, 9]]
    assert read["prompts"].values.dtype == torch.int32
    assert [row.tolist() for row in read["responses"].rows()] == [[4], [5, 6]]
    assert TEACHER_PROMPTS not in read.columns()
    assert list(read["uid"]) == ["a", "b"]
