"""The roles' typed methods on processes that are none; tests/chaos has real ones that are lost."""

import asyncio
import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.errors import ConfigError, EngineError, RewardError, TrainingDiverged, WorkerLost
from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import DataProto, Mean, Ragged, Sum, metric_values
from grpo_dist.rewards.scorer import PrintedLines
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.process import Address
from grpo_dist.workers import gang
from grpo_dist.workers.actor import ActorGroup, ActorWorker
from grpo_dist.workers.gang import Gang, ReferenceGroup, TorchProfile, Turn, find_model
from grpo_dist.workers.reward import RewardPool
from grpo_dist.workers.roles import Roles
from grpo_dist.workers.scorer import Task
from tests.engines.fakes import FakeTrainEngine
from tests.messages import refuses
from tests.runtime.fakes import FakeNodes, Fakes, Held, settle
from tests.worker_settings import lora, model_settings, policy_settings


def settings(split: int = 1) -> Any:
    """All that a group itself reads of a worker's settings."""
    return SimpleNamespace(model=SimpleNamespace(sequence_parallel_size=split))


def groups_of(count: int) -> list[DataProtoRef]:
    """Groups "0", "1", ... of two responses, of two tokens and of one."""
    groups = []
    for i in range(count):
        columns = {name: Ragged.from_rows([[5, 6], [7]], torch.int32) for name in ("prompts", "responses")}
        columns["response_mask"] = Ragged.from_rows([[1, 1], [1]], torch.int8)
        lengths = {name: torch.tensor([2, 1]) for name in ("prompt_length", "response_length")}
        groups.append(DataProtoRef.put(DataProto.from_dict(columns | lengths, {"uid": [f"{i}"] * 2})))
    return groups


def log_probs(found: DataProtoRef, name: str) -> list[list[float]]:
    return [row.tolist() for row in found.fetch((name,))[name].rows()]


# --- ranks that split sequences ------------------------------
class Splitting(Fakes):
    """Ranks that note their rows, and return their rank as log-probs and loss; some are lost in their first pass."""

    def __init__(self, lost: Sequence[int] = ()) -> None:
        super().__init__("actor", 4)
        self.rows: dict[int, Any] = {}
        self.lost_ranks = lost

    def submit_for_data(self, rank: int, stage: str, method: str, rows: DataProtoRef, *args: Any, **_: Any) -> Call:
        lengths = rows.fetch(("responses",))["responses"].lengths.tolist() if len(rows) else []
        values = Ragged.from_rows([[float(rank)] * n for n in lengths], torch.float32)
        data = DataProto.from_dict({"old_log_probs": values})
        self.rows[rank] = rows["uid"].tolist()
        answer: Any = Label.of(data)
        if method == "update":
            self.rows[rank] = [rows["uid"][part].tolist() for part in args[0]]
            answer = [{"actor/loss": Sum(1.0), "actor/entropy": Mean(10.0 * rank, 2)}], answer
        if rank in self.lost_ranks and not self.lives[rank]:
            answer = self.lost(rank, stage, "its process died")
        self.results[method] = self.results.get(method, {}) | {rank: answer}
        return replace(self.submit(rank, stage, method), data=ray.put(data))


def test_ranks_that_split_sequences_have_the_same_rows_and_count_once(store_here: None) -> None:
    """Of four ranks the first two and the last two split the same sequences."""
    workers = Splitting()
    group, batch = ActorGroup(workers), DataProtoRef.concat(groups_of(2))
    group._settings = settings(split=2)
    by_rank = [[[0, 0], [0], [2, 2], [2]], [[2, 2], [2], [0, 0], [0]]]  # each row is in one group
    found = run(group.compute_log_probs("old_log_prob", batch))
    assert log_probs(found, "old_log_probs") in by_rank
    assert (workers.rows[0], workers.rows[2]) == (workers.rows[1], workers.rows[3])
    assert sorted([*workers.rows[0], *workers.rows[2]]) == ["0", "0", "1", "1"]

    updated, metrics = run(group.update(batch, [np.arange(4)], None, 1))
    assert (workers.rows[0], workers.rows[2]) == (workers.rows[1], workers.rows[3])
    assert len(workers.rows[0][0]) == len(workers.rows[2][0]) == 2
    assert metric_values(metrics) == {"actor/loss": 2.0, "actor/entropy": 20 / 4}, "of ranks 0 and 2"
    assert log_probs(updated, "old_log_probs") in by_rank


