import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.data.loader.loader import steps_from
from refocused.data.manifest.shard_manifest import Manifest, Shard
from refocused.data.order.sequence_order import Order
from refocused.data.order.sequences import Position, SequenceRange
from refocused.data.order.sources import (
    Source,
    begun_stages,
    data_warnings,
    describe_mixture,
    describe_order,
    files_done,
    later_stages,
    most_bytes_of_a_step,
    order_sources,
    split_sources,
    unused_tokens,
)
from refocused.system.errors import ShardError

LENGTH = 4


def manifest_with(**sequences: int) -> Manifest:
    """Shards of so many sequences; `web_a` is a.npy of the source web."""
    return Manifest(
        tuple(
            Shard(f"{name.replace('_', '/')}.npy", LENGTH * count + 1, "uint16", 1, 1, None)
            for name, count in sequences.items()
        ),
        "bytes",
    )


MIXED = manifest_with(code_a=10, code_val=4, web_a=30, web_b=50, web_val=20)
ALONE = manifest_with(a=10, val=4)


def mixture(weight: float = 1.0, stages: Any = None, **code: Any) -> DataConfig:
    return DataConfig(
        stages=stages or {},
        mixture={
            "web": {"source": "w", "weight": 3 * weight, "validation_files": ["val*"]},
            "code": {"source": "c", "weight": weight, **code},
        },
    )


def split(manifest: Manifest, data: DataConfig, sequences: int = 8) -> list[Source]:
    return split_sources(manifest, data, sequence_length=LENGTH, evaluation_sequences=sequences)


@pytest.mark.parametrize(
    ("length", "changes"), [(8, {}), (4, {"mask_documents": False}), (4, {"document_id": 8})]
)
def test_packed_documents_need_their_length_and_masks(length, changes):
    (shard,) = manifest_with(a=10).shards
    data = {"source": "a", "document_id": 9, "mask_documents": True}
    packed = dataclasses.replace(shard, packed_for=LENGTH, document_id=9)
    assert split(Manifest((packed,), "bytes"), DataConfig(**data))
    packed = dataclasses.replace(packed, packed_for=length)
    with pytest.raises(ShardError, match=r"for model.sequence_length=\d, data.document_id=9 and"):
        split(Manifest((packed,), "bytes"), DataConfig(**data | changes))


def order_of(
    data: DataConfig,
    manifest: Manifest = MIXED,
    room: int | None = None,
    step_sequences: int = 1,
    steps: int = 100,
) -> Any:
    sizes = [2 * shard.tokens for shard in manifest.shards]
    sources = split(manifest, data)
    return order_sources(
        sources,
        data,
        seed=7,
        plan=BatchPlan(step_sequences, 1, 1, LENGTH),
        steps=steps,
        shard_bytes=sizes,
        room_bytes=room,
    )


def text_of(order: Any, manifest: Manifest, *, document_id: int | None = None) -> str:
    return describe_order(
        order, manifest=manifest, seed=7, sequence_length=LENGTH, document_id=document_id
    )


def test_each_source_is_split_by_its_own_names_and_numbers_shards_of_the_mixture():
    code, web = split(MIXED, mixture(validation_files=["val.npy"]))
    assert (code.name, code.share, code.sequences, code.kept) == ("code", 256, 10, 4)
    assert (web.name, web.share, web.sequences, web.kept) == ("web", 768, 80, 20)
    assert {one.shard for one in code.train} == {0}
    assert {one.shard for one in web.train} == {2, 3}
    assert set(code.validation.shards.tolist()) == {1}
    assert set(web.validation.shards.tolist()) == {4}


@pytest.mark.parametrize(
    ("sequences", "code", "found"),
    [
        (8, {"validation_files": ["val*"]}, [2, 6]),
        (1, {"validation_files": ["val*"]}, [1, 1]),
        (8, {}, [0, 6]),  # code keeps nothing
    ],
)
def test_a_validation_takes_its_sequences_by_the_shares(sequences, code, found):
    sources = split(MIXED, mixture(**code), sequences)
    assert [len(source.validation.sequences) for source in sources] == found


