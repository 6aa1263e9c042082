"""Compare a run with the step it resumes: what takes effect, what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable
from typing import Any, Literal

from refocused.checkpoints.resume.comparison import Difference, differences, dotted
from refocused.checkpoints.step.checkpoint_manifest import RunFacts
from refocused.checkpoints.step.step_directory import StepDirectory, parse_mapping, read_mapping
from refocused.system.errors import CheckpointError, ConfigError

MOST_LINES = 12
DATA, MIXTURE, MODEL, DTYPE = "data", "data.mixture", "model.preset", "precision.dtype"
_DATA_ORDER = "data order"
# Which window comes when depends on these, beside the files themselves.
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
_LAYOUT_SETTINGS = (
    "zero.stage",
    "zero.offload_optimizer",
    "zero.offload_parameters",
    "zero.fragment",  # may hold the size of stage 3's groups
)
_ONLY_AT_THE_START = ("precision.initial_scale_power",)  # a step has the scale it has come to
_CONSEQUENCES = {
    MIXTURE: " (every source goes on where it stands, in its new share)",
    MODEL: " (the weights were trained for the other shape)",
    DTYPE: " (the masters are float32 in both)",
    **dict.fromkeys((DATA, *ORDER_SETTINGS), " (a new pass over the data begins)"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """What is done about the differences between a step and the run that resumes it."""

    settings: tuple[Difference, ...]  # settings that differ; all of them take effect
    # what is accepted all the same, in words: what would be refused if it had not been allowed, and
    # data that are compared as the version that saved the step did
    allowed: tuple[str, ...]
    # `exact`: every rank reads its own file back; `resharded`: the states are divided anew, because
    # ranks, stage, precision or offload differ
    way: Literal["exact", "resharded"]
    new_data: bool  # the data, or their order, are others: a pass over them begins

    def lines(self) -> list[str]:
        """Describe the settings that differ, at most `MOST_LINES` of them."""
        lines = [f"{one.name} {_shown(one.a)} -> {_shown(one.b)}" for one in self.settings]
        if len(lines) > MOST_LINES:
            lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more settings"]
        return lines


@dataclasses.dataclass(frozen=True, slots=True)
class _Obstacle:
    """One difference that keeps a step from being resumed as things are."""

    what: str
    saved: object
    now: object
    remedy: str
    keys: tuple[str, ...] = ()  # what allows it, all of them together; none: nothing does

    def is_allowed(self, allowed: Collection[str]) -> bool:
        """Whether all its keys are allowed; `data` allows every change of the data."""
        if self.what == _DATA_ORDER and DATA in allowed:
            return True
        return bool(self.keys) and set(self.keys) <= set(allowed)


def check_allowable(names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is none of `ALLOWABLE`."""
    unknown = [name for name in names if name not in ALLOWABLE]
    if unknown:
        raise ConfigError(
            f"--allow-change {unknown[0]}: this is not refused when it changes, or cannot be "
            f"allowed. There are {', '.join(ALLOWABLE)}."
        )


def changes_since(
    step: StepDirectory, *, facts: RunFacts, world_size: int, allowed: Collection[str]
) -> Changes:
    """Compare a verified step with the run that resumes it on `world_size` ranks.

    Settings that change neither the model nor the order of the data take effect; the others are
    refused with a CheckpointError unless they are allowed, by names among `ALLOWABLE`.
    """
    saved = step.manifest
    now = parse_mapping(facts.run_yaml, where="run.yaml")
    settings = tuple(
        one
        for one in differences(dotted(read_mapping(step.path / "run.yaml")), dotted(now))
        if one.name not in _ONLY_AT_THE_START
        and (one.a, one.b) != (None, None)  # a setting that is new
    )
    names = {one.name for one in settings}
    exact = (
        saved.world_size == world_size
        and saved.zero_stage == facts.zero_stage
        and saved.dtype == facts.dtype
        and not names.intersection(_LAYOUT_SETTINGS)
    ) or saved.zero_stage == facts.zero_stage == 0
    obstacles = _obstacles(step, facts, settings)
    refused = [one for one in obstacles if not one.is_allowed(allowed)]
    if refused:
        raise _refusal(saved.name, refused)
    notes = [f"{one.what} changes here: it was {one.saved} and is {one.now}" for one in obstacles]
    if saved.data_fingerprint == facts.data_fingerprint_by_size:
        notes.append(
            f"{saved.name} was saved by an earlier version, whose fingerprint "
            f"{saved.data_fingerprint[:16]} is of the files' names and sizes; they agree. The "
            f"checkpoints of this run compare content too: {facts.data_fingerprint[:16]}"
        )
    return Changes(
        settings=settings,
        allowed=tuple(notes),
        way="exact" if exact else "resharded",
        new_data=any(one.what in (DATA, _DATA_ORDER) for one in obstacles),
    )


