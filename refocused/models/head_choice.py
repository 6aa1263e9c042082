"""Choose how the head computes its loss: on GPUs the fastest form that is correct.

Liger's kernel is not a candidate: it synchronizes with the host three times per pass.
"""

import functools
from typing import Literal

import torch
from torch import Tensor

from refocused.models.head_loss import (
    IGNORED_LABEL,
    PLAIN,
    HeadForm,
    LogitTerms,
    LossHead,
    head_loss,
)
from refocused.models.timed_trial import fastest_seconds
from refocused.system.errors import ConfigError, short_reason
from refocused.system.world import World

FORMS: dict[HeadForm, str] = {
    "chunked": "in chunks",
    "fused": "by torch's fused form",
    "kernel": "by the Triton kernel",
}
TRIED, TRIED_CHUNK = (500, 64, 5000), 64  # tokens, width, vocabulary; tokens per chunk
SMALLEST_LIMIT = 1e-5  # of relative errors


def choose_head(
    head: LossHead,
    asked: HeadForm | Literal["auto"],
    *,
    tokens: int,
    dtype: torch.dtype,
    world: World,
) -> str:
    """Set the form of a head's loss; return which and why, in words. Collective.

    On GPUs `auto` takes the form that is fastest on rank 0 in passes of `tokens` tokens, of those
    that are correct on all ranks. Raises ConfigError on every rank if the requested form fails.
    """
    why = f"model.head={asked}"
    if asked != "auto":
        head.form, reason = asked, _failure_on_any(asked, head.terms, dtype=dtype, world=world)
        if reason is not None:
            raise ConfigError(
                f"model.head is {asked}, but a loss {FORMS[asked]} does not work here: {reason}. "
                "Set model.head=auto."
            )
    elif world.device_kind == "cpu":
        head.form, why = "chunked", f"{why} on a CPU"
    elif torch.are_deterministic_algorithms_enabled():  # timings vary between runs
        head.form, why = "chunked", f"{why} in a deterministic run"
    else:
        head.form, why = _fastest(head, tokens=tokens, dtype=dtype, world=world)
    return f"loss {FORMS[head.form]} ({why})"


def _fastest(
    head: LossHead, *, tokens: int, dtype: torch.dtype, world: World
) -> tuple[HeadForm, str]:
    """Return the fastest form, and a description of each one's time or failure."""
    reasons = {form: _failure_on_any(form, head.terms, dtype=dtype, world=world) for form in FORMS}
    sizes = (tokens, head.in_features, head.out_features)

    def seconds(form: HeadForm) -> float | str:
        try:
            sample = _sample(*sizes, dtype=dtype, device=world.device)
            run = functools.partial(_pass, form, head.terms, *sample, chunk=head.chunk_tokens)
            return fastest_seconds(run, world.device)
        except RuntimeError as raised:  # such as out of memory
            return short_reason(raised)

    found = world.on_rank_0(lambda: {form: reasons[form] or seconds(form) for form in FORMS})
    times = {form: taken for form, taken in found.items() if isinstance(taken, float)}
    said = [f"{form} {1e3 * taken:.1f} ms" for form, taken in times.items()]
    said += [f"{form} left out: {why}" for form, why in found.items() if form not in times]
    return min(times, key=lambda form: times[form], default="chunked"), "; ".join(said)


def failure(
    form: HeadForm, dtype: torch.dtype, device: torch.device, terms: LogitTerms = PLAIN
) -> str | None:
    """Return why a form cannot be used here; None if it can.

    Its loss must be float32, and its error at most twice that of the chunked form.
    """
    hidden, weight, labels = _sample(*TRIED, dtype=dtype, device=device)
    exact = _pass("chunked", terms, hidden.double(), weight.double(), labels, chunk=TRIED_CHUNK)

    def errors(found: list[Tensor]) -> list[float]:
        pairs = zip(found, exact, strict=True)
        return [float((one.double() - wanted).norm() / wanted.norm()) for one, wanted in pairs]

    try:
        found = _pass(form, terms, hidden, weight, labels, chunk=TRIED_CHUNK)
        its = errors(found)
    except Exception as raised:  # Triton's compiler and driver raise any type
        return short_reason(raised)
    if found[0].dtype != torch.float32:
        return f"its loss is in {found[0].dtype}"
    ours = errors(_pass("chunked", terms, hidden, weight, labels, chunk=TRIED_CHUNK))
    # NaN fails this comparison.
    right = all(one <= max(SMALLEST_LIMIT, 2 * other) for one, other in zip(its, ours, strict=True))
    said = ", ".join(f"{error:.1e}" for error in its)
    return None if right else f"relative errors of loss and gradients are {said}"


def _failure_on_any(
    form: HeadForm, terms: LogitTerms, *, dtype: torch.dtype, world: World
) -> str | None:
    return next(filter(None, world.gather(failure(form, dtype, world.device, terms))), None)


def _sample(
    tokens: int, width: int, rows: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a weight, and labels, some of them ignored."""
    draw = torch.Generator(device).manual_seed(2)
    hidden, weight = (
        torch.randn(size, width, generator=draw, device=device).mul_(0.5).to(dtype)
        for size in (tokens, rows)
    )
    labels = torch.randint(rows, (tokens,), generator=draw, device=device)
    labels[::8] = IGNORED_LABEL
    return hidden, weight, labels


def _pass(
    form: HeadForm, terms: LogitTerms, hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int
) -> list[Tensor]:
    """Return the loss and both gradients."""
    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    loss = head_loss(form, leaves[0], leaves[1], labels, chunk=chunk, terms=terms)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]
