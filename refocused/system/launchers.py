"""Read a run's ranks from srun's and mpirun's variables, and refuse runs that would be separate."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import random
import re
import signal
import socket
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from refocused.system.errors import ConfigError, ExitCode, counted

PORTS = range(12_000, 28_000)  # below Linux's ephemeral ports
MPI_PORT = "29500"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Settings of torch's GPU allocator: the name since torch 2.9, and the older ones.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Size, rank, local rank and local size as Open MPI and Hydra (MPICH, Intel MPI) name them.
OPEN_MPI = "OMPI_COMM_WORLD_"
MPI = (
    [OPEN_MPI + name for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")],
    ["PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
)
SHELLS = {"sh", "bash", "dash", "ash", "zsh", "ksh", "csh", "tcsh", "fish"}
# A launcher sets the first. srun and mpirun set the others, from which a script derives the first.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
SESSIONS = {"sshd", "login", "su", "sudo", "tmux", "screen"}  # what a person's command runs in
INTERACTIVE_OPTIONS = {"--init-file", "--rcfile"}  # of a shell that reads a file and then a person


def complete_environment(environment: MutableMapping[str, str]) -> None:
    """Set RANK and its companions as srun's or mpirun's variables give them, and torch's settings.

    Without those variables no RANK is set: a session with one ends with its launcher.

    Raises:
        ConfigError: WORLD_SIZE is set, but no variable gives the rank.
    """
    if "RANK" not in environment:
        open_mpi, pmi = (_of_mpi(environment, names) for names in MPI)
        # mpirun starts its daemons by srun, and `srun --mpi=pmi2` sets PMI_SIZE.
        step = _of_srun(environment)
        ranks = open_mpi or (pmi if pmi and pmi["WORLD_SIZE"] != step.get("WORLD_SIZE") else step)
        if not ranks and environment.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                f"WORLD_SIZE={environment['WORLD_SIZE']} is set, but RANK is not. Start with "
                "deepspeed, torchrun or srun, or set RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, too."
            )
        environment.update(ranks)
    environment.update(torch_settings(environment))


def torch_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torch that a rank needs and that are not set: before torch's import.

    Segments that grow lose less GPU memory to fragments than those of fixed sizes. And each rank
    of a machine would start a compiler process for every core, up to 32.
    """
    cores = max(1, len(os.sched_getaffinity(0)) // ranks_here(environment))
    # The level: without stack traces of lost connections.
    needed = {"TORCHINDUCTOR_COMPILE_THREADS": f"{min(cores, 32)}", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if not any(name in environment for name in ALLOCATOR):
        needed[ALLOCATOR[0]] = "expandable_segments:True"
    return {name: value for name, value in needed.items() if name not in environment}


def ranks_here(environment: Mapping[str, str]) -> int:
    """Return the number of ranks on this machine, which DeepSpeed's launcher calls LOCAL_SIZE."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")
    return int(next((environment[name] for name in names if environment.get(name)), 1))


def free_port() -> str:
    """Return a port that can be bound here, and that the kernel gives to no connection meanwhile.

    Raises OSError if there is none.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return str(port)
    raise OSError(errno.EADDRINUSE, f"no port from {PORTS.start} to {PORTS.stop - 1} is free")


def visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES that CUDA accepts; None: it is not set.

    CUDA ignores those after the first that is no GPU, so that `` and `-1` hide all.
    """
    if VISIBLE not in environment:
        return None
    words = [word.strip() for word in environment[VISIBLE].split(",")]
    is_gpu = [word.isdecimal() or word.startswith(("GPU-", "MIG-")) for word in words]
    return words[: [*is_gpu, False].index(False)]


def alone() -> dict[str, str]:
    """Return the variables of a single rank, with a free port."""
    only = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return only | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}


def _of_mpi(environment: Mapping[str, str], names: list[str]) -> dict[str, str]:
    if "MASTER_ADDR" not in environment or any(name not in environment for name in names):
        return {}
    size, rank, local_rank, local_size = (environment[name] for name in names)
    ranks = {"WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": local_rank}
    port = environment.get("MASTER_PORT", MPI_PORT)
    return ranks | {"LOCAL_WORLD_SIZE": local_size, "MASTER_PORT": port}


def _of_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a task of srun; nothing in a batch script or a person's shell."""
    get = environment.get
    if not _is_task(environment):
        return {}
    size = get("SLURM_STEP_NUM_TASKS") or get("SLURM_NTASKS", "1")
    hosts = expand_nodes(get("SLURM_STEP_NODELIST") or get("SLURM_JOB_NODELIST", ""))
    tasks = expand_tasks(get("SLURM_STEP_TASKS_PER_NODE") or get("SLURM_TASKS_PER_NODE", size))
    node = int(get("SLURM_NODEID", "0"))
    if int(size) == 1 or not hosts or node >= len(tasks):
        return {}
    job = f"{get('SLURM_JOB_ID')}.{environment['SLURM_STEP_ID']}"
    return {
        "WORLD_SIZE": size,
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": get("MASTER_ADDR") or ("127.0.0.1" if len(tasks) == 1 else hosts[0]),
        "MASTER_PORT": get("MASTER_PORT") or str(PORTS[zlib.crc32(job.encode()) % len(PORTS)]),
    }


def _is_task(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this, and not a person in a shell of `srun --pty` or salloc."""
    task = Path(f"/proc/{environment.get('SLURM_TASK_PID')}/cmdline")
    try:
        words = task.read_text().split("\0")[:-1]
    except OSError:  # of another host or container
        words = []
    return {"SLURM_STEP_ID", "SLURM_PROCID"} <= environment.keys() and not is_typed_into(words)


_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in prctl(2)


def end_with_parent(parent: int) -> None:
    """Exit at once if the parent ends, or has ended, until `outlive_parent`.

    The kernel also signals the end of the thread that started this process, which does not count.
    """

    def receive(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(ExitCode.INTERRUPTED)

    signal.signal(signal.SIGUSR2, receive)
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGUSR2)
    receive()


def outlive_parent() -> None:
    """No longer exit with the parent: a session may have something to save."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, 0)


def start_as_rank() -> None:
    """End this rank with its launcher while it has not begun its session.

    A shell is no launcher: it may exit after it has started a command in the background.
    """
    launcher = os.getppid()
    with contextlib.suppress(OSError):
        name = program(Path(f"/proc/{launcher}/cmdline").read_text().split("\0"))
        if name not in SHELLS | SESSIONS and any(name in os.environ for name in RANK_VARIABLES):
            end_with_parent(launcher)


def program(words: Sequence[str]) -> str:
    """Return the program of a process: `bash` of `-bash`, `sshd` of `sshd: name@pts/0`."""
    return Path(words[0].split(":")[0].lstrip("-")).name if words else ""


def is_typed_into(words: Sequence[str]) -> bool:
    """Return whether a process is a shell that a person types into, not one with a script."""
    given = set(words[1:])
    is_script = not given & INTERACTIVE_OPTIONS and any(not word.startswith("-") for word in given)
    return program(words) in SHELLS and not is_script


def expand_nodes(text: str) -> list[str]:
    """Expand SLURM's `gpu[01-02,7],login` as scontrol would, which containers lack."""
    nodes = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        before, _, rest = name.partition("[")
        inside, _, after = rest.partition("]")
        for part in inside.split(",") if rest else [""]:
            first, _, last = part.partition("-")
            numbers = [first]
            if last:
                numbers = [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
            ends = expand_nodes(after) or [""]  # `rack[1-2]n[1-4]`
            nodes += [f"{before}{number}{end}" for number in numbers for end in ends]
    return nodes


def expand_tasks(text: str) -> list[int]:
    """Expand SLURM's number of tasks on each host: `2(x3),1` is 2, 2, 2, 1."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in pairs for _ in range(int(times or 1))]


def refuse_separate_runs(environment: Mapping[str, str], *, ranks: int | None) -> None:
    """Refuse a world of fewer ranks than started, or of another number than `run.ranks`.

    Raises:
        ConfigError: Also if the head address is a loopback address, and there are several hosts.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if ranks is not None and size != ranks:
        raise ConfigError(
            f"run.ranks is {ranks}, but {counted(size, 'rank was', 'ranks were')} started. "
            "Start that many (srun, torchrun, deepspeed with a hostfile), or change run.ranks."
        )
    # The launcher on each host (torchrun, DeepSpeed) may be the task that srun or mpirun started.
    launched = environment.get("GROUP_WORLD_SIZE") or environment.get("CROSS_SIZE")
    # What to do if there are fewer tasks than a variable promises.
    remedy = "Export MASTER_ADDR, the first host's address, to all ranks (mpirun -x)."
    remedies = {"OMPI_COMM_WORLD_SIZE": remedy, "PMI_SIZE": remedy}
    if _is_task(environment):
        remedy = "Let srun start launch/train.py, or one torchrun with --nnodes on each host."
        name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
        remedies[name] = remedy
    elif "SLURM_PROCID" in environment and not launched and "SLURM_STEP_ID" not in environment:
        # A batch script, not a shell.
        remedy = "Start the command with srun, or with launch/train.sh on one host."
        remedies["SLURM_NTASKS"] = remedy
    index = "JOB_COMPLETION_INDEX"  # from 0
    remedies[index] = "Start it with torchrun --nnodes N --node_rank $JOB_COMPLETION_INDEX."
    for name, remedy in remedies.items():
        promised = int(environment.get(name, "0")) + (name == index)
        if promised > int(launched or size) and ranks is None:
            raise ConfigError(
                f"{name} is {environment[name]}, but this process is part of a run of "
                f"{counted(size, 'rank')}: each task would train a run of its own. "
                f"{remedy} If separate runs are intended, set run.ranks={size}."
            )
    if size <= ranks_here(environment) or environment.get("GLOO_SOCKET_IFNAME") == "lo":
        return
    address, is_loopback = environment.get("MASTER_ADDR", ""), False
    with contextlib.suppress(OSError, ValueError):  # an unknown name is not this host's own
        hosts = [str(row[4][0]).partition("%")[0] for row in socket.getaddrinfo(address, None)]
        is_loopback = any(ipaddress.ip_address(host).is_loopback for host in hosts)
    if is_loopback:
        raise ConfigError(
            f"MASTER_ADDR={address} is a loopback address on {socket.gethostname()}, but the ranks "
            "are on several hosts, which cannot reach it. Set it to the first host's address in "
            "their network (see hostname -I). On one host, for trials, set GLOO_SOCKET_IFNAME=lo."
        )
