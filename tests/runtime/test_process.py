"""What a process knows of its node.

Addresses of processes, with answers of Ray that come when a test says so.

What of the driver's environment reaches a worker, and what Ray writes down of it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayActorError

from grpo_dist import assets
from grpo_dist.engines.base import MiniBatchResult
from grpo_dist.engines.settings import PassLimits, SamplingSettings
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, Sum
from grpo_dist.runtime.event_loop import TimeLimits
from grpo_dist.runtime.group import DATA_STAYS_IN_STORE, WorkerGroup
from grpo_dist.runtime.process import Address, Addresses, Process, shared_environment, with_environment
from grpo_dist.workers.actor import ActorWorker
from grpo_dist.workers.rollout import RolloutWorker
from tests.agents.fakes import Characters, Writer
from tests.messages import refuses, says
from tests.models import objective, random_batch
from tests.processes import reserved
from tests.worker_settings import agent, engine_settings


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(Process, "here", lambda self: "node gpu7 (10.0.0.7)")
    return Process()


def test_a_folder_of_the_node(process: Process, tmp_path: Path) -> None:
    assert process.find_model(str(tmp_path)) == str(tmp_path)
    assert Path(process.find_model("builtin:tiny-qwen3"), "config.json").is_file()


def test_a_folder_that_is_on_another_node(process: Process, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        process.find_model(str(tmp_path / "mine"))
    told = str(caught.value)
    says(told, "gpu7 (10.0.0.7)", f"actor_rollout_ref.model.path={tmp_path}/mine", "share")


def test_the_peak_of_memory_is_in_gib(process: Process) -> None:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    assert process.peak_memory_gib() == {"resident": pytest.approx(int(lines["VmHWM"].split()[0]) / 2**20, rel=0.1)}


def test_a_model_that_the_hub_does_not_give_to_a_node(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, key: str, *, weights: bool) -> str:
        raise ConfigError(f"{key}={name}: 401")

    monkeypatch.setattr(assets, "_from_hub", refuse)
    with refuses(ConfigError, "gpu7 (10.0.0.7)", "actor_rollout_ref.model.path=a/gated: 401"):
        process.find_model("a/gated")


def test_a_node_with_the_other_build(process: Process) -> None:
    with refuses(ConfigError, "gpu7 (10.0.0.7)", "cuda here"):
        process.check_build("cuda", lambda device: f"no {device} here")


# --- what custom code prints ---------------------------------------------------------------------------------------
class PrintingEngine:
    """Stands for a train engine whose loss prints."""

    def on_device(self, **_: bool) -> contextlib.AbstractContextManager[None]:
        print("not the loss")
        return contextlib.nullcontext()

    def train_mini_batch(self, data: DataProto, *options: object) -> MiniBatchResult:
        print("rows", len(data))
        return MiniBatchResult({"actor/loss": Sum(1.0)}, None)


def test_what_a_loss_prints_in_an_actor_is_kept() -> None:
    worker = ActorWorker.__new__(ActorWorker)
    model = SimpleNamespace(room="", sequence_parallel_size=1, replays_routes=False)
    settings: Any = SimpleNamespace(model=model, update=PassLimits("actor_rollout_ref.actor.ppo_", 2))
    worker.settings, worker.engine = settings, PrintingEngine()  # type: ignore[assignment]
    data = random_batch(num_groups=1, n=4)
    rows: Any = SimpleNamespace(columns=(), fetch=lambda columns: data)
    worker.update(rows, [np.array([0, 1, 2]), np.array([3])], objective(), 1)
    assert worker.take_printed() == (["rows 3", "rows 1"], 0)
    assert worker.take_printed() == ([], 0)


LOOP = """
from grpo_dist.agents import AgentLoop


class Chatty(AgentLoop):
    def __init__(self):
        print("made")

    async def run(self, episode):
        await episode.generate()
        print("said", episode.text)
