"""What a run says differently from the step it resumes: what is refused, and what is not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

from refocused.checkpoints.resume.comparison import Difference, differences
from refocused.checkpoints.resume.step_contents import dotted
from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest, RunFacts
from refocused.checkpoints.step.step_directory import StepDirectory, parse_mapping, read_mapping
from refocused.system.errors import CheckpointError, ConfigError

MOST_LINES = 12
DATA, MIXTURE, MODEL, DTYPE = "data", "data.mixture", "model.preset", "precision.dtype"
# What decides, beside the files themselves, which window comes when.
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
_NOTHING = "not set"


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """What is done about the differences between a step and the run that resumes it.

    Attributes:
        settings: Settings that differ; all of them take effect.
        allowed: What is accepted all the same, in words: what would be refused if it had not been
            allowed, and data that are compared as the version that saved the step did.
        way: `exact`: every rank reads its own file back; `resharded`: the states are divided anew,
            because ranks, stage, precision or offload differ.
        new_data: The data, or their order, are others: a pass over them begins.
    """

    settings: tuple[Difference, ...]
    allowed: tuple[str, ...]
    way: Literal["exact", "resharded"]
    new_data: bool

    def lines(self) -> list[str]:
        """Say each setting that differs, at most `MOST_LINES` of them."""
        lines = [f"{one.name} {_shown(one.a)} -> {_shown(one.b)}" for one in self.settings]
        if len(lines) > MOST_LINES:
            lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more settings"]
        return lines


@dataclasses.dataclass(frozen=True, slots=True)
class _Obstacle:
    """One difference that keeps a step from being resumed as things are.

    Attributes:
        what: What differs.
        saved: What the step says.
        now: What the run says.
        way_out: How to resume without the difference.
        keys: What allows it, all of them together; none: nothing does.
    """

    what: str
    saved: object
    now: object
    way_out: str
    keys: tuple[str, ...] = ()


def check_allowable(names: Iterable[str]) -> None:
    """Refuse changes that nothing refuses, or that cannot be allowed.

    Raises:
        ConfigError: A name is none of `ALLOWABLE`.
    """
    unknown = [name for name in names if name not in ALLOWABLE]
    if unknown:
        raise ConfigError(
            f"--allow-change {unknown[0]}: this is not refused when it changes, or cannot be "
            f"allowed. There are {', '.join(ALLOWABLE)}."
        )


def changes_since(
    step: StepDirectory, *, facts: RunFacts, world_size: int, allowed: Collection[str]
) -> Changes:
    """Compare a verified step with the run that resumes it.

    Settings that change neither the model nor the order of the data take effect; the others are
    refused unless they are allowed.

    Args:
        step: The step.
        facts: What the run would write into its own steps.
        world_size: Ranks of the run.
        allowed: Names among `ALLOWABLE`.

    Raises:
        CheckpointError: Something differs that is not allowed, or that cannot be taken over.
    """
    manifest = step.manifest
    settings = _settings(step, facts)
    names = {one.name for one in settings}
    exact = (
        manifest.world_size == world_size
        and manifest.zero_stage == facts.zero_stage
        and manifest.dtype == facts.dtype
        and not names.intersection(_LAYOUT_SETTINGS)
    ) or manifest.zero_stage == facts.zero_stage == 0
    obstacles = [
        *_impossible(step, facts),
        *_other_optimizer(settings),
        *_refused(manifest, facts, names),
        *_other_model(step, facts),
    ]
    in_the_way = [one for one in obstacles if not _is_allowed(one, allowed)]
    if in_the_way:
        raise _refusal(manifest.name, in_the_way)
    return Changes(
        settings=tuple(settings),
        allowed=(
            *(f"{one.what} changes here: it was {one.saved} and is {one.now}" for one in obstacles),
            *_compared_by_size(manifest, facts),
        ),
        way="exact" if exact else "resharded",
        new_data=any(one.what in (DATA, "data order") for one in obstacles),
    )


def _settings(step: StepDirectory, facts: RunFacts) -> list[Difference]:
    now = parse_mapping(facts.run_yaml, where="run.yaml")
    found = differences(dotted(read_mapping(step.run)), dotted(now))
    told = [one for one in found if one.name not in _ONLY_AT_THE_START]
    return [one for one in told if (one.a, one.b) != (None, None)]  # a setting that is new


def _impossible(step: StepDirectory, facts: RunFacts) -> list[_Obstacle]:
    """List what no way of loading can bridge."""
    manifest, found = step.manifest, []
    if manifest.parameters != facts.parameters:
        way_out = _model_back([one.name for one in _shape_differences(step, facts)], step)
        found.append(_Obstacle("parameters", manifest.parameters, facts.parameters, way_out))
    if (manifest.zero_stage == 0) != (facts.zero_stage == 0):
        found.append(
            _Obstacle(
                "zero.stage",
                manifest.zero_stage,
                facts.zero_stage,
                f"set zero.stage={manifest.zero_stage} (1, 2 and 3 read each other's steps)",
            )
        )
    return found


def _other_optimizer(settings: Sequence[Difference]) -> list[_Obstacle]:
    """Refuse to read one kind of optimizer's states as another's."""
    return [
        _Obstacle(one.name, one.a or "adamw", one.b, f"set {one.name}={one.a or 'adamw'}")
        for one in settings
        if one.name == "optimizer.kind"
    ]


def _refused(
    manifest: CheckpointManifest, facts: RunFacts, settings: Collection[str]
) -> list[_Obstacle]:
    """List what changes the numbers of training."""
    found: list[_Obstacle] = []
    if manifest.dtype != facts.dtype:
        keys: tuple[str, ...] = () if 0 in (manifest.zero_stage, facts.zero_stage) else (DTYPE,)
        found.append(
            _Obstacle(
                DTYPE, manifest.dtype, facts.dtype, f"set precision.dtype={manifest.dtype}", keys
            )
        )
    if manifest.data_fingerprint not in (facts.data_fingerprint, facts.data_fingerprint_by_size):
        found.append(
            _Obstacle(
                DATA,
                manifest.data_fingerprint,
                facts.data_fingerprint,
                "set data.source back",
                (DATA,),
            )
        )
    if manifest.data_order != facts.data_order:
        keys = tuple(name for name in ORDER_SETTINGS if name in settings) or (DATA,)
        found.append(
            _Obstacle("data order", manifest.data_order, facts.data_order, "set those back", keys)
        )
    if manifest.data_mixture != facts.data_mixture:
        found.append(
            _Obstacle(
                MIXTURE,
                manifest.data_mixture or "none",
                facts.data_mixture or "none",
                "set the weights back",
                (MIXTURE,),
            )
        )
    return found


def _compared_by_size(manifest: CheckpointManifest, facts: RunFacts) -> list[str]:
    if manifest.data_fingerprint != facts.data_fingerprint_by_size:
        return []
    return [
        f"{manifest.name} was saved by an earlier version, whose fingerprint "
        f"{manifest.data_fingerprint[:16]} is of the files' names and sizes; they agree. The "
        f"checkpoints of this run compare content too: {facts.data_fingerprint[:16]}"
    ]


def _other_model(step: StepDirectory, facts: RunFacts) -> list[_Obstacle]:
    """List what of the model's shape differs without changing its number of parameters."""
    if step.manifest.parameters != facts.parameters:
        return []  # said already
    found = _shape_differences(step, facts)
    way_out = _model_back([one.name for one in found], step)
    return [_Obstacle(one.name, _shown(one.a), _shown(one.b), way_out, (MODEL,)) for one in found]


