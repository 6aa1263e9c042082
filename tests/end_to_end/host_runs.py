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

    def deepspeed(self, host: Host, *arguments: str, options: Sequence[str] = ()) -> "Started":
        """Start DeepSpeed's command on a host, with one rank on each."""
        hostfile = self.root / "hostfile"
        hostfile.write_text("".join(f"{host.name} slots=1\n" for host in self.hosts))
        words = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(hostfile)]
        words += ["--master_port", PORT, *options, str(TRAIN), *self.settings, *arguments]
        return self.start(host, words)


def torchrun(node: int, head: Host, options: Sequence[str]) -> list[str]:
    """Return the command that starts a node's ranks."""
    at = ["--node_rank", str(node), "--master_addr", head.address, "--master_port", PORT]
    return [sys.executable, "-m", "torch.distributed.run", *options, *at, str(TRAIN)]


def serve_ssh(folder: Path, hosts: Sequence[Host]) -> None:
    """Let every host log in to the others by ssh, with a new key and without a question."""
    key, known, server, client = (folder / name for name in ("key", "key.pub", "sshd", "ssh"))
    subprocess.check_call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    server.write_text(
        f"HostKey {key}\nAuthorizedKeysFile {known}\nStrictModes no\nUsePAM no\nPidFile none\n"
    )
    client.write_text(
        f"IdentityFile {key}\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        "LogLevel ERROR\n"
    )
    for host in hosts:
        host.run("mount", "-t", "tmpfs", "none", "/run")
        host.run("mkdir", "-m", "755", "/run/sshd")
        host.run("mount", "--bind", str(client), "/etc/ssh/ssh_config")
        host.run("/usr/sbin/sshd", "-f", str(server))


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
