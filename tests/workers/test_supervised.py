"""A rank that trains on rows with known answers, and the group of all ranks."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.algorithms.settings import PreferenceSettings
from grpo_dist.engines.settings import PassLimits
from grpo_dist.errors import OutOfMemory, TrainingDiverged
from grpo_dist.protocol import DataProto, Mean, Metric, Sum
from grpo_dist.runtime.event_loop import run
from grpo_dist.workers.supervised import SupervisedGroup, SupervisedWorker
from tests.messages import refuses
from tests.runtime.fakes import Fakes

OBJECTIVE = PreferenceSettings()


class Engine:
    """Remembers what it was given, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.seen = error, []

    def on_device(self, **_: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def evaluate(self, *arguments: Any) -> dict[str, Metric]:
        self.seen.append(arguments)
        if self.error is not None:
            raise self.error
        return {"reward_model/loss": Sum(0.5)}

    def train_mini_batch(self, *arguments: Any) -> Any:
        return SimpleNamespace(metrics=self.evaluate(*arguments))


def passed(method: str, engine: Engine, tokens: int | None = 99) -> dict[str, Metric]:
    """What a rank returns of rows after step 3."""
    worker = SupervisedWorker(0, 1)
    limits = PassLimits("data.", 4, tokens, lengths="data.max_length")
    worker.engine = engine
    worker.settings = SimpleNamespace(update=limits, model=SimpleNamespace(room="take more GPUs"))
    rows = SimpleNamespace(columns=("prompts",), fetch=lambda columns: "rows")
    return getattr(worker, method)(rows, OBJECTIVE, 3)


@pytest.mark.parametrize(("method", "what"), [("train", "step 3"), ("evaluate", "validation after step 3")])
def test_a_rank_takes_its_rows_in_passes_of_the_config(method: str, what: str) -> None:
    """Numbers that are not finite are told with the step, a full GPU with what makes passes smaller."""
    engine = Engine()
    assert passed(method, engine) == {"reward_model/loss": Sum(0.5)}
    assert engine.seen == [("rows", OBJECTIVE, PassLimits("data.", 4, 99, lengths="data.max_length"))]
    with refuses(TrainingDiverged, "step 3", "loss nan") as caught:
        passed(method, Engine(TrainingDiverged("loss nan")))
    assert str(caught.value).startswith(what)
    for tokens, setting in ((None, ("data.micro_batch_size_per_gpu", 4)), (99, ("data.max_token_len_per_gpu", 99))):
        with pytest.raises(OutOfMemory) as full:
            passed(method, Engine(OutOfMemory("the forward pass", remedy="")), tokens)
        assert full.value.setting == setting


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_every_rank_is_asked_and_metrics_are_merged(method: str, store_here: None) -> None:
    """All take part, also one without rows: the passes are collective."""
    answers = {0: {"loss": Sum(0.5), "accuracy": Mean(3.0, 3)}, 1: {"loss": Sum(0.0), "accuracy": Mean(0.0, 1)}}
    workers = Fakes("reward_model", 2, **{method: answers})
    rows = DataProto.from_dict({}, {"uid": ["a", "a"]})
    found = run(getattr(SupervisedGroup(workers), method)([rows, DataProto()], OBJECTIVE, 7))
    assert (found["loss"].value, found["accuracy"].value) == (0.5, 0.75)
    assert workers.order == [(method, 0), (method, 1)]
    assert [len(handle) for _, _, handle, *_ in workers.asked] == [2, 0]
    assert {tuple(more) for _, _, _, *more in workers.asked} == {(OBJECTIVE, 7)}