def _shape_differences(step: StepDirectory, facts: RunFacts) -> list[Difference]:
    ours = parse_mapping(facts.model_json, where="model.json")
    saved, now = (dotted({"model": model}) for model in (read_mapping(step.model), ours))
    saved.pop("model.initializer_range", None)  # of no use once the weights are there
    now.pop("model.initializer_range", None)
    return list(differences(saved, now))


def _model_back(differing: Sequence[str], step: StepDirectory) -> str:
    """Return the setting that makes the model the checkpoint's again."""
    if differing != ["model.vocab_size"]:
        return "set model.preset back"
    return f"set model.vocabulary={read_mapping(step.model)['vocab_size']}"


def _is_allowed(obstacle: _Obstacle, allowed: Collection[str]) -> bool:
    """Whether all names that stand for it are allowed; `data` allows every change of the data."""
    if obstacle.what == "data order" and DATA in allowed:
        return True
    return bool(obstacle.keys) and set(obstacle.keys) <= set(allowed)


def _refusal(name: str, obstacles: list[_Obstacle]) -> CheckpointError:
    first, others = obstacles[0], obstacles[1:]
    text = f"{name} was saved with {first.what} {first.saved}; this run has {first.now}."
    if others:
        text += f" So do {', '.join(one.what for one in others)} differ."
    way_out = first.way_out
    keys = dict.fromkeys(key for one in obstacles for key in one.keys)
    if all(one.keys for one in obstacles):
        allowing = " ".join(f"--allow-change {key}" for key in keys)
        way_out += f", or accept what follows from it with {allowing}"
        way_out += _CONSEQUENCES.get(first.keys[0], "")
    return CheckpointError(
        f"{text} To resume it, {way_out}; to start anew, give another --run name or --resume none."
    )


_CONSEQUENCES = {
    MIXTURE: " (every source goes on where it stands, in its new share)",
    MODEL: " (the weights were trained for the other shape)",
    DTYPE: " (the masters are float32 in both)",
    **dict.fromkeys((DATA, *ORDER_SETTINGS), " (a new pass over the data begins)"),
}


def _shown(value: Any) -> str:
    return _NOTHING if value is None else json.dumps(value, default=str)
