"""What `estimate_cost` prints for a person."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from refocused.commands.output import count_text, size_text
from refocused.metrics.step_metrics import duration

if TYPE_CHECKING:
    from refocused.commands.run_estimate import Estimate, OnGpus
    from refocused.commands.run_measured import Measured


def estimate_lines(found: Estimate) -> list[str]:
    """Return what is to be said before a run begins."""
    lines = [f"{name:<10} {value}" for name, value in _facts(found)]
    lines += ["", *_step_table(found.main), "", *_scenario_table(found.main)]
    if found.budget_usd is not None:
        lines += ["", *_budget_lines(found)]
    if found.sweep:
        lines += ["", *_sweep_table(found.sweep)]
    if found.offers:
        lines += ["", *_offer_table(found)]
    return lines


def _facts(found: Estimate) -> Iterable[tuple[str, str]]:
    work, shape, count = found.work, found.loaded.shape, found.parameters
    plan, choice, storage = found.main.plan, found.main.choice, found.storage
    assert plan is not None and choice is not None
    yield (
        "run",
        f"{found.loaded.config.run.name}: {work.steps:,} steps of {work.step_tokens:,} tokens = "
        f"{count_text(work.tokens)} tokens, {work.tokens / count.total:,.1f} a parameter",
    )
    yield (
        "model",
        f"{shape.family} {shape.layers} x {shape.width}, {count.total:,} parameters "
        f"({count.without_embeddings / 1e6:,.1f} M without embeddings)",
    )
    yield (
        "compute",
        f"{work.flops_per_token / 1e9:.2f} GFLOP a token, "
        f"{work.flops_per_token * work.tokens:.2e} FLOP in all",
    )
    yield (
        "machine",
        f"{found.main.gpus} x {found.gpu.name}, {found.gpu.bf16_flops / 1e12:.1f} TFLOP/s each "
        f"(dense bf16); {plan.micro} x {plan.sequence_length} x {plan.accumulation} accumulation",
    )
    yield "memory", _memory_text(found)
    yield (
        "saves",
        f"{work.saves:,} of {size_text(storage.checkpoint)}: {size_text(storage.disk)} of disk"
        + (
            f", {size_text(storage.mirror)} in the mirror (${found.bucket_month_usd:,.2f} a "
            f"month), {size_text(storage.upload_per_second)}/s to keep up"
            if storage.mirror
            else "; no mirror"
        ),
    )
    yield "evaluation", _evaluation_text(found)
    yield (
        "data",
        f"up to {size_text(storage.data)} of tokens, {size_text(storage.data_per_second)}/s; out "
        f"of the bucket to another provider up to ${found.data_out_usd:,.2f}",
    )
    yield "prices", _prices_text(found)


def _evaluation_text(found: Estimate) -> str:
    work, config = found.work, found.loaded.config.evaluation
    parts = [f"{work.validations:,} x {count_text(work.validation_tokens)} tokens of validation"]
    if found.tasks.counted:
        tasks = ", ".join(f"{task.name} {task.items:,} items" for task in found.tasks.counted)
        tokens = count_text(int(float(f"{work.task_tokens:.3g}")))
        parts.append(f"{work.task_rounds:,} x tasks ({tasks}; about {tokens} tokens)")
    if work.sample is not None:
        parts.append(f"{work.samples:,} x a sample of {config.sample_tokens:,} tokens")
    if found.tasks.missing:
        parts.append(f"LEFT OUT, as the file is not here: {', '.join(found.tasks.missing)}")
    return "; ".join(parts)


def _prices_text(found: Estimate) -> str:
    bucket = found.prices.bucket
    days = sorted(offer.price.looked_up for offer in found.offers)
    machines = f"no machine with {found.gpu.name}"
    if days:
        when = f"{days[0]}" if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
        machines = f"machines below looked up {when}"
    return (
        f"TO BE CHECKED, from config/prices.yaml: {bucket.provider} looked up {bucket.looked_up}, "
        f"{machines}"
    )


def _memory_text(found: Estimate) -> str:
    choice, gpu = found.main.choice, found.gpu
    assert choice is not None
    memory, room = choice.memory, gpu.memory_gib * 2**30
    taken = memory.states + memory.gathered if memory.peak is None else memory.peak
    what = "at the peak" if memory.peak is not None else "for the states alone"
    verdict = "fits" if found.main.fits else "does NOT fit"
    return (
        f"{taken / 1e9:.1f} GB of {room / 1e9:.1f} GB a GPU {what}, ZeRO-{choice.zero.stage}: "
        f"{verdict}"
    )


def _step_table(on: OnGpus) -> list[str]:
    """Return what a step is made of, by the roofline that the rest of the estimate rests on."""
    assert on.step is not None
    parts = {**on.step.parts, "a step": on.step.seconds}
    rows = [
        ("ms", *(f"{1000 * seconds:,.1f}" for seconds in parts.values())),
        ("share", *(f"{seconds / on.step.seconds:.1%}" for seconds in parts.values())),
    ]
    note = "expected from data sheets and assumed shares of their peaks, NOT measured: MFU "
    return [*_table(("step", *parts), rows, left=(0,)), f"{note}{on.step.mfu_fraction:.1%}"]


def _scenario_table(on: OnGpus) -> list[str]:
    head = ("MFU", "tokens/s", "step", "steps/h", "training", "eval", "saves", "total", "cost")
    rows = [
        (
            f"{one.mfu_fraction:.1%}",
            f"{one.cost.tokens_per_second:,.0f}",
            f"{one.cost.step_seconds:.3g} s",
            f"{3600 / one.cost.step_seconds:,.0f}",
            duration(one.cost.training_seconds),
            duration(one.cost.evaluation_seconds),
            duration(one.cost.save_seconds),
            duration(one.cost.hours * 3600),
            _cost_text(one.cost.cost_usd, one.cost.usd_per_million_tokens),
        )
        for one in on.scenarios
    ]
    price = (
        "no price: give --per-hour, or see the offers below"
        if on.per_hour_usd is None
        else f"at ${on.per_hour_usd:,.2f} an hour"
    )
    assumed = "saves at 2 GB/s of disk, start-up of 3 min: assumed"
    paces = "0.75, 1 and 1.25 times the expected speed"
    return [*_table(head, rows), f"{price}; {paces}; {assumed}"]


def _budget_lines(found: Estimate) -> list[str]:
    lines = []
    for one in found.main.scenarios:
        reach, cost = one.affordable_steps, one.cost.cost_usd
        if reach is None or cost is None or found.budget_usd is None:
            return [f"budget ${found.budget_usd:,.2f}: give --per-hour to see how far it reaches"]
        answer = f"all steps, ${found.budget_usd - cost:,.2f} are left"
        if reach < found.work.steps:
            answer = (
                f"step {reach:,} of {found.work.steps:,} ({reach / found.work.steps:.1%}), "
                f"{count_text(reach * found.work.step_tokens)} tokens"
            )
        lines.append(f"budget ${found.budget_usd:,.2f} at {one.mfu_fraction:.1%} MFU: {answer}")
    if any(one.affordable_steps != found.work.steps for one in found.main.scenarios):
        lines.append("A run that is to end there wants run.steps set to it: the schedule follows.")
    return lines


def _sweep_table(sweep: Sequence[OnGpus]) -> list[str]:
    rows = []
    for on in sweep:
        if on.likely is None or on.plan is None:
            rows.append((str(on.gpus), "-", "-", "-", "-", "-", (on.refused or "").split(". ")[0]))
            continue
        cost = on.likely.cost
        rows.append(
            (
                str(on.gpus),
                f"{on.plan.tokens:,}",
                f"{cost.step_seconds:.3g} s",
                duration(cost.hours * 3600),
                "-" if on.per_hour_usd is None else f"${on.per_hour_usd:,.2f}",
                "-" if cost.cost_usd is None else f"${cost.cost_usd:,.2f}",
                "" if on.fits else "does NOT fit into the GPUs' memory",
            )
        )
    head = ("GPUs", "tokens/step", "step", "total", "an hour", "cost", "")
    return [*_table(head, rows), "at the expected speed of each, and one price a GPU"]


def _offer_table(found: Estimate) -> list[str]:
    rows = [
        (
            f"{offer.price.provider} {offer.price.machine}",
            f"${offer.per_hour_usd:,.2f}",
            f"${offer.cost_usd:,.2f}",
            str(offer.price.looked_up),
            offer.price.source,
        )
        for offer in found.offers
    ]
    head = ("provider", "an hour", "the run", "looked up", "source")
    return [
        *_table(head, rows, left=(0, 3, 4)),
        "TO BE CHECKED on the pages named: on demand, without disks and taxes; not every one is "
        "for so many GPUs in one machine.",
    ]


def measured_lines(found: Measured) -> list[str]:
    """Return what is to be said of a run that trains or has trained."""
    return [f"{name:<10} {value}" for name, value in _measured_facts(found)]


def _measured_facts(found: Measured) -> Iterable[tuple[str, str]]:
    yield (
        "run",
        f"{found.name}: step {found.step:,} of {found.total_steps:,}, "
        f"{count_text(found.tokens)} tokens, {found.status}",
    )
    yield (
        "so far",
        f"{duration(found.seconds_trained)} in {found.sessions} session"
        f"{'' if found.sessions == 1 else 's'}, {_spent_text(found)}",
    )
    if found.time_line:
        yield "time", found.time_line
    if found.step_seconds is not None:
        parts = [f"{found.step_seconds:.3g} s a step"]
        if found.tokens_per_second is not None:
            parts.append(f"{found.tokens_per_second:,.0f} tokens/s")
        if found.validation_seconds is not None:
            parts.append(f"{duration(found.validation_seconds)} a validation")
        if found.save_seconds is not None:
            parts.append(f"{found.save_seconds:.2g} s a save")
        yield "measured", ", ".join(parts) + " (means)"
    if found.seconds_left is not None and found.seconds_left > 0:
        ends = datetime.datetime.fromtimestamp(found.ends, datetime.UTC) if found.ends else None
        yield (
            "left",
            f"{duration(found.seconds_left)}"
            + ("" if found.cost_left_usd is None else f", ${found.cost_left_usd:,.2f}")
            + (f", ends {ends:%a %d %b %H:%M} UTC" if ends else "")
            + _resume_text(found.resumes_from),
        )
        if found.total_usd is not None:
            yield "in all", f"${found.total_usd:,.2f}"
    if found.budget_usd is not None:
        yield "budget", f"${found.budget_usd:,.2f}: {_budget_text(found, found.budget_usd)}"


def _resume_text(step: int | None) -> str:
    if step is None:
        return ""
    return f" if it goes on now from {f'checkpoint {step:,}' if step else 'the start'}"


def _spent_text(found: Measured) -> str:
    if found.cost_usd is None:
        return "price unknown: name it by --per-hour"
    each = found.usd_per_million_tokens
    return f"${found.cost_usd:,.2f}" + ("" if each is None else f", ${each:,.4f} a million tokens")


def _budget_text(found: Measured, budget_usd: float) -> str:
    if found.cost_usd is not None and found.cost_usd > budget_usd:
        return f"spent, and ${found.cost_usd - budget_usd:,.2f} more than that"
    if found.budget_step is None:
        return "how far it reaches is seen with --per-hour and after the first steps"
    if found.budget_step >= found.total_steps:
        return "enough"
    return f"ends at step {found.budget_step:,}"


def _cost_text(cost_usd: float | None, per_million_usd: float | None) -> str:
    if cost_usd is None or per_million_usd is None:
        return "-"
    return f"${cost_usd:,.2f} (${per_million_usd:.4f}/M tokens)"


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = ()
) -> list[str]:
    """Return rows below a head, numbers on the right of their columns."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column in left or not head[column] else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
