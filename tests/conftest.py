"""What tests share because it is slow to start: one local Ray cluster, random models on disk, one whole run."""

import asyncio
import inspect
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from grpo_dist.errors import ConfigError
from grpo_dist.runtime import event_loop
from grpo_dist.runtime.cluster import TIMELINE_VARIABLE, prepare, set_local_environment
from grpo_dist.sandbox import SandboxSettings, check
from tests.chaos.runs import Outcome, train

# Test modules import Ray when they are collected; what `connect` sets for a local cluster would come too late then.
set_local_environment()
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests run on CPU, also where there are GPUs

# Examples of a property in each tier; `make test-deep` has --hypothesis-profile=deep.
for tier, max_examples in (("fast", 16), ("deep", 100)):
    settings.register_profile(tier, max_examples=max_examples, deadline=None, derandomize=True, database=None)
settings.load_profile("fast")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Paths within the project count from its root: a test has the same name in every checkout."""
    root = f"{Path(__file__).parents[1]}/"
    return str(val).removeprefix(root) if isinstance(val, str | Path) and str(val).startswith(root) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Where the time has gone: of what takes minutes, the slowest files."""
    seconds = Counter[str]()
    for kind in ("", "passed", "failed", "error"):  # the first: beginnings and ends that went well
        for report in terminalreporter.stats.get(kind, ()):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    if sum(seconds.values()) > 60:
        slowest = ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.most_common(12))
        terminalreporter.write_line(f"slowest files: {slowest}")


@pytest.fixture(autouse=True)
def fp32_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of the tests hold in fp32, also on a processor that has bf16."""
    monkeypatch.setattr("grpo_dist.config.schema_job.has_bf16", lambda: False)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths lead into the test's folder; hub and cluster are out of reach."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("grpo_dist.runtime.cluster.running_cluster", lambda: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def _vllms_environment() -> Iterator[None]:
    """What is set for a vLLM in the tests' own process ends with the test, or its module: plans ask for it too."""
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        if name.startswith(("VLLM_", "TORCHDYNAMO_")):
            del os.environ[name]


vllms_environment_of_a_module = pytest.fixture(_vllms_environment, scope="module", autouse=True)
vllms_environment = pytest.fixture(_vllms_environment, autouse=True)


@pytest.fixture(autouse=True)
def empty_event_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test on fakes leaves on the driver's event loop ends with it.

    Else asyncio complains of it whenever it is collected as garbage, in the middle of another test; under Python 3.11
    that breaks an `ast.parse` at work (CPython's gh-106905).
    """
    yield
    if request.node.get_closest_marker("ray") is None and event_loop._loop.cache_info().currsize:
        event_loop.run(_end_all())


async def _end_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(scope="session")
def bwrap() -> None:
    """For tests that run programs in bubblewrap."""
    try:
        check(SandboxSettings())
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A local Ray cluster with two logical CPUs."""
    import ray

    from grpo_dist.runtime.nodes import connect

    connect(prepare("local"), 2)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def main_run(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The main job on real workers, from its start to its end, with nothing in its way, all trackers but W&B, and a
    profile of step 2.
    """
    folder = tmp_path_factory.mktemp("main")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        loggers = "trainer.logger=[console,tensorboard,mlflow,trackio,prometheus]"
        patch.delenv(TIMELINE_VARIABLE, raising=False)  # set by a cluster of the tests
        profile = ("trainer.profile_steps=[2]", "trainer.stage_timeout_s.profile=300")
        return train(folder / "run", [], loggers, "trainer.log_val_generations=2", *profile)


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of random models with a tokenizer: "tied" and "untied" embeddings, and "experts", a Qwen3-MoE with tied
    ones. vLLM takes them too.
    """
    from tests.models import EXPERTS

    kinds = {
        "tied": ("Qwen3", {}),
        "untied": ("Qwen3", {"tie_word_embeddings": False}),
        "experts": ("Qwen3Moe", EXPERTS),
    }
    return {name: _random_model(tmp_path_factory.mktemp(name), *kind) for name, kind in kinds.items()}


def _random_model(folder: Path, family: str, changes: dict[str, Any]) -> str:
    import torch
    import transformers

    from tests.models import random_model

    # the smallest head that vLLM's CPU attention has
    config = transformers.AutoConfig.from_pretrained(random_model(family, folder, head_dim=32, **changes))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():  # the default init is so small that every distribution is uniform
        if "norm" not in name:
            parameter.data.mul_(3.0)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    _tokenizer(config.vocab_size).save_pretrained(folder)
    return str(folder)


def _tokenizer(vocab_size: int) -> Any:
    """One token per word: w3, w4, ...; 0 pads, 2 ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<unk>": 1, "<end>": 2} | {f"w{i}": i for i in range(3, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>")


@pytest.fixture(scope="session")
def rollouts(local_ray: None, random_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two started rollout workers, each with a vLLM engine: rank 0 holds the tied model and has a profiler, rank 1 the
    untied one and a tokenizer.
    """
    from tests.engines.vllm.real import WatchedRolloutWorker
    from tests.processes import spawned
    from tests.worker_settings import engine_settings

    settings = [
        engine_settings(path, seed=seed, needs_tokenizer=seed == 1)
        for seed, path in enumerate((random_models["tied"], random_models["untied"]))
    ]
    settings[0] = replace(settings[0], profile_dir=str(tmp_path_factory.mktemp("profiles") / ".rollout0"))
    with spawned("rollout", WatchedRolloutWorker, [(), ()], env={"OMP_NUM_THREADS": "1"}) as group:
        group.gather([group.submit(rank, "start", "start", each) for rank, each in enumerate(settings)])
        yield group
        group.call_all("shutdown", "shutdown")
