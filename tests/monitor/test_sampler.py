from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from nvml_machine import Machine

from refocused.config.outputs import CostConfig, LogConfig
from refocused.metrics.jsonl import JsonLines, write_state
from refocused.monitor.sampler import gpu_reader, start_sampler
from refocused.monitor.sampler.alarms import RULES
from refocused.monitor.sampler.sampler import Sampler, take_turn
from refocused.monitor.sampler.start_sampler import SamplerSettings
from refocused.system.processes import ProcessIdentity, identify, this_process
from refocused.system.world import World

LONG_S = 60.0


def settings(run: Path, training: ProcessIdentity | None = None, **more: Any) -> SamplerSettings:
    return SamplerSettings(
        run=run, training=training or this_process(), interval_seconds=0.1, ranks=8, **more
    )


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def alarms(run: Path) -> list[tuple[str, str, bool]]:
    found = [line for line in lines(run / "logs" / "events.jsonl") if line["kind"] == "alarm"]
    return [(line["alarm"], line["subject"].rpartition(" ")[2], line["raised"]) for line in found]


def ill(machine: Machine) -> None:
    """One GPU is hot and slows down, one has errors, one is lost."""
    machine.gpu(5, temperature=88, clock_events=0x44, sm_clock=1305)
    machine.gpu(2, ecc_uncorrected=3)
    machine.gpu(7, lost=1)


def test_a_round_writes_a_line_for_each_gpu_and_one_for_the_machine(
    tmp_path: Path, eight_gpus: Machine
) -> None:
    Sampler(settings(tmp_path, visible_devices="4,5,6,7,0,1,2,3")).round()
    found = lines(tmp_path / "logs" / "gpu_metrics.jsonl")
    assert [line["kind"] for line in found] == ["gpu"] * 8 + ["system"]
    assert [line["local_rank"] for line in found[:8]] == [4, 5, 6, 7, 0, 1, 2, 3]
    assert found[8]["gpus"] == 8
    assert alarms(tmp_path) == []


