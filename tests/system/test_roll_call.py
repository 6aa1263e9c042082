"""Ranks of several hosts meet, or each of them reads what keeps the run from starting."""

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from ranks import free_port

from refocused.system.errors import ConfigError
from refocused.system.roll_call import meet

HOST = socket.gethostname()


def outcomes(
    ranks: Sequence[int], *, size: int, limit: float = 30, odd: Mapping[str, str] | None = None
) -> list[str]:
    """Return what each of these ranks, of which the last has odd variables, ended with."""
    port, stores = str(free_port()), []  # rank 0's end closes the store

    def one(number: int) -> str:
        rank, last = str(ranks[number]), number == len(ranks) - 1
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
        environment = {**shared, "RANK": rank, **(odd or {} if last else {})}
        try:
            stores.append(meet(environment, on_each_host=2, limit_seconds=limit))
        except ConfigError as error:
            assert error.on_every_rank
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, range(len(ranks))))


def test_ranks_meet() -> None:
    assert outcomes([3, 0, 2, 1], size=4) == [""] * 4


@pytest.mark.slow
def test_hosts_that_never_come_are_named() -> None:
    (first,) = set(outcomes([0, 1], size=8, limit=1))
    assert first.startswith("rank 2 of node 1, rank 3 of node 1, rank 4 of node 2, 3 more did ")
    assert f"but rank 0 on {HOST} did" in first
    assert "rank 3 of " + HOST in outcomes([0, 1, 2], size=4, limit=1)[1]


def test_without_rank_0_the_others_name_its_address() -> None:
    (text,) = outcomes([1], size=2, limit=1)
    assert text.startswith(f"{HOST} got no answer from rank 0 at 127.0.0.1, port ")


@pytest.mark.slow
def test_a_rank_that_two_processes_have_is_named_to_all() -> None:
    (text,) = set(outcomes([0, 1, 1], size=3))
    assert text.startswith(f"Rank 1 was started twice, on {HOST} and on {HOST}.")


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there_is_named_to_all(variable: str) -> None:
    (text,) = set(outcomes([0, 1], size=2, odd={variable: "eth99"}))
    assert text.startswith(f"{HOST} has {variable}=eth99, but its network interfaces are ")
    assert outcomes([0, 1], size=2, odd={variable: "lo"}) == [""] * 2
    assert outcomes([0, 1], size=2, odd={"NCCL_SOCKET_IFNAME": "^docker0"}) == [""] * 2


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        odd = {"MASTER_PORT": port}
        (text,) = outcomes([0], size=2, odd=odd)
        assert text.startswith(f"Rank 0 cannot use port {port} of {HOST} (")
        assert f"port {port}, in 1 s." in outcomes([1], size=2, limit=1, odd=odd)[0]
