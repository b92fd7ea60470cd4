import numpy as np
import pytest

from grpo_dist.errors import BatchError, RewardError
from grpo_dist.runtime.batch_ref import DataProtoRef, Frame
from grpo_dist.tracking.summary import Progress
from grpo_dist.trainer.loop import stage
from tests.messages import refuses, says


def batch(*columns: str) -> DataProtoRef:
    return DataProtoRef((Frame(columns, (), np.zeros(0), np.zeros(0)),))


class Loop:
    step = 4

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self.progress = Progress(1, 0, None)

    @stage("score", needs=("responses",), adds=("token_level_scores",))
    async def score(self, rows: DataProtoRef) -> DataProtoRef:
        return batch(*rows.columns, "token_level_scores")

    @stage("forgetful", adds=("advantages",))
    async def forgetful(self) -> DataProtoRef:
        return batch("responses")

    @stage("failing")
    async def failing(self) -> None:
        raise RewardError("bad")


def test_times_and_passes_through() -> None:
    loop = Loop()
    assert "token_level_scores" in loop.score(batch("responses")).columns
    assert loop.timings["score"] >= 0
    assert Loop.score.stage == ("score", ("responses",), ("token_level_scores",))


def test_a_missing_column_names_stage_and_maker() -> None:
    with refuses(BatchError, "'score'", "'responses'", "rollout", "prompts"):
        Loop().score(batch("prompts"))


def test_a_broken_promise_is_named() -> None:
    with refuses(BatchError, "forgetful", "'advantages'", "responses"):
        Loop().forgetful()


def test_errors_carry_stage_and_step() -> None:
    with pytest.raises(RewardError) as caught:
        Loop().failing()
    (note,) = caught.value.__notes__
    says(note, "'failing'", "step 5")
