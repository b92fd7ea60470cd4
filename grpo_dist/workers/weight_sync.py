"""Weight sync: the actor's weights to every rollout engine, with a version number.

The driver starts it, after each update (and once before the first rollout) and while no request is in flight. The
weights travel as buckets of bounded size, each with its number and a checksum: all actor ranks gather one tensor at a
time, and rank 0 packs them, cast to the engine's type. How the buckets travel is the transport's business
(weight_transport.py):

- object_store: an engine has all buckets at hand, checks them, and only then pauses and loads. What is damaged,
  incomplete or not newer is refused, and the weights in force stay.
- broadcast: an engine pauses, then checks and loads one bucket after the other as they come in. A damaged first bucket
  is refused as above. After a later one the weights are mixed, and the engine samples nothing until a whole sync has
  come through; the transport makes a second attempt with the engines that still answer.

Every engine answers with the version it now holds. The sync is done when all answered `version`; from then on each
sequence generated carries it. If an actor rank or an engine fails on the way, the sync raises and the run stops; no
rollout is taken from an engine whose version was not confirmed.
"""

from __future__ import annotations

from grpo_dist.errors import GrpoDistError
from grpo_dist.workers.group import WorkerGroup
from grpo_dist.workers.weight_transport import ObjectStoreTransport, WeightTransport


def sync_weights(
    actor: WorkerGroup, rollout: WorkerGroup, *, version: int, dtype: str, transport: WeightTransport | None = None
) -> None:
    """Bring the actor's weights, as weight version `version`, to all rollout engines.

    Args:
        actor: the actor's workers.
        rollout: the rollout workers.
        version: what the engines will hold.
        dtype: the engines' type, a torch name such as "float32".
        transport: how the weights travel; None: through the object store.

    Raises:
        GrpoDistError: a worker failed, or an engine confirmed another version.
    """
    transport = transport or ObjectStoreTransport()
    confirmed = transport.sync(actor, rollout, range(len(rollout)), version=version, dtype=dtype)
    for rank, held in confirmed.items():
        if isinstance(held, GrpoDistError):
            raise held
        if held != version:
            raise GrpoDistError(f"rollout worker {rank} holds weight version {held} after the sync of {version}")
