"""A rank that trains on rows with known answers, and the group of all ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.algorithms.settings import PreferenceSettings
from grpo_dist.engines.settings import PassLimits
from grpo_dist.errors import OutOfMemory, TrainingDiverged
from grpo_dist.protocol import DataProto, Mean, Metric, Sum
from grpo_dist.workers import supervised
from grpo_dist.workers.supervised import SupervisedGroup, SupervisedWorker
from tests.messages import refuses

OBJECTIVE = PreferenceSettings()


class Engine:
    """Remembers what it was given, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.seen = error, []  # type: ignore[var-annotated]

    def on_device(self, **_: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def evaluate(self, *arguments: Any) -> dict[str, Metric]:
        self.seen.append(arguments)
        if self.error is not None:
            raise self.error
        return {"reward_model/loss": Sum(0.5)}

    def train_mini_batch(self, *arguments: Any) -> Any:
        return SimpleNamespace(metrics=self.evaluate(*arguments))


def worker(engine: Engine, tokens: int | None = None) -> SupervisedWorker:
    made = SupervisedWorker(0, 1)
    made.engine = engine  # type: ignore[assignment]
    settings: Any = SimpleNamespace(
        update=PassLimits("data.", 4, tokens, lengths="data.max_length"), model=SimpleNamespace(room="take more GPUs")
    )
    made.settings = settings
    return made


ROWS: Any = SimpleNamespace(columns=("prompts",), fetch=lambda columns: "rows")


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_a_rank_takes_its_rows_in_passes_of_the_config(method: str) -> None:
    engine = Engine()
    found = getattr(worker(engine, tokens=99), method)(ROWS, OBJECTIVE, 3)
    assert found == {"reward_model/loss": Sum(0.5)}
    assert engine.seen == [("rows", OBJECTIVE, PassLimits("data.", 4, 99, lengths="data.max_length"))]


@pytest.mark.parametrize(("method", "what"), [("train", "step 3"), ("evaluate", "validation after step 3")])
def test_numbers_that_are_not_finite_are_told_with_the_step(method: str, what: str) -> None:
    with refuses(TrainingDiverged, "step 3", "loss nan") as caught:
        getattr(worker(Engine(TrainingDiverged("loss nan"))), method)(ROWS, OBJECTIVE, 3)
    assert str(caught.value).startswith(what)


@pytest.mark.parametrize("method", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("tokens", "setting"), [(None, ("data.micro_batch_size_per_gpu", 4)), (99, ("data.max_token_len_per_gpu", 99))]
)
def test_a_full_gpu_names_the_setting_that_makes_passes_smaller(
    method: str, tokens: int | None, setting: tuple[str, int]
) -> None:
    full = OutOfMemory("the forward pass", remedy="")
    with pytest.raises(OutOfMemory) as caught:
        getattr(worker(Engine(full), tokens), method)(ROWS, OBJECTIVE, 3)
    assert caught.value.setting == setting


# --- the group -----------------------------------------------------------------------------------------------------
class Workers:
    """Answers of two ranks, of which one has no rows."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def submit(self, *call: Any) -> int:
        self.calls.append(call)
        return len(self.calls) - 1

    async def answers(self, calls: Sequence[int]) -> list[dict[str, Metric]]:
        answers: list[dict[str, Metric]] = [
            {"loss": Sum(0.5), "accuracy": Mean(3.0, 3)},
            {"loss": Sum(0.0), "accuracy": Mean(0.0, 1)},
        ]
        return [answers[call] for call in calls]


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_every_rank_is_asked_and_metrics_are_merged(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All take part, also one without rows: the passes are collective."""
    monkeypatch.setattr(supervised.DataProtoRef, "put", staticmethod(lambda part: "stored"))
    workers: Any = Workers()
    rows = DataProto.from_dict({}, {"uid": ["a", "a"]})
    found = asyncio.run(getattr(SupervisedGroup(workers), method)([rows, DataProto()], OBJECTIVE, 7))
    assert (found["loss"].value, found["accuracy"].value) == (0.5, 0.75)
    assert [(rank, name) for rank, _, name, *_ in workers.calls] == [(0, method), (1, method)]
    assert workers.calls[0][3] == "stored"
    assert len(workers.calls[1][3]) == 0
    assert {call[4:] for call in workers.calls} == {(OBJECTIVE, 7)}