def test_one_process_of_each_node_finds_the_model() -> None:
    groups = [Fakes(role, len(nodes)) for role, nodes in (("rollout", "22"), ("actor", "1122"), ("reward", "13"))]
    for group, nodes in zip(groups, ("22", "1122", "13"), strict=True):
        group.note_addresses([Address(node, f"10.0.0.{node}", 1, node) for node in nodes])
    run(find_model(groups, "Qwen/Qwen3-8B", "model.path"))
    asked = [[("find_model", rank, "Qwen/Qwen3-8B", "model.path")] for rank in (0, 0, 1)]
    assert [group.asked for group in groups] == asked
    groups[2].results = {"find_model": {1: ConfigError("there is no such folder")}}
    with refuses(ConfigError, "folder"):
        run(find_model(groups, "Qwen/Qwen3-8B", "model.path"))


# --- a rank that is lost ------------------------------


def test_ranks_that_are_lost_together_cost_one_restart_and_other_passes_wait(store_here: None) -> None:
    workers = Splitting(lost=range(4))
    reference, batch = ReferenceGroup(workers, RestartBudget(1, FakeNodes())), DataProtoRef.concat(groups_of(4))

    async def passes() -> list[DataProtoRef]:
        await reference.start(settings())
        return await asyncio.gather(*(reference.compute_log_probs("ref_log_prob", batch) for _ in range(5)))

    for found in run(passes()):
        assert sorted(len(row) for row in log_probs(found, "old_log_probs")) == [1] * 4 + [2] * 4
    assert (workers.lives, len(reference.restarts.failures)) == ([1] * 4, 1)


def test_only_a_loss_is_made_good() -> None:
    reference = ReferenceGroup(Fakes("ref", 2), RestartBudget(1, FakeNodes()))
    run(reference.start(settings()))
    with pytest.raises(TrainingDiverged, match="nan"):
        run(reference.restart(TrainingDiverged("nan")))
    run(reference.load_checkpoint("folder"))
    for group in (reference, ActorGroup(reference.workers)):  # only a checkpoint has its weights, or the policy
        with pytest.raises(WorkerLost, match="gone"):
            run(group.restart(WorkerLost("gone")))
    assert (reference.restarts.failures, reference.workers.lives) == ([], [0, 0])


# --- reward processes; tests/runtime/test_pool.py ------------------------------
async def test_whole_batches_are_asked_again_and_the_functions_own_mistake_is_shown_at_once(store_here: None) -> None:
    workers = Held("reward", 1)
    pool = RewardPool(workers, RestartBudget(1, FakeNodes()))
    scoring = asyncio.create_task(pool.score(groups_of(1)[0], Task("", "", {}), 240.0))
    await settle()
    workers.open("score")[0][1].set_exception(RewardError("own.py, line 7: mistake"))
    with refuses(RewardError, "own.py, line 7"):
        await scoring
    assert (pool.restarts.failures, workers.lives) == ([], [0])

    columns = ["uid", "token_level_scores", "response_mask", "rollout_log_probs", "old_log_probs"]
    columns += ["prompts", "responses", "score", "failure", "said"]
    batch = DataProtoRef.put(DataProto.from_dict({name: torch.zeros(2) for name in columns}))
    making = asyncio.create_task(pool.compute_targets(batch, TargetSettings("grpo"), 0.0, 0))
    writing = pool.write_samples(batch, "7.jsonl", 7, {})
    await settle()
    workers.open("compute_targets")[0][1].set_exception(WorkerLost("gone", "reward", 0))
    await settle()
    workers.open("start")[0][1].set_result(None)
    await settle()
    workers.open("compute_targets")[0][1].set_result((Label((), {}, 2), {"loss": 1.0}, (["a line"], 0)))
    workers.open("write_samples")[0][1].set_result(None)
    await writing
    assert (await making)[1] == {"loss": 1.0}
    assert pool.printed.take() == ["the advantage or KL estimator printed:\n  a line"]
    assert [method for method, _ in workers.order].count("write_samples") == 2
    assert workers.lives == [1]


# --- turns ------------------------------
class Busy(Gang):
    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__(Fakes(name, 1))
        self.name, self.events = name, events

    def _parts(self, batch: Any, columns: Sequence[str]) -> Any:
        return [], []

    async def _ask(self, send: Any) -> Any:
        self.events.append(f"{self.name} begins")
        await asyncio.sleep(0)
        self.events.append(f"{self.name} ends")
        raise TimeoutError  # what comes after does not matter here


