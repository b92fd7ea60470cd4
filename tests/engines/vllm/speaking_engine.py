"""A speaking engine of the built-in model with Qwen3's template with tools."""

from pathlib import Path

from grpo_dist.assets import resolve_model_path
from grpo_dist.engines.vllm import speaking

MODEL = resolve_model_path("builtin:tiny-qwen3")
TEMPLATE = Path(__file__).parents[2] / "agents" / "templates" / "qwen3.jinja"
OPTIONS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "chat_template": str(TEMPLATE)}


class SpeakingEngine(speaking.SpeakingEngine):
    """Has all that renders and parses; who samples is the app's function."""

    def __init__(self, max_model_len: int = 8192) -> None:
        super().__init__(MODEL, max_model_len, hf_overrides={"max_position_embeddings": max_model_len})