"""


async def test_what_an_agent_loop_prints_in_an_engine_is_kept(tmp_path: Path, random_models: dict[str, str]) -> None:
    (tmp_path / "chatty.py").write_text(LOOP)
    loop = agent(f"{tmp_path}/chatty.py:Chatty", timeout_s=30.0)
    worker, writer = RolloutWorker(), Writer("yes", "no")
    settings = engine_settings(random_models["tied"], agent=loop, max_model_len=90)
    worker.engine = SimpleNamespace(settings=settings, generate=writer.generate, load=None)  # type: ignore[assignment]
    await worker._start_agent()
    worker.tokenizer = Characters()  # type: ignore[assignment]
    print("not the loop")
    await worker.generate("p", np.array([1, 2]), SamplingSettings(2, 1.0, 1.0, -1, 30, 5))
    assert worker.runner is not None
    await worker.runner.stop()
    lines, more = worker.take_printed()
    assert (lines[0], sorted(lines[1:]), more) == ("made", ["said no", "said yes"], 0)


def address(node: int) -> Address:
    return Address(f"host{node}", f"10.0.0.{node}", 7, f"node{node}")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """By reference, what has been answered: an address or an error."""
    there: dict[Any, Any] = {}

    def wait(refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [ref for ref in refs if ref in there], [ref for ref in refs if ref not in there]

    def get(ref: Any) -> Any:
        if isinstance(there[ref], Exception):
            raise there[ref]
        return there[ref]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    return there


def test_a_new_process_has_an_address_once_it_has_started(answers: dict[Any, Any]) -> None:
    found = Addresses()
    found.note({0: address(0), 1: address(1)})
    found.expect(1, "new")  # type: ignore[arg-type]
    assert found.known() == {0: address(0)}
    answers["new"] = address(2)
    assert found.known() == {0: address(0), 1: address(2)}


def test_where_a_process_was_that_has_ended_is_known_until_the_next_has_started(answers: dict[Any, Any]) -> None:
    found = Addresses()
    assert found.last(0) is None
    found.note({0: address(0)})
    found.forget(0)
    assert (found.known(), found.last(0)) == ({}, address(0))
    found.expect(0, "new")  # type: ignore[arg-type]
    assert found.last(0) == address(0)
    answers["new"] = RayActorError()
    assert (found.known(), found.last(0)) == ({}, address(0))
    found.expect(0, "newer")  # type: ignore[arg-type]
    answers["newer"] = address(1)
    assert found.last(0) == address(1)


NUMBERS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
SECRET = "hf_" + "s3cretS3cretS3cretS3cret"


def test_credentials_proxies_and_nccl_are_shared() -> None:
    wanted = {
        "HF_TOKEN": SECRET,
        "HF_ENDPOINT": "https://hub.example",
        "WANDB_API_KEY": "k",
        "WANDB_MODE": "offline",
        "https_proxy": "http://me:pass@proxy:3128",
        "NO_PROXY": "10.0.0.0/8",
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "^lo,docker",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    others = {
        "PATH": "/bin",
        "HF_HOME": "/data/hf",
        "WANDB_SERVICE": "2-1-tcp-localhost-1",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    others |= {"RAY_AUTH_TOKEN": "t", "WANDB_DIR": "/here", "VLLM_API_KEY": "k", "VLLM_HOST_IP": "10.0.0.1"}
    wanted |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "PYTORCH_ALLOC_CONF": "max_split_size_mb:128", "TRITON_DEBUG": "1"}
    assert shared_environment(wanted | others) == wanted | NUMBERS
    assert shared_environment({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}


def test_what_ties_a_process_to_its_machine_is_not() -> None:
    """As a local run sets it for itself; a later run in the same process may be one over several nodes."""
    tied = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_COMM_ID": "127.0.0.1:7000"}
    assert shared_environment(tied | {"NCCL_DEBUG": "WARN"}) == {"NCCL_DEBUG": "WARN"} | NUMBERS


def test_a_local_runs_own_settings_are_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_dist.runtime.cluster import set_local_environment

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    set_local_environment()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in shared_environment(os.environ)
    assert "GLOO_SOCKET_IFNAME" not in shared_environment(os.environ)


def test_the_class_keeps_its_name_and_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(Process):
        def __init__(self, rank: int) -> None:
            self.rank, self.colour = rank, os.environ["COLOUR"]

    monkeypatch.setenv("COLOUR", "red")
    made = with_environment(Named)
    assert (made.__name__, made.__module__) == ("Named", __name__)
    worker = made({"COLOUR": "blue"}, 3)
    assert (worker.rank, worker.colour) == (3, "blue"), "it is set before the constructor runs"


@pytest.mark.ray
def test_workers_have_it_also_after_a_restart_and_ray_does_not_write_it_down(local_ray: None) -> None:
    class Looking(Process):
        def __init__(self) -> None:
            self.seen = os.environ.get("HF_TOKEN")

        def look(self) -> str | None:
            return self.seen

    with reserved(actor=1) as bundles:
        options = {"limits": TimeLimits(240.0), "env": DATA_STAYS_IN_STORE, "shared": {"HF_TOKEN": SECRET}}
        group = WorkerGroup.spawn("actor", Looking, bundles["actor"], args=[()], **options)
        assert group.call(0, "start", "look") == SECRET
        group.respawn(0)
        assert group.call(0, "start", "look") == SECRET
        group.kill()
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = [path.read_bytes() for path in logs.rglob("*") if path.is_file()]
    assert any(b"RAY_max_direct_call_object_size" in text for text in texts), "it does write a runtime_env down"
    assert not any(SECRET.encode() in text for text in texts)