def test_alarms_of_gpus(
    tmp_path: Path, eight_gpus: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for alarm in ("gpu_temperature", "gpu_throttle"):
        at_once = dataclasses.replace(RULES[alarm], begins_after=0.0, ends_after=0.0)
        monkeypatch.setitem(RULES, alarm, at_once)
    sampler = Sampler(settings(tmp_path))
    sampler.round()
    ill(eight_gpus)
    sampler.round()
    sampler.round()
    raised = {
        ("gpu_temperature", "5", True),
        ("gpu_throttle", "5", True),
        ("gpu_ecc", "2", True),
        ("gpu_lost", "7", True),
    }
    assert sorted(alarms(tmp_path)) == sorted(raised)
    eight_gpus.gpu(5, temperature=70, clock_events=0x4)
    sampler.round()
    ended = {("gpu_temperature", "5", False), ("gpu_throttle", "5", False)}
    assert sorted(alarms(tmp_path)) == sorted(raised | ended)


def test_a_new_start_ends_the_alarms_of_the_last_and_looks_for_itself(
    tmp_path: Path, eight_gpus: Machine
) -> None:
    eight_gpus.gpu(2, ecc_uncorrected=3)
    eight_gpus.gpu(7, lost=1)
    Sampler(settings(tmp_path)).round()
    eight_gpus.gpu(7, lost=0)
    Sampler(settings(tmp_path)).round()
    assert [alarm for alarm in alarms(tmp_path) if alarm[0] == "gpu_lost"] == [
        ("gpu_lost", "7", True),
        ("gpu_lost", "7", False),
    ]
    still = [raised for name, _, raised in alarms(tmp_path) if name == "gpu_ecc"]
    assert still == [True, False, True]


def test_the_first_machine_watches_the_run_and_the_others_files_are_their_own(
    tmp_path: Path, eight_gpus: Machine
) -> None:
    write_state(tmp_path / "state.json", {"status": "training", "step": 1})
    (tmp_path / "logs").mkdir()
    metrics = JsonLines(tmp_path / "logs" / "training_metrics.jsonl")
    first, second = (Sampler(settings(tmp_path, node=node)) for node in (0, 1))
    metrics.write({"kind": "step", "step": 1, "loss": None})
    first.round()
    second.round()
    assert alarms(tmp_path) == [("non_finite", "run", True)]
    assert len(lines(tmp_path / "logs" / "gpu_metrics-node-1.jsonl")) == 9
    assert lines(tmp_path / "logs" / "events-node-1.jsonl") == []


def test_a_machine_without_a_driver_is_watched_without_gpus(
    tmp_path: Path, eight_gpus: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(gpu_reader.pynvml, "nvmlInit", lambda: (_ for _ in ()).throw(missing))
    sampler = Sampler(settings(tmp_path))
    sampler.round()
    sampler.round()
    [first, second] = lines(tmp_path / "logs" / "gpu_metrics.jsonl")
    assert first["kind"] == second["kind"] == "system"
    assert first["gpus"] is second["gpus"] is None
    said = lines(tmp_path / "logs" / "events.jsonl")
    assert [(line["kind"], line["text"]) for line in said] == [("sampler", first["gpu_note"])]


def test_a_driver_that_does_not_answer_is_a_warning(tmp_path: Path, eight_gpus: Machine) -> None:
    eight_gpus.driver(init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    Sampler(settings(tmp_path)).round()
    [said] = lines(tmp_path / "logs" / "events.jsonl")
    assert said["kind"] == "sampler_warning"
    assert "Restart the machine" in said["text"]


def test_a_round_that_fails_is_said_once_and_costs_no_other(
    tmp_path: Path,
    eight_gpus: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampler = Sampler(settings(tmp_path))
    with monkeypatch.context() as broken:
        broken.setattr(gpu_reader.GpuReader, "samples", lambda self: 1 / 0)
        sampler.round()
        sampler.round()
    sampler.round()
    assert [r.getMessage() for r in caplog.records] == ["a round of samples failed"]
    assert len(lines(tmp_path / "logs" / "gpu_metrics.jsonl")) == 9


class Rank:
    """A process that stands for the rank that starts the sampler."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "600"])
        identity = identify(self._process.pid)
        assert identity is not None
        self.identity = identity

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def rank() -> Iterator[Rank]:
    started = Rank()
    yield started
    started.kill()


def await_lines(file: Path, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + LONG_S
    while len(found := lines(file)) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} lines in {file}"
        time.sleep(0.02)
    return found


def await_end(pid: int) -> None:
    deadline = time.monotonic() + LONG_S
    while identify(pid) is not None:
        assert time.monotonic() < deadline, "the sampler goes on"
        time.sleep(0.02)


def test_the_process_ends_with_its_rank_and_says_that_it_was_killed(
    tmp_path: Path, eight_gpus: Machine, rank: Rank
) -> None:
    write_state(tmp_path / "state.json", {"status": "training", "step": 12})
    chosen = settings(tmp_path, rank.identity)
    pid = start_sampler.start_sampler(chosen)
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == "1"  # no rank's
    await_lines(chosen.samples, 18)
    eight_gpus.gpu(7, lost=1)
    found = await_lines(chosen.events, 1)
    assert (found[0]["alarm"], found[0]["raised"]) == ("gpu_lost", True)
    rank.kill()
    await_end(pid)
    assert alarms(tmp_path)[1:] == [("run_died", "run", True)]
    log = (tmp_path / "logs" / "training.log").read_text()
    assert " sampler WARNING ALARM: " in log
    assert "has ended at step 12" in log
    assert (tmp_path / "logs" / "sampler.log").read_text() == ""


@pytest.mark.slow
def test_of_two_on_a_machine_one_samples(tmp_path: Path, eight_gpus: Machine, rank: Rank) -> None:
    """The sampler of a start that was killed ends; that of the next one goes on for it."""
    later = Rank()
    first = start_sampler.start_sampler(settings(tmp_path, rank.identity))
    file = settings(tmp_path).samples
    await_lines(file, 9)
    second = start_sampler.start_sampler(settings(tmp_path, later.identity))
    os.kill(first, signal.SIGSTOP)
    count = len(lines(file))
    time.sleep(0.5)
    assert len(lines(file)) == count  # the second one waits
    os.kill(first, signal.SIGCONT)
    rank.kill()
    await_end(first)
    await_lines(file, count + 27)
    assert identify(second) is not None
    later.kill()
    await_end(second)


def test_without_a_rank_nothing_is_said_of_a_run(tmp_path: Path, eight_gpus: Machine) -> None:
    write_state(tmp_path / "state.json", {"status": "training", "step": 1})
    eight_gpus.gpu(7, lost=1)
    alone = SamplerSettings(run=tmp_path, training=None)
    assert take_turn(alone)
    assert not take_turn(alone)  # another one samples: nothing to wait for
    Sampler(alone).round()
    assert alarms(tmp_path) == [("gpu_lost", "7", True)]


COST = CostConfig(per_hour_usd=24, budget_usd=400, credit_usd=500)


def start(world: World, folder: Path, *, seconds: float = 5.0) -> list[str]:
    """Start sampling as training does; return what is reported."""
    reports: list[str] = []
    start_sampler.start_sampling(
        folder,
        world,
        report=lambda kind, text: reports.append(f"{kind}: {text}"),
        log=LogConfig(sample_seconds=seconds),
        cost=COST,
    )
    return reports


def test_a_sampler_that_cannot_be_started_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    [report] = start(World(), tmp_path)
    assert report.startswith("sampler_failed: The sampler of GPUs and machine")
    assert "Training goes on without" in report


@pytest.mark.parametrize(
    ("changes", "seconds", "ranks"),
    [
        ({}, 5.0, 8),
        ({"rank": 8, "node": 1}, 2.0, 8),
        ({"device_kind": "cpu"}, 5.0, 0),
        ({"local_rank": 1}, 5.0, None),  # each machine's first rank starts one
        ({}, 0.0, None),  # where it is wanted
    ],
)
def test_the_sampler_that_a_rank_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    seconds: float,
    ranks: int | None,
) -> None:
    started: list[SamplerSettings] = []
    monkeypatch.setattr(start_sampler, "start_sampler", started.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    world = World(world_size=16, local_world_size=8, device_kind="cuda")
    world = dataclasses.replace(world, **changes)
    assert start(world, tmp_path, seconds=seconds) == []
    for found in started:
        assert found.training == this_process()
        assert (found.node, found.ranks, found.interval_seconds) == (world.node, ranks, seconds)
        assert (found.visible_devices, found.cuda_order, found.cost) == ("1,0", "PCI_BUS_ID", COST)
        assert SamplerSettings.model_validate_json(found.model_dump_json()) == found
    assert len(started) == (ranks is not None)
