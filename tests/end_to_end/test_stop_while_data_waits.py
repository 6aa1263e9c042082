"""A stalled bucket: a signal still stops the run and saves the last finished step."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from fakes import Emulator, Fault
from ranks import ForkedRanks, metrics, write_tokens
from tiny import RUN

from refocused.data.order.sequence_order import Order
from refocused.data.order.sequences import SequenceRange

pytestmark = [pytest.mark.slow, pytest.mark.bucket]
STEPS, WINDOWS_PER_STEP, SEQUENCE_LENGTH, SEED = 5, 8, 32, 1337
PASSES = 66_000  # bytes: more than is read of a header, less than a shard


def test_a_signal_to_one_rank_ends_the_wait_of_both(tmp_path: Path, emulator: Emulator) -> None:
    (tmp_path / "tiny.yaml").write_text(RUN)
    write_tokens(tmp_path / "tokens", shards=3, tokens=40_000, vocabulary=512)
    order = Order([SequenceRange(i, 0, 1) for i in range(3)], seed=SEED, block_shards=1)
    first = f"shard_{int(order.locate(np.array([0])).shards[0]):03d}.npy"
    shard = np.load(tmp_path / "tokens" / first)
    np.save(tmp_path / "tokens" / first, shard[: STEPS * WINDOWS_PER_STEP * SEQUENCE_LENGTH + 1])
    for path in (tmp_path / "tokens").iterdir():
        emulator.put(f"data/{path.name}", path.read_bytes())
    stall = Fault(stall_after=PASSES, stall_s=30)
    emulator.proxy.script(
        lambda r: r.is_download and not r.path.endswith(first), stall, times=10**6
    )

    settings = [
        *("--config", "tiny.yaml", f"run.seed={SEED}", "checkpoint.mirror=null"),
        *(f"data.source={emulator.url}/data", "data.validation_fraction=0", "data.block_shards=1"),
        *("checkpoint.interval=0", "evaluation.interval=0", f"log.interval={STEPS}"),
    ]
    environment = {"STORAGE_EMULATOR_HOST": emulator.proxy.url}
    ranks = ForkedRanks(2, settings, folder=tmp_path, environment=environment)
    run = tmp_path / "runs" / "tiny"
    ranks.wait_until(lambda: STEPS in metrics(run))
    ranks.processes[1].send_signal(signal.SIGTERM)
    ended = ranks.wait(30)
    assert ended.codes == [130, 130], ended.everything
    assert "Traceback" not in ended.everything
    assert f"done  step {STEPS} of 20" in ended.out[0]
    assert list(metrics(run)) == [STEPS]
    assert (run / "checkpoints" / f"checkpoint_step_{STEPS}" / "manifest.json").exists()
    assert json.loads((run / "state.json").read_text())["status"] == "stopped"
