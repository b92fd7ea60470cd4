"""An engine of two processes: it samples what one process does, weights reach both, and both end with it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.weights.buckets import clear_left_behind
from grpo_dist.errors import EngineError, WeightSyncError, WorkerError
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.weight_transport import BroadcastTransport, outcomes
from tests.engines.vllm import real
from tests.engines.vllm.split_rollout import SplitRolloutWorker, SpoiledWorker
from tests.messages import refuses, says
from tests.observed import alive_as, command_line
from tests.processes import open_to_others, spawned, start_together
from tests.worker_settings import changed, engine_settings
from tests.workers.test_weight_transport import TIMEOUT_S, Case, actor_class, actor_settings

pytestmark = [pytest.mark.ray, pytest.mark.deep]

SIZE = 2
SECRET = "hf_only_in_the_environment"
# Two processes add up their halves of every matrix product in another order than one does: rounding, in fp32.
ROUNDING = 1e-4


def split_settings(path: str) -> EngineSettings:
    extension = {"worker_extension_cls": f"{SpoiledWorker.__module__}.{SpoiledWorker.__name__}"}
    parallel = {"tensor_model_parallel_size": SIZE, "collective_timeout_s": int(TIMEOUT_S)}
    return engine_settings(path, vllm=extension, **parallel)


def engine_processes(rollout: WorkerGroup) -> list[psutil.Process]:
    children = psutil.Process(rollout.addresses[0].pid).children(recursive=True)
    return [each for each in children if "Worker_TP" in command_line(each)]


def segments(rollout: WorkerGroup) -> set[Path]:
    return {Path("/dev/shm", name) for names in rollout.call(0, "test", "shared_memory") for name in names}


@pytest.fixture(scope="module")
def engines(local_ray: None, random_models: dict[str, str]) -> Iterator[tuple[Case, WorkerGroup]]:
    """An actor and an engine of two processes; and one of a single process with the same model."""
    path, env = random_models["tied"], {"OMP_NUM_THREADS": "1", "HF_TOKEN": SECRET}
    with (
        spawned("actor", actor_class(), [(0, 1)]) as actor,
        spawned("rollout", SplitRolloutWorker, [()], env=env) as rollout,
        spawned("rollout", SplitRolloutWorker, [()], env=env) as one,
    ):
        start_together(
            Gang(actor).start(actor_settings(path)),
            rollout.ask(0, "start", "start", split_settings(path)),
            one.ask(0, "start", "start", engine_settings(path)),
        )
        run(rollout.call_home())
        yield Case("tied", path, actor, rollout, BroadcastTransport(SIZE, TIMEOUT_S)), one


@pytest.fixture
def case(engines: tuple[Case, WorkerGroup]) -> Case:
    return engines[0]


def test_two_processes_sample_as_one_does(engines: tuple[Case, WorkerGroup]) -> None:
    case, single = engines
    for settings in (real.GREEDY, real.sampling(n=8)):
        one, two = (real.generate(group, 0, real.PROMPTS, settings) for group in (single, case.rollout))
        assert real.tokens(two) == real.tokens(one)
        log_probs = [data["rollout_log_probs"].values for data in (two, one)]
        torch.testing.assert_close(*log_probs, atol=ROUNDING, rtol=0)
    whole = sum(p.numel() for p in real.of_folder(case.path).parameters())
    parts = case.rollout.call(0, "test", "num_parameters")
    assert len(parts) == len(engine_processes(case.rollout)) == SIZE
    assert all(part < 0.6 * whole for part in parts), "each holds half of the matrices, and all of the norms"


def test_its_processes_are_closed_to_others_and_tell_no_secrets(case: Case) -> None:
    case.sync()
    for each in engine_processes(case.rollout):
        assert (each.environ()["HF_TOKEN"], each.environ()["GLOO_SOCKET_IFNAME"]) == (SECRET, "lo")
    worker = psutil.Process(case.rollout.addresses[0].pid)
    assert open_to_others(worker) == {}
    said = [command_line(each) for each in (worker, *worker.children(recursive=True))]
    assert len(said) > SIZE
    for secret in (SECRET, os.environ["RAY_AUTH_TOKEN"]):
        assert not [line for line in said if secret in line]


@pytest.mark.parametrize("bucket", [0, 2])
def test_a_bucket_that_one_process_reads_wrong_is_found_and_mended(case: Case, bucket: int) -> None:
    """The other process has loaded it, so the weights are mixed, wherever the damage is."""
    case.sync()
    case.rollout.call(0, "test", "damage", 1, bucket)
    case.actor.call_all("test", "perturb", 10 + bucket)
    call = case.rollout.submit(0, "test", "receive_weights", case.version + 1)
    case.actor.call_all("test", "broadcast_weights", "float32", case.version + 1)
    error = run(outcomes({0: call}))[0]
    assert isinstance(error, WeightSyncError)
    versions = f"versions {case.version} and {case.version + 1}"
    says(error, "rank 1", f"bucket {bucket}", versions)
    with refuses(EngineError, "mixed", versions):
        real.greedy(case.rollout)
    case.sync()
    assert case.answers(0) == case.expected()


def test_its_processes_end_with_it_whatever_they_are_at(case: Case, tmp_path: Path) -> None:
    """The last test of the case."""
    case.sync()
    shared = segments(case.rollout)
    assert len(shared) > SIZE
    assert len(engine_processes(case.rollout)) == SIZE
    assert left_by_a_killed_engine(case.rollout, tmp_path) == []
    clear_left_behind()  # as the next engine does
    assert not [segment for segment in shared if segment.exists()]


def left_by_a_killed_engine(rollout: WorkerGroup, folder: Path) -> list[psutil.Process]:
    """What still runs of its processes, which all hang. Ray stands still, for it would end what a worker has left."""
    rollout.submit(0, "test", "hang", str(folder))
    while len(list(folder.iterdir())) < SIZE:
        time.sleep(0.01)
    worker = psutil.Process(rollout.addresses[0].pid)
    raylet, processes = worker.parent(), worker.children(recursive=True)
    assert raylet is not None
    assert raylet.name() == "raylet"
    # Asked while all of them live: one that has ended and waits for its parent to notice has no command line.
    engine = [each for each in processes if "resource_tracker" not in command_line(each)]
    raylet.suspend()
    try:
        worker.kill()
        # The worker may end after its engine: threads of its own are still at work when the engine's end.
        _, alive = psutil.wait_procs([worker, *engine], TIMEOUT_S)
    finally:
        raylet.resume()
    return [each for each in alive if alive_as(each)]


@pytest.mark.long
def test_a_core_of_its_own_ends_with_the_engine_too(
    local_ray: None, random_models: dict[str, str], tmp_path: Path
) -> None:
    with spawned("rollout", SplitRolloutWorker, [()], env={"OMP_NUM_THREADS": "1"}) as rollout:
        rollout.call(0, "start", "start", split_settings(random_models["tied"]))
        run(rollout.call_home())
        assert any("EngineCore" in command_line(p) for p in psutil.Process(rollout.addresses[0].pid).children())
        assert len(engine_processes(rollout)) == SIZE
        assert len(real.greedy(rollout)) == len(real.PROMPTS)
        assert left_by_a_killed_engine(rollout, tmp_path) == []


@pytest.mark.long
def test_an_engine_that_does_not_start_says_where_its_processes_have_written_why(
    local_ray: None, random_models: dict[str, str]
) -> None:
    settings = changed(split_settings(random_models["tied"]), kv_cache_memory_gib=1e6)
    with spawned("rollout", SplitRolloutWorker, [()]) as rollout:
        with refuses(WorkerError, "rollout worker 0", "vLLM", "start") as caught:
            rollout.call(0, "start", "start", settings)
        file = next(word for word in str(caught.value).splitlines()[0].split() if word.startswith("/"))
        said = Path(file).read_text()
        assert "Available memory" in said
        assert "(Worker_TP1 pid=" in said, "which process says it"


@pytest.mark.long
def test_files_reach_both_processes_and_are_checked_by_both(local_ray: None, random_models: dict[str, str]) -> None:
    old = real.of_folder(random_models["untied"])
    with real.started(split_settings(random_models["untied"]), worker=SplitRolloutWorker) as rollout:
        for version, model in enumerate((real.perturbed(old, 1), real.perturbed(old, 2))):
            assert real.load(rollout, 0, model, version) == version
            assert real.greedy(rollout) == real.hf_answers(model)
        rollout.call(0, "test", "damage", 1, 0)
        with refuses(WeightSyncError, "rank 1", "bucket 0", "mixed", "1 and 2"):
            real.load(rollout, 0, old, 2)
        with refuses(EngineError, "weights", "mixed", "1 and 2"):
            real.greedy(rollout)
        assert real.load(rollout, 0, old, 2) == 2
        assert real.greedy(rollout) == real.hf_answers(old)
        shared = segments(rollout)
    assert not [segment for segment in shared if segment.exists()]
