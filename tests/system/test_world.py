import datetime
import inspect
import os
import re
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import on_ranks
from thread_ranks import on_two_ranks, results
from torch.utils._python_dispatch import TorchDispatchMode
from world_ranks import exercise

from refocused.evaluate.load_model import build_network
from refocused.system import roll_call, world
from refocused.system.errors import ConfigError, RefocusedError, ShardError
from refocused.system.world import (
    World,
    choose_device,
    join_world,
    lost_connection,
    ranks_from_environment,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two real ranks."""
    return on_ranks(exercise, folder=tmp_path_factory.mktemp("world"), timeout=60)


def both(found: list[dict[str, Any]], name: str) -> Any:
    first, second = (rank[name] for rank in found)
    assert first == second
    return first


@pytest.mark.slow
def test_ranks_exchange_values_and_act_alone_or_together(found: list[dict[str, Any]]) -> None:
    assert [rank["world"] for rank in found] == [[0, 0, 2, 2], [1, 1, 2, 2]]
    assert both(found, "gather") == [{"rank": 0}, {"rank": 1}]
    assert both(found, "broadcast") == "from 0"
    assert both(found, "broadcast of rank 1") == "from 1"
    assert both(found, "largest") == [1.0, 0.0, 2.5]
    assert both(found, "total") == [3.0, 1.0]
    assert [rank["together"]["result"] for rank in found] == ["made by 0", "made by 1"]
    assert both(found, "nothing to raise") == {"result": None}
    assert both(found, "first does") == {"result": "made by 0"}
    assert [rank["acted in the end"] - rank["acted so far"] for rank in found] == [2, 0]


@pytest.mark.slow
def test_an_error_is_raised_on_every_rank_with_the_first_failing_rank_named(
    found: list[dict[str, Any]],
) -> None:
    assert both(found, "together, rank 1 fails") == {
        "error": "rank 1: broken by 1",
        "kind": "BucketError",
        "on_every_rank": True,
    }
    assert both(found, "raise together")["error"] == "rank 1: mine"
    wanted = {"error": "broken by 0", "kind": "ShardError", "on_every_rank": True}
    for name in ("together, rank 0 fails", "together, both fail", "first does, and fails"):
        assert both(found, name) == wanted


@pytest.mark.slow
def test_a_lost_rank_is_reported_in_words(found: list[dict[str, Any]]) -> None:
    assert found[0]["lost"].startswith("Another rank ended and closed its connection (")
    assert "start the same command again" in found[0]["lost"]
    assert lost_connection(RuntimeError("shapes differ")) is None


def fail(error: RefocusedError) -> None:
    raise error


def test_variables_of_both_launchers_are_read() -> None:
    environment = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert ranks_from_environment({}) == World()
    world = ranks_from_environment(environment)
    assert (world.rank, world.local_rank, world.world_size, world.local_world_size) == (9, 1, 16, 8)
    assert not world.is_rank_0 and not world.is_local_rank_0
    assert world.node == 1
    deepspeeds = {"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_SIZE": "8"}
    world = ranks_from_environment(deepspeeds)
    assert (world.node, world.local_world_size) == (1, 8)
    assert world.is_local_rank_0 and not world.is_rank_0
    for name in ("CROSS_RANK", "GROUP_RANK"):  # DeepSpeed's, torchrun's: machines may be uneven
        assert ranks_from_environment(environment | {name: "2"}).node == 2


@pytest.mark.parametrize("machines", [1, 2])
def test_storage_ranks_act_once_per_disk_and_all_ranks_get_the_results(machines: int) -> None:
    def action(world: World) -> tuple[list[int], int]:
        return world.on_storage_ranks(lambda: world.rank), world.broadcast(world.rank, source=1)

    assert results(on_two_ranks(action, machines=machines)) == [(list(range(machines)), 1)] * 2

    def failing(world: World) -> None:
        world.on_storage_ranks(lambda: fail(ShardError("gone")))

    for rank in on_two_ranks(failing, machines=machines):
        assert isinstance(rank.error, ShardError) and rank.error.on_every_rank
        assert str(rank.error) == "gone"


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_more_ranks_than_gpus_are_refused_with_the_numbers(asked: str) -> None:
    with pytest.raises(ConfigError) as told:
        choose_device(asked, local_world_size=8, gpus=4)
    assert str(told.value) == (
        "8 ranks were started on this machine, but torch sees only 4 GPUs. "
        "Start with --num_gpus 4, or set run.device=cpu for a trial without GPUs."
    )
    chosen = {("auto", 0): "cpu", ("auto", 2): "cuda", ("cuda", 8): "cuda", ("cpu", 8): "cpu"}
    for (asked_for, gpus), kind in chosen.items():
        assert choose_device(asked_for, local_world_size=2, gpus=gpus) == kind
    with pytest.raises(ConfigError, match=r"torch sees no GPU .*\(2 ranks.*nvidia-smi.*device=cpu"):
        choose_device("cuda", local_world_size=2, gpus=0)
    with pytest.raises(ConfigError, match=r"\(1 rank was started\)"):
        choose_device("cuda", local_world_size=1, gpus=0)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What joining sets on a machine of four GPUs on two NUMA nodes; the last one's is unknown."""
    buses, told = [0x01, 0x02, 0x81, 0x82], []
    for bus, cores in {"01": "0-3,4-6,7", "02": "0-7", "81": "8-15", "82": "all"}.items():
        (tmp_path / f"0000:{bus}:00.0").mkdir()
        (tmp_path / f"0000:{bus}:00.0" / "local_cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(world, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda gpu: types.SimpleNamespace(pci_domain_id=0, pci_bus_id=buses[gpu], pci_device_id=0),
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda _, device_id, **met: told.append(str(device_id)),
    )
    monkeypatch.setattr(roll_call, "meet", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: backend)
    c10d = torch.distributed.distributed_c10d
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(c10d, name, getattr(c10d, name))
    monkeypatch.setattr(c10d, "_set_pg_timeout", lambda timeout: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(12)})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: told.append(cores))
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return told


