"""vLLM's endpoint without an engine: its app renders prompts and parses answers, and somebody else samples."""

from __future__ import annotations

import tempfile
from typing import Any

from grpo_dist.engines.base import AppSample
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.starting import quiet_environment


class SpeakingEngine:
    """What vLLM's server asks of an engine: its config, and what renders and checks prompts. Loads no weights."""

    def __init__(self, model_path: str, max_model_len: int, **arguments: Any) -> None:
        quiet_environment("cpu")
        from vllm import AsyncEngineArgs
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        given = {"dtype": "float32", "generation_config": "vllm", **arguments}
        self.vllm_config = AsyncEngineArgs(model_path, max_model_len=max_model_len, **given).create_engine_config()
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)


async def speaking_app(settings: EngineSettings, sample: AppSample) -> Any:
    """Return the app of a run's endpoint, as a rollout engine with these settings has it."""
    from grpo_dist.engines.vllm.arguments import tokenizer_args
    from grpo_dist.engines.vllm.openai_app import openai_app

    model = settings.model
    with tempfile.TemporaryDirectory() as folder:
        own = tokenizer_args(settings, folder) | {"trust_remote_code": model.trust_remote_code}
        engine = SpeakingEngine(model.path, settings.max_model_len, **own)
        return await openai_app(engine, model.path, sample, settings.rollout.agent.endpoint_kwargs)
