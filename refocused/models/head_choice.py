"""Choose how the head computes its loss: on GPUs the fastest form that is correct.

Liger's kernel is not a candidate: it synchronizes with the host three times per pass.
"""

import functools
from collections.abc import Callable
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
from refocused.models.timed_trial import fastest_form, why_wrong
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
        head.form = asked
        reasons = world.gather(failure(asked, dtype, world.device, head.terms))
        reason = next(filter(None, reasons), None)
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
        sizes = (tokens, head.in_features, head.out_features)

        def run_of(form: HeadForm) -> Callable[[], list[Tensor]]:
            sample = _sample(*sizes, dtype=dtype, device=world.device)
            return functools.partial(_pass, form, head.terms, *sample, chunk=head.chunk_tokens)

        head.form, why = fastest_form(
            FORMS,
            failure=lambda form: failure(form, dtype, world.device, head.terms),
            run_of=run_of,
            world=world,
        )
    return f"loss {FORMS[head.form]} ({why})"


def failure(
    form: HeadForm, dtype: torch.dtype, device: torch.device, terms: LogitTerms = PLAIN
) -> str | None:
    """Return why a form cannot be used here; None if it can.

    Its loss must be float32, and its error at most twice that of the chunked form.
    """
    hidden, weight, labels = _sample(*TRIED, dtype=dtype, device=device)
    exact, ours = (
        _pass("chunked", terms, *leaves, labels, chunk=TRIED_CHUNK)
        for leaves in ((hidden.double(), weight.double()), (hidden, weight))
    )
    try:
        found = _pass(form, terms, hidden, weight, labels, chunk=TRIED_CHUNK)
    except Exception as raised:  # Triton's compiler and driver raise any type
        return short_reason(raised)
    if found[0].dtype != torch.float32:
        return f"its loss is in {found[0].dtype}"
    return why_wrong(found, ours=ours, exact=exact, smallest_limit=SMALLEST_LIMIT)


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
