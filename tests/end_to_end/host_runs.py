"""A run on hosts that share no disk: each works in its own `/mnt`; data and mirror are shared."""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hosts import Host
from ranks import TRAIN
from tiny import tiny_run

ENVIRONMENT = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1"]


class Started:
    """A command in a host's `/mnt`."""

    def __init__(self, host: Host, command: Sequence[str], output: Path) -> None:
        self._output = output
        with output.open("wb") as file:
            words = ["env", "-C", "/mnt", *command]
            self.process = host.start(words, environment=ENVIRONMENT, stdout=file, stderr=file)

    @property
    def printed(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout: float = 120) -> None:
        """Wait until the command has printed text that matches a pattern."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.printed):
            running = self.process.poll() is None and time.monotonic() < deadline
            assert running, self.printed[-10_000:]
            time.sleep(0.05)


class HostRun:
    """The tiny run on several hosts; `root` holds the run file, the data and the mirror."""

    def __init__(self, root: Path, hosts: Sequence[Host], *settings: str) -> None:
        self.root, self.hosts = root, list(hosts)
        self.settings = ["--config", str(tiny_run(root)), f"data.source={root / 'tokens'}"]
        self.settings += [f"checkpoint.mirror={root / 'mirror'}", *settings]
        self.mirrored = root / "mirror" / "tiny" / "checkpoints"

    def folder(self, host: Host) -> Path:
        return self.root / f"disk-{host.name}" / "runs" / "tiny"

    def start(self, host: Host, launcher: Sequence[str], *arguments: str) -> Started:
        command = [*launcher, str(TRAIN), *self.settings, *arguments]
        return Started(host, command, self.root / f"{host.name}-{time.monotonic_ns()}.txt")

    def torchrun(self, *arguments: str) -> list[Started]:
        """Start torchrun on each host, with one rank."""
        return [
            self.start(host, [*TORCHRUN, *self.nodes(node)], *arguments)
            for node, host in enumerate(self.hosts)
        ]

    def nodes(self, node: int) -> list[str]:
        """Return torchrun's options for one of the hosts."""
        count, head = str(len(self.hosts)), self.hosts[0].address
        return ["--nnodes", count, "--node_rank", str(node), "--master_addr", head]

    def deepspeed(self) -> list[str]:
        """Return DeepSpeed's command for one rank on each host."""
        hostfile = self.root / "hostfile"
        hostfile.write_text("".join(f"{host.name} slots=1\n" for host in self.hosts))
        return [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(hostfile)]


def serve_ssh(folder: Path, hosts: Sequence[Host]) -> None:
    """Let every host log in to the others by ssh, with a new key and without a question."""
    key, server, client = (folder / name for name in ("key", "sshd", "ssh"))
    subprocess.check_call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    server.write_text(f"HostKey {key}\nAuthorizedKeysFile {key}.pub\nStrictModes no\nPidFile none")
    no_question = "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR"
    client.write_text(f"IdentityFile {key}\n{no_question}")
    for host in hosts:
        host.run("mount", "-t", "tmpfs", "none", "/run")
        host.run("mkdir", "-m", "755", "/run/sshd")
        host.run("mount", "--bind", str(client), "/etc/ssh/ssh_config")
        host.run("/usr/sbin/sshd", "-f", str(server))


def wait(started: Sequence[Started], *, timeout: float = 240, code: int = 0) -> float:
    """Wait until all commands have ended with a code; return the seconds."""
    began = time.monotonic()
    while any(one.process.poll() is None for one in started) and time.monotonic() < began + timeout:
        time.sleep(0.2)
    ended = [one.process.poll() for one in started]
    assert ended == [code] * len(ended), "\n".join(one.printed[-5_000:] for one in started)
    return time.monotonic() - began
