"""Prometheus: the metrics of the newest step among those that Ray exports of the driver's node."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from typing import Any

from grpo_dist.errors import ConfigError
from grpo_dist.tracking.base import RunInfo, Tracker
from grpo_dist.tracking.metric_names import GLOBAL_STEP, DistinctNames

_REFRESH_S = 1.0
"""Ray's own shortest interval: it forgets a gauge that has not been set for two of them."""


class PrometheusTracker(Tracker):
    """Sets a gauge of Ray for each metric, with the last value that was measured.

    Ray exports `critic/score/mean` as `ray_grpo_dist_critic_score_mean`, with the labels `project` and `experiment`. A
    value that is not finite is not exported.
    """

    def __init__(self, run: RunInfo) -> None:
        import ray  # not before `workers.cluster.connect` has set what Ray reads when it is imported

        here = ray.get_runtime_context().get_node_id()
        (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
        if node["MetricsExportPort"] <= 0:
            raise ConfigError(
                "trainer.logger: 'prometheus': Ray exports no metrics of this node (its agent is off); start Ray with "
                "`ray start --metrics-export-port=PORT`, or remove 'prometheus' from trainer.logger"
            )
        self.note = (
            f"Prometheus: http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics has ray_grpo_dist_*"
        )
        self._labels = {"project": run.project_name, "experiment": run.experiment_name}
        self._gauges: dict[str, Any] = {}
        self._names = DistinctNames(gauge_name)
        self._shown: dict[str, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._refresh, name="prometheus", daemon=True).start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Export the values from now on; those of metrics that this step does not have stay."""
        from ray.util.metrics import Gauge

        values = self._shown | dict(metrics) | {GLOBAL_STEP: step}
        shown = {name: value for name, value in values.items() if math.isfinite(value)}
        for name in [each for each in shown if each not in self._gauges]:
            gauge = Gauge(self._names[name], description=ascii(name)[1:-1], tag_keys=tuple(self._labels))
            self._gauges[name] = gauge.set_default_tags(self._labels)
        self._shown = shown  # in one assignment, since the other thread reads it

    def close(self) -> None:
        """Set no gauge any more: Ray forgets them after two of its intervals."""
        self._closed.set()

    def _refresh(self) -> None:
        while not self._closed.wait(_REFRESH_S):
            for name, value in self._shown.items():
                self._gauges[name].set(value)


def gauge_name(metric: str) -> str:
    """Return the name of a metric's gauge, in characters of Prometheus's names; Ray puts `ray_` in front."""
    return "grpo_dist_" + re.sub(r"[^a-zA-Z0-9_]+", "_", metric)
