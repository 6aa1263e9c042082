"""Resuming with other ranks, other settings, or in another run."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from ranks import metrics, train
from tiny import losses as exact_losses
from tiny import tiny_run, wait_for_the_mirror

from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
from refocused.data.loader.open_data import TokenLoader

pytestmark = pytest.mark.slow
UNMIRRORED = ["--config", "tiny.yaml", "checkpoint.mirror=null"]
# The sequences of a step do not depend on the number of ranks, and there is no dropout.
ALIKE = [
    *UNMIRRORED,
    "batch.gradient_accumulation_steps=null",
    "batch.global_batch_size=8",
    "model.dropout=0",
    "evaluation.interval=100",
]


def losses(folder: Path, run: str = "tiny") -> dict[int, float]:
    return {step: record["loss"] for step, record in metrics(folder / "runs" / run).items()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps on two ranks under ZeRO 3."""
    folder = tmp_path_factory.mktemp("straight")
    tiny_run(folder)
    train(folder, *ALIKE, ranks=2)
    return folder


@pytest.fixture
def copied(straight: Path, tmp_path: Path) -> Path:
    """The same run, as it was at step 10."""
    folder = shutil.copytree(straight, tmp_path / "copy")
    shutil.rmtree(folder / "runs" / "tiny" / "checkpoints" / "checkpoint_step_20")
    return folder


def test_two_ranks_then_one_then_two_train_like_two(straight: Path, copied: Path) -> None:
    alone = train(copied, *ALIKE, "checkpoint.interval=5", "--max-steps", "15", ranks=1)
    assert "ranks    2 -> 1, the states are partitioned again" in alone.out[0]
    assert "differs  run.steps 20 -> 15" in alone.out[0]
    again = train(copied, *ALIKE, ranks=2)
    assert "1 new ranks draw their dropout from the seed" in again.out[0]
    wanted, found = losses(straight), losses(copied)
    # The schedule of the middle part is that of 15 steps, so that only its first loss is alike.
    assert found[11] == pytest.approx(wanted[11], abs=1e-5)
    last = read_checkpoint(copied / "runs" / "tiny" / "checkpoints" / "checkpoint_step_20")
    assert last.manifest.world_size == 2


@pytest.mark.parametrize("changed", ["zero.stage=1", "zero.stage=2", "zero.offload_optimizer=cpu"])
def test_another_stage_or_offload_continues_the_training(
    straight: Path, copied: Path, changed: str
) -> None:
    train(copied, *ALIKE, changed, ranks=1)
    wanted, found = losses(straight), losses(copied)
    assert [found[step] for step in range(11, 21)] == pytest.approx(
        [wanted[step] for step in range(11, 21)], abs=1e-4
    )


def test_a_checkpoint_of_another_run_is_imported(copied: Path) -> None:
    steps = copied / "runs" / "tiny" / "checkpoints"
    branch = [*ALIKE, "--run", "branch", "optimizer.lr=1e-3"]
    ended = train(copied, *branch, "--resume", "runs/tiny", "--trust", ranks=2)
    assert 'differs  run.name "tiny" -> "branch"' in ended.out[0]
    assert "differs  optimizer.lr 0.003 -> 0.001" in ended.out[0]
    assert sorted(losses(copied, "branch")) == list(range(11, 21))
    taken = read_checkpoint(copied / "runs" / "branch" / "checkpoints" / "checkpoint_step_10")
    assert taken.manifest.run == "branch"
    assert read_checkpoint(steps / "checkpoint_step_10").manifest.run == "tiny"
    again = train(copied, *branch, "--max-steps", "22", ranks=2)
    assert "resume   step 20" in again.out[0]


