"""The rollout engine on vLLM, and vLLM's server. vLLM is imported when an engine is made, or a server started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.starting import plain_errors, prepare

if TYPE_CHECKING:
    from grpo_dist.engines.vllm.engine import VLLMEngine


def vllm_engine(settings: EngineSettings) -> VLLMEngine:
    """Make an engine. It does not run before its `start`.

    Raises:
        ConfigError: vLLM is not installed.
    """
    folder = prepare(settings.device)
    with plain_errors():
        from grpo_dist.engines.vllm.engine import VLLMEngine  # imports vLLM, whose environment is set by now
    return VLLMEngine(settings, folder)