def test_the_texts_of_an_order_are_those_of_every_version():
    alone = order_of(DataConfig(source="x", validation_files=("val*",)), ALONE)
    assert text_of(alone, ALONE) == "seed 7, blocks of 1 shards, 10 sequences of 4 tokens"
    assert describe_mixture(alone) == ""
    for order in (order_of(mixture()), order_of(mixture(2.0))):  # the same shares
        assert text_of(order, MIXED, document_id=50256) == (
            "seed 7, blocks of 2 shards, code 14, web 80 sequences of 4 tokens, documents masked "
            "by id 50256"
        )
        assert describe_mixture(order) == "code 256, web 768 of 1024 sequences"


ANNEAL = {"weights": {"web": 1, "code": 3}}
STAGES = {"last": {"from_step": 9, "weights": {"web": 0, "code": 1}}, "anneal": ANNEAL}


def test_stages_are_described_in_order_by_their_sequences():
    in_steps = mixture(stages={**STAGES, "anneal": {**ANNEAL, "from_step": 5}})
    text = describe_mixture(order_of(in_steps, step_sequences=8))
    first, anneal = "code 256, web 768 of 1024 sequences", "; from sequence 40: code 768, web 256"
    assert text == f"{first}{anneal}; from sequence 72: code 1024, web 0"
    assert [begun_stages(text, n) for n in (0, 40, 41)] == [first, first, first + anneal]
    assert begun_stages(text, 73) == text
    # Tokens do not depend on the batch; a part of a sequence counts as one.
    for step_sequences, tokens in ((8, 160), (6, 160), (8, 157)):
        in_tokens = mixture(stages={"anneal": {**ANNEAL, "from_tokens": tokens}})
        assert (
            describe_mixture(order_of(in_tokens, step_sequences=step_sequences)) == first + anneal
        )
    growing = BatchPlan(2, 4, 1, LENGTH, warmup_steps=3)
    begins = [stage.begins for stage in later_stages(in_steps, growing)]
    assert begins == [2 * (1 + 2 + 3 + 4 + 4), 2 * (1 + 2 + 3 + 6 * 4)]
    assert [growing.step_of(n) for n in (begins[0] - 1, *begins)] == [5, 6, 10]
    shares = [source.share for source in split(MIXED, in_steps)]
    assert shares == [256, 768]  # a validation has those of the mixture


def test_a_source_that_would_run_out_is_refused_with_the_step():
    stages = {"anneal": {**ANNEAL, "from_step": 5}}
    data = mixture(stages=stages, max_epochs=1.5)
    stream = order_of(mixture(stages=stages), step_sequences=8).stream_from(Position())
    # 14 sequences an epoch, so 21: 10 of the first 40, and 11 of the 15 or so that follow.
    is_code = np.isin(stream.locate(np.arange(80)).shards, [0, 1])
    assert np.flatnonzero(is_code)[21] // 8 + 1 == 7
    order_of(data, step_sequences=8, steps=6)
    for steps in (7, 1000):
        with pytest.raises(ShardError) as told:
            order_of(data, step_sequences=8, steps=steps)
        assert f"data.mixture.code runs out at step 7 of {steps:,}: max_epochs" in str(told.value)
        assert "=1.5 allows 21 sequences. Lower its weight or run.steps" in str(told.value)
    order_of(data, step_sequences=8, steps=1 << 40)  # a stream without an end


def test_the_room_is_for_the_largest_share_of_all_stages():
    # A step with many sequences of code takes three of its blocks.
    manifest = manifest_with(code_a=10, code_b=4, code_c=4, web_a=90, web_b=50, web_val=20)
    tight = 2 * (4 * 90 + 1) + 2 * (4 * 50 + 1) + 2 * 41 + 34
    assert order_of(mixture(), manifest, room=tight, step_sequences=8)
    with pytest.raises(ShardError, match="may span more than two blocks"):
        only = {"only": {"from_step": 1, "weights": {"web": 0, "code": 1}}}
        order_of(mixture(stages=only), manifest, room=tight, step_sequences=8)


def test_sources_of_one_mixture_are_shuffled_differently():
    twin = manifest_with(code_a=30, code_b=50, web_a=30, web_b=50, web_val=20)
    code, web = order_of(mixture(), twin).orders.values()
    assert not np.array_equal(*(one.locate(np.arange(80)).sequences for one in (code, web)))


