"""Ranks as threads of one process, which exchange values in memory."""

import dataclasses
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from refocused.system.errors import RefocusedError
from refocused.system.world import World

T = TypeVar("T")
TIMEOUT_S = 20.0


class Exchange:
    """Exchanges values between threads; one that fails unexpectedly releases the others."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=TIMEOUT_S)
        self._values: list[bytes] = [b""] * count

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = pickle.dumps(value)
        self.barrier.wait()
        values = [pickle.loads(sent) for sent in self._values]
        self.barrier.wait()
        return values


@dataclasses.dataclass(frozen=True)
class ThreadWorld(World):
    """The world of one thread."""

    def gather(self, value: T) -> list[T]:
        return list(self._control.exchange(self.rank, value))

    def broadcast(self, value: T, *, source: int = 0) -> T:
        return self.gather(value)[source]

    def largest(self, numbers: Sequence[float]) -> list[float]:
        return [float(max(column)) for column in zip(*self.gather(list(numbers)), strict=True)]


@dataclasses.dataclass(frozen=True)
class Ended:
    """Result or error of a rank."""

    result: Any = None
    error: BaseException | None = None


def on_two_ranks(action: Callable[[World], Any], *, machines: int = 1) -> list[Ended]:
    """Run an action on two concurrent ranks, on one machine or on two that share no disk."""
    exchange = Exchange(2)

    def one(rank: int) -> Ended:
        world = ThreadWorld(
            rank=rank,
            local_rank=rank if machines == 1 else 0,
            world_size=2,
            local_world_size=2 // machines,
            node=0 if machines == 1 else rank,
            storage_ranks=machines,
            _control=exchange,
        )
        try:
            return Ended(result=action(world))
        except RefocusedError as error:
            return Ended(error=error)
        except BaseException as error:
            exchange.barrier.abort()
            return Ended(error=error)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(one, range(2)))


def results(ended: Sequence[Ended]) -> list[Any]:
    for rank in ended:
        if rank.error is not None:
            raise rank.error
    return [rank.result for rank in ended]
