"""What every start of vLLM needs before vLLM is imported: its environment, a folder and plain errors; and processes
that end with the one that started them.

The other modules of this folder import vLLM, but for this one, installed.py, front.py and server.py.

With `tied_core()` the kernel kills the engine core together with the rollout worker; vLLM's own would outlive a killed
worker, and hold its GPUs. This and local_llm.py rely on the internals of vLLM 0.32: with another version
`knows_internals` is false, and vLLM starts in its own way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from typing import Any

from grpo_dist.config.schema_roles import RolloutConfig
from grpo_dist.errors import ConfigError, GrpoDistError
from grpo_dist.hosts import stay_on_loopback
from grpo_dist.supervisor import end_with_parent
from grpo_dist.terminal import quiet_libraries

ARGUMENTS_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def given_arguments(rollout: RolloutConfig) -> dict[str, Any]:
    """Return the arguments that the config gives vLLM as they are."""
    return {name: value for name, value in rollout.engine_kwargs.get("vllm", {}).items() if value is not None}


def quiet_environment(device: str) -> None:
    """Set vLLM's environment, before it is imported: no progress bars, no telemetry, a fast start on CPU.

    The processes of a tensor parallel engine inherit it.
    """
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # beside the tracebacks of the process itself
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": "8192",  # in a request; more ends the core, which takes 128 words
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    cpu = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # keeps the executor inside the core
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # which a Triton for CPU would bring; ours is tested with the other
        "TORCHDYNAMO_DISABLE": "1",  # or the first log-probs compile C++ for seconds
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines and trainers share the cores
    }
    for name, value in (quiet | (cpu if device == "cpu" else {})).items():
        os.environ.setdefault(name, value)
    quiet_libraries()
    logging.getLogger("vllm").setLevel(logging.ERROR)


def prepare(device: str) -> tempfile.TemporaryDirectory[str]:
    """Set vLLM's environment before it is imported; returns the folder of its sockets and its tokenizer."""
    quiet_environment(device)
    stay_on_loopback()  # the processes of an engine share a node
    # vLLM itself would never delete its sockets. RAY_TMPDIR is short where TMPDIR is too long for the paths of sockets.
    folder = tempfile.TemporaryDirectory(prefix="grpo_dist-", dir=os.environ.get("RAY_TMPDIR"))
    os.environ["VLLM_RPC_BASE_PATH"] = folder.name
    return folder


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors of importing and starting vLLM, within this block, into plain ones of this package."""
    try:
        yield
    except GrpoDistError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=vllm: vLLM cannot be imported ({error}). "
            "Install it with `pip install -e '.[cpu]'`, or '.[gpu]' on a GPU machine."
        ) from error
    except ValueError as error:  # pydantic's ValidationError is one too
        reason = next((line for line in str(error).splitlines() if "error, " in line.lower()), str(error))
        raise ConfigError(f"actor_rollout_ref.rollout: vLLM refuses the settings: {reason.strip()[:400]}") from None
    except Exception as error:  # its processes fail on their own, and vLLM says only that they did
        raise RuntimeError(f"vLLM did not start: {type(error).__name__}: {error}{_error_log()}") from error


def _error_log() -> str:
    """The end of a message: the file to which this process and its children write errors."""
    file = os.path.realpath("/proc/self/fd/2")
    return f"; the reason is in {file}" if os.path.isfile(file) else ""


KNOWN_VERSION = "0.32."


def knows_internals() -> bool:
    """Tell if the installed vLLM is one whose internals are known."""
    for package in ("vllm-cpu", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            return version(package).startswith(KNOWN_VERSION)
    return False


class TiedProcess(SpawnProcess):
    """A process that is killed when the one that started it has ended."""

    def run(self) -> None:
        """Run the core."""
        end_with_parent()
        super().run()


class _Context:
    Process = TiedProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(get_context("spawn"), name)


@contextlib.contextmanager
def tied_core() -> Iterator[None]:
    """Within this block, vLLM starts engine cores as processes that end with this one, if its internals are known."""
    if not knows_internals():
        yield
        return
    import vllm.v1.engine.utils as engine_utils

    original = engine_utils.get_mp_context
    engine_utils.get_mp_context = lambda: _Context()  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        engine_utils.get_mp_context = original
