"""A run on hosts that share no disk: each works in its own `/mnt`; data and mirror are shared."""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hosts import Host
from ranks import TRAIN
from tiny import tiny_run

ENVIRONMENT = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
PORT = "29500"


class HostRun:
    """The tiny run on several hosts; `root` holds the run file, the data and the mirror."""

    def __init__(self, root: Path, hosts: Sequence[Host], *settings: str) -> None:
        self.root, self.hosts = root, list(hosts)
        self.settings = ["--config", str(tiny_run(root)), f"data.source={root / 'tokens'}"]
        self.settings += [f"checkpoint.mirror={root / 'mirror'}", *settings]
        self.mirrored = root / "mirror" / "tiny" / "checkpoints"
        self._started = 0

    def disk(self, host: Host) -> Path:
        """Return the folder that is `/mnt` on a host."""
        return self.root / f"disk-{host.name}"

    def folder(self, host: Host) -> Path:
        """Return the run's folder on a host's disk."""
        return self.disk(host) / "runs" / "tiny"

    def start(
        self, host: Host, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> "Started":
        """Start a command in a host's `/mnt`."""
        self._started += 1
        output = self.root / f"{host.name}-{self._started}.txt"
        with output.open("wb") as file:
            process = host.start(
                ["env", "-C", "/mnt", *command],
                environment={**ENVIRONMENT, **(environment or {})},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Started(process, output)

    def torchrun(self, *arguments: str, options: Sequence[str] = ()) -> "list[Started]":
        """Start torchrun on each host, with one rank."""
        nodes = ["--nnodes", str(len(self.hosts)), "--nproc_per_node", "1", *options]
        return [
            self.start(host, [*torchrun(node, self.hosts[0], nodes), *self.settings, *arguments])
            for node, host in enumerate(self.hosts)
        ]


def torchrun(node: int, head: Host, options: Sequence[str]) -> list[str]:
    """Return the command that starts a node's ranks."""
    at = ["--node_rank", str(node), "--master_addr", head.address, "--master_port", PORT]
    return [sys.executable, "-m", "torch.distributed.run", *options, *at, str(TRAIN)]


class Started:
    """A command that runs on a host."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        self.process, self._output = process, output

    @property
    def printed(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Wait until the command has printed a text."""
        deadline = time.monotonic() + timeout
        while text not in self.printed:
            assert self.process.poll() is None and time.monotonic() < deadline, self.printed
            time.sleep(0.05)


def wait(started: Sequence[Started], *, timeout: float = 240, code: int = 0) -> None:
    """Wait until all commands have ended with a code."""
    deadline = time.monotonic() + timeout
    for one in started:
        try:
            assert one.process.wait(max(1.0, deadline - time.monotonic())) == code, one.printed
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(other.printed for other in started)) from None
