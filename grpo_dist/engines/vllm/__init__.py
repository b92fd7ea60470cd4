"""The rollout engine on vLLM, and vLLM's server. vLLM is imported when an engine is made, or a server started."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.starting import plain_errors, prepare

if TYPE_CHECKING:
    from grpo_dist.engines.vllm.engine import VLLMEngine

# A package that vLLM's server imports would set the whole process's logging to ERROR, and our warnings would be lost.
os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")
# Its own warnings are of SageMaker's files, which no run has.
logging.getLogger("model_hosting_container_standards").addFilter(lambda record: record.levelno > logging.WARNING)


def vllm_engine(settings: EngineSettings) -> VLLMEngine:
    """Make an engine. It does not run before its `start`.

    Raises:
        ConfigError: vLLM is not installed.
    """
    folder = prepare(settings.device)
    with plain_errors():
        from grpo_dist.engines.vllm.engine import VLLMEngine  # imports vLLM, whose environment is set by now
    return VLLMEngine(settings, folder)
