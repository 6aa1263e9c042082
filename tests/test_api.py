"""The Python API, compared with what the trainer and the commands do."""

import collections
import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands.run_samples import SampleRun
from end_to_end.tiny import tiny_run
from ranks import write_tokens

import refocused
from refocused.commands.main import run_command
from refocused.config.batch_plan import plan_batch
from refocused.config.load_run import load_run, render_run
from refocused.data.loader.open_data import build_data
from refocused.data.order.sequences import Position
from refocused.system.errors import CheckpointError, ConfigError, ExitCode
from refocused.system.world import World

MIXTURE = {"a": {"source": "tokens", "weight": 3}, "b": {"source": "more", "weight": 1}}


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "more", shards=2, tokens=3000, vocabulary=512, seed=1)
    return tiny_run(tmp_path)


@contextlib.contextmanager
def loaders(world_size, batch_size, **others):
    """The loaders of all ranks over the folder `tokens`."""
    given: dict[str, Any] = {"sequence_length": 32, "cache": "cache", **others}
    source = given.pop("source", "tokens")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                refocused.TokenLoader(
                    source, batch_size=batch_size, rank=rank, world_size=world_size, **given
                )
            )
            for rank in range(world_size)
        ]


def rows(found, batches):
    """The rows of so many batches of all ranks, in the order of the stream."""
    iterators = [iter(one) for one in found]
    taken = [next(iterator)[0].tolist() for _ in range(batches) for iterator in iterators]
    return list(itertools.chain.from_iterable(taken))


def test_the_import_needs_no_package_and_lists_what_there_is():
    program = (
        "import sys, refocused\n"
        "assert set(refocused.__all__) <= set(dir(refocused))\n"
        "assert not hasattr(refocused, 'nothing')\n"
        "print([one for one in ('torch', 'numpy', 'pydantic', 'ruamel') if one in sys.modules])\n"
        "refocused.CheckpointManager, refocused.estimate_run, refocused.start_training\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"], done.stderr


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.mask_documents=true", "data.document_id=7", "run.seed=3"],
        ["data.skip=[shard_001.npy]", "data.disk_limit_gb=3.3e-5"],
        [
            f"data.mixture={json.dumps(MIXTURE)}",
            "data.source=null",
            "data.stages={late: {from_tokens: 500, weights: {a: 1, b: 4}}}",
            'data.skip=["stream[3:8]"]',
        ],
        [
            f"data.mixture={json.dumps(MIXTURE)}",
            "data.source=null",
            "data.stages={late: {from_step: 3, weights: {a: 1, b: 4}}}",
            "batch.gradient_accumulation_steps=null",
            "batch.global_batch_size=8",
        ],
    ],
)
def test_a_run_and_its_token_loader_give_the_same_batches(run_file, overrides):
    config = load_run(run_file, overrides).config
    run = run_file.parent / "runs" / "tiny"  # as training leaves it
    run.mkdir(parents=True)
    (run / "run.yaml").write_text(render_run(config))
    plan = plan_batch(config.batch, world_size=2, sequence_length=32)
    assert plan.gradient_accumulation_steps == 2
    for rank in range(2):
        trainer = build_data(
            config.data,
            plan=plan,
            world=World(),
            rank=rank,
            vocabulary=512,
            seed=config.run.seed,
            steps=config.run.steps,
            evaluation_sequences=config.evaluation.sequences,
        )
        with (
            contextlib.closing(trainer.cache),
            contextlib.closing(trainer.loader.batches_from(Position())) as stream,
            refocused.TokenLoader.from_run(run, batch_size=2, rank=rank, world_size=2) as loader,
        ):
            batches = iter(loader)
            for _ in range(100):  # more than an epoch
                for wanted in stream.next_step() or ():
                    inputs, labels = next(batches)
                    assert torch.equal(inputs, wanted.input_ids)
                    assert torch.equal(labels, wanted.labels)
            assert loader.position == stream.position


def test_steps_of_an_unknown_number_of_sequences_are_no_place_in_the_stream(run_file):
    stages = {"late": {"from_step": 3, "weights": {"a": 1, "b": 4}}}
    settings = [f"data.mixture={json.dumps(MIXTURE)}", "data.source=null"]
    settings.append(f"data.stages={json.dumps(stages)}")
    run_file.write_text(render_run(load_run(run_file, settings).config))
    with pytest.raises(ConfigError, match=r"late\.from_step=3: the number of ranks decides"):
        refocused.TokenLoader.from_run(run_file, batch_size=2)
    stages["late"] = {"from_tokens": 500, "weights": {"a": 1, "b": 4}}
    with refocused.TokenLoader.from_run(run_file, batch_size=2, stages=stages) as loader:
        next(iter(loader))


@pytest.mark.parametrize("source", ["tokens", MIXTURE])
def test_other_ranks_continue_the_stream_of_all(run_file, source):
    with loaders(2, 6, source=source) as two:
        rows(two, 5)
        saved = json.loads(json.dumps(two[0].state_dict()))
        assert saved == two[1].state_dict()
        expected = rows(two, 50)  # into the second epoch
    for world_size, batch_size in ((3, 4), (4, 3), (1, 12)):
        with loaders(world_size, batch_size, source=source) as others:
            for one in others:
                rows([one], 1)  # what was read before does not matter
                one.load_state_dict(saved)
            assert rows(others, 50) == expected


@pytest.mark.bucket
def test_a_bucket_gives_what_a_folder_gives(run_file, emulator):
    address = f"{emulator.url}/tokens"
    assert run_command("prepare_data", ["upload", "tokens", address]) == ExitCode.OK
    with loaders(1, 4) as here, loaders(1, 4, source=address, cache="other") as there:
        assert rows(here, 100) == rows(there, 100)


