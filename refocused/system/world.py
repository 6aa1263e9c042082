"""The ranks of a run, and the values they exchange outside of training itself."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from refocused.system import launchers, roll_call
from refocused.system.errors import ConfigError, ExitCode, RefocusedError, TrainingError, counted
from refocused.system.progress import Progress

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
DeviceKind = Literal["cuda", "cpu"]
PCI_DEVICES = Path("/sys/bus/pci/devices")
JOIN_SECONDS = 40.0  # for the ranks of all hosts to start
ONE_HOST_SECONDS = 180.0  # for those of one host
GROUP_SECONDS = 7200.0  # longer than any save, download or validation
# Those that torch's CPU kernels leave to MKL (ATen/cpu/vml.h).
VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2"),
    *("sin", "sqrt", "tan", "tanh", "trunc"),
)
# Kernels answer for busy processes, too: 5 + 15 * 2 s without an answer end an idle connection.
# TCP_USER_TIMEOUT on gloo's own would also end those of ranks that are too busy to read.
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 15}
NOTICE_SECONDS, EXIT_SECONDS = 10.0, 15.0  # for a rank to see by itself that another exited; to end
_leaving, _silent = threading.Event(), list[str]()  # every rank is about to exit; a silent host


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """This process's rank, machine and device.

    Control values (flags, names, errors) are exchanged over gloo on the CPU: waiting for a slow
    disk then cannot trip NCCL's watchdog.
    """

    rank: int = 0
    local_rank: int = 0  # index of this process on its machine
    world_size: int = 1
    local_world_size: int = 1  # the run's processes on this machine
    node: int = 0  # index of this machine
    storage_ranks: int = 1  # 1 on a shared disk, else one per machine
    device_kind: DeviceKind = "cpu"
    _control: Any = None
    # What this rank does, for the machine's watchdog.
    progress: Progress = dataclasses.field(default_factory=Progress, compare=False, repr=False)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        import torch

        is_cuda = self.device_kind == "cuda"
        return torch.device("cuda", self.local_rank) if is_cuda else torch.device("cpu")

    @property
    def device_name(self) -> str:
        """The driver's name of this rank's GPU, or `CPU`."""
        import torch

        return torch.cuda.get_device_name(self.device) if self.device_kind == "cuda" else "CPU"

    @property
    def is_rank_0(self) -> bool:
        """Whether this rank decides and prints."""
        return self.rank == 0

    @property
    def is_local_rank_0(self) -> bool:
        """Whether this rank does the work needed once per machine, such as downloads."""
        return self.local_rank == 0

    @property
    def storage_rank(self) -> int:
        """Index of the storage rank that shares this rank's disk."""
        return self.node if self.storage_ranks > 1 else 0

    @property
    def is_storage_rank(self) -> bool:
        """Whether this rank writes the files of its disk."""
        return self.is_local_rank_0 if self.storage_ranks > 1 else self.is_rank_0

    def barrier(self) -> None:
        """Wait for every rank."""
        self.gather(None)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        with self.progress.calling("gather"):
            dist.all_gather_object(values, value, group=self._control)
        return values

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """Return one rank's value, rank 0's by default, on every rank."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        with self.progress.calling("broadcast"):
            dist.broadcast_object_list(box, src=source, group=self._control)
        return box[0]

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over all ranks."""
        if self.world_size == 1:
            return [float(number) for number in numbers]
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(list(numbers), dtype=torch.float64)
        with self.progress.calling("largest"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)
        return [float(number) for number in tensor.tolist()]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Return the element-wise sum over all ranks, added in rank order."""
        gathered = self.gather([float(number) for number in numbers])
        return [sum(column) for column in zip(*gathered, strict=True)]

    def on_all_ranks(self, action: Callable[[], T]) -> T:
        """Run an action on every rank; if any fails, all raise the first failing rank's error."""
        result, error = _outcome(action)
        self.raise_together(error)
        return result  # type: ignore[return-value]

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0; every rank gets its result or raises its error."""
        return self.broadcast(self.on_all_ranks(lambda: action() if self.is_rank_0 else None))  # type: ignore[return-value]

    def on_storage_ranks(self, action: Callable[[], T]) -> list[T]:
        """Run an action once per disk; all ranks get every storage rank's result, or an error."""
        result, error = _outcome(action) if self.is_storage_rank else (None, None)
        gathered = self.gather((error, self.storage_rank, self.is_storage_rank, result))
        self._raise_first([failed for failed, *_ in gathered])
        results = {rank: result for _, rank, has_acted, result in gathered if has_acted}
        return [results[rank] for rank in sorted(results)]  # type: ignore[misc]

    def raise_together(self, error: RefocusedError | None) -> None:
        """Raise on every rank if any rank passes an error."""
        self._raise_first(self.gather(error))

    def _raise_first(self, errors: Sequence[RefocusedError | None]) -> None:
        failed = [(rank, e) for rank, e in enumerate(errors) if e is not None]
        if failed:
            rank, first = failed[0]
            host = f"{first.host}, " if self.local_world_size < self.world_size else ""
            shared = type(first)(str(first) if rank == 0 else f"{host}rank {rank}: {first}")
            shared.on_every_rank, shared.exit_code = True, first.exit_code
            raise shared

    def leave(self) -> None:
        """Wait for all ranks, then close the GPU connections."""
        _leaving.set()
        self.barrier()
        if self.device_kind == "cuda":
            import torch.distributed as dist

            dist.destroy_process_group()


