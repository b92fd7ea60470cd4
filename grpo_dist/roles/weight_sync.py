"""Weight sync: sends the actor's weights, with a version number, to every rollout engine.

The driver starts it after each update, and once before the first rollout. The weights are sent in buckets of bounded
size, each with its number and a checksum: all actor ranks gather one tensor at a time, and rank 0 packs them, cast to
the engine's dtype. The transport (weight_transport.py) decides how the buckets are sent:

- object_store: an engine reads and checks all buckets, and only then pauses and loads them. If they are damaged,
  incomplete or not newer, it refuses them and keeps its weights.
- broadcast: once all engines have paused, each checks and loads the buckets as they arrive. A damaged first bucket is
  refused as above. After a damaged later one the engine holds a mix of old and new weights, and samples nothing until
  a complete sync has succeeded; the transport makes a second attempt with the engines that still answer.
- ipc: as broadcast, but each actor rank packs the buckets for the engines on its own GPU or machine.

Responses in flight continue with the new weights (`rollout.partial_rollout`), or are finished first. The prefix cache
is cleared. Every engine answers with the version it now holds, and tags each token that it samples with it.

A rollout worker that fails during the sync is replaced and does not delay the others (rollout_group.py). It gets
requests again once it holds the current weights: from the next sync or, while the actor still holds them, from a sync
of its own. Responses of an engine with an unconfirmed version are never used. If an actor rank fails, the sync raises
and the run stops.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_dist.roles.rollout_group import RolloutGroup
from grpo_dist.roles.weight_transport import ObjectStoreTransport, Outcomes, WeightTransport
from grpo_dist.runtime.group import WorkerGroup


async def sync_weights(
    actor: WorkerGroup, rollout: RolloutGroup, *, version: int, dtype: str, transport: WeightTransport | None = None
) -> None:
    """Send the actor's weights, as weight version `version`, to all rollout engines.

    Args:
        dtype: the engines' dtype, a torch name such as "float32".
        transport: how the weights are sent; None: through the object store.

    Raises:
        GrpoDistError: an actor rank failed, the restart budget is used up, or an engine confirmed another version.
    """
    way = transport or ObjectStoreTransport()

    async def bring(ranks: Sequence[int]) -> Outcomes:
        return await way.sync(actor, rollout.workers, ranks, version=version, dtype=dtype)

    await rollout.take_weights(bring, version)
