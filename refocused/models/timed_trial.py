"""Compare alternative kernels on the run's device: their errors and their times."""

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from refocused.system.errors import short_reason
from refocused.system.world import World

PASSES = 3
Form = TypeVar("Form", bound=str)


def fastest_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the time of the fastest of `PASSES` runs on a GPU, after a warm-up."""
    taken = []
    for _ in range(1 + PASSES):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def fastest_form(
    forms: Iterable[Form],
    *,
    failure: Callable[[Form], str | None],
    run_of: Callable[[Form], Callable[[], Any]],
    world: World,
) -> tuple[Form, str]:
    """Return the form that is fastest on rank 0, of those without `failure` on any rank.

    Collective. Also returns each form's time or failure, in words. If all fail, it is the first.
    """
    reasons = {form: next(filter(None, world.gather(failure(form))), None) for form in forms}

    def seconds(form: Form) -> float | str:
        try:
            return fastest_seconds(run_of(form), world.device)
        except RuntimeError as raised:  # such as out of memory
            return short_reason(raised)

    found = world.on_rank_0(lambda: {form: reasons[form] or seconds(form) for form in reasons})
    times = {form: taken for form, taken in found.items() if isinstance(taken, float)}
    said = [f"{form} {1e3 * taken:.1f} ms" for form, taken in times.items()]
    said += [f"{form} left out: {why}" for form, why in found.items() if form not in times]
    return min(times, key=lambda form: times[form], default=next(iter(found))), "; ".join(said)


def why_wrong(
    found: list[Tensor], *, ours: list[Tensor], exact: list[Tensor], smallest_limit: float
) -> str | None:
    """Return the relative errors of results, in words, if one is too large; None: none is.

    An error from `exact`, computed in float64, may be twice that of `ours`, or `smallest_limit`.
    """

    def errors(results: list[Tensor]) -> list[float]:
        pairs = zip(results, exact, strict=True)
        return [float((one.double() - wanted).norm() / wanted.norm()) for one, wanted in pairs]

    its = errors(found)
    # NaN fails this comparison.
    pairs = zip(its, errors(ours), strict=True)
    right = all(one <= max(smallest_limit, 2 * other) for one, other in pairs)
    said = ", ".join(f"{error:.1e}" for error in its)
    return None if right else f"relative errors of values and gradients are {said}"