def _outcome(action: Callable[[], T]) -> tuple[T | None, RefocusedError | None]:
    try:
        return action(), None
    except RefocusedError as error:
        error.host = socket.gethostname()
        return None, error


def ranks_from_environment(environment: dict[str, str]) -> World:
    """Read the launcher's variables; without a launcher there is one rank."""
    rank = int(environment.get("RANK", "0"))
    local_size = launchers.ranks_here(environment)
    # The machine's index: CROSS_RANK from DeepSpeed's launcher, GROUP_RANK from torchrun.
    node = environment.get("CROSS_RANK") or environment.get("GROUP_RANK")
    return World(
        rank=rank,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        world_size=int(environment.get("WORLD_SIZE", "1")),
        local_world_size=local_size,
        node=rank // local_size if node is None else int(node),
    )


def choose_device(requested: str, *, local_world_size: int, gpus: int) -> DeviceKind:
    """Choose the device for `run.device`; raise `ConfigError` if there are too few GPUs."""
    if requested == "cpu" or (requested == "auto" and gpus == 0):
        return "cpu"
    if gpus < local_world_size:
        raise ConfigError(
            f"{counted(local_world_size, 'rank was', 'ranks were')} started on this machine, but "
            f"torch sees only {counted(gpus, 'GPU')}. Start with --num_gpus {gpus}, or set "
            "run.device=cpu for a trial without GPUs."
            if gpus
            else f"run.device is cuda, but torch sees no GPU on this machine "
            f"({counted(local_world_size, 'rank was', 'ranks were')} started). "
            "Check nvidia-smi and that torch is a CUDA build, or set "
            "run.device=cpu for a trial."
        )
    return "cuda"


def join_world(
    requested_device: str,
    *,
    ranks: int | None = None,
    limit_seconds: float = JOIN_SECONDS,
    wait_seconds: float = GROUP_SECONDS,
) -> World:
    """Connect this process to the other ranks of the run, of which `run.ranks` may give the number.

    A collective of any group, whoever makes it, fails once it has waited for `wait_seconds`, at
    least for `GROUP_SECONDS`.

    Raises:
        ConfigError: As `choose_device`, `complete_environment`, `refuse_separate_runs` and, after
            `limit_seconds`, `roll_call.meet`.
    """
    launchers.complete_environment(os.environ)
    launchers.refuse_separate_runs(os.environ, ranks=ranks)
    if "RANK" not in os.environ:
        os.environ.update(launchers.alone())
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    alone = ranks_from_environment(dict(os.environ))
    gpus = 0 if requested_device == "cpu" else torch.cuda.device_count()
    kind = choose_device(requested_device, local_world_size=alone.local_world_size, gpus=gpus)
    _limit_cores(alone, [_cores_near(gpu) for gpu in range(gpus)] if kind == "cuda" else [])
    settle_vector_math()
    here = alone.local_world_size
    if here == alone.world_size:  # whose ranks one launcher starts, and may take long to load
        limit_seconds = max(limit_seconds, ONE_HOST_SECONDS)
    store: Any = HashStore()  # of a rank that nobody has to meet, without a port
    if alone.world_size > 1:
        store = roll_call.meet(os.environ, on_each_host=here, limit_seconds=limit_seconds)
    met: dict[str, Any] = {"store": store, "rank": alone.rank, "world_size": alone.world_size}
    if kind == "cuda":
        torch.cuda.set_device(alone.local_rank)
        # With a single rank, binding the device makes NCCL fail on some machines (DeepSpeed
        # issue 8248). Without it torch warns that barriers use the current device: that set above.
        bound = torch.device("cuda", alone.local_rank) if alone.world_size > 1 else None
        warnings.filterwarnings("ignore", r"barrier\(\): using the device")
        dist.init_process_group("nccl", device_id=bound, **met)
    else:
        dist.init_process_group("gloo", **met)
    # Not `init_process_group`'s argument, for which it would also wait for ranks that never come.
    # The defaults are those of every later group; DeepSpeed's give no time-out of their own.
    defaults: Any = dist.distributed_c10d
    timeout = datetime.timedelta(seconds=max(GROUP_SECONDS, wait_seconds))
    defaults.default_pg_timeout = defaults.default_pg_nccl_timeout = timeout
    defaults._set_pg_timeout(timeout)
    control: Any = dist.new_group(backend="gloo") if kind == "cuda" else dist.group.WORLD
    return dataclasses.replace(alone, device_kind=kind, _control=control)


