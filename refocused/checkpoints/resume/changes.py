"""Compare a run with the checkpoint it resumes, or two checkpoints with each other."""

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from refocused.bucket.bucket import extended_crc32c
from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
from refocused.checkpoints.step.checkpoint_directory import (
    CHOOSE_ANOTHER,
    Checkpoint,
    parse_mapping,
    read_checkpoint,
    read_mapping,
)
from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest, RunMetadata
from refocused.checkpoints.step.verify import WHOLE
from refocused.data.order.sequences import Position
from refocused.data.order.sources import FROM, begun_stages
from refocused.metrics.jsonl import dotted
from refocused.system.atomic_files import read_regular
from refocused.system.errors import CheckpointError, ConfigError, as_typed

MAX_LINES = 12
# Fields of a manifest that are shown elsewhere (losses) or not useful to a reader.
_NOT_SHOWN = {"schema_version", "name", "files", "loss", "validation_loss", "bits_per_byte"}
DATA, MIXTURE, MODEL, DTYPE = "data", "data.mixture", "model.preset", "precision.dtype"
_DATA_ORDER = "data order"
# The settings that determine the order of sequences, besides the files themselves.
ORDER_SETTINGS = (
    "run.seed",
    "model.sequence_length",
    "data.block_shards",
    "data.disk_limit_gb",
    "data.max_files",
    "data.include",
    "data.exclude",
    "data.validation_files",
    "data.validation_fraction",
    "data.mask_documents",
    "data.document_id",
)
ALLOWABLE = (DATA, MIXTURE, MODEL, DTYPE, *ORDER_SETTINGS)
# `fragment` may set the sizes of stage 3's groups.
_LAYOUT = "zero.stage", "zero.offload_optimizer", "zero.offload_parameters", "zero.fragment"
_ONLY_AT_THE_START = ("precision.initial_scale_power",)  # a checkpoint has its own loss scale
_CONSEQUENCES = {
    MIXTURE: " (each source continues at its position, with its new weight)",
    MODEL: " (the weights were trained for the other shape)",
    DTYPE: " (the master weights are float32 in both)",
    **dict.fromkeys((DATA, *ORDER_SETTINGS), " (a new pass over the data begins)"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """An entry, by dotted name, that differs or that only one side has."""

    name: str
    a: Any
    b: Any
    only_in: Literal["a", "b"] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """The accepted differences between a checkpoint and the run that resumes it."""

    settings: tuple[Difference, ...]  # changed settings; all of them apply
    allowed: tuple[str, ...]  # messages about changes that need `--allow-change`, or compatibility
    # `resharded`: ranks, stage, precision or offload differ.
    load_mode: Literal["exact", "resharded"]
    new_data: bool  # the data or their order changed: a new pass begins
    restart: Position  # where that pass begins; stages go on where they were

    def lines(self) -> list[str]:
        """Describe the changed settings, at most `MAX_LINES` of them."""
        lines = [
            f"{difference.name} {_shown(difference.a)} -> {_shown(difference.b)}"
            for difference in self.settings
        ]
        if len(lines) > MAX_LINES:
            lines[MAX_LINES:] = [f"and {len(lines) - MAX_LINES} more settings"]
        return lines


@dataclasses.dataclass(frozen=True, slots=True)
class _Obstacle:
    """A difference that prevents a resume unless it is allowed."""

    what: str
    saved: object
    now: object
    remedy: str
    keys: tuple[str, ...] = ()  # names to allow, all of them; empty: it cannot be allowed

    def is_allowed(self, allowed: Collection[str]) -> bool:
        """Whether all its keys are allowed; `data` allows any change of the data order."""
        if self.what == _DATA_ORDER and DATA in allowed:
            return True
        return bool(self.keys) and set(self.keys) <= set(allowed)


def check_allowable(names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is not in `ALLOWABLE`."""
    unknown = [name for name in names if name not in ALLOWABLE]
    if unknown:
        raise ConfigError(
            f"--allow-change {unknown[0]}: this needs no permission, or cannot be allowed. "
            f"Choose from {', '.join(ALLOWABLE)}."
        )


def changes_since(
    checkpoint: Checkpoint, *, metadata: RunMetadata, world_size: int, allowed: Collection[str]
) -> Changes:
    """Compare a verified checkpoint with the run that resumes it on `world_size` ranks.

    Args:
        checkpoint: The checkpoint.
        metadata: Of the run that resumes it.
        world_size: Ranks of that run.
        allowed: Names from `ALLOWABLE`.

    Raises:
        CheckpointError: The model, the optimizer or the order of the data changed, and this is not
            allowed.
    """
    saved = checkpoint.manifest
    now = parse_mapping(metadata.run_yaml, where="run.yaml")
    then = dotted(read_mapping(checkpoint.path / "run.yaml"))
    settings = tuple(
        setting
        for setting in differences(then, dotted(now))
        if setting.name not in _ONLY_AT_THE_START
        and (setting.a, setting.b) != (None, None)  # a new setting
    )
    names = {setting.name for setting in settings}
    groups = _separate_groups(then), _separate_groups(dotted(now))
    exact = (
        saved.world_size == world_size
        and groups[0] == groups[1]
        and saved.zero_stage == metadata.zero_stage
        and saved.dtype == metadata.dtype
        and not names.intersection(_LAYOUT)
    ) or saved.zero_stage == metadata.zero_stage == 0
    obstacles = list[_Obstacle]()

    def compare(
        what: str, saved: object, now: object, remedy: str, keys: tuple[str, ...] = ()
    ) -> None:
        if saved != now:
            obstacles.append(_Obstacle(what, saved, now, remedy, keys))

    current = dotted({"model": parse_mapping(metadata.model_json, where="model.json")})
    shape = differences(dotted({"model": read_mapping(checkpoint.path / "model.json")}), current)
    # This one is irrelevant to a resume.
    shape = [field for field in shape if field.name != "model.initializer_range"]
    model_back = "set model.preset back"
    if [field.name for field in shape] == ["model.vocab_size"]:
        model_back = f"set model.vocabulary={shape[0].a}"
    # Those that cannot be loaded come first, then those that change the training.
    compare("parameters", saved.parameters, metadata.parameters, model_back)
    if 0 in (saved.zero_stage, metadata.zero_stage):
        remedy = f"set zero.stage={saved.zero_stage} (1, 2 and 3 read each other's checkpoints)"
        compare("zero.stage", saved.zero_stage, metadata.zero_stage, remedy)
        compare(
            "optimizer settings of", *groups, "set optimizer.embedding_* and optimizer.head_* back"
        )
    for setting in settings:
        if setting.name == "optimizer.kind":
            kind = setting.a or "adamw"
            compare(setting.name, kind, setting.b, f"set {setting.name}={kind}")
    keys = () if 0 in (saved.zero_stage, metadata.zero_stage) else (DTYPE,)
    compare(DTYPE, saved.dtype, metadata.dtype, f"set precision.dtype={saved.dtype}", keys)
    fingerprints = saved.data_fingerprint, metadata.data_fingerprint
    compare(DATA, *fingerprints, "set data.source back", (DATA,))
    changed = tuple(name for name in ORDER_SETTINGS if name in names) or (DATA,)
    compare(_DATA_ORDER, saved.data_order, metadata.data_order, "set those back", changed)
    before, after = saved.data_mixture, metadata.data_mixture
    if FROM in before + after:  # stages that had not begun may differ
        trainer = read_mapping(checkpoint.path / "trainer.json")
        sequences = Position.from_dict(trainer["position"]).sequences
        before, after = begun_stages(before, sequences), begun_stages(after, sequences)
    if before != after:
        mixtures = saved.data_mixture or "none", metadata.data_mixture or "none"
        obstacles.append(_Obstacle(MIXTURE, *mixtures, "set weights and batch back", (MIXTURE,)))
    if saved.parameters == metadata.parameters:
        obstacles += [
            _Obstacle(field.name, _shown(field.a), _shown(field.b), model_back, (MODEL,))
            for field in shape
        ]
    refused = [obstacle for obstacle in obstacles if not obstacle.is_allowed(allowed)]
    if refused:
        raise _refusal(saved.name, refused)
    notes = [f"{item.what} changes from {item.saved} to {item.now}" for item in obstacles]
    sequences_done = (
        saved.tokens // now["model"]["sequence_length"] if FROM in metadata.data_mixture else 0
    )
    if saved.data_mixture != metadata.data_mixture:
        settings += (Difference(MIXTURE, saved.data_mixture, metadata.data_mixture),)
    return Changes(
        settings=settings,
        allowed=tuple(notes),
        load_mode="exact" if exact else "resharded",
        new_data=any(obstacle.what in (DATA, _DATA_ORDER) for obstacle in obstacles),
        restart=Position(0, sequences_done, {}) if sequences_done else Position(),
    )


def _separate_groups(settings: Mapping[str, Any]) -> str:
    """Return the parameters that the optimizer has groups of their own for, by their settings."""
    of_groups = ("optimizer.embedding_", "optimizer.head_")
    names = (name for name, value in settings.items() if value is not None)
    roles = {name.split(".")[1].split("_")[0] for name in names if name.startswith(of_groups)}
    return " and ".join(sorted(roles)) or "neither embedding nor head"


def _refusal(name: str, obstacles: list[_Obstacle]) -> CheckpointError:
    first, others = obstacles[0], obstacles[1:]
    text = f"{name} was saved with {first.what} {first.saved}; this run has {first.now}."
    if others:
        text += f" Also different: {', '.join(obstacle.what for obstacle in others)}."
    remedy = first.remedy
    keys = dict.fromkeys(key for obstacle in obstacles for key in obstacle.keys)
    if all(obstacle.keys for obstacle in obstacles):
        allowing = " ".join(f"--allow-change {key}" for key in keys)
        remedy += f", or accept the change with {allowing}"
        remedy += _CONSEQUENCES.get(first.keys[0], "")
    return CheckpointError(
        f"{text} To resume it, {remedy}. To start from scratch, use another --run NAME or "
        "--resume none."
    )


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, default=str)


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return the differences of two mappings, in the order of `a`, then `b`."""
    changed = [
        Difference(name, value, b.get(name), only_in=None if name in b else "a")
        for name, value in a.items()
        if name not in b or value != b[name]
    ]
    return changed + [Difference(n, None, v, only_in="b") for n, v in b.items() if n not in a]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointContents:
    """A checkpoint without its tensors."""

    where: str
    manifest: CheckpointManifest
    trainer: dict[str, Any]  # the training state
    settings: dict[str, Any]  # the run file, by dotted name


def read_contents(catalog: Catalog, entry: CatalogEntry) -> CheckpointContents:
    """Read a checkpoint's small files, from the disk if it is complete there, else from the bucket.

    Raises CheckpointError if it is complete in neither, or one of these files is corrupt.
    """
    remote, name, path = catalog.remote, entry.name, catalog.local / entry.name
    if entry.local == WHOLE:
        where, manifest = str(path), read_checkpoint(path).manifest
    elif remote is not None and entry.bucket == WHOLE:
        where, manifest = f"{remote.url}/{name}", remote.manifest(name)
    else:
        raise CheckpointError(f"{name} cannot be read: {'; '.join(entry.notes)}. {CHOOSE_ANOTHER}")

    def verified(file: str) -> dict[str, Any]:
        if entry.local == WHOLE or remote is None:
            content = read_regular(path / file)
        else:
            content = remote.bucket.read(remote.object_name(name, file))
        crc32c, listed = extended_crc32c(0, content), manifest.files[file].crc32c
        if crc32c != listed:
            raise CheckpointError(
                f"{where}/{file} is corrupt: it has CRC-32C {crc32c:08x}, not {listed:08x}. Check "
                f"the other files with: {as_typed('checkpoints verify --deep')} {manifest.step}"
            )
        return parse_mapping(content, where=f"{where}/{file}")

    trainer = checked_trainer(verified("trainer.json"), where=where)
    return CheckpointContents(where, manifest, trainer, settings=dotted(verified("run.yaml")))


def checked_trainer(trainer: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return a training state; raises CheckpointError if a figure in it is not a number."""
    names = ["best_loss", "best_step", "cost_usd"]  # may be null
    odd = [name for name in names if not isinstance(trainer.get(name, ""), int | float | None)]
    if not isinstance(trainer.get("seconds"), int | float):
        odd.insert(0, "seconds")
    if odd:
        raise CheckpointError(
            f"{where}/trainer.json: {odd[0]} is {trainer.get(odd[0], 'missing')!r:.80}, not a "
            f"number. {CHOOSE_ANOTHER}"
        )
    return trainer


def facts_of(checkpoint: CheckpointContents) -> dict[str, Any]:
    """Return the manifest without files and losses, by dotted name, with size, time and cost."""
    manifest = dotted(checkpoint.manifest.model_dump(mode="json", exclude=_NOT_SHOWN))
    spent = {name: checkpoint.trainer[name] for name in ("seconds", "cost_usd", "best_step")}
    return {**manifest, "bytes": checkpoint.manifest.total_bytes, **spent}
