"""Experts that vLLM's tokens go to, recorded by vLLM's own connector (`enable_return_routed_experts`).

vLLM keeps them by the blocks of its KV cache, so that tokens of cached prompts have theirs too, and delivers them with
a request's output: of every token but the last one, each as it was when the token was first computed. Only its newer
model runner asks the connector, and the build for CPU has the older one: there `RecordingScheduler` and `record_steps`
do. They rely on the internals of vLLM 0.32.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.core.sched.scheduler import Scheduler


class RecordingScheduler(Scheduler):
    """vLLM's scheduler with the part that takes experts from workers: vLLM itself asks for its newer runner first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector = AuxOutputSchedulerConnector()


def record_steps(runner: Any) -> None:
    """Have vLLM's older model runner, some methods of which are replaced, deliver the experts of its steps.

    The connector is told of a step before it runs; then which rows of it are whose, from which token on; and when the
    tokens are sampled, how many of these were accepted.
    """
    connector: Any = get_aux_output_connector(runner.model, runner.vllm_config, runner.kv_cache_config)
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
    steps: list[tuple[Any, list[int]]] = []  # the one that is under way

    def execute(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        connector.begin_step(scheduled.aux_output_connector_metadata)
        result = execute_model(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            batch = runner.input_batch
            ids = list(batch.req_ids)
            rows = SimpleNamespace(
                req_ids=ids,
                query_start_loc_np=np.cumsum([0, *(scheduled.num_scheduled_tokens[name] for name in ids)]),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(ids)].copy(),
            )
            drafted = [len(scheduled.scheduled_spec_decode_tokens.get(name, ())) for name in ids]
            steps.append((connector.prepare_output(rows), drafted))
        return result

    def sample(*args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(*args, **kwargs)
        while steps:
            pending, drafted = steps.pop()
            if pending is not None:  # the first worker of the engine's
                counts = np.array([len(tokens) for tokens in output.sampled_token_ids])
                pending.enqueue_cpu_copy(counts, np.array(drafted) - np.maximum(counts - 1, 0))
                output.aux_output_connector_output = pending.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute, sample