def watch_hosts(world: World) -> None:
    """Exit once a host is silent for 35 s, for which gloo would wait a quarter of an hour."""
    if world.local_world_size == world.world_size:
        return
    watched: dict[socket.socket, str] = {}
    with socket.create_server(("", 0), backlog=world.world_size) as server:
        head = (os.environ["MASTER_ADDR"], world.broadcast(server.getsockname()[1]))
        if world.is_local_rank_0 and not world.is_rank_0:
            connection = socket.create_connection(head)
            connection.sendall(socket.gethostname().encode())
            watched[connection] = head[0]
        others = sum(world.gather(len(watched)))
        for _ in range(others if world.is_rank_0 else 0):
            connection, _address = server.accept()
            watched[connection] = connection.recv(256).decode()
    for connection, host in watched.items():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        threading.Thread(target=_watch, args=(connection, host), daemon=True).start()


def _watch(connection: socket.socket, host: str) -> None:
    """Wait until a connection ends, and make this rank exit unless all are about to."""
    try:
        connection.recv(1)
    except ConnectionError:
        pass  # as without an error: that rank exited
    except OSError as error:
        _silent.append(f"{host} does not answer ({error.strerror})")
    if not _leaving.wait(0 if _silent else NOTICE_SECONDS):
        # gloo waits for a silent rank even if another one exits; without any connection it fails.
        for file in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername():
                    end.shutdown(socket.SHUT_RDWR)  # no listener, at which gloo would abort
        if not _leaving.wait(EXIT_SECONDS):  # NCCL may block it
            logging.getLogger(__name__).error("Exiting: %s.", *_silent or ["another rank exited"])
            os._exit(ExitCode.FAILED)


def _limit_cores(alone: World, near: Sequence[frozenset[int]]) -> None:
    """Limit a rank to its share of the cores; otherwise each rank's CPU Adam would use all.

    `near` are the cores on each GPU's NUMA node; empty where unknown.
    """
    import torch

    allowed = os.sched_getaffinity(0)
    sharing = alone.local_world_size
    if near and (local := allowed & near[alone.local_rank]):
        os.sched_setaffinity(0, local)
        allowed, sharing = local, near[:sharing].count(near[alone.local_rank])
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(allowed) // max(1, sharing)))


def settle_vector_math() -> None:
    """Let MKL choose its kernel of each elementwise function while one thread calls it.

    It chooses at the first call, and if two threads make that one, the half of one of them may come
    from a kernel of low accuracy: `cos` is wrong by 1.5e-4 once, so a resume is not exact (torch
    2.13; pytorch/pytorch issue 188792).
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in VECTOR_FUNCTIONS:
            getattr(torch, function)(one)


def _cores_near(gpu: int) -> frozenset[int]:
    """Return the cores of a GPU's NUMA node (`0-3,8` in sysfs); empty if unknown."""
    import torch

    gpu_properties: Any = torch.cuda.get_device_properties(gpu)  # the stub lacks the PCI ids
    domain, bus = gpu_properties.pci_domain_id, gpu_properties.pci_bus_id
    address = f"{domain:04x}:{bus:02x}:{gpu_properties.pci_device_id:02x}.0"
    try:
        text = (PCI_DEVICES / address / "local_cpulist").read_text().strip()
        ranges = [part.partition("-") for part in text.split(",") if part]
        return frozenset(
            core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)
        )
    except (OSError, ValueError):
        return frozenset()


def lost_connection(error: BaseException) -> TrainingError | None:
    """Return a readable error for a broken connection between ranks, or None for other errors.

    gloo raises a plain RuntimeError, recognized by the source path in its text.
    """
    # Not imported here: the error may be that torch cannot be.
    kinds = getattr(sys.modules.get("torch.distributed"), "DistError", ())
    if not isinstance(error, kinds) and "gloo/transport" not in str(error):
        return None
    if _silent:
        return TrainingError(
            f"{_silent[0]}: it was switched off, or the network to it is down. The last "
            "checkpoint is intact: start the same command again on all hosts."
        )
    reason = roll_call.reason_of(error)
    return TrainingError(
        f"Another rank ended and closed its connection ({reason}). Its error is above or in the "
        "run's logs/rank-N.log; if there is none, it was killed, most often for lack of memory "
        "(see dmesg). The last checkpoint is intact: start the same command again."
    )