def test_the_blocks_of_all_sources_fit_into_the_room_together():
    # Two blocks of one shard: code 82 + 34, web 402 + 242 bytes.
    needed = 82 + 34 + 402 + 242
    assert order_of(mixture(), room=needed).orders["web"].block_shards == 1
    with pytest.raises(ShardError, match=rf"of each source take up to {needed} bytes"):
        order_of(mixture(), room=needed - 1)
    assert order_of(mixture(), room=2 * needed).orders["web"].block_shards == 2


def test_a_step_of_a_mixture_may_reach_over_more_than_two_blocks_of_a_source():
    manifest = manifest_with(code_a=10, code_b=4, web_a=2, web_b=50, web_c=50, web_val=20)
    needed = 82 + 34 + 402 + 18 + 402  # all of both
    with pytest.raises(ShardError, match=f"may span more than two blocks .* to {needed} bytes"):
        order_of(mixture(), manifest, room=needed - 1, step_sequences=8)
    assert order_of(mixture(), manifest, room=needed, step_sequences=8)
    assert order_of(mixture(), manifest, room=needed - 1, step_sequences=1)


def test_files_are_done_with_their_block():
    order = order_of(mixture())
    web = Order(split(MIXED, mixture())[1].train, seed=0, block_shards=1)
    first = web.block_start(1)
    assert [files_done(web, consumed) for consumed in (0, first - 1, first, 79)] == [0, 0, 1, 1]
    assert files_done(web, 80) == 0  # the next epoch begins
    assert files_done(order.orders["code"], 0) == 0


def test_another_packing_of_the_same_chunks_is_another_order():
    def packed(*groups: tuple[int, ...]) -> Manifest:
        shards = []
        for numbers in groups:
            parts = tuple(Shard(f"chunk_{n:06d}.pt", 41, "uint16", 9, n, None) for n in numbers)
            tokens = sum(part.tokens for part in parts)
            shards.append(Shard(f"pack_{numbers[0]}", tokens, "uint16", 9, None, None, parts=parts))
        return Manifest(tuple(shards), "x")

    manifests = [packed((0, 1), (2, 3)), packed((0, 1, 2), (3,))]
    order = order_of(DataConfig(source="x"), ALONE)
    assert manifests[0].fingerprint == manifests[1].fingerprint
    assert len({text_of(order, one) for one in manifests}) == 2


def test_skipped_shards_keep_the_order_and_lose_their_sequences():
    plain, data = mixture(), mixture().model_copy(update={"skip": ("web/a.npy",)})
    before, after = order_of(plain), order_of(data)
    assert text_of(before, MIXED) == text_of(after, MIXED)
    assert after.stream_from(Position()).skipped == {2}
    numbers = np.arange(400)
    one, other = (order.stream_from(Position()).locate(numbers) for order in (before, after))
    assert np.array_equal(one.shards, other.shards)
    assert np.array_equal(one.sequences, other.sequences)
    plan = BatchPlan(
        micro_batch_size=8, gradient_accumulation_steps=1, world_size=2, sequence_length=LENGTH
    )
    steps = steps_from(after.stream_from(Position()), Position(), plan=plan, rank=1)
    shards = np.concatenate([next(steps).shards.ravel() for _ in range(40)])
    assert set(shards.tolist()) == {0, 1, 3}


def test_a_skip_or_a_pattern_without_effect_is_refused():
    for skip, said in {
        ("c.npy",): "data.skip: 'c.npy' matches none of the 5 token files",
        ("code/a.npy",): "data.skip leaves no training sequence of the source code",
        ("val.npy",): "data.skip leaves no validation sequence of the source code",
    }.items():
        with pytest.raises(ShardError, match=said):
            split(MIXED, mixture(validation_files=["val*"]).model_copy(update={"skip": skip}))
    with pytest.raises(ShardError, match=r"^data\.mixture\.code: data\.validation_files: 'none'"):
        split(MIXED, mixture(validation_files=["none"]))


def test_the_sequences_that_validate_stay_the_same_but_for_those_of_skipped_shards():
    manifest = manifest_with(a=10, val_a=9, val_b=9)
    data = DataConfig(source="s", validation_files=["val/*"])
    [whole] = split(manifest, data)
    [rest] = split(manifest, data.model_copy(update={"skip": ("val/a.npy",)}))
    kept = whole.validation.shards != 1
    assert 0 < kept.sum() < len(kept)
    assert rest.validation.sequences.tolist() == whole.validation.sequences[kept].tolist()
    assert set(rest.validation.shards.tolist()) == {2}


