"""What of the driver's environment reaches the workers, on whatever node they are.

A worker has the environment that `ray start` had on its node. Credentials, proxies and settings of NCCL that are set
where the run is started go to all of them besides, and hold there. They travel as an argument of the worker's
constructor: Ray writes a `runtime_env` into the logs of every node, and these may be secrets.

What names a folder (HF_HOME, SSL_CERT_FILE) stays behind, since nodes differ in it, and so does what ties a process to
its own machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from grpo_dist.engines.rendezvous import is_loopback_setting

NAMES = frozenset(
    {
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        *("GLOO_SOCKET_IFNAME", "VLLM_LOGGING_LEVEL"),
    }
)
PREFIXES = ("WANDB_", "NCCL_", "TORCH_NCCL_")
# W&B's background process of the driver, which is not on other nodes, and folders.
_OF_THE_DRIVER = frozenset({"WANDB_SERVICE", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"})


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a driver's environment that its workers get."""
    return {
        name: value
        for name, value in environment.items()
        if (name in NAMES or name.startswith(PREFIXES))
        and name not in _OF_THE_DRIVER
        and not is_loopback_setting(name, value)
    }


def in_environment(worker_class: type) -> type:
    """A class whose constructor takes environment variables first, sets them, and makes a worker of the rest.

    It has the name of the worker's class, by which Ray's tools show a process.
    """

    class Worker(worker_class):  # type: ignore[misc, valid-type]
        def __init__(self, environment: Mapping[str, str], *args: Any) -> None:
            os.environ.update(environment)
            super().__init__(*args)

    Worker.__name__, Worker.__qualname__ = worker_class.__name__, worker_class.__qualname__
    Worker.__module__, Worker.__doc__ = worker_class.__module__, worker_class.__doc__
    return Worker
