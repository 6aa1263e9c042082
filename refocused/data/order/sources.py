"""The sources of a run: sequences, order and share of each, and the disk space of a step."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.config.run_config import RunConfig
from refocused.data.formats.object_names import HELD_OUT
from refocused.data.manifest.run_manifest import split_by_source
from refocused.data.manifest.shard_manifest import Manifest, Shard, is_skipped
from refocused.data.order.mixture_order import PERIOD, Mixture, Stage, shares_of, source_seed
from refocused.data.order.sequence_order import Order, choose_block_shards
from refocused.data.order.sequences import (
    Located,
    Position,
    SequenceRange,
    sequence_count,
    sequences_of,
    split_sequences,
    spread_sequences,
)
from refocused.system.errors import ShardError, as_typed

ENDLESS_STEPS = 1 << 40
MAX_EPOCHS = 1000  # examined, within a second; more than a run that streams has
PACKING_CHARACTERS = 8
MUCH_UNUSED = 0.05
FROM = "; from sequence "  # a later stage in the description of a mixture
# Sequences of a source that a step may need beyond its share: one at each end (see `interleaved`),
# and the next one.
SHARE_MARGIN = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """The sequences of one source."""

    name: str | None  # None for the only source of a run without a mixture
    share: int  # of 1,024 sequences
    train: Sequence[SequenceRange]  # in shards of the run's manifest
    kept: int  # sequences held out for validation
    validation: Located  # those of them that are used
    skipped: frozenset[int] = frozenset()  # shards of all sources that `data.skip` names

    @property
    def sequences(self) -> int:
        """Training sequences of one epoch, including skipped ones."""
        return sequence_count(self.train)

    @property
    def skipped_sequences(self) -> int:
        """Training sequences of an epoch in skipped shards."""
        return sequence_count(span for span in self.train if span.shard in self.skipped)


def split_sources(
    manifest: Manifest, data: DataConfig, *, sequence_length: int, evaluation_sequences: int
) -> list[Source]:
    """Split each source's sequences into training and validation sequences.

    The sequences of a validation are divided among the sources by their shares, with at least one
    of each source that holds any out. Raises `ShardError` if a pattern matches no shard, no
    sequence is left for training or validation, or documents are packed for other settings.
    """
    for pattern in data.skip:
        section = data.model_copy(update={"skip": (pattern,)})
        if not (
            section.skipped_sequences
            or any(is_skipped(shard, section) for shard in manifest.shards)
        ):
            raise ShardError(
                f"data.skip: {pattern!r} matches none of the {len(manifest.shards)} token files. "
                "Correct the pattern; it may match a file's name with or without its folder."
            )
    for shard in manifest.shards:
        needed = (shard.packed_for, shard.document_id, True)
        given = (sequence_length, data.document_id, data.mask_documents)
        if shard.packed_for is not None and given != needed:
            raise ShardError(
                f"{shard.name}: its documents are packed for model.sequence_length={needed[0]}, "
                f"data.document_id={needed[1]} and data.mask_documents=true; the run has "
                f"{given[0]}, {given[1]} and {str(given[2]).lower()}. Set the three, or prepare "
                "the data again without --best-fit, or with another."
            )
    skipped = frozenset(i for i, shard in enumerate(manifest.shards) if is_skipped(shard, data))
    shares, parts = {"": PERIOD}, {"": (0, manifest)}
    if data.mixture:
        shares = shares_of({name: section.weight for name, section in data.mixture.items()})
        parts = split_by_source(manifest)
    sources = []
    for name, (first_shard, part) in parts.items():
        sequences, config, of_source = evaluation_sequences, data, ""
        if name:
            sequences = max(1, round(evaluation_sequences * shares[name] / PERIOD))
            config, of_source = data.of_source(name), f" of the source {name}"
        try:
            split = split_sequences(
                part,
                sequence_length=sequence_length,
                validation_files=config.validation_files,
                validation_fraction=config.validation_fraction,
                first_shard=first_shard,
            )
        except ShardError as error:
            raise ShardError(f"data.mixture.{name}: {error}" if name else str(error)) from None
        source = Source(
            name=name or None,
            share=shares[name],
            train=split.train,
            kept=sequence_count(split.validation),
            validation=spread_sequences(split.validation, sequences=sequences, skipped=skipped),
            skipped=skipped,
        )
        unvalidated = sequences and source.kept and not len(source.validation.sequences)
        untrained = source.skipped_sequences == source.sequences
        for is_empty, kind in ((untrained, "training"), (unvalidated, "validation")):
            if is_empty:
                raise ShardError(
                    f"data.skip leaves no {kind} sequence{of_source}. Skip fewer shards."
                )
        sources.append(source)
    return sources


def tokens_of_epochs(config: RunConfig, manifest: Manifest) -> int:
    """Return the tokens of `run.epochs` passes over the training data; raises as `split_sources`.

    The last pass is rounded up to a sequence.
    """
    (source,) = split_sources(
        manifest,
        config.data,
        sequence_length=config.model.sequence_length,
        evaluation_sequences=config.evaluation.sequences,
    )
    sequences = source.sequences - source.skipped_sequences
    return math.ceil((config.run.epochs or 1) * sequences) * config.model.sequence_length


def later_stages(data: DataConfig, plan: BatchPlan) -> list[Stage]:
    """Return the stages after the first in order; those in steps by the sequences of the batch."""
    stages = []
    for name, stage in data.stages.items():
        before = -(-(stage.from_tokens or 0) // plan.sequence_length)  # rounded up
        begins = before if stage.from_step is None else plan.sequences_between(0, stage.from_step)
        stages.append(Stage(begins, shares_of(stage.weights), name))
    return sorted(stages, key=lambda stage: stage.begins)


def order_sources(
    sources: Sequence[Source],
    data: DataConfig,
    *,
    seed: int,
    plan: BatchPlan,
    steps: int,
    shard_bytes: Sequence[int],
    room_bytes: int | None,
) -> Order | Mixture:
    """Return the order of the only source, or the mixture of all.

    `shard_bytes` are the local sizes of the manifest's shards. Raises `ShardError` if two blocks of
    each source, or the shards of a step, exceed the `room_bytes` for training shards on disk, or a
    source runs out in `steps`.
    """
    later, step_sequences = later_stages(data, plan), plan.global_batch_size
    block_shards = choose_block_shards(
        data.block_shards,
        sources=[source.train for source in sources],
        shard_bytes=shard_bytes,
        room_bytes=room_bytes,
    )
    orders = [
        Order(
            source.train,
            seed=seed if source.name is None else source_seed(seed, source.name),
            block_shards=block_shards,
            skipped=source.skipped,
        )
        for source in sources
    ]
    if room_bytes is not None:
        needed = 0
        for source, order in zip(sources, orders, strict=True):
            own_sequences = step_sequences
            share = max([source.share, *(stage.shares[str(source.name)] for stage in later)])
            if share < PERIOD:  # and a step over a border has one more end
                own_sequences = step_sequences * share // PERIOD + SHARE_MARGIN + len(later)
            reach = most_bytes_of_a_step(
                order,
                step_sequences=own_sequences,
                sequences=steps * step_sequences * share // PERIOD + 1 + len(later),
                shard_bytes=shard_bytes,
            )
            largest = sorted((shard_bytes[span.shard] for span in source.train), reverse=True)
            needed += max(reach, sum(largest[: 2 * block_shards]))
        if needed > room_bytes:
            raise ShardError(
                f"a step of {step_sequences:,} sequences may span more than two blocks of "
                f"{block_shards} shards where these are short, and then needs up to {needed:,} "
                f"bytes on disk, but data.disk_limit_gb leaves {room_bytes:,} besides the "
                "validation shards and a download. Raise data.disk_limit_gb by at least "
                f"{math.ceil((needed - room_bytes) / 1e6) / 1e3}, or make shards of even length."
            )
    mixed: Order | Mixture = orders[0]
    if data.mixture:
        weights = {name: section.weight for name, section in data.mixture.items()}
        named = {str(source.name): order for source, order in zip(sources, orders, strict=True)}
        mixed = Mixture(named, weights=weights, seed=seed)
        mixed.stages += later
        stream = mixed.stream_from(Position())
        for number, (name, order) in enumerate(mixed.orders.items()):
            limit = data.mixture[name].max_epochs
            if limit is None or steps >= ENDLESS_STEPS:
                continue
            most = math.floor(Fraction(str(limit)) * order.sequences_per_epoch)
            beyond = stream.number_of_sequence(number, most)
            if beyond is not None and (step := plan.step_of(beyond)) <= steps:
                raise ShardError(
                    f"data.mixture.{name} runs out at step {step:,} of {steps:,}: "
                    f"max_epochs={limit:g} allows {most:,} sequences. Lower its weight or "
                    "run.steps, or raise max_epochs."
                )
    mixed.left_out = data.skipped_sequences
    return mixed


def unused_tokens(shards: Iterable[Shard], *, sequence_length: int) -> int:
    """Return the tokens after the last sequence of each shard, which no run can use."""
    used = (sequences_of(shard.tokens, sequence_length=sequence_length) for shard in shards)
    ends = (sequences * sequence_length + 1 if sequences else 0 for sequences in used)
    return sum(shard.tokens - end for shard, end in zip(shards, ends, strict=True))


def data_warnings(
    sources: Sequence[Source], manifest: Manifest, data: DataConfig, *, sequence_length: int
) -> list[str]:
    """Return what a run should not do with its data unnoticed, each with the setting that helps."""
    warnings, shards = [], manifest.shards
    parts = split_by_source(manifest) if data.mixture else {"": (0, manifest)}
    for source, (first, whole) in zip(sources, parts.values(), strict=True):
        setting = f"data.mixture.{source.name}" if source.name else "data"
        section = data.of_source(source.name) if source.name else data
        trained = [whole.shards[span.shard - first] for span in source.train]
        files = [file.name for shard in trained for file in shard.files]
        named = [name for name in files if HELD_OUT.search(name)]
        if 0 < len(named) < len(files):
            shown, more = named[:3], f" and {len(named) - 3:,} more" if len(named) > 3 else ""
            warnings.append(
                f"{len(named)} of {len(files)} training files look held out ({', '.join(shown)}"
                f"{more}). Add them to {setting}.validation_files={json.dumps(shown)}{more}, in "
                f"place of validation_fraction, or to {setting}.exclude"
            )
        unused = unused_tokens(whole.shards, sequence_length=sequence_length) / whole.tokens
        if unused > MUCH_UNUSED:
            options = {
                "dtype": section.dtype,
                "pad-id": section.pad_id,
                "separator-id": section.separator_id,
            }
            given = [f" --{key} {value}" for key, value in options.items() if value is not None]
            given += [" --vocabulary N"] * any(shard.dtype == "uint32" for shard in whole.shards)
            warnings.append(
                f"{unused:.1%} of the tokens of {section.address} are in no sequence, since its "
                "files end before one is full. Pack them into longer ones: "
                f"{as_typed('prepare_data convert')} {section.address} --out data/packed "
                f"--shard-tokens 1e8{''.join(given)}"
            )
    held_out = {number for source in sources for number in source.validation.shards.tolist()}
    contents = {shards[number].content: shards[number].name for number in held_out}
    contents.pop(None, None)
    trained = [
        shards[number] for number in {span.shard for source in sources for span in source.train}
    ]
    same = [(shard.name, contents.get(shard.content, shard.name)) for shard in trained]
    if same := sorted((name, other) for name, other in same if name != other):
        warnings.append(
            f"{len(same)} training files have the bytes of a validation file ({same[0][0]} those "
            f"of {same[0][1]}). Put one of each in data.exclude"
        )
    return warnings


def most_bytes_of_a_step(
    order: Order, *, step_sequences: int, sequences: int, shard_bytes: Sequence[int]
) -> int:
    """Return the largest disk space of a step that spans three blocks or more; 0 if none does.

    A step may start at any sequence, since a resume with another batch shifts all steps. Of those
    that start in a block, the one that starts with its last sequence extends the furthest.
    `step_sequences` and `sequences` are those of one source in a step and in the run.
    """
    most, per_epoch = 0, order.blocks_per_epoch
    if step_sequences - 2 < order.smallest_block:
        return most
    for epoch in range(min(MAX_EPOCHS, math.ceil(sequences / order.sequences_per_epoch))):
        firsts = epoch * per_epoch + np.arange(per_epoch)
        starts = np.array([order.block_start(first + 1) - 1 for first in firsts.tolist()])
        lasts = order.blocks_of(starts + step_sequences - 1)
        # Two epochs contain all shards, and a repeated shard counts once.
        lasts = np.where(lasts - firsts > 1, np.minimum(lasts, firsts + 2 * per_epoch), firsts)
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            if first < last:
                shards = set(order.shards_between(first, last))
                most = max(most, sum(shard_bytes[shard] for shard in shards))
    return most


def describe_order(
    order: Order | Mixture,
    *,
    manifest: Manifest,
    seed: int,
    sequence_length: int,
    document_id: int | None,
) -> str:
    """Describe what determines the order, besides the data and a mixture's shares.

    A resume requires the same text.
    """
    orders = order.orders if isinstance(order, Mixture) else {"": order}
    first = next(iter(orders.values()))
    sequences = ", ".join(
        f"{name} {source_order.sequences_per_epoch}".strip()
        for name, source_order in orders.items()
    )
    documents = "" if document_id is None else f", documents masked by id {document_id}"
    is_packed = any(shard.parts for shard in manifest.shards)
    packing = f", chunks packed as {manifest.packing[:PACKING_CHARACTERS]}" if is_packed else ""
    return (
        f"seed {seed}, blocks of {first.block_shards} shards, {sequences} sequences of "
        f"{sequence_length} tokens{documents}{packing}"
    )


def validation_fingerprint(
    sources: Sequence[Source], manifest: Manifest, *, sequence_length: int, document_id: int | None
) -> str:
    """Identify all that decides a validation loss besides the model; empty without a sequence."""
    held_out = []
    for source in sources:
        shards, sequences = source.validation.shards, source.validation.sequences
        held_out += [
            [manifest.shards[shard].fingerprint_row(), sequences[shards == shard].tolist()]
            for shard in np.unique(shards).tolist()
        ]
    text = json.dumps([sequence_length, document_id, held_out])
    return hashlib.sha256(text.encode()).hexdigest()[:16] if held_out else ""


def describe_mixture(order: Order | Mixture) -> str:
    """Describe the shares of a mixture's sources, and of its stages; empty without a mixture."""
    if not isinstance(order, Mixture):
        return ""
    texts = [", ".join(f"{name} {n}" for name, n in stage.shares.items()) for stage in order.stages]
    later = [
        f"{FROM}{stage.begins}: {text}" for stage, text in zip(order.stages, texts, strict=True)
    ]
    return f"{texts[0]} of {PERIOD} sequences{''.join(later[1:])}"


def begun_stages(mixture: str, sequences: int) -> str:
    """Return the part of `describe_mixture` that decided the first `sequences` of the stream."""
    first, *later = mixture.split(FROM)
    return FROM.join([first, *(text for text in later if int(text.partition(":")[0]) < sequences)])


def files_done(order: Order, consumed: int) -> int:
    """Count the shards of a source's present epoch in completely consumed blocks."""
    block = int(order.blocks_of(np.array([consumed]))[0])
    return block % order.blocks_per_epoch * order.block_shards
