"""The loss to expect during a run, from published scaling fits."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic

from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import LoadedRun
from refocused.config.optimization import share_of_peak
from refocused.metrics.history import StepMetrics
from refocused.metrics.jsonl import text
from refocused.system.number_text import count_text, known

EXPECTED_LOSS_FILE = "expected_loss.json"  # in a run's folder
POINTS = 100  # of a curve
# The runs that Besiroglu et al. fit have 57 M to 16.9 B parameters and at least 0.25 B tokens, with
# 32,000 ids. The bands below are checked from 0.5 B tokens on (docs/decisions/cost.md).
PARAMETERS, VOCABULARIES, FEWEST_TOKENS, FIRST_TOKENS = (50e6, 17e9), (30_000, 70_000), 1e9, 5e8
MOST_EPOCHS = 4  # Muennighoff et al. 2023 (arXiv 2305.16264): so often tokens are as good as new
# The rest was measured on 37 published loss curves with known learning rates (same page).
# A run at its peak rate is so far above one that has decayed, in nats; in between, linear.
ANNEALING = 0.06
FITTED_RATIO = 0.1  # last learning rate of the fits' runs, as a share of the peak
# Half of a band, in nats: at the end, and more for each factor e of tokens up to there.
LEVEL_BAND = (0.3, 0.1)  # of the fit, for other text, ids and recipes than the fit's
SHIFTED_BAND = (0.02, 0.15)  # of the end, by a curve through the losses so far
RECENT = 0.9  # losses from this share of the tokens on place the curve
AHEAD = 0.5  # a drawn curve goes on for at most this share of the steps before it

# Tokens so far, ascending, and the expected loss in nats a token.
Curve = list[tuple[int, float]]
_CURVE = pydantic.TypeAdapter(Annotated[Curve, pydantic.Field(min_length=2)])

# E, A, alpha, B and beta of L(N, D) = E + A / N^alpha + B / D^beta, the loss of a run of D tokens
# at its end, with N parameters in all. To the runs that Besiroglu et al. read from Hoffmann's
# figure (5 to 400 tokens a parameter, loss below 4) theirs has errors of 0.013 nats; Hoffmann's is
# 0.045 too high, with 0.021 around that.
FITS = {
    "Besiroglu et al. 2024 (arXiv 2404.10102)": (1.8172, 482.01, 0.3478, 2085.43, 0.3658),
    "Hoffmann et al. 2022 (arXiv 2203.15556)": (1.69, 406.4, 0.34, 410.7, 0.28),
}
FIT = next(iter(FITS))  # of the curves


def fitted_loss(parameters: float, tokens: float, *, fit: str = FIT) -> float:
    """Return the loss at the end of a run by a fit, in nats for each token of the fit's."""
    floor, a, alpha, b, beta = FITS[fit]
    return floor + a / math.pow(parameters, alpha) + b / math.pow(tokens, beta)


def curve_from_record(record: Mapping[str, Any] | None) -> Curve | None:
    """Read a curve back; None: there is none, or it is damaged."""
    try:
        curve = _CURVE.validate_python((record or {}).get("curve"))
    except pydantic.ValidationError:
        return None
    ascends = all(low < high for (low, _), (high, _) in itertools.pairwise([(0, 0.0), *curve]))
    return curve if ascends else None


def loss_at(curve: Curve, tokens: float) -> float | None:
    """Return the expected loss at so many tokens; None: outside of the curve."""
    if not curve[0][0] <= tokens <= curve[-1][0]:
        return None
    last = max(1, bisect.bisect_left(curve, (tokens, -math.inf)))
    (low, before), (high, after) = curve[last - 1], curve[last]
    return before + (after - before) * (tokens - low) / (high - low)


def half_band(curve: Curve, tokens: float, *, band: tuple[float, float] = LEVEL_BAND) -> float:
    """Return half of the band at so many tokens, in nats: of the fit, or of the end from there."""
    return band[0] + band[1] * math.log(max(1.0, curve[-1][0] / tokens))


def expected_end(curve: Curve, steps: Sequence[StepMetrics]) -> tuple[float, float] | None:
    """Return the loss to expect at the end after these steps, and half of its band, in nats.

    The curve is shifted to the mean of the losses logged in the last tenth of the tokens.
    """
    last = (steps[-1].tokens or 0) if steps else 0
    distances = [
        loss - expected
        for step in steps
        if (step.tokens or 0) >= RECENT * last
        and (loss := step.loss_mean or step.loss) is not None
        and (expected := loss_at(curve, step.tokens or 0)) is not None
    ]
    if not (distances and last):
        return None
    shift = statistics.fmean(distances)
    return curve[-1][1] + shift, half_band(curve, last, band=SHIFTED_BAND)


