"""All parts of the engine layer in a process that has only what the layer needs; a module that loads no more either."""

import sys
from pathlib import Path

import torch.distributed as dist

from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.process import run_part
from benchmarks.gpu_check.results import Result

SETUP = {"device": "cpu", "scale": "small"}
ENGINE = [part for part in PARTS if part.layer == "engine"]
# What a run has and the engine layer must do without.
ABSENT = ("ray", "vllm", "hydra", "omegaconf", "wandb", "tensorboard", "pyarrow", "psutil", "datasets", "peft")


def engine_parts(rank: int, folder: Path) -> list[Result]:
    """Their results, one after the other; none of `ABSENT` can be imported."""
    loaded = [name for name in ABSENT if name in sys.modules and name != "psutil"]  # torch takes that where it is there
    assert loaded == [], loaded
    sys.modules.update(dict.fromkeys(ABSENT))  # type: ignore[arg-type]
    found = []
    for part in ENGINE:
        if dist.is_initialized():  # each part joins a group of its own
            dist.destroy_process_group()
        found.append(run_part(part, folder, SETUP))
    return found
