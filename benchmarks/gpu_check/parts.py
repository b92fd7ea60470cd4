"""The parts, in the order in which they run. Loads neither torch nor Ray: each part runs in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

Layer = Literal["engine", "whole", "runs"]
_ENGINE = ("torch", "transformers", "safetensors", "pydantic")
_WHOLE = (*_ENGINE, "ray", "vllm", "hydra")
NEEDED: dict[Layer, tuple[str, ...]] = {"engine": _ENGINE, "whole": _WHOLE, "runs": _WHOLE}
# A part that takes this many times what it should is ended, and none sooner than after so many seconds.
PATIENCE, LEAST_LIMIT_S = 3, 120


@dataclass(frozen=True)
class Part:
    """One process's work.

    Attributes:
        name: of the part, and of its file in the state folder.
        layer: what has to be installed.
        function: `module:function` of this package, called with a `Job`.
        seconds: what it should take on an H100, its process's start included: an estimate.
        measures: what it does, in a line.
        asks_gpu: whether there is nothing to ask on CPU.
        needs_model: whether it reads the model that the part "model" writes.
        gpus: how many it takes; with more than one there is nothing to ask on CPU.
    """

    name: str
    layer: Layer
    function: str
    seconds: int
    measures: str
    asks_gpu: bool = False
    needs_model: bool = False
    gpus: int = 1

    @property
    def limit_s(self) -> int:
        """Seconds after which it is ended."""
        return max(PATIENCE * self.seconds, LEAST_LIMIT_S)

    def not_installed(self) -> list[str]:
        """Packages that it needs and this environment has not."""
        return [name for name in NEEDED[self.layer] if find_spec(name) is None]


PARTS = (
    Part("model", "engine", "model:write_model", 18, "writes Qwen3-0.6B's shape with random weights"),
    Part(
        "context", "engine", "device:context", 10, "what a process takes of the GPU before its tensors", asks_gpu=True
    ),
    Part("matmul", "engine", "device:matmul", 10, "the rate that everything else is held against"),
    Part("head", "engine", "device:head", 20, "the output layer in chunks against all logits at once"),
    Part("attention", "engine", "kernels:attention", 65, "FlexAttention against SDPA, and how often it is compiled"),
    Part(
        "layouts", "engine", "kernels:layouts", 50, "log-probs of shared, packed and padded sequences", needs_model=True
    ),
    Part(
        "update", "engine", "update:update", 65, "updates in micro-batches of 16,384 and 2,048 tokens", needs_model=True
    ),
    Part(
        *("update_eager", "engine", "update:update_eager", 45, "the long ones without torch.compile"),
        asks_gpu=True,
        needs_model=True,
    ),
    Part("layout_speed", "engine", "update:layout_speed", 40, "the same update in each layout", needs_model=True),
    Part(
        "weights",
        "engine",
        "weights:weights",
        35,
        "loading, export, weights and optimizer states to CPU memory and back",
        needs_model=True,
    ),
    Part(
        *("hybrid_sharding", "engine", "hybrid:hybrid_sharding", 45, "an update of two copies, on a GPU each"),
        needs_model=True,
        gpus=2,
    ),
    Part("ipc", "engine", "ipc:ipc", 15, "weights from process to process on one GPU (CUDA IPC)", asks_gpu=True),
    Part("main_job", "whole", "main_job:main_job", 90, "the main job: its reward rises, and it ends well"),
    Part("roles", "whole", "roles:roles", 75, "weight sync, tokens/s, kill -9 of the engine", needs_model=True),
    Part("broadcast", "whole", "roles:broadcast", 60, "weight sync between two GPUs (NCCL)", needs_model=True, gpus=2),
    Part(
        *("vllm_alone", "whole", "runners:vllm_alone", 60, "tokens/s of vLLM without us, with both model runners"),
        needs_model=True,
    ),
    Part("in_turns", "runs", "main_job:in_turns", 60, "a run whose engine and actor take turns", asks_gpu=True),
    Part("factors", "runs", "main_job:factors", 60, "LoRA's factors go to an engine that sleeps", asks_gpu=True),
    Part("seeds", "runs", "main_job:seeds", 100, "seeded samples, twice"),
    Part("seeds_v1", "runs", "main_job:seeds_v1", 100, "the same with vLLM's older model runner", asks_gpu=True),
    Part("routes", "runs", "main_job:routes", 60, "routes of experts, recorded and replayed"),
    Part("float32_head", "runs", "main_job:head", 50, "an output layer in float32"),
    Part("changes", "runs", "main_job:changes", 50, "syncs of changed weights through the object store"),
    Part("eight_bit", "runs", "main_job:eight_bit", 60, "8-bit optimizer states and bf16 weights"),
    Part("float32", "runs", "main_job:float32", 60, "trainer and engine in float32", asks_gpu=True),
)
