"""Settings that make a run fit which does not, each tried against the plan before it is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from refocused.config.consistency import check_run
from refocused.config.fragment import idle_offloads
from refocused.config.load_run import LoadedRun
from refocused.config.run_config import RunConfig
from refocused.system.errors import ConfigError

RANKS = "RANKS"  # the variable by which `launch/train.sh` starts fewer ranks
Fits = Callable[[LoadedRun, int], bool]


def settings_that_fit(
    loaded: LoadedRun, *, micro: int, ranks: int, fits: Fits, fewer_ranks: bool = False
) -> str | None:
    """Return settings, as they are typed, with which a run fits; None: none of those tried does.

    Tokens a step, model and learning rate stay. What costs least is tried first, then more of it
    together; what turns out not to be needed is left out.

    Args:
        loaded: The run that does not fit.
        micro: Windows of a pass, as given or chosen.
        ranks: Of the run.
        fits: Whether a run fits on so many ranks.
        fewer_ranks: One rank is a way out too.
    """
    taken: list[Mapping[str, Any]] = []

    def succeeds(changes: list[Mapping[str, Any]]) -> bool:
        try:
            return fits(*_changed(loaded, changes, micro=micro, ranks=ranks)[:2])
        except (ConfigError, ValueError):  # these settings do not go together
            return False

    for candidate in _candidates(loaded.config, micro=micro, fewer_ranks=fewer_ranks):
        taken.append(candidate)
        if succeeds(taken):
            break
    else:
        return None
    for one in list(taken):
        rest = [other for other in taken if other is not one]
        if succeeds(rest):
            taken = rest
    return " ".join(_changed(loaded, taken, micro=micro, ranks=ranks)[2])


def _candidates(config: RunConfig, *, micro: int, fewer_ranks: bool) -> Iterator[Mapping[str, Any]]:
    """Yield changes that may save memory, the one that costs least first."""
    if config.checkpoint.in_background:
        yield {"checkpoint.async": False}
    while micro > 1:
        micro = micro // 2 if micro % 2 == 0 else 1
        yield {"batch.micro": micro}
    if config.zero.stage != 3:
        yield {"zero.stage": 3}
    if not config.model.activation_checkpointing:
        yield {"model.activation_checkpointing": True}
    if (config.zero.offload_optimizer, config.zero.offload_parameters) != ("none", "none"):
        yield {"zero.offload_optimizer": "none", "zero.offload_parameters": "none"}
    else:
        yield {"zero.offload_optimizer": "cpu"}
        yield {"zero.offload_optimizer": "cpu", "zero.offload_parameters": "cpu"}
    if fewer_ranks:
        yield {RANKS: 1}


def _changed(
    loaded: LoadedRun, changes: list[Mapping[str, Any]], *, micro: int, ranks: int
) -> tuple[LoadedRun, int, list[str]]:
    """Return a run with changes, its ranks, and what is typed for both."""
    typed = {key: value for change in changes for key, value in change.items()}
    new_ranks = typed.get(RANKS, ranks)
    accumulation = loaded.config.batch.accumulation
    if accumulation is not None:  # a step keeps its windows
        windows = micro * accumulation * ranks
        kept = windows // (typed.get("batch.micro", micro) * new_ranks)
        if kept != accumulation:
            typed["batch.accumulation"] = kept
    values = loaded.config.model_dump(by_alias=True)
    for key, value in typed.items():
        if key != RANKS:
            section, name = key.split(".")
            values[section][name] = value
    config = RunConfig.model_validate(values)
    if check_run(config) or any(idle_offloads(loaded.fragment, zero=config.zero)):
        raise ConfigError("These settings do not go together.")
    words = [f"{key}={str(value).lower()}" for key, value in typed.items()]
    return dataclasses.replace(loaded, config=config), new_ranks, words