@pytest.mark.parametrize(
    ("size", "rank", "expected"),
    [
        (1, 0, [{*range(8)}, 8, 0, "None"]),  # alone there is nobody to connect to
        (4, 0, [{*range(8)}, 4, 0, "cuda:0"]),
        (4, 2, [{8, 9, 10, 11}, 4, 2, "cuda:2"]),
        (4, 3, [3, 3, "cuda:3"]),
    ],
)
def test_each_rank_takes_its_gpu_and_its_share_of_the_cores_near_it(
    monkeypatch: pytest.MonkeyPatch, joined: list[Any], size: int, rank: int, expected: list[Any]
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, str(value))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert join_world("auto", wait_seconds=9000).device_kind == "cuda"
        text = "barrier(): using the device under current context"
        assert text in inspect.getsource(torch.distributed.barrier)
        warnings.warn(f"{text}. You can ...", stacklevel=2)
    assert warned == []
    assert joined == expected
    backends = map(torch.distributed.Backend, ("gloo", "nccl"))
    later = [torch.distributed.distributed_c10d._get_default_timeout(one) for one in backends]
    assert later == [datetime.timedelta(seconds=9000)] * 2


class VectorCalls(TorchDispatchMode):
    """Notes the first call of each elementwise function of a type: its number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[tuple[str, torch.dtype], int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = function.overloadpacket.__name__
        if name in world.VECTOR_FUNCTIONS:
            self.first.setdefault((name, args[0].dtype), args[0].numel())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["training", "evaluation"])
def test_mkl_chooses_its_kernels_while_one_thread_calls_them(
    joined: list[Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Of which torch's own header names the functions."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h"
    functions = re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header.read_text(), re.M)
    assert len(functions) > 10
    with VectorCalls() as calls:
        if way == "training":
            for name in ("RANK", "LOCAL_RANK"):
                monkeypatch.setenv(name, "0")
            monkeypatch.setenv("WORLD_SIZE", "1")
            join_world("auto", wait_seconds=9)
        else:
            config = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)
            build_network(config, transformers.GPT2LMHeadModel(config).state_dict(), dtype="fp32")
    types = (torch.float32, torch.float64)
    assert calls.first == {(one, dtype): 1 for one in functions for dtype in types}
