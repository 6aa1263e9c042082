"""The ranks of a run and the messages between them outside of training itself."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from refocused.system.errors import ConfigError, RefocusedError, TrainingError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
DeviceKind = Literal["cuda", "cpu"]
PCI_DEVICES = Path("/sys/bus/pci/devices")
CONTROL_TIMEOUT = datetime.timedelta(hours=2)  # longer than any save, download or validation


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks of the run.

    Messages of the control plane (flags, names, errors) go over gloo on the CPU, so that they
    need no GPU and may wait for a slow disk without tripping NCCL's watchdog.
    """

    rank: int = 0
    local_rank: int = 0  # number of this process on its machine
    world_size: int = 1
    local_world_size: int = 1  # processes of the run on this machine
    node: int = 0  # number of this machine among those of the run
    storage_ranks: int = 1  # write the run's files: 1 on a shared disk, else one a machine
    device_kind: DeviceKind = "cpu"
    _control: Any = None

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        import torch

        is_cuda = self.device_kind == "cuda"
        return torch.device("cuda", self.local_rank) if is_cuda else torch.device("cpu")

    @property
    def device_name(self) -> str:
        """What the driver calls this rank's GPU; `CPU` without one."""
        import torch

        return torch.cuda.get_device_name(self.device) if self.device_kind == "cuda" else "CPU"

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the rank that decides and prints."""
        return self.rank == 0

    @property
    def is_local_rank_0(self) -> bool:
        """Whether this rank does its machine's own work, such as fetching."""
        return self.local_rank == 0

    @property
    def storage_rank(self) -> int:
        """Index of the storage rank whose disk this rank writes to."""
        return self.node if self.storage_ranks > 1 else 0

    @property
    def is_storage_rank(self) -> bool:
        """Whether this rank does the work on the disk that it writes to."""
        return self.is_local_rank_0 if self.storage_ranks > 1 else self.is_rank_0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather(None)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """Return one rank's value, rank 0's by default, on every rank."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=source, group=self._control)
        return box[0]

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Return, for each place, the largest number that any rank gave there."""
        if self.world_size == 1:
            return [float(number) for number in numbers]
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(list(numbers), dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)
        return [float(number) for number in tensor.tolist()]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Return, for each place, the sum of the numbers of all ranks."""
        gathered = self.gather([float(number) for number in numbers])
        return [sum(column) for column in zip(*gathered, strict=True)]

    def on_all_ranks(self, action: Callable[[], T]) -> T:
        """Do the same on every rank; when one fails, all raise the first failing rank's error."""
        result, error = _outcome(action)
        self.raise_together(error)
        return result  # type: ignore[return-value]

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """Do something on rank 0 alone; every rank gets its result or its error."""
        return self.broadcast(self.on_all_ranks(lambda: action() if self.is_rank_0 else None))  # type: ignore[return-value]

    def on_storage_ranks(self, action: Callable[[], T]) -> list[T]:
        """Do something once per disk; all ranks get every storage rank's result, or an error."""
        result, error = _outcome(action) if self.is_storage_rank else (None, None)
        told = self.gather((error, self.storage_rank, self.is_storage_rank, result))
        self._raise_first([failed for failed, *_ in told])
        found = {rank: result for _, rank, has_acted, result in told if has_acted}
        return [found[rank] for rank in sorted(found)]  # type: ignore[misc]

    def raise_together(self, error: RefocusedError | None) -> None:
        """Raise on every rank when at least one rank brings an error."""
        self._raise_first(self.gather(error))

    def _raise_first(self, errors: Sequence[RefocusedError | None]) -> None:
        failed = [(rank, e) for rank, e in enumerate(errors) if e is not None]
        if failed:
            rank, first = failed[0]
            shared = type(first)(str(first) if rank == 0 else f"rank {rank}: {first}")
            shared.on_every_rank = True
            raise shared

    def leave(self) -> None:
        """Wait for all ranks, then close the connections of the GPUs."""
        self.barrier()
        if self.device_kind == "cuda":
            import torch.distributed as dist

            dist.destroy_process_group()


def _outcome(action: Callable[[], T]) -> tuple[T | None, RefocusedError | None]:
    try:
        return action(), None
    except RefocusedError as error:
        return None, error


