"""Exercise every method of `World` on real gloo."""

from refocused.system.errors import BucketError, RefocusedError, ShardError
from refocused.system.world import lost_connection


def outcome(action):
    try:
        return {"result": action()}
    except RefocusedError as error:
        return {
            "error": str(error),
            "kind": type(error).__name__,
            "on_every_rank": error.on_every_rank,
        }


def exercise(world):
    """Return what each method does; rank 1 leaves before rank 0."""
    done = []

    def fails_on(*ranks):
        def action():
            done.append("acted")
            if world.rank in ranks:
                raise (ShardError, BucketError)[world.rank](f"broken by {world.rank}")
            return f"made by {world.rank}"

        return action

    found = {
        "world": [world.rank, world.local_rank, world.world_size, world.local_world_size],
        "gather": world.gather({"rank": world.rank}),
        "broadcast": world.broadcast(f"from {world.rank}"),
        "broadcast of rank 1": world.broadcast(f"from {world.rank}", source=1),
        "largest": world.largest([world.rank, -world.rank, 2.5]),
        "total": world.total([world.rank + 1, 0.5]),
        "together": outcome(lambda: world.on_all_ranks(fails_on())),
        "together, rank 1 fails": outcome(lambda: world.on_all_ranks(fails_on(1))),
        "together, rank 0 fails": outcome(lambda: world.on_all_ranks(fails_on(0))),
        "together, both fail": outcome(lambda: world.on_all_ranks(fails_on(0, 1))),
        "acted so far": len(done),
        "first does": outcome(lambda: world.on_rank_0(fails_on())),
        "first does, and fails": outcome(lambda: world.on_rank_0(fails_on(0))),
        "acted in the end": len(done),
        "raise together": outcome(
            lambda: world.raise_together(ShardError("mine") if world.rank == 1 else None)
        ),
        "nothing to raise": outcome(lambda: world.raise_together(None)),
    }
    world.barrier()
    while world.rank == 0:
        try:
            world.barrier()
        except RuntimeError as error:
            found["lost"] = str(lost_connection(error))
            break
    return found
