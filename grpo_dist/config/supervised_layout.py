"""The machine, CPUs and GPU of each rank of a command that trains one model."""

from __future__ import annotations

from grpo_dist.config.node_layout import Slot, fill, slots_of, spread
from grpo_dist.config.placement import CPU_SHARE
from grpo_dist.config.schema_supervised import SupervisedConfig


def slots(config: SupervisedConfig) -> list[Slot]:
    """A slot for each rank. On GPUs they fill one machine after the other; on CPU they are spread over them."""
    machines, on_cpu = config.trainer.nnodes, config.device == "cpu"
    if on_cpu:
        homes = spread(config.world_size, [0] * machines)
    else:
        homes = fill(config.world_size, 1, [config.trainer.n_gpus_per_node] * machines)
    cpus = config.cluster.num_cpus_per_worker or (CPU_SHARE if on_cpu else 1.0)
    return slots_of({config.role: homes}, {config.role: (cpus, 0.0 if on_cpu else 1.0)})
