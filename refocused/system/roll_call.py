"""Meet the other ranks before training, and name what keeps the run from starting."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import queue
import re
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from refocused import __version__
from refocused.system.errors import ConfigError, as_typed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Present = dict[str, str]
COMPARED = ("torch", "deepspeed", "transformers", "python", "refocused")
POLL_SECONDS = 0.2
LAST_SECONDS = 5.0  # for the other ranks to read the verdict
HEAD_SECONDS = 20.0  # for rank 0 to sign in the store that it has opened
SHOWN = 3  # ranks named in a message


def meet(environment: Mapping[str, str], *, on_each_host: int, limit_seconds: float) -> Store:
    """Return the store of all ranks, once each is there, as one process with the same software.

    torch itself waits for hours for a rank that does not start or whose number another one has.
    Rank 0 decides, and the others read its verdict. `on_each_host` are the ranks of this host.

    Raises:
        ConfigError: On the ranks of all hosts, with the host and what is wrong there.
    """
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    until = time.monotonic() + limit_seconds
    mine, store = _present(environment), _open(environment, limit_seconds=limit_seconds)
    try:
        first = json.loads(store.compare_set(f"rank/{rank}", "", json.dumps(mine)))
        if first != mine and on_each_host == size:
            raise ConfigError(_taken(environment)).agreed()
        if first != mine:
            twice = f"Rank {rank} was started twice, on {first['host']} and on {mine['host']}. "
            store.set("twice", f"{twice}Give each host another number (--node_rank).")
        if rank == 0 and first == mine:
            verdict = _judge(store, size=size, on_each_host=on_each_host, until=until)
            store.set("verdict", verdict or " ")
            time.sleep(LAST_SECONDS if verdict else 0)  # its end closes the store
        else:
            signed = time.monotonic() + HEAD_SECONDS
            while not store.check(["verdict"]) and time.monotonic() < until + LAST_SECONDS:
                time.sleep(POLL_SECONDS)
                is_late = time.monotonic() > signed and not _is_torchruns(environment)
                if is_late and not store.check(["rank/0"]):
                    raise ConfigError(_taken(environment)).agreed()
            store.wait(["verdict"], datetime.timedelta(seconds=POLL_SECONDS))
            verdict = store.get("twice" if first != mine else "verdict").decode().strip()
    except RuntimeError as error:  # torch's
        verdict = f"{mine['host']} lost rank 0 before all had started ({reason_of(error)})."
    if verdict:
        raise ConfigError(verdict).agreed()
    return store


def _open(environment: Mapping[str, str], *, limit_seconds: float) -> Store:
    """Connect to the store, which torchrun or else rank 0 keeps."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    address, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    host = socket.gethostname()
    keeps = environment["RANK"] == "0" and not _is_torchruns(environment)
    timeout = datetime.timedelta(seconds=limit_seconds)
    done: queue.SimpleQueue[Store | RuntimeError] = queue.SimpleQueue()

    def connect() -> None:  # a thread: torch waits without end for a program that has the port
        try:
            done.put(TCPStore(address, int(port), None, keeps, timeout, wait_for_workers=False))
        except RuntimeError as error:
            done.put(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        store = done.get(timeout=limit_seconds)
    except queue.Empty:
        store = RuntimeError("no answer")
    if isinstance(store, RuntimeError):
        raise ConfigError(
            f"Rank 0 cannot use port {port} of {host} ({reason_of(store)}). {_taken(environment)}"
            if keeps
            else f"{host} got no answer from rank 0 at {address}, port {port}, in "
            f"{limit_seconds:.0f} s. Start all hosts within that time, or raise run.join_seconds; "
            "check the address, the firewall between them, and that no other program has the port."
        ).agreed()
    return PrefixStore(f"roll call {environment.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _is_torchruns(environment: Mapping[str, str]) -> bool:
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _taken(environment: Mapping[str, str]) -> str:
    """Say that another program has the run's port, which one if that is known, and what to do."""
    address, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    owner = "another program, as it seems"  # or this user may not use it
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            is_here = connection.status == psutil.CONN_LISTEN and str(connection.laddr.port) == port
            if is_here and connection.pid not in (None, os.getpid()):
                words = " ".join(psutil.Process(connection.pid).cmdline()).split()
                owner = f"process {connection.pid} ({' '.join(words):.80})"
    return (
        f"Port {port} of {address} is used by {owner}. Choose another for all ranks: --master_port "
        f"(MASTER_PORT); {as_typed('launch')} takes a free one."
    )


def _present(environment: Mapping[str, str]) -> Present:
    """Return what the others need to know of this rank; the token tells its process from others."""
    source = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        source.update(file.read_bytes())
    present = {name: importlib.metadata.version(name) for name in COMPARED[:3]}
    present |= {"python": platform.python_version(), "host": socket.gethostname()}
    present |= {"refocused": f"{__version__} (files {source.hexdigest()[:8]})"}
    devices = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL takes first letters, too, `=` before a whole name, and `^` before those to leave out.
        names = re.split("[=,]", environment.get(variable, "^"))
        if names[0][:1] != "^" and not any(d.startswith(n) for n in names if n for d in devices):
            text = f"{variable}={environment[variable]}, but its network interfaces are "
            present["trouble"] = text + ", ".join(devices)
    return present | {"token": os.urandom(8).hex()}


def _judge(store: Store, *, size: int, on_each_host: int, until: float) -> str:
    """Wait for all ranks; return what keeps the run from starting, if anything."""
    began, missing = time.monotonic(), list(range(size))
    while True:
        missing = [rank for rank in missing if not store.check([f"rank/{rank}"])]
        if not missing or time.monotonic() >= until or store.check(["twice"]):
            break
        time.sleep(POLL_SECONDS)
    if store.check(["twice"]):
        return store.get("twice").decode()
    here = {r: json.loads(store.get(f"rank/{r}")) for r in range(size) if r not in missing}
    first = here[0]
    if missing:
        hosts = {rank // on_each_host: other["host"] for rank, other in here.items()}
        nodes = [(rank, rank // on_each_host) for rank in missing]
        named = [f"rank {rank} of {hosts.get(n, f'node {n}')}" for rank, n in nodes]
        named[SHOWN:] = [f"{len(named) - SHOWN} more"] if len(named) > SHOWN else []
        return (
            f"{', '.join(named)} did not start in {time.monotonic() - began:.0f} s, "
            f"but rank 0 on {first['host']} did. Start the command on all hosts, and read its "
            "output there; run.join_seconds allows more time."
        )
    for other in here.values():
        if "trouble" in other:
            return f"{other['host']} has {other['trouble']}. Correct or remove the variable there."
        for name in COMPARED:
            if other[name] != first[name]:
                return (
                    f"{other['host']} has {name} {other[name]}, but {first['host']} has "
                    f"{first[name]}. Bring all hosts to one commit; run "
                    "launch/setup_environment.sh on each."
                )
    return ""


def reason_of(error: BaseException) -> str:
    """Return the first sentence of one of torch's errors, without its place."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0]