def ranks_from_environment(environment: dict[str, str]) -> World:
    """Read the launcher's variables; without a launcher this is the only rank."""
    size = int(environment.get("WORLD_SIZE", "1"))
    rank = int(environment.get("RANK", "0"))
    local_size = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or size
    # The machine's number by DeepSpeed's launcher, or by torchrun.
    node = environment.get("CROSS_RANK") or environment.get("GROUP_RANK")
    return World(
        rank=rank,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        world_size=size,
        local_world_size=int(local_size),
        node=rank // int(local_size) if node is None else int(node),
    )


def choose_device(asked: str, *, local_world_size: int, gpus: int) -> DeviceKind:
    """Decide what to compute on.

    Raises:
        ConfigError: More ranks than GPUs, or `cuda` on a machine without any.
    """
    if asked == "cpu" or (asked == "auto" and gpus == 0):
        return "cpu"
    if gpus < local_world_size:
        raise ConfigError(
            f"{local_world_size} ranks were started on this machine, and it has {gpus} GPUs that "
            f"torch can see. Start with --num_gpus {gpus}, or set run.device=cpu for a trial "
            "without GPUs."
            if gpus
            else f"run.device is cuda, and torch sees no GPU on this machine ({local_world_size} "
            "ranks were started). Check nvidia-smi and that torch is a CUDA build, or set "
            "run.device=cpu for a trial."
        )
    return "cuda"


def join_world(asked_device: str) -> World:
    """Connect this process to the other ranks of the run.

    Raises:
        ConfigError: The machine has too few GPUs.
    """
    import torch
    import torch.distributed as dist

    _complete_environment()
    alone = ranks_from_environment(dict(os.environ))
    gpus = 0 if asked_device == "cpu" else torch.cuda.device_count()
    kind = choose_device(asked_device, local_world_size=alone.local_world_size, gpus=gpus)
    near = [_cores_near(gpu) for gpu in range(gpus)] if kind == "cuda" else []
    _take_cores(alone, near)
    if kind == "cuda":
        torch.cuda.set_device(alone.local_rank)
        # A single rank has no peer, and on some machines NCCL fails to connect to none as soon as
        # the device is bound (DeepSpeed issue 8248).
        bound = torch.device("cuda", alone.local_rank) if alone.world_size > 1 else None
        dist.init_process_group("nccl", device_id=bound)
        control: Any = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=CONTROL_TIMEOUT)
        control = dist.group.WORLD
    return dataclasses.replace(alone, device_kind=kind, _control=control)


def _take_cores(alone: World, near: Sequence[frozenset[int]]) -> None:
    """Keep a rank to its share of the cores, or every rank's CPU Adam would take all of them.

    `near` are the cores beside each GPU of this machine; empty where unknown.
    """
    import torch

    allowed = os.sched_getaffinity(0)
    sharing = alone.local_world_size
    if near and (beside := allowed & near[alone.local_rank]):
        os.sched_setaffinity(0, beside)
        allowed, sharing = beside, near[:sharing].count(near[alone.local_rank])
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(allowed) // max(1, sharing)))


def _cores_near(gpu: int) -> frozenset[int]:
    """Return the cores of a GPU's NUMA node, as the kernel lists them (`0-3,8`); empty: unknown."""
    import torch

    place: Any = torch.cuda.get_device_properties(gpu)  # the stub lacks the address
    address = f"{place.pci_domain_id:04x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0"
    try:
        text = (PCI_DEVICES / address / "local_cpulist").read_text().strip()
        ranges = [part.partition("-") for part in text.split(",") if part]
        return frozenset(
            core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)
        )
    except (OSError, ValueError):
        return frozenset()


def lost_connection(error: Exception) -> TrainingError | None:
    """Say what a broken connection between ranks means; None when the error is another one.

    gloo raises a plain RuntimeError, which its source file's name gives away.
    """
    import torch.distributed as dist

    text = str(error)
    if not isinstance(error, dist.DistError) and "gloo/transport" not in text:
        return None
    reason = re.sub(r"^\[[^]]*\] ", "", text).partition(". ")[0]
    return TrainingError(
        f"Another rank has ended and took the connection with it ({reason}). What it said is above "
        "or in the run's logs/rank-N.log; one that says nothing was killed, most often for want "
        "of memory (see dmesg). The last checkpoint is good: start the same command again."
    )


def _complete_environment() -> None:
    """Name a world of one rank when no launcher did, with a port of its own."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    only = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(only, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