def _obstacles(
    step: StepDirectory, facts: RunFacts, settings: Collection[Difference]
) -> list[_Obstacle]:
    """List what no load can bridge, then what changes the numbers of training."""
    saved, found = step.manifest, []
    shape = _shape_differences(step, facts)
    model_back = "set model.preset back"
    if [one.name for one in shape] == ["model.vocab_size"]:
        model_back = f"set model.vocabulary={shape[0].a}"
    if saved.parameters != facts.parameters:
        found.append(_Obstacle("parameters", saved.parameters, facts.parameters, model_back))
    if (saved.zero_stage == 0) != (facts.zero_stage == 0):
        remedy = f"set zero.stage={saved.zero_stage} (1, 2 and 3 read each other's steps)"
        found.append(_Obstacle("zero.stage", saved.zero_stage, facts.zero_stage, remedy))
    for one in settings:
        if one.name == "optimizer.kind":  # one kind's states are no other's
            kind = one.a or "adamw"
            found.append(_Obstacle(one.name, kind, one.b, f"set {one.name}={kind}"))
    if saved.dtype != facts.dtype:
        keys = () if 0 in (saved.zero_stage, facts.zero_stage) else (DTYPE,)
        remedy = f"set precision.dtype={saved.dtype}"
        found.append(_Obstacle(DTYPE, saved.dtype, facts.dtype, remedy, keys))
    fingerprint = facts.data_fingerprint
    if saved.data_fingerprint not in (fingerprint, facts.data_fingerprint_by_size):
        remedy = "set data.source back"
        found.append(_Obstacle(DATA, saved.data_fingerprint, fingerprint, remedy, (DATA,)))
    if saved.data_order != facts.data_order:
        names = {one.name for one in settings}
        changed = tuple(name for name in ORDER_SETTINGS if name in names) or (DATA,)
        orders = saved.data_order, facts.data_order
        found.append(_Obstacle(_DATA_ORDER, *orders, "set those back", changed))
    if saved.data_mixture != facts.data_mixture:
        mixtures = saved.data_mixture or "none", facts.data_mixture or "none"
        found.append(_Obstacle(MIXTURE, *mixtures, "set the weights back", (MIXTURE,)))
    if saved.parameters == facts.parameters:
        found += [
            _Obstacle(one.name, _shown(one.a), _shown(one.b), model_back, (MODEL,)) for one in shape
        ]
    return found


def _shape_differences(step: StepDirectory, facts: RunFacts) -> list[Difference]:
    ours = parse_mapping(facts.model_json, where="model.json")
    saved, now = (
        dotted({"model": model}) for model in (read_mapping(step.path / "model.json"), ours)
    )
    found = differences(saved, now)  # the initialization is of no use once the weights are there
    return [one for one in found if one.name != "model.initializer_range"]


def _refusal(name: str, obstacles: list[_Obstacle]) -> CheckpointError:
    first, others = obstacles[0], obstacles[1:]
    text = f"{name} was saved with {first.what} {first.saved}; this run has {first.now}."
    if others:
        text += f" So do {', '.join(one.what for one in others)} differ."
    remedy = first.remedy
    keys = dict.fromkeys(key for one in obstacles for key in one.keys)
    if all(one.keys for one in obstacles):
        allowing = " ".join(f"--allow-change {key}" for key in keys)
        remedy += f", or accept what follows from it with {allowing}"
        remedy += _CONSEQUENCES.get(first.keys[0], "")
    return CheckpointError(
        f"{text} To resume it, {remedy}; to start anew, give another --run name or --resume none."
    )


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, default=str)