def expected_text(record: Mapping[str, Any] | None, steps: Sequence[StepMetrics]) -> str:
    """Return the loss to expect after these steps and at the end, or why there is none.

    Empty: unknown.
    """
    curve, last = curve_from_record(record), steps[-1] if steps else StepMetrics(0)
    if curve is None:
        return text(record or {}, "reason") or ""
    at = last.tokens or 0
    if (loss := loss_at(curve, at)) is None:
        (at, loss), after = curve[-1], ", the end"
    else:
        is_above = (last.loss_mean or last.loss or 0.0) > loss + half_band(curve, at)
        end = known(
            "; end {:.2f} +- {:.2f} by the losses so far", *(expected_end(curve, steps) or (None,))
        )
        after = " (it is above)" * is_above + end
    half = half_band(curve, at)
    return f"{loss - half:.2f} to {loss + half:.2f} at {count_text(at)} tokens{after}"


def expected_columns(
    record: Mapping[str, Any] | None, steps: Sequence[StepMetrics], *, since: int = 0
) -> dict[str, list[float]]:
    """Return the curve through the losses so far as columns, to draw from step `since` on.

    From the last step on, `loss_low` and `loss_high` are its band, which is that of the end by
    `expected_end` where the curve gets there. Empty: there is no curve.
    """
    curve, drawn = curve_from_record(record), [step for step in steps if step.step >= since]
    if curve is None or not drawn or (at_end := expected_end(curve, steps)) is None:
        return {}
    last, shift, end = drawn[-1], at_end[0] - curve[-1][1], curve[-1][0]
    seen, left = last.tokens or 0, max(0, int(last.total_steps or 0) - last.step)
    reach = min(left, math.ceil(AHEAD * (last.step - drawn[0].step)))
    ahead = sorted({last.step + reach * part // POINTS for part in range(POINTS + 1)})
    places = [(step.step, step.tokens or 0) for step in drawn[: -1 : len(drawn) // POINTS + 1]]
    places += [(to, seen + (end - seen) * (to - last.step) // max(1, left)) for to in ahead]
    rows = []
    for step, tokens in places:
        if (loss := loss_at(curve, tokens)) is not None:
            is_ahead = step >= last.step
            half = half_band([(tokens, loss)], seen, band=SHIFTED_BAND) if is_ahead else 0.0
            rows.append([step, *(round(loss + shift + part, 4) for part in (0.0, -half, half))])
    names = ("step", "loss", "loss_low", "loss_high")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=False))


def expected_curve(
    loaded: LoadedRun, plan: BatchPlan, *, parameters: int, epochs: float = 1.0
) -> Curve | str:
    """Return the curve of a run, or why no published fit holds for it.

    The loss after a step is the fit's at the tokens so far, and more by `ANNEALING` times how much
    of the learning rate is left above that of the fit's runs at their end.
    """
    config, shape = loaded.config, loaded.shape
    steps = config.run.steps or loaded.with_steps(plan).config.run.total_steps
    made = sorted({max(1, steps * part // POINTS) for part in range(1, POINTS + 1)})
    parts = itertools.starmap(plan.sequences_between, itertools.pairwise([0, *made]))
    tokens = [sequences * plan.sequence_length for sequences in itertools.accumulate(parts)]
    if config.model.start_from is not None:
        return "the run continues another model (model.start_from)"
    (fewest, most), (low, high) = PARAMETERS, VOCABULARIES
    is_size = fewest <= parameters <= most and low <= shape.vocabulary <= high
    if not (shape.record.has_attention and is_size and tokens[-1] >= FEWEST_TOKENS):
        return "the fits hold for attention, 50 M to 17 B parameters, 30 k to 70 k ids, 1 B tokens"
    if epochs > MOST_EPOCHS:
        return f"the data repeat {epochs:.1f} times; the fits are of tokens seen once"
    # While the rate rises nothing has decayed yet.
    warmup = config.schedule.warmup_steps
    shares = [share_of_peak(max(step - 1, warmup), steps, config.schedule) for step in made]
    return [
        (seen, fitted_loss(parameters, seen) + ANNEALING * (share - FITTED_RATIO))
        for seen, share in zip(tokens, shares, strict=True)
        if seen >= FIRST_TOKENS
    ]
