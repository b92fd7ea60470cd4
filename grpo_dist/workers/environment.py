"""The environment variables that workers on every node get from the driver.

A worker inherits the environment that `ray start` had on its node. The driver's credentials, proxies and NCCL settings
override it. They are passed as a constructor argument, because they may be secrets, and Ray writes a `runtime_env` into
the logs of every node.

Variables that name a folder (HF_HOME, SSL_CERT_FILE) are not passed, because nodes differ, nor those that bind a
process to the loopback interface.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from grpo_dist.engines.rendezvous import is_loopback_setting
from grpo_dist.workers.ray_watch import end_with_ray

NAMES = frozenset(
    {
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        *("GLOO_SOCKET_IFNAME", "VLLM_LOGGING_LEVEL"),
    }
)
PREFIXES = ("WANDB_", "NCCL_", "TORCH_NCCL_")
# The address of the driver's W&B service process, and folders: both are useless on other nodes.
_OF_THE_DRIVER = frozenset({"WANDB_SERVICE", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"})


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of the driver's environment that workers get."""
    return {
        name: value
        for name, value in environment.items()
        if (name in NAMES or name.startswith(PREFIXES))
        and name not in _OF_THE_DRIVER
        and not is_loopback_setting(name, value)
    }


def with_environment(worker_class: type) -> type:
    """A subclass whose constructor takes environment variables as its first argument, and sets them first.

    Its process ends once Ray's control service is lost (ray_watch.py). It keeps the name of the worker class, which
    Ray's tools show.
    """

    class Worker(worker_class):  # type: ignore[misc, valid-type]
        def __init__(self, environment: Mapping[str, str], *args: Any) -> None:
            os.environ.update(environment)
            end_with_ray()
            super().__init__(*args)

    Worker.__name__, Worker.__qualname__ = worker_class.__name__, worker_class.__qualname__
    Worker.__module__, Worker.__doc__ = worker_class.__module__, worker_class.__doc__
    return Worker