def test_a_state_of_other_data_or_another_order_is_refused(run_file):
    with loaders(1, 2) as (loader,):
        rows([loader], 3)
        saved = loader.state_dict()
    for change in ({"seed": 4}, {"sequence_length": 16}, {"source": "more"}, {"source": MIXTURE}):
        with (
            loaders(1, 2, **change) as (other,),
            pytest.raises(CheckpointError, match="saved with"),
        ):
            other.load_state_dict(saved)


def test_epochs_end_the_stream_and_no_thread_stays(run_file):
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    with loaders(1, 4, epochs=2) as (loader,):
        seen = [tuple(row) for batch, _ in loader for row in batch.tolist()]
        first, second = collections.Counter(seen[:372]), collections.Counter(seen[372:])
        assert first == second  # 3 shards of 124 sequences, each once an epoch
        assert seen[:372] != seen[372:]
        assert list(loader) == []
    assert set(threading.enumerate()) <= before


def test_a_torch_data_loader_takes_it_without_workers(run_file):
    with loaders(1, 4) as (plain,):
        expected = [batch.tolist() for batch, _ in itertools.islice(plain, 5)]
    with loaders(1, 4) as (loader,):
        wrapped = torch.utils.data.DataLoader(loader, batch_size=None)
        assert [batch.tolist() for batch, _ in itertools.islice(wrapped, 5)] == expected
        assert loader.position == Position(0, 20)
        for method in ("fork", "spawn"):
            workers = torch.utils.data.DataLoader(
                loader, batch_size=None, num_workers=1, multiprocessing_context=method
            )
            with pytest.raises(ConfigError, match="num_workers=0"):
                next(iter(workers))


def test_a_wrong_argument_is_named(run_file):
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        refocused.TokenLoader("tokens", sequence_length=8, batch_size=1, rank=2, world_size=2)
    with pytest.raises(ConfigError, match=r"validation_fractoin: .* not permitted\.$"):
        refocused.TokenLoader("tokens", sequence_length=8, batch_size=1, validation_fractoin=0.1)


@pytest.mark.slow
def test_checkpoints_are_listed_and_downloaded_verified(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sample_run = SampleRun(Path("runs/one"), tmp_path / "bucket", capsys)
    for step, loss in ((10, 1.5), (20, 2.5)):
        sample_run.mirror(sample_run.save_readable(step, validation_loss=loss))
    manager = refocused.CheckpointManager("one")
    listed = manager.list_checkpoints()
    printed = sample_run.command_json("list")["steps"]
    assert [(one.step, one.size, one.bucket) for one in listed] == [
        (one["step"], one["size"], one["bucket"]) for one in printed
    ]
    best = manager.download_checkpoint("best")
    assert best == Path("runs/one/checkpoints/checkpoint_step_10")
    file = max((best / "zero").iterdir(), key=lambda path: path.stat().st_size)
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])  # sizes agree, bytes do not
    assert manager.download_checkpoint(10) == best
    assert file.read_bytes() == whole
    with pytest.raises(CheckpointError, match="Nearest: checkpoint_step_20"):
        manager.download_checkpoint(30)
    shutil.rmtree("runs")
    for place in ({}, {"prefix": "one/checkpoints"}):
        elsewhere = refocused.CheckpointManager("copies/one", str(sample_run.bucket), **place)
        path = elsewhere.download_checkpoint("latest")
        assert path == Path("copies/one/checkpoints/checkpoint_step_20")
        assert (path / "trainer.json").is_file()


def test_an_estimate_is_that_of_the_command(capsys):
    found = refocused.estimate_run(
        "gpt2_1b_8xh100_fast", gpus=4, per_hour_usd=12, overrides={"run.steps": 100}
    )
    words = "--config gpt2_1b_8xh100_fast --gpus 4 --per-hour 12 --json run.steps=100"
    assert run_command("estimate_cost", words.split()) == ExitCode.OK
    assert json.loads(json.dumps(found)) == json.loads(capsys.readouterr().out)
    assert found["work"]["steps"] == 100
    with pytest.raises(ConfigError, match=r"run\.stepz"):
        refocused.estimate_run("demo", overrides={"run.stepz": 1})


def test_what_cannot_be_loaded_or_started_is_named(run_file):
    Path("runs/demo").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^dmeo: no such folder.*Did you mean demo"):
        refocused.load("dmeo")
    with pytest.raises(ConfigError, match=r"no file dmeo\.yaml"):
        refocused.start_training("dmeo")


@pytest.mark.slow
def test_a_run_is_followed_stopped_resumed_and_its_failure_raised(run_file, capsys):
    longer = {"run.steps": 100_000, "checkpoint.mirror": None}
    run = refocused.start_training(run_file, longer, ranks=1, wait=False)
    assert run.folder == Path("runs/tiny")
    saved = run.folder / "checkpoints" / "checkpoint_step_10"
    while run.process.poll() is None and not saved.exists():
        time.sleep(0.1)
    assert run.process.poll() is None, run.log.read_text()
    assert run.status()["status"] == "training"
    run.stop()
    assert run.wait(show=False) == ExitCode.INTERRUPTED
    assert capsys.readouterr().out == ""
    stopped = run.status()["step"]
    with pytest.raises(ConfigError, match=r"tiny: exit code 2.*(?s:.*)run\.steps"):
        refocused.start_training(run_file, {**longer, "run.steps": 1}, ranks=1)
    again = {**longer, "run.steps": stopped + 2}
    assert refocused.start_training(run_file, again, ranks=1).status()["step"] == stopped + 2
    assert f"resume   step {stopped} (runs/tiny/" in capsys.readouterr().out
