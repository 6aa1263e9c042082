"""The plan of a run for a budget: one Markdown page, written before the money is spent."""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

from refocused.estimate.run_cost import DISK_BYTES_PER_SECOND, Estimate, RunCost, run_cost
from refocused.metrics.expected_loss import (
    ANNEALING,
    FIT,
    FITS,
    FITTED_RATIO,
    LEVEL_BAND,
    SHIFTED_BAND,
    expected_curve,
    fitted_loss,
    half_band,
    loss_at,
)
from refocused.system.errors import ConfigError
from refocused.system.number_text import count_text, duration, size_text

TEMPLATE = Path(__file__).with_suffix(".md")
TENTHS = 10
OPTIMAL_TOKENS = 20  # a parameter (Hoffmann et al. 2022)
FAR = 2.0  # times as many or as few of them get a hint
BYTES_A_TOKEN = 4.5  # of English web text with 32,768 ids (docs/guides/text_to_model.md): assumed


def affordable_steps(estimate: Estimate) -> int:
    """Return the steps that the budget pays for at the expected speed, also beyond the run's.

    Raises:
        ConfigError: There is no price or no budget, the run is made on the CPU, or the budget does
            not pay for one step and its checkpoint.
    """
    budget, price = estimate.budget_usd, estimate.main.per_hour_usd
    if budget is None or price is None:
        raise ConfigError(
            "--plan needs a budget and a price: give --budget USD and --per-hour USD, or set "
            "cost.budget_usd and cost.per_hour_usd."
        )
    if estimate.loaded.config.run.device == "cpu":
        raise ConfigError("--plan needs GPUs, whose speed is estimated; this run has device: cpu.")
    longest = max(1, math.ceil(budget / price * 3600 / estimate.main.step.seconds))
    if steps := _cost(estimate, longest).affordable_steps:
        return steps
    raise ConfigError(
        f"A budget of ${budget:,.2f} does not pay for the start, one step and its checkpoint, "
        f"which cost ${_cost(estimate, 1).cost_usd:,.2f} at ${price:,.2f} an hour."
    )


def _cost(estimate: Estimate, steps: int) -> RunCost:
    main, work = estimate.main, dataclasses.replace(estimate.main.work, steps=steps)
    budget, price = estimate.budget_usd, main.per_hour_usd
    return run_cost(work, main.step, gpus=main.gpus, per_hour_usd=price, budget_usd=budget)


def plan_page(estimate: Estimate, facts: Iterable[tuple[str, str]], *, reach: int) -> str:
    """Return the plan of a run whose budget pays for `reach` steps; `facts` are of its estimate."""
    main, total, price = estimate.main, estimate.parameters.total, estimate.main.per_hour_usd or 0.0
    work, likely = main.work, main.likely
    curve = expected_curve(estimate.loaded, main.plan, parameters=total)
    rows = []
    for tenth in range(1, TENTHS + 1):
        steps = max(1, work.steps * tenth // TENTHS)
        tokens, cost = dataclasses.replace(work, steps=steps).tokens, _cost(estimate, steps)
        losses = "- | -"
        if not isinstance(curve, str) and (loss := loss_at(curve, tokens)) is not None:
            half, bits = half_band(curve, tokens), loss / math.log(2) / BYTES_A_TOKEN
            losses = f"{loss:.2f} ({loss - half:.2f} to {loss + half:.2f}) | {bits:.3f}"
        spent = f"{cost.hours:.1f} | {count_text(tokens)} | {cost.cost_usd:,.2f}"
        rows.append(f"| {tenth} | {spent} | {losses} |")
    most, ratio = dataclasses.replace(work, steps=reach).tokens, work.tokens / total
    best = math.sqrt(work.flops_per_token * most / 6 / OPTIMAL_TOKENS)  # C = 6 N D, D = 20 N
    page, basis, abort = TEMPLATE.read_text(encoding="utf-8").split("=====\n")
    hint = ""
    if isinstance(curve, str):
        basis, abort = f"No loss is given: {curve}.", ""
    else:
        ends = [f"{fitted_loss(total, work.tokens, fit=fit):.2f} by {fit}" for fit in FITS]
        basis = basis.format(
            ends=", ".join(ends),
            fit=FITS[FIT],
            total=total,
            annealing=ANNEALING,
            fitted_ratio=FITTED_RATIO,
            level_band=LEVEL_BAND[0],
            shifted_band=SHIFTED_BAND[0],
            bytes_a_token=BYTES_A_TOKEN,
        ).rstrip()
        hint = (
            f"The fit gives {fitted_loss(total, most):.2f} there, and for the same compute (6 N D) "
            f"{fitted_loss(best, OPTIMAL_TOKENS * best):.2f} to {count_text(best)} parameters on "
            f"{count_text(OPTIMAL_TOKENS * best)} tokens."
        )
    if not 1 / FAR <= ratio / OPTIMAL_TOKENS <= FAR:
        size = "larger" if ratio > OPTIMAL_TOKENS else "smaller"
        hint += f" The {ratio:,.1f} of this plan suit a {size} model for the same dollars."
    parts = (likely.training_seconds, likely.evaluation_seconds, likely.save_seconds)
    return page.format(
        e=estimate,
        costs=main.scenarios,
        facts="\n".join(f"| {name} | {text} |" for name, text in facts),
        parts=[seconds / 3600 * price for seconds in (*parts, likely.start_up_seconds)],
        time=duration(likely.hours * 3600),
        rows="\n".join(rows),
        basis=basis,
        abort=abort,
        disk_rate=size_text(DISK_BYTES_PER_SECOND),
        optimal_tokens=OPTIMAL_TOKENS,
        reach=reach,
        most=count_text(most),
        most_ratio=most / total,
        hint=hint,
    )
