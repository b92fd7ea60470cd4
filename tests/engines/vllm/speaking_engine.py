"""What vLLM's server needs of an engine, without weights: its config, and a renderer of Qwen3's template with tools."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.assets import resolve_model_path
from grpo_dist.engines.vllm.starting import quiet_environment

MODEL = resolve_model_path("builtin:tiny-qwen3")
TEMPLATE = Path(__file__).parents[2] / "agents" / "templates" / "qwen3.jinja"
OPTIONS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "chat_template": str(TEMPLATE)}


class SpeakingEngine:
    """Has all that renders and parses; who samples is the app's function."""

    def __init__(self, max_model_len: int = 8192) -> None:
        quiet_environment("cpu")
        from vllm import AsyncEngineArgs
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        longer = {"max_position_embeddings": max_model_len}
        args = AsyncEngineArgs(
            MODEL, dtype="float32", max_model_len=max_model_len, generation_config="vllm", hf_overrides=longer
        )
        self.vllm_config = args.create_engine_config()
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
