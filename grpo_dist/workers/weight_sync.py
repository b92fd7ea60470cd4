"""Weight sync: the actor's weights to every rollout engine, with a version number.

The protocol, in order. The driver starts it after each update, and once before the first rollout:

1. `ActorWorker.export_weights` on all actor ranks: the ranks gather one tensor at a time; rank 0 packs them, cast to
   the engine's type, into buckets and puts each bucket, with its number and checksum, into the object store. The
   driver gets references.
2. `RolloutWorker.load_weights(buckets, version)` on every engine: check all buckets, pause, load them, set the
   version, resume. What is damaged, incomplete or not newer is refused, and the weights in force stay.
   The prefix cache is dropped with the old weights.
   Requests that are in flight go on under the new weights (`rollout.partial_rollout`), or are finished first.
3. Every engine answers with the version it now holds; from then on each token it samples carries it. The buckets stay
   until the next sync: a worker that is replaced in between takes them.

A rollout worker that fails on the way is replaced and does not hold up the others (see `rollout_group`); no response
is taken from an engine whose version was not confirmed. If an actor rank fails, the sync raises and the run stops.
"""

from __future__ import annotations

from grpo_dist.workers.group import WorkerGroup
from grpo_dist.workers.rollout_group import RolloutGroup


def sync_weights(actor: WorkerGroup, rollout: RolloutGroup, *, version: int, dtype: str) -> None:
    """Bring the actor's weights, as weight version `version`, to all rollout engines.

    Args:
        actor: the actor's workers.
        rollout: the engines.
        version: what the engines will hold.
        dtype: the engines' type, a torch name such as "float32".

    Raises:
        GrpoDistError: an actor rank failed, too many rollout workers have failed, or one confirmed another version.
    """
    buckets = actor.call_all("sync_weights", "export_weights", dtype)[0]
    rollout.load_weights(buckets, version)