def found_by_trying(order: Order, *, step_sequences: int, sequences: int, sizes: list[int]) -> int:
    """The most bytes of all steps that may begin anywhere in the run."""
    most = 0
    for begin in range(sequences):
        first, last = order.blocks_of(np.array([begin, begin + step_sequences - 1])).tolist()
        if last - first > 1:
            most = max(most, sum(sizes[shard] for shard in set(order.shards_between(first, last))))
    return most


@pytest.mark.parametrize("block_shards", [1, 2, 3])
@pytest.mark.parametrize("step_sequences", [1, 3, 4, 5, 12, 40])
def test_it_is_what_trying_all_steps_finds(block_shards, step_sequences):
    chance = random.Random(step_sequences)
    counts = [chance.choice((1, 2, 3, 9)) for _ in range(8)]
    sizes = [100 * count + shard for shard, count in enumerate(counts)]
    ranges = [SequenceRange(shard, 0, count) for shard, count in enumerate(counts)]
    order = Order(ranges, seed=5, block_shards=block_shards)
    sequences = 3 * order.sequences_per_epoch
    tried = found_by_trying(order, step_sequences=step_sequences, sequences=sequences, sizes=sizes)
    most = most_bytes_of_a_step(
        order, step_sequences=step_sequences, sequences=sequences, shard_bytes=sizes
    )
    assert most == tried
    if step_sequences in (1, 12, 40):
        assert (most > 0) == (step_sequences > 1)


def warnings(manifest: Manifest, data: DataConfig) -> list[str]:
    return data_warnings(split(manifest, data), manifest, data, sequence_length=LENGTH)


def test_what_a_run_would_train_on_in_error_is_named():
    """A validation file among the others, and one whose bytes also train, maybe by another name."""
    rows = [Shard(f"{n}.bin", 41, "uint16", 80, crc, None) for n, crc in (("train", 1), ("val", 2))]
    manifest = Manifest(tuple(rows), "gpt2")
    (leak,) = warnings(manifest, DataConfig(source="x", validation_fraction=0.1))
    assert (
        '1 of 2 training files look held out (val.bin). Add them to data.validation_files=["val'
        in leak
    )
    several = [dataclasses.replace(rows[1], name=f"val{n}.bin", crc32c=n) for n in range(5)]
    (leak,) = warnings(Manifest((rows[0], *several), "gpt2"), DataConfig(source="x"))
    names = '"val0.bin", "val1.bin", "val2.bin"'
    assert "5 of 6 training files look held out" in leak
    assert f"data.validation_files=[{names}] and 2 more" in leak
    named = DataConfig(source="x", validation_files=("val*",))
    assert not warnings(manifest, named)
    copy = dataclasses.replace(rows[1], name="more.bin")
    (same,) = warnings(Manifest((*rows, copy), "gpt2"), named)
    assert (
        "1 training files have the bytes of a validation file (more.bin those of val.bin)" in same
    )
    unknown = [dataclasses.replace(one, crc32c=None) for one in (*rows, copy)]
    assert not warnings(Manifest(tuple(unknown), "gpt2"), named)
    found = warnings(MIXED, mixture())  # its rows have one checksum
    assert found[0].startswith("1 of 2 training files look held out (val.npy). Add")
    assert "data.mixture.code.validation_files" in found[0]


def test_tokens_in_no_sequence_are_counted_and_packed_by_a_command():
    sizes = {"a": 4, "b": 4, "c": 4, "d": 9}
    shards = [Shard(f"{n}.npy", count, "uint16", count, 1, None) for n, count in sizes.items()]
    assert unused_tokens(shards, sequence_length=LENGTH) == 12
    (short,) = warnings(Manifest(tuple(shards), "gpt2"), DataConfig(source="x", separator_id=7))
    assert short.startswith("57.1% of the tokens of x are in no sequence")
    assert short.endswith("convert x --out data/packed --shard-tokens 1e8 --separator-id 7")
    assert not warnings(Manifest(tuple(shards[3:]), "gpt2"), DataConfig(source="x"))
