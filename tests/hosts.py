"""Hosts of a test network: Linux namespaces on one machine, joined by a bridge.

    with network(tmp_path, 2) as hosts:
        process = hosts[0].start(["ping", "-c1", hosts[1].name])
        hosts[1].pull_cable()

Every host has its own loopback, host name, /etc/hosts, processes and `/mnt` (its own disk).
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

OWN = ["--fork", "--pid", "--mount-proc", "--net", "--uts", "--mount", "--ipc", "--kill-child"]


class Host:
    """One host; its name is `hostN`, its address `10.77.0.N+1`, its device `eth0`."""

    def __init__(self, number: int, bridge: "subprocess.Popen[bytes]") -> None:
        self.name, self.address = f"host{number}", f"10.77.0.{number + 1}"
        self._cable, self._bridge = f"cable{number}", bridge
        self._holder = subprocess.Popen(["unshare", *OWN, "sleep", "infinity"])
        try:
            self._init = _child(self._holder.pid)
        except BaseException:
            self.kill()
            raise

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, **popen: Any
    ) -> "subprocess.Popen[bytes]":
        """Start a command on this host; `popen` is passed on (stdout, stderr, cwd)."""
        wanted = {**os.environ, **(environment or {})}
        return subprocess.Popen([*_enter(self._init), *command], env=wanted, **popen)

    def run(self, *command: str) -> str:
        """Run a command on this host to its end and return what it printed."""
        return subprocess.check_output([*_enter(self._init), *command], text=True, timeout=60)

    def plug(self, disk: Path, names: Path) -> None:
        """Connect this host to the bridge and mount its disk."""
        disk.mkdir()
        self._at_bridge(f"ip link add {self._cable} type veth peer eth0 netns {self._init}")
        self._at_bridge(f"ip link set {self._cable} master bridge up")
        self.run("hostname", self.name)
        self.run("mount", "--bind", str(names), "/etc/hosts")
        self.run("mount", "--bind", str(disk), "/mnt")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def pull_cable(self) -> None:
        """Drop all packets to and from this host, without a message to either side."""
        self._at_bridge(f"ip link set {self._cable} nomaster")

    def plug_cable(self) -> None:
        """Undo `pull_cable`."""
        self._at_bridge(f"ip link set {self._cable} master bridge")

    def isolate(self) -> None:
        """Drop all packets between this host and others that are isolated, and no others."""
        self._at_bridge(f"ip link set {self._cable} type bridge_slave isolated on")

    def disturb(self, *discipline: str) -> None:
        """Disturb what this host sends by a queueing discipline of `tc`."""
        self.run("tc", "qdisc", "replace", "dev", "eth0", "root", *discipline)

    def kill(self) -> None:
        """End this host and all its processes at once, as a power cut does."""
        self._holder.kill()
        self._holder.wait()

    def _at_bridge(self, command: str) -> None:
        subprocess.check_call(["nsenter", "-t", str(self._bridge.pid), "-n", *command.split()])


@contextlib.contextmanager
def network(folder: Path, count: int) -> Iterator[list[Host]]:
    """Run hosts on one network until the block ends; skip the test where that is not allowed."""
    try:
        subprocess.run(["unshare", *OWN, "ip", "link"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")
    ready = "ip link add bridge type bridge && ip link set bridge up && echo && exec sleep infinity"
    bridge = subprocess.Popen(["unshare", "--net", "sh", "-c", ready], stdout=subprocess.PIPE)
    hosts: list[Host] = []
    try:
        assert bridge.stdout is not None and bridge.stdout.readline(), "the bridge did not start"
        hosts.extend(Host(number, bridge) for number in range(count))  # keeps those before an error
        names = folder / "hosts"
        lines = [f"{host.address} {host.name}" for host in hosts]
        names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for host in hosts:
            host.plug(folder / f"disk-{host.name}", names)
        yield hosts
    finally:
        for host in hosts:
            host.kill()
        bridge.kill()
        bridge.wait()


def _enter(pid: int) -> list[str]:
    return ["nsenter", "-t", str(pid), "--pid", "--net", "--uts", "--mount", "--ipc", "--wdns=."]


def _child(pid: int) -> int:
    """Return the only child of a process, once it runs `sleep` with its namespaces mounted."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/comm").read_text() == "sleep\n":
            return int(children[0])
        time.sleep(0.01)
    raise TimeoutError("a host did not start in 60 s")
