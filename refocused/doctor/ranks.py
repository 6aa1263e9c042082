"""Real ranks: started here, as a launcher does, and what became of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from refocused.doctor.finding import Finding, size
from refocused.doctor.rank_process import RankTask
from refocused.system.strict_json import parse_json_object

LONGEST_SECONDS = 900.0
POLL_SECONDS = 0.1
LAST_WORDS_SECONDS = 3.0  # for the others to say why, once a rank has ended with a failure
SHOWN_CHARACTERS = 600
# A direction of one NVLink of the A100 and H100, in bytes a second. Assumed: what is reached of
# all of them in a large all-reduce, and what PCIe gives at least.
LINK_BYTES_PER_SECOND = 25e9
REACHED_SHARE = 0.4
LEAST_PCIE_BYTES_PER_SECOND = 2e9


@dataclasses.dataclass(frozen=True, slots=True)
class RanksOutcome:
    """What the ranks said.

    Attributes:
        ranks: How many there were.
        results: What rank 0 told, by its name: `joined`, `allreduce`, `step`.
        doing: What they were at when one failed; None: none did.
        failure: Why; None: none did.
    """

    ranks: int
    results: Mapping[str, Mapping[str, Any]]
    doing: str | None = None
    failure: str | None = None


def run_ranks(
    task: RankTask, *, ranks: int, longest_seconds: float = LONGEST_SECONDS
) -> RanksOutcome:
    """Start so many ranks on this machine and wait for them; none is left behind."""
    with tempfile.TemporaryDirectory(prefix="refocused-doctor-") as name:
        logs = Path(name)
        with _started(task, ranks=ranks, logs=logs) as processes:
            ended = _wait(processes, until=time.monotonic() + longest_seconds)
        doing_first = "allreduce" if task.payload_bytes else "step"
        codes = [process.returncode for process in processes]
        return _outcome(logs, codes=codes, ended=ended, doing_first=doing_first)


def judge_allreduce(
    outcome: RanksOutcome, *, device: Literal["cuda", "cpu"], nvlinks: int | None
) -> Finding:
    """Say whether the ranks find each other, and how fast they are.

    Args:
        outcome: What they said.
        device: What the run computes on.
        nvlinks: Links of the GPU that has the fewest; None or 0: there are none.
    """
    library = "NCCL" if device == "cuda" else "gloo"
    if outcome.doing in ("join", "allreduce"):
        fix = (
            "NCCL_DEBUG=INFO says more; see /dev/shm, a firewall, NCCL_SOCKET_IFNAME."
            if device == "cuda"
            else None
        )
        text = f"{outcome.ranks} ranks cannot talk over {library}: {outcome.failure}"
        return Finding("allreduce", "fail", text, fix)
    found = outcome.results.get("allreduce")
    if found is None:
        return Finding("allreduce", "ok", "one rank has nobody to talk to")
    if not found["is_right"]:
        return Finding(
            "allreduce",
            "fail",
            f"{library} sums wrongly over {outcome.ranks} ranks",
            "Try NCCL_P2P_DISABLE=1; where that helps, ask for another machine.",
        )
    speed = float(found["bus_bytes_per_second"])
    text = (
        f"{library}, {outcome.ranks} ranks: {speed / 1e9:.2f} GB/s bus bandwidth "
        f"({found['payload_bytes'] / 2**20:.0f} MiB in {found['seconds'] * 1e3:.1f} ms)"
    )
    least = 0.0
    if device == "cuda":
        links = (nvlinks or 0) * LINK_BYTES_PER_SECOND
        least = REACHED_SHARE * links if links else LEAST_PCIE_BYTES_PER_SECOND
    if speed < least:
        return Finding(
            "allreduce",
            "warn",
            f"{text}, where {least / 1e9:.0f} are usual: every step waits for it",
            "See nvidia-smi topo -m, and NCCL_DEBUG=INFO for the way that NCCL takes.",
        )
    return Finding("allreduce", "ok", text)


def judge_step(outcome: RanksOutcome) -> Finding:
    """Say what became of the step."""
    if outcome.failure is not None:
        return Finding("step", "fail", f"no step: {outcome.failure}")
    found = outcome.results["step"]
    memory = ""
    if found["peak_bytes"] is not None:
        memory = (
            f", {size(found['peak_bytes'])} of {size(found['gpu_bytes'])} a GPU "
            f"(planned {size(found['planned_bytes'])})"
        )
    return Finding(
        "step",
        "ok",
        f"the first one, {found['tokens']:,} tokens, took {found['seconds']:.1f} s, loss "
        f"{found['loss']:.4f} (untrained {found['untrained_loss']:.4f}){memory}; ZeRO-"
        f"{found['zero_stage']}, micro-batch {found['micro']}, {found['compute']}; "
        f"{found['build_seconds']:.0f} s to build, {found['wait_seconds']:.0f} s for the data",
    )


@contextlib.contextmanager
def _started(
    task: RankTask, *, ranks: int, logs: Path
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Start the ranks; whatever happens, they have ended afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            environment = {
                **os.environ,
                "PYTHONWARNINGS": "ignore",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            with (logs / f"{rank}.out").open("wb") as out, (logs / f"{rank}.err").open("wb") as err:
                processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-P",
                            "-m",
                            "refocused.doctor.rank_process",
                            task.model_dump_json(),
                        ],
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started, as compilers
        for process in processes:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def _wait(processes: Sequence[subprocess.Popen[bytes]], *, until: float) -> bool:
    """Wait until all ranks have ended, or one with a failure; False: the time is over."""
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return True
        if any(code for code in codes):
            until = min(until, time.monotonic() + LAST_WORDS_SECONDS)
            while time.monotonic() < until and any(p.poll() is None for p in processes):
                time.sleep(POLL_SECONDS)
            return True
        time.sleep(POLL_SECONDS)
    return False


def _outcome(logs: Path, *, codes: Sequence[int], ended: bool, doing_first: str) -> RanksOutcome:
    """Read what the ranks have said; a failure that another caused comes last."""
    ranks = len(codes)
    told = [_records(logs / f"{rank}.out") for rank in range(ranks)]
    results = {one["what"]: one for one in told[0] if one["what"] != "failed"}
    doing = doing_first if "joined" in results else "join"
    doing = "step" if "allreduce" in results else doing
    failures = [
        (bool(one["is_echo"]), rank, one)
        for rank, records in enumerate(told)
        for one in records
        if one["what"] == "failed"
    ]
    if failures:
        _, rank, first = min(failures, key=lambda one: one[:2])
        where = "" if rank == 0 or f"rank {rank}" in first["text"] else f"rank {rank}: "
        return RanksOutcome(ranks, results, first["doing"], where + first["text"])
    if not ended:
        text = f"nothing came of it in time. Last words: {_last_words(logs, 0)}"
        return RanksOutcome(ranks, results, doing, text)
    dead = next((rank for rank in range(ranks) if codes[rank]), None)
    if dead is not None:
        text = f"rank {dead} {_end(codes[dead])}. Last words: {_last_words(logs, dead)}"
        return RanksOutcome(ranks, results, doing, text)
    return RanksOutcome(ranks, results)


def _end(code: int) -> str:
    """Say how a process ended that said nothing."""
    if code == -signal.SIGKILL:
        return "was killed, most often for want of memory (see dmesg)"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _records(file: Path) -> list[dict[str, Any]]:
    records = []
    for line in file.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            found = parse_json_object(line)
            if "what" in found:
                records.append(found)
    return records


def _last_words(logs: Path, rank: int) -> str:
    text = (logs / f"{rank}.err").read_text(errors="replace").strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-SHOWN_CHARACTERS:] or "none"
