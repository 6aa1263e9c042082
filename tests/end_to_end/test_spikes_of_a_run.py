"""Runs whose data has one step of garbage: warned of, skipped, and gone back over."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import train
from tiny import log_lines, same, tiny_run, wait_for_the_mirror

from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.mirror.lease import read_lease
from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import load_run
from refocused.data.loader.open_data import build_data
from refocused.system.errors import ExitCode
from refocused.system.world import World

pytestmark = pytest.mark.slow
RUN = Path("runs") / "tiny"
SPIKE, SAVED, STEPS = 68, 66, 72
WINDOWS = 8  # of a step
LEFT_OUT = [(SPIKE - 2) * WINDOWS, SPIKE * WINDOWS]
ALONE = "batch.gradient_accumulation_steps=4"  # the same sequences a step on one rank


def start(folder: Path, *settings: str, ranks: int = 2, code: int = 0) -> Any:
    always = [
        *("--config", "tiny.yaml", f"run.steps={STEPS}", "checkpoint.interval=22"),
        *("checkpoint.save_best=false", "evaluation.interval=0", "log.interval=4"),
        *("schedule.kind=constant", "optimizer.lr=1e-2"),
    ]
    return train(folder, *always, *settings, ranks=ranks, code=code, timeout=180)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run up to the step before a spike; its sequences are easy to learn but those of one
    step."""
    folder = tmp_path_factory.mktemp("spike")
    file = tiny_run(folder)
    tokens = {n: ((np.arange(8000) + 5 * n) % 16 * 7).astype(np.uint16) for n in range(3)}
    for number, ids in tokens.items():
        np.save(folder / "tokens" / f"shard_{number:03d}.npy", ids)
    config = load_run(str(file)).config
    data = config.data.model_copy(
        update={"source": str(folder / "tokens"), "cache": str(folder / "other")}
    )
    plan = BatchPlan(2, 2, 2, config.model.sequence_length)
    parts = build_data(
        data,
        plan=plan,
        world=World(),
        vocabulary=512,
        seed=config.run.seed,
        steps=STEPS,
        evaluation_sequences=8,
        rank=0,
    )
    found = parts.order.stream_from(parts.order.position_at(0)).locate(
        np.arange(*LEFT_OUT)[WINDOWS:]
    )
    parts.cache.close()
    draw = np.random.default_rng(0)
    for shard, sequence in zip(found.shards.tolist(), found.sequences.tolist(), strict=True):
        begin = sequence * plan.sequence_length
        tokens[shard][begin : begin + 32] = draw.integers(0, 512, 32)
    for number, ids in tokens.items():
        np.save(folder / "tokens" / f"shard_{number:03d}.npy", ids)
    start(folder, f"run.steps={SAVED}")
    return folder


def copy(saved: Path, folder: Path) -> Path:
    """A run as it ended, in a folder of its own."""
    wait_for_the_mirror(saved / RUN)
    for name in ("tokens", "runs", "mirror"):
        shutil.copytree(saved / name, folder / name)
    shutil.copy(saved / "tiny.yaml", folder)
    return folder


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in log_lines(folder / RUN, "events") if one["kind"] == kind]


def state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / RUN / "state.json").read_text())
    return found


def states(folder: Path, name: str) -> list[Any]:
    """Every rank's masters and moments in a checkpoint."""
    files = sorted((folder / RUN / "checkpoints" / name / "zero").glob("*optim*.pt"))
    return [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]