@pytest.mark.parametrize("share", [True, False])
async def test_gangs_on_the_same_gpus_take_turns(share: bool) -> None:
    events: list[str] = []
    gangs = [Busy(name, events) for name in ("actor", "ref")]
    if share:
        gangs[0].turn = gangs[1].turn
    passes = (gang.compute_log_probs("ref_log_prob", DataProtoRef()) for gang in gangs)
    await asyncio.gather(*passes, return_exceptions=True)
    in_turns = ["actor begins", "actor ends", "ref begins", "ref ends"]
    assert (events == in_turns) == share
    assert sorted(events) == sorted(in_turns)


async def test_engines_make_room_for_a_gang_that_is_to_be_alone() -> None:
    asked: list[str] = []

    async def make_room() -> None:
        asked.append("sleep")

    turn = Turn(make_room)
    async with turn.beside_engines:
        assert asked == []
    async with turn.alone():
        assert (asked, turn.beside_engines.locked()) == (["sleep"], True)


# --- what custom code has printed ------------------------------
LOOP = f"actor_rollout_ref.rollout.agent.default_agent_loop={__file__}:Loop"
LOSS = f"actor_rollout_ref.actor.policy_loss.loss_mode={__file__}:loss"
KL = f"actor_rollout_ref.actor.kl_loss_type={__file__}:kl"
OF_RANKS = ["  rank 0", "  rank 2", "  ... and 4 more lines"]
OF_ENGINES = ["  engine 0", "  ... and 2 more lines"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [([], []), ([LOOP], [OF_ENGINES]), ([LOSS], [OF_RANKS]), ([KL, LOOP], [OF_RANKS, OF_ENGINES])],
)
def test_processes_with_custom_code_are_asked_what_it_has_printed(overrides: list[str], told: list[list[str]]) -> None:
    """Of three the second is lost; the last engine has been replaced, and is not there yet."""
    ranks, engines = (
        Fakes(name, 3, take_printed={0: ([f"{name} 0"], 2), 1: WorkerLost("gone"), 2: ([f"{name} 2"], 2)})
        for name in ("rank", "engine")
    )
    rollout = SimpleNamespace(workers=engines, is_starting=lambda rank: rank == 2)
    reward = SimpleNamespace(printed=PrintedLines())
    roles = Roles({"actor": SimpleNamespace(workers=ranks), "rollout": rollout, "reward": reward})
    config, _ = load_config(overrides)
    assert [message.splitlines()[1:] for message in run(roles.take_printed(config))] == told
    reward.printed.note("reward function", ["hello"], 0)  # which these processes have sent
    plain, _ = load_config([])
    assert run(roles.take_printed(plain)) == ["the reward function printed:\n  hello"]
    assert run(roles.take_printed(plain)) == []


# --- what actors send ------------------------------
@pytest.mark.parametrize(("apart", "name"), [(False, "weights"), (True, "factor")])
def test_engines_get_whole_weights_or_factors_alone(apart: bool, name: str) -> None:
    worker = object.__new__(ActorWorker)
    worker.engine = FakeTrainEngine()
    worker.settings = policy_settings(model_settings("model", lora(), merge=not apart))
    for sends in (True, False):
        assert [found for found, _ in worker._sent("float32", "cpu", sends=sends)] == [name]


# --- torch's own profiler ------------------------------
def recorded(path: Path, calls: int) -> int:
    """How many of the calls of a module are in the profile of them, which replaces the one before."""
    module = torch.nn.Linear(2, 2)
    profile = TorchProfile()
    for _ in range(calls):
        module(torch.ones(1, 2))
    profile.write(path)
    assert os.listdir(path.parent) == [path.name]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events].count("aten::linear")


def test_the_modules_that_are_recorded_are_bounded_and_a_trace_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json.gz"
    assert recorded(path, 20) == 20
    monkeypatch.setattr(gang, "MOST_MODULE_CALLS", 7)
    assert recorded(path, 20) == 7
    profile = TorchProfile()
    with refuses(EngineError, f"{tmp_path}/gone/x.json.gz"):
        profile.write(tmp_path / "gone" / "x.json.gz")
    assert recorded(path, 5) == 5, "the next profile counts anew"
    assert not torch.nn.modules.module._global_forward_pre_hooks
