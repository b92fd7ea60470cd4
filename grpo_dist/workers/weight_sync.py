"""Weight sync: the actor's weights to every rollout engine, with a version number.

The protocol, in order. The driver starts it, after each update (and once before the first rollout) and while no
request is in flight:

1. `ActorWorker.export_weights` on all actor ranks: the ranks gather one tensor at a time; rank 0 packs them, cast to
   the engine's type, into buckets and puts each bucket, with its number and checksum, into the object store. The
   driver gets references.
2. `RolloutWorker.load_weights(buckets, version)` on every engine: check all buckets, pause, load them, set the
   version, resume. What is damaged, incomplete or not newer is refused, and the weights in force stay.
   The prefix cache is dropped with the old weights.
3. Every engine answers with the version it now holds. The sync is done when all answered `version`; from then on
   each sequence generated carries it. The buckets are freed when the references go out of scope.

If an actor rank or an engine fails on the way, the sync raises and the run stops; no rollout is taken from an engine
whose version was not confirmed.
"""

from __future__ import annotations

from grpo_dist.errors import GrpoDistError
from grpo_dist.workers.group import WorkerGroup


def sync_weights(actor: WorkerGroup, rollout: WorkerGroup, *, version: int, dtype: str) -> None:
    """Bring the actor's weights, as weight version `version`, to all rollout engines.

    Args:
        actor: the actor's workers.
        rollout: the rollout workers.
        version: what the engines will hold.
        dtype: the engines' type, a torch name such as "float32".

    Raises:
        GrpoDistError: a worker failed, or an engine confirmed another version.
    """
    buckets = actor.call_all("sync_weights", "export_weights", dtype)[0]
    confirmed = rollout.call_all("sync_weights", "load_weights", buckets, version)
    for rank, held in enumerate(confirmed):
        if held != version:
            raise GrpoDistError(f"rollout worker {rank} holds weight version {held} after the sync of {version}")