def test_a_run_decayed_from_a_stable_checkpoint_equals_an_undivided_one(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    wsd = ["--config", "tiny.yaml", "schedule.kind=wsd", "schedule.decay_steps=5"]
    wsd += ["checkpoint.interval=7", "evaluation.interval=0", "batch.warmup_steps=8"]
    runs, decayed = tmp_path / "runs", ["run.steps=12", "--run", "decayed"]
    train(tmp_path, *wsd, "run.steps=12", ranks=2)
    train(tmp_path, *wsd, "run.steps=14", "--run", "longer", ranks=2)
    wait_for_the_mirror(runs / "longer")
    shutil.rmtree(runs / "longer" / "checkpoints" / "checkpoint_step_7")
    new = [*wsd, "run.steps=12", "--run", "longer", "--resume", "7", "--as", "decayed"]
    ended = train(tmp_path, *new, ranks=2)
    assert "resume   step 7 (branch 1 of run longer, verified)" in ended.out[0]
    assert "jumps from" not in ended.everything  # the learning rate
    assert exact_losses(runs / "decayed") == exact_losses(runs / "tiny")
    for step in ("checkpoint_step_7", "checkpoint_step_12"):
        whole, divided = (
            read_checkpoint(runs / run / "checkpoints" / step).manifest
            for run in ("tiny", "decayed")
        )
        states = [name for name in whole.files if name.startswith(("zero/", "ranks/"))]
        assert [whole.files[name] for name in states] == [divided.files[name] for name in states]
        # The first eight steps have one pass, the others two, each of 4 sequences of 32 tokens.
        assert whole.tokens == divided.tokens == {7: 7, 12: 8 + 4 * 2}[whole.step] * 4 * 32
        assert whole.parent is None and divided.parent is not None
        assert (divided.run, divided.parent.run, divided.parent.step) == ("decayed", "longer", 7)
        assert len({whole.run_id, divided.run_id, divided.parent.run_id}) == 3
    again = train(tmp_path, *wsd, *decayed, "run.steps=16", ranks=2)
    assert "resume   step 12 (runs/decayed/checkpoints/checkpoint_step_12" in again.out[0]
    assert "To avoid this, resume from step 7 or before it" in again.err[0]
    later = read_checkpoint(runs / "decayed" / "checkpoints" / "checkpoint_step_16").manifest
    assert later.parent == divided.parent


def test_other_data_start_from_their_first_sequence_if_allowed(copied: Path) -> None:
    ended = train(copied, *ALIKE, "run.seed=7", "--allow-change", "run.seed", ranks=2)
    assert "warning: data order changes from seed 1337" in ended.err[0]
    final = read_checkpoint(copied / "runs" / "tiny" / "checkpoints" / "checkpoint_step_20")
    assert '"sequences": 80' in (final.path / "trainer.json").read_text()


def test_a_run_that_cannot_be_resumed_starts_in_its_folder_if_told_to(copied: Path) -> None:
    checkpoints = copied / "runs" / "tiny" / "checkpoints"
    (checkpoints / "checkpoint_step_10" / "trainer.json").unlink()
    before = sorted(checkpoints.rglob("*"))
    told = [*ALIKE, "--resume-or-start"]
    ended = train(copied, *told, "--max-steps", "6", ranks=2)
    assert "Starting FROM SCRATCH beside them" in ended.err[0]
    assert set(before) < set(checkpoints.rglob("*"))
    assert (checkpoints / "branch-2" / "checkpoint_step_6").is_dir()
    again = train(copied, *told, "--max-steps", "8", ranks=2)
    assert "resume   step 6" in again.out[0]
    other = train(copied, *told, "run.seed=7", "--max-steps", "9", ranks=2, code=1)
    assert "--allow-change run.seed" in other.err[0]
    assert sorted(path.name for path in (copied / "runs").iterdir()) == ["tiny"]


def test_ranks_that_share_sequences_train_like_ranks_with_their_own_and_resume_so(
    straight: Path, copied: Path
) -> None:
    shared = train(copied, *ALIKE, "model.sequence_parallel=2", ranks=2)
    assert "x 1/2 of 2 ranks = 256 tokens" in shared.out[0]
    assert "differs  model.sequence_parallel 1 -> 2" in shared.out[0]
    assert "2 ranks share the tokens of a sequence" in shared.out[0]
    wanted, found = losses(straight), losses(copied)
    assert [found[step] for step in range(11, 21)] == pytest.approx(
        [wanted[step] for step in range(11, 21)], abs=1e-5
    )


def test_a_run_of_tokens_counts_those_it_has_with_any_batch(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    given = ["--config", "tiny.yaml", "checkpoint.mirror=null", "schedule.kind=linear"]
    folder = tmp_path / "runs" / "tiny"
    for tokens, text in {
        "100": "run.tokens = 100 (1 step): less than the tokens of a step (128). Raise it.",
        "600": "run.tokens = 600 (5 steps): schedule.warmup_steps: the warmup must end before",
    }.items():
        refused = train(tmp_path, *given, f"run.tokens={tokens}", code=2)
        assert refused.everything.count(text) == 1, refused.everything
    given.append("schedule.warmup_steps=1")
    first = train(tmp_path, *given, "run.tokens=600").out[0]  # 128 a step
    assert "steps    5 for run.tokens = 600" in first
    state = json.loads((folder / "state.json").read_text())
    assert (state["step"], state["total_steps"], state["tokens"]) == (5, 5, 640)
    assert "steps: null" in (folder / "run.yaml").read_text()
    manifest = json.loads((folder / "checkpoints/checkpoint_step_5/manifest.json").read_text())
    assert manifest["total_steps"] == 5
    assert (
        "finished all 5 steps were made before" in train(tmp_path, *given, "run.tokens=600").out[0]
    )
    (onwards,) = re.findall("train on: (.*) --max-steps N", first)
    assert onwards.endswith(" ".join(given))  # N takes the place of the tokens
    longer = train(tmp_path, *given, "run.tokens=1700", ranks=2)  # 256 a step: 4.1 more
    assert "was planned for 5 steps; now it is linear over 10" in longer.err[0]
    state = json.loads((folder / "state.json").read_text())
    assert (state["step"], state["total_steps"], state["tokens"]) == (10, 10, 640 + 5 * 256)


def test_a_run_of_epochs_trains_on_all_its_data_but_what_is_held_out_or_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_run(tmp_path)
    given = ["--config", "tiny.yaml", "checkpoint.mirror=null", "schedule.warmup_steps=1"]
    skip = f"data.skip=[{sorted((tmp_path / 'tokens').glob('*.npy'))[1].name}]"
    for epochs, more in {"0.5": [], "1": [skip], "2": []}.items():
        said = train(tmp_path, *given, f"run.epochs={epochs}", f"run.name=of{epochs}", *more)
        folder = tmp_path / "runs" / f"of{epochs}"
        loader = TokenLoader.from_run(folder, batch_size=1, epochs=1)
        with loader:
            sequences = sum(1 for _ in loader)
        tokens = math.ceil(float(epochs) * sequences) * 32
        assert f"for run.epochs = {epochs} ({tokens:,} tokens)" in said.out[0]
        trained = json.loads((folder / "state.json").read_text())
        assert trained["tokens"] == math.ceil(tokens / 128) * 128
        assert "tokens: null\n  epochs: " in (folder / "run.yaml").read_text()
    longer = train(tmp_path, *given, "run.epochs=2.1", "run.name=of2").out[0]
    assert "resume   step" in longer
    again = train(tmp_path, *given, "run.epochs=2.1", "run.name=of2").out[0]
    assert "were made before; time and cost stay as they are. Raise run.epochs" in again
