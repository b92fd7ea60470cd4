"""Weight sync: the actor's weights to every rollout engine, with a version number.

The driver starts it after each update, and once before the first rollout. The weights travel as buckets of bounded
size, each with its number and a checksum: all actor ranks gather one tensor at a time, and rank 0 packs them, cast to
the engine's type. How the buckets travel is the transport's business (weight_transport.py):

- object_store: an engine has all buckets at hand, checks them, and only then pauses and loads. What is damaged,
  incomplete or not newer is refused, and the weights in force stay.
- broadcast: once all engines have paused, each checks and loads one bucket after the other as they come in. A damaged
  first bucket is refused as above. After a later one the weights are mixed, and the engine samples nothing until a
  whole sync has come through; the transport makes a second attempt with the engines that still answer.
- ipc: as broadcast, but each actor rank packs the buckets, and hands them to the engines on its own GPU or machine.

Responses that are in flight go on under the new weights (`rollout.partial_rollout`), or are finished first. The prefix
cache is dropped with the old ones. Every engine answers with the version it now holds; from then on each token it
samples carries it.

A rollout worker that fails on the way is replaced and does not hold up the others (rollout_group.py). It takes part
again once it holds the weights in force, by the next sync or, while the actor still holds them, by one of its own. No
response is taken from an engine whose version was not confirmed. If an actor rank fails, the sync raises and the run
stops.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_dist.workers.group import WorkerGroup
from grpo_dist.workers.rollout_group import RolloutGroup
from grpo_dist.workers.weight_transport import ObjectStoreTransport, Outcomes, WeightTransport


async def sync_weights(
    actor: WorkerGroup, rollout: RolloutGroup, *, version: int, dtype: str, transport: WeightTransport | None = None
) -> None:
    """Bring the actor's weights, as weight version `version`, to all rollout engines.

    Args:
        actor: the actor's workers.
        rollout: the engines.
        version: what the engines will hold.
        dtype: the engines' type, a torch name such as "float32".
        transport: how the weights travel; None: through the object store.

    Raises:
        GrpoDistError: an actor rank failed, too many rollout workers have failed, or one confirmed another version.
    """
    way = transport or ObjectStoreTransport()

    async def bring(ranks: Sequence[int]) -> Outcomes:
        return await way.sync(actor, rollout.workers, ranks, version=version, dtype=dtype)

    await rollout.take_weights(bring, version)
