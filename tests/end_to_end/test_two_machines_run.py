"""A run over machines with own disks: the same results, also after one is lost."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from ranks import Ended, ForkedRanks, metrics, train, until
from test_full_disks import SmallDisk, fill, small_disk
from tiny import losses, same, tiny_run, wait_for_the_mirror

from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.verify import verify

pytestmark = pytest.mark.slow
__all__ = ["small_disk"]  # a fixture


class Site:
    """Two working folders, as on two machines, and their mirror."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.places = [root / "machine_0", root / "machine_1"]
        self.runs = [place / "runs" / "tiny" for place in self.places]
        for place in self.places:
            place.mkdir()
        self.settings = [
            "--config",
            str(tiny_run(root)),
            f"data.source={root / 'tokens'}",
            f"data.cache={root / 'cache'}",
            f"checkpoint.mirror={root / 'mirror'}",
        ]
        self.mirrored = root / "mirror" / "tiny" / "checkpoints"

    def start(self, *arguments: str) -> ForkedRanks:
        return ForkedRanks(
            2,
            [*self.settings, *arguments],
            folder=self.root,
            places=self.places,
            environment={"LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"},
            local_ranks=(0, 0),
        )

    def train(self, *arguments: str, codes: tuple[int, int] = (0, 0)) -> Ended:
        with self.start(*arguments) as ranks:
            ended = ranks.wait(60)
        assert ended.codes == list(codes), ended.everything
        return ended

    def step(self, node: int, number: int) -> Path:
        return self.runs[node] / "checkpoints" / f"checkpoint_step_{number}"

    def forget(self, number: int) -> None:
        """Remove a checkpoint everywhere."""
        for path in (self.step(0, number), self.step(1, number)):
            shutil.rmtree(path)
        shutil.rmtree(self.mirrored / f"checkpoint_step_{number}", ignore_errors=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_continues_bit_for_bit_after_a_machine_lost_its_disk(
    tmp_path: Path, stage: int
) -> None:
    site = Site(tmp_path)
    settings = [f"zero.stage={stage}", "run.steps=8", "checkpoint.interval=4"]
    site.train(*settings)
    wanted = losses(site.runs[0])
    assert sorted(wanted) == list(range(1, 9))
    own_files = [sorted(path.name for path in site.step(n, 8).glob("zero/*")) for n in range(2)]
    assert not set(own_files[0]) & set(own_files[1])
    for node in range(2):
        assert verify(read_checkpoint(site.step(node, 8)), deep=True) == []
    for number in (4, 8):
        whole = site.mirrored / f"checkpoint_step_{number}"
        assert (whole / COMMITTED).exists() and verify(read_checkpoint(whole), deep=True) == []
    last = [next(site.step(node, 8).glob("zero/*optim*")) for node in range(2)]
    states = [torch.load(path, weights_only=False)["optimizer_state_dict"] for path in last]

    for run in site.runs:
        wait_for_the_mirror(run)
    site.forget(8)
    shutil.rmtree(site.runs[1])
    ended = site.train(*settings)
    assert "resume   step 4" in ended.out[0]
    assert losses(site.runs[0]) == wanted
    assert verify(read_checkpoint(site.step(1, 4)), deep=True) == []
    assert not list(site.step(1, 4).glob("ranks/rank_00000.pt"))
    for path, before in zip(last, states, strict=True):
        assert same(torch.load(path, weights_only=False)["optimizer_state_dict"], before)


def test_each_machine_runs_the_command_at_the_end_once_all_parts_are_mirrored(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    facts = "$REFOCUSED_NODE $REFOCUSED_STEP $REFOCUSED_EXIT_CODE"
    command = f"echo {facts} $(ls {site.mirrored}/*/COMMITTED | wc -l) >> {tmp_path}/ended"
    site.settings += ["checkpoint.interval=4", "schedule.warmup_steps=2", f"run.on_end={command}"]

    def lines() -> list[str]:
        file = tmp_path / "ended"
        return sorted(file.read_text().splitlines()) if file.exists() else []

    site.train("run.steps=4", "--dry-run")
    site.train("run.steps=4")
    until(lambda: len(lines()) == 2)
    assert lines() == ["0 4 0 1", "1 4 0 1"]
    looked = site.train("run.steps=4")  # as somebody does who looks at the end of a run
    assert "run.on_end does not run: the run was complete before" in looked.out[0]
    assert "run.on_end runs" not in looked.everything
    site.train("run.steps=8")
    until(lambda: len(lines()) == 4)
    assert lines() == ["0 4 0 1", "0 8 0 2", "1 4 0 1", "1 8 0 2"]


def test_one_machine_continues_from_the_mirror_and_then_two(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.settings.append("schedule.warmup_steps=2")
    site.train("run.steps=4")
    wait_for_the_mirror(site.runs[1])
    shutil.rmtree(site.places[1])
    site.places[1].mkdir()
    # The first machine has only a part; the mirror has everything.
    alone = train(site.places[0], *site.settings, "run.steps=5", "checkpoint.mirror=null", code=1)
    assert "node 0 of 2: its part" in alone.everything, alone.everything
    alone = train(site.places[0], *site.settings, "run.steps=6")
    assert "Downloading checkpoint_step_4 " in alone.out[0] and "ranks    2 -> 1" in alone.out[0]
    both = site.train("run.steps=8")
    assert "ranks    1 -> 2" in both.out[0], both.everything
    assert verify(read_checkpoint(site.step(1, 8)), deep=True) == []


def test_one_full_disk_fails_a_save_and_training_continues(
    tmp_path: Path, small_disk: SmallDisk
) -> None:
    site = Site(tmp_path)
    filler = fill(small_disk(site.places[1] / "runs", 16 * 1024))
    with filler.open("ab") as file:
        file.truncate((16 * 1024 - 2300) * 1024)  # a machine's part takes 0.9 MB: two have room
    settings = ["checkpoint.interval=4", "evaluation.interval=0", "run.steps=60"]
    with site.start(*settings, "checkpoint.max_failed_saves=99") as ranks:
        ranks.wait_until(lambda: "checkpoint_step_12 was not saved" in ranks.printed("err"))
        assert not site.step(0, 12).exists()
        filler.unlink()
        ended = ranks.wait(60)
    assert ended.codes == [0, 0], ended.everything
    assert "free, and a save needs" in ended.err[0] and "Training goes on." in ended.err[0]
    assert [verify(read_checkpoint(site.step(node, 60)), deep=True) for node in range(2)] == [
        [],
        [],
    ]


def test_a_stop_file_on_any_machine_stops_all(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.start("run.steps=100000", "checkpoint.interval=0", "evaluation.interval=0") as ranks:
        ranks.wait_until(lambda: max(metrics(site.runs[0]), default=0) >= 3)
        (site.runs[1] / "STOP").touch()
        ended = ranks.wait(60)
    assert ended.codes == [130, 130], ended.everything
    (saved,) = (site.runs[1] / "checkpoints").glob("checkpoint_step_*")
    assert json.loads((saved / "part.json").read_text()) == {"node": 1, "nodes": 2}
