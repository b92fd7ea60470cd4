"""What every start of vLLM needs: its environment, a folder for its small files, and plain errors."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from grpo_dist.engines.rendezvous import stay_on_loopback
from grpo_dist.engines.vllm.arguments import quiet_environment
from grpo_dist.errors import ConfigError, GrpoDistError


def prepare(device: str) -> tempfile.TemporaryDirectory[str]:
    """Set vLLM's environment before it is imported; returns the folder of its sockets and its tokenizer."""
    quiet_environment(device)
    stay_on_loopback()  # the processes of an engine share a node
    folder = tempfile.TemporaryDirectory(prefix="grpo_dist-")  # vLLM itself would never delete its sockets
    os.environ["VLLM_RPC_BASE_PATH"] = folder.name
    return folder


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Within this block vLLM is imported and started.

    Raises:
        ConfigError: vLLM is not installed or refuses the settings.
        RuntimeError: it did not start; says where the reason is.
    """
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
