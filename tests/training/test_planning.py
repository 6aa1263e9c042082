"""A shipped run of GPT-2 takes GPT-2's tokens, and the plan counts all of their embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from refocused.bucket.directory import DirectoryBucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.decode import load_run
from refocused.errors import ConfigError
from refocused.training.data import build_data
from refocused.training.planning import settle
from refocused.world import World

END_OF_TEXT = 50_256


def opened(name: str) -> DirectoryBucket:
    return DirectoryBucket(Path(name))


@pytest.mark.parametrize("run", ["gpt2_1b_8xh100", "gpt2_1b_8xh100_fast"])
def test_the_ids_of_gpt2_are_taken(tmp_path: Path, run: str) -> None:
    (tmp_path / "tokens").mkdir()
    np.save(tmp_path / "tokens" / "a.npy", np.full(500, END_OF_TEXT, np.uint16))
    places = [f"data.source={tmp_path / 'tokens'}", f"data.cache={tmp_path / 'cache'}"]
    settings = [*places, "run.device=cpu", "data.validation_fraction=0"]
    loaded, planned = settle(load_run(run, settings), World(), open_source=opened)
    assert loaded.config.model.vocabulary == loaded.shape.vocabulary == END_OF_TEXT + 1
    data = build_data(
        loaded.config.data,
        plan=BatchPlan(micro=2, accumulation=1, world_size=1, sequence_length=10),
        world=World(),
        vocabulary=loaded.shape.vocabulary,
        seed=1,
        steps=3,
        evaluation_windows=0,
        credentials_file=None,
        project=None,
    )
    stream = data.loader.batches_from(data.order.position_at(0))
    try:
        [batch] = stream.next_step()
    finally:
        stream.close()
        data.cache.close()
    assert int(batch.input_ids.max()) == END_OF_TEXT
    exact, fewer = (
        settle(load_run(run, [*settings, *more]), World(), open_source=opened)[1].choice.memory
        for more in (["model.vocabulary=50257"], ["model.vocabulary=9", "data.tokenizer=unknown"])
    )
    assert planned.choice.memory == exact
    assert exact.peak > fewer.peak


def test_a_number_below_the_tokenizers_is_refused_before_anything_is_built() -> None:
    settings = ["model.vocabulary=50256", "run.device=cpu"]
    with pytest.raises(ConfigError, match=r"50257 token ids.*Set model\.vocabulary=auto"):
        settle(load_run("gpt2_1b_8xh100_fast", settings), World(), open_source=opened)