def test_a_rewind_equals_a_resume_without_the_sequences_also_after_a_kill(
    saved: Path, tmp_path: Path
) -> None:
    went_back = copy(saved, tmp_path / "went_back")
    ended = start(went_back, "run.on_spike=rewind")
    (told,) = events(went_back, "rewind_warning")
    assert told["text"] in ended.err[0]
    assert f"Going back to step {SAVED}, on branch 2 (rewind 1 of 5)" in told["text"]
    assert (told["step"], told["sequences"]) == (SPIKE, LEFT_OUT)
    assert told["names"].count("shard_") >= 1 and "sequence" in told["names"]
    after = state(went_back)
    assert (after["branch"], after["ancestry"], after["left_out"]) == (2, [[1, SAVED]], [LEFT_OUT])
    assert list((went_back / "mirror").glob(f"**/branch-2/checkpoint_step_{STEPS}"))
    there, _ = read_lease(DirectoryBucket(went_back / "mirror"), "tiny/checkpoints/lease.json")
    assert there is not None and there.branch is not None
    assert (there.branch.number, there.branch.ancestry) == (2, ((1, SAVED),)), "the head"
    assert f"checkpoint runs/tiny/checkpoints/branch-2/checkpoint_step_{STEPS}" in ended.out[0]
    final = states(went_back, f"branch-2/checkpoint_step_{STEPS}")

    # Killed before the branch has a checkpoint of its own: `state.json` knows what is left out.
    killed = copy(went_back, tmp_path / "killed")
    for path in list(killed.glob("**/branch-2")):
        shutil.rmtree(path)
    resumed = start(killed)
    sequences = f"stream[{LEFT_OUT[0]}:{LEFT_OUT[1]}]"
    assert f"skip     {sequences}, which a rewind left out" in resumed.out[0]
    assert not events(killed, "spike_warning")
    assert same(states(killed, f"branch-2/checkpoint_step_{STEPS}"), final)

    # A resume in a new process, told to leave the sequences out.
    fresh = copy(saved, tmp_path / "fresh")
    start(fresh, f'data.skip=["{sequences}"]')
    assert same(states(fresh, f"checkpoint_step_{STEPS}"), final)


def test_a_skipped_update_leaves_the_states_alone_also_on_one_rank(
    saved: Path, tmp_path: Path
) -> None:
    for ranks, more in ((2, ()), (1, (ALONE,))):
        folder = copy(saved, tmp_path / f"on_{ranks}")
        every = (f"run.steps={SPIKE + 1}", "checkpoint.interval=1", "run.on_spike=skip")
        ended = start(folder, *every, *more, ranks=ranks)
        (told,) = events(folder, "spike_warning")
        assert told["text"] in ended.err[0] and "Its update was skipped." in told["text"]
        assert (told["step"], told["sequences"]) == (SPIKE, [LEFT_OUT[1] - WINDOWS, LEFT_OUT[1]])
        before, skipped, after = (
            states(folder, f"checkpoint_step_{SPIKE + offset}") for offset in (-1, 0, 1)
        )
        assert same(before, skipped) and not same(skipped, after)
        assert len(before) == ranks


@pytest.mark.long
def test_other_ranks_and_a_resume_at_any_step_decide_alike(saved: Path, tmp_path: Path) -> None:
    found = []
    for number in range(3):  # resumed on one rank, on two, and on two at the step before the spike
        folder = copy(saved, tmp_path / str(number))
        more = ((ALONE,), (), ())[number]
        if number == 2:
            start(folder, f"run.steps={SPIKE - 1}", "run.on_spike=rewind")
        start(folder, "run.on_spike=rewind", *more, ranks=1 if number == 0 else 2)
        (told,) = events(folder, "rewind_warning")
        found.append((told["step"], told["to_step"], told["sequences"], told["names"]))
    assert found == [(SPIKE, SAVED, LEFT_OUT, found[0][3])] * 3


@pytest.mark.long
def test_a_spike_without_a_checkpoint_to_go_back_to_stops_the_run(
    saved: Path, tmp_path: Path
) -> None:
    folder = copy(saved, tmp_path / "none")
    shutil.rmtree(folder / "mirror")
    for path in (folder / RUN / "checkpoints").iterdir():
        if path.name != f"checkpoint_step_{SAVED}":
            shutil.rmtree(path)
    settings = ("run.on_spike=rewind", "checkpoint.mirror=null", "checkpoint.keep=2")
    start(folder, *settings, f"run.steps={SAVED + 1}")
    shutil.rmtree(folder / RUN / "checkpoints" / f"checkpoint_step_{SAVED}")
    text = start(folder, *settings, code=ExitCode.FAILED).everything
    assert f"Spike at step {SPIKE}: loss " in text
    assert f"No usable checkpoint of step {SAVED} or before is left to go back to." in text
    assert f'data.skip=["stream[{LEFT_OUT[0]}:{LEFT_OUT[1]}]"]' in text
