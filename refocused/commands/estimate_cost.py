"""`estimate_cost`: the hours and dollars of a run, estimated or measured."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Once, Parser, add_json, add_overrides
from refocused.commands.output import count, positive, print_result, table
from refocused.system.errors import ConfigError, ExitCode, ShardError, counted, local_path
from refocused.system.logs import print_message
from refocused.system.number_text import count_text, size_text

if TYPE_CHECKING:
    from refocused.config.run_config import RunConfig
    from refocused.estimate.run_cost import Estimate, OnGpus, TaskWork

GPUS, GPU = 8, "H100 SXM"
# Assumed for every tokenizer but `bytes`; GPT-2 has 4.5 on HellaSwag.
BYTES_A_TOKEN = 4


def run_estimate_cost(parser: Parser) -> int:
    """Estimate or measure a run, and print the result."""
    parser.examples = (
        "--config llama_1b_8xh100 --gpus 8 --per-hour 24",
        "--config gpt2_124m --sweep gpus=1,2,4,8",
        "--config llama_1b_8xh100 --per-hour 24 --budget 1000 --plan plan.md",
        "--measured demo",
    )
    add_overrides(parser)
    add = parser.group("run")
    add("--config FILE", "run file, or the name of one in config/runs", action=Once)
    add("--measured RUN", "report what this run (folder or name) takes, instead of an estimate")
    add = parser.group("machine and price")
    add("--gpus N", f"number of GPUs (default: {GPUS})", type=count)
    add("--gpu NAME", f"kind of GPU (default: {GPU})")
    add("--sweep gpus=1,2,4,8", "compare the run on these numbers of GPUs, by ZeRO stage")
    add("--per-hour USD", "price of the machine (default: cost.per_hour_usd)", type=positive)
    add("--budget USD", "print how far it reaches (default: cost.budget_usd)", type=positive)
    plan = "write a page for the budget: what it buys, the loss to expect, when to abort"
    parser.group("output")("--plan FILE", plan, type=Path)
    add_json(parser)
    arguments = parser.read()
    if (arguments.config is None) == (arguments.measured is None):
        raise ConfigError("Name either --config FILE or --measured RUN.")
    if arguments.plan is not None:
        parser.refuse(arguments, "has no effect with --plan", "json", "sweep")
    if arguments.measured is not None:
        from refocused.commands.run_measured import measure
        from refocused.commands.run_selection import find_run

        parser.refuse(arguments, "has no effect with --measured", "plan")
        if arguments.overrides or arguments.sweep or arguments.gpus or arguments.gpu:
            raise ConfigError(
                "--measured reports a run as it is. Leave out settings, --gpus, --gpu and --sweep."
            )
        measured = measure(
            find_run(arguments.measured, option="--measured"),
            per_hour_usd=arguments.per_hour,
            budget_usd=arguments.budget,
            now=time.time(),
        )
        lines = [f"{name:<10} {value}" for name, value in measured.facts()]
        print_result(measured.as_record(), lines, as_json=arguments.json)
        return ExitCode.OK
    swept = arguments.sweep
    if swept is not None and not re.fullmatch("gpus=[1-9][0-9]*(,[1-9][0-9]*)*", swept):
        raise ConfigError(f"--sweep {swept}: expected numbers of GPUs, such as gpus=1,2,4,8.")
    estimate_with = functools.partial(
        estimate_of,
        arguments.config,
        gpus=arguments.gpus or GPUS,
        gpu=arguments.gpu or GPU,
        per_hour_usd=arguments.per_hour,
        budget_usd=arguments.budget,
        sweep=[int(number) for number in re.findall("[0-9]+", swept or "")],
    )
    estimate, fix = estimate_with(arguments.overrides)
    if arguments.plan is not None and fix is None:
        from refocused.bucket.partial_files import disk_errors
        from refocused.estimate.plan_page import affordable_steps, plan_page
        from refocused.system.atomic_files import replace_file

        steps = affordable_steps(estimate)
        if steps < estimate.main.work.steps:
            most = dataclasses.replace(estimate.main.work, steps=steps)
            in_tokens = estimate.loaded.config.run.tokens is not None
            changed = f"run.tokens={most.tokens}" if in_tokens else f"run.steps={steps}"
            planned = f"{estimate.main.work.steps:,}"
            print_message("warning", f"The budget ends before step {planned}. Planned: {changed}")
            others = [one for one in arguments.overrides if not one.startswith("run.epochs=")]
            estimate, fix = estimate_with([*others, changed])
        facts = list(_facts(estimate))[:-1]  # the prices of machines are not on the page
        page = plan_page(estimate, facts, reach=steps)
        with disk_errors(arguments.plan):
            arguments.plan.parent.mkdir(parents=True, exist_ok=True)
            replace_file(arguments.plan, page.encode())
        print(arguments.plan)
        return ExitCode.OK
    lines = [*_lines(estimate), *([] if fix is None else ["", fix])]
    print_result({**estimate.as_record(), "fix": fix}, lines, as_json=arguments.json)
    return ExitCode.OK if fix is None else ExitCode.CHECK_FAILED


def estimate_of(
    config: str | Path,
    overrides: Sequence[str],
    *,
    gpus: int,
    gpu: str,
    per_hour_usd: float | None,
    budget_usd: float | None,
    sweep: Sequence[int] = (),
) -> tuple[Estimate, str | None]:
    """Return the estimate of a run, and what makes it fit; None: it fits.

    Price and budget are the run file's unless they are given.
    """
    from refocused.bucket.open_bucket import open_bucket
    from refocused.config.load_run import load_run
    from refocused.config.prices import read_prices
    from refocused.data.manifest.run_manifest import describe_run
    from refocused.data.manifest.vocabulary import decide_vocabulary
    from refocused.data.order.sources import tokens_of_epochs
    from refocused.doctor.run_fits import fitting_on_gpus
    from refocused.estimate.run_cost import estimate

    loaded = load_run(config, overrides)
    try:
        loaded = decide_vocabulary(loaded)
    except ShardError as error:
        known = f"{loaded.shape.vocabulary:,} token ids of {loaded.config.model.preset}"
        print_message("warning", f"{error} Estimating with the {known}.")
    given, data = loaded.config, loaded.config.data
    loaded = loaded.with_tokens(
        lambda: tokens_of_epochs(given, describe_run({"": open_bucket(data.address)}, data))
    )
    run = loaded.config
    tasks, missing = _tasks_work(run)
    prompts = run.evaluation.sample_prompts
    expected = estimate(
        loaded,
        gpus=gpus,
        gpu=gpu,
        per_hour_usd=per_hour_usd or run.cost.per_hour_usd,
        budget_usd=budget_usd or run.cost.budget_usd,
        sweep=sweep,
        prices=read_prices(),
        tasks=tasks,
        missing_tasks=missing,
        prompt_tokens=max((_tokens(prompt, run) for prompt in prompts), default=0),
    )
    on, memory_bytes = expected.main, expected.gpu.memory_gib * 2**30
    if on.fits:
        return expected, None
    fix = fitting_on_gpus(expected.loaded, on.choice, ranks=on.gpus, memory_bytes=memory_bytes)
    return expected, f"A step does not fit into a GPU's memory. {fix}"


def _tasks_work(config: RunConfig) -> tuple[list[TaskWork], list[str]]:
    """Count the tokens of a run's tasks without a tokenizer, contexts cut to the sequence.

    Also returns the files that are missing.
    """
    from refocused.evaluate.tasks import CORE, find_tasks, read_questions

    requests, limit = config.evaluation.tasks, config.evaluation.task_items
    missing = [name for name in requests if not local_path(name.rpartition("=")[2]).exists()]
    counted = []
    for task in find_tasks([name for name in requests if name not in missing], data=None):
        if task.form == CORE:
            from refocused.evaluate.core import read_bundle  # with torch, which takes a second

            bundle = read_bundle(task.file, limit=limit)
            items = [prompts for each in bundle for prompts in each.scored_prompts()]
        else:
            questions = read_questions(task, limit=limit)
            items = [[f"{item.context} {end}" for end in item.endings] for item in questions]
        lengths = (_tokens(text, config) for texts in items for text in texts)
        tokens = sum(min(config.model.sequence_length, length) for length in lengths)
        counted.append((task.name, len(items), tokens))
    return counted, missing


def _tokens(text: str, config: RunConfig) -> int:
    each = 1 if config.data.tokenizer == "bytes" else BYTES_A_TOKEN
    return math.ceil(len(text.encode()) / each)


def _lines(estimate: Estimate) -> Iterable[str]:
    for name, value in _facts(estimate):
        yield f"{name:<10} {value}"
    # The parts of a step by the roofline model, on which the estimate rests.
    step = estimate.main.step
    parts = {**step.parts, "a step": step.seconds}
    shares = [
        ["ms", *(f"{1000 * seconds:,.1f}" for seconds in parts.values())],
        ["share", *(f"{seconds / step.seconds:.1%}" for seconds in parts.values())],
    ]
    note = "expected from data sheets and assumed shares of their peaks, NOT measured: MFU "
    yield from ("", *table(shares, "step", *parts, numbers=True), f"{note}{step.mfu_fraction:.1%}")
    yield from ("", *_scenario_table(estimate.main))
    if estimate.budget_usd is not None:
        yield from ("", *_budget_lines(estimate, estimate.budget_usd))
    if estimate.sweep:
        yield from ("", *_sweep_table(estimate.sweep))
    if estimate.offers:
        rows = []
        for price, usd in estimate.offers_usd():
            costs = [f"${price.for_gpus(estimate.main.gpus):,.2f}", f"${usd:,.2f}"]
            name = f"{price.provider} {price.machine}"
            rows.append([name, *costs, str(price.looked_up), price.source])
        yield from ("", *table(rows, "provider", "an hour", "the run", "looked up", "source"))
        note = "TO BE CHECKED on these pages: on demand, without disks and taxes; some need several"
        yield f"{note} machines for so many GPUs."


def _facts(estimate: Estimate) -> Iterable[tuple[str, str]]:
    main, shape, count = estimate.main, estimate.loaded.shape, estimate.parameters
    work, plan, choice = main.work, main.plan, main.choice
    storage, gpu = estimate.storage, estimate.gpu
    steps = f"{counted(work.steps, 'step')} of {plan.tokens:,} tokens = {count_text(work.tokens)}"
    a_parameter = f"{work.tokens / count.total:,.1f} a parameter"
    yield "run", f"{estimate.loaded.config.run.name}: {steps} tokens, {a_parameter}"
    blocks = f"{count.without_embeddings / 1e6:,.1f} M without embeddings"
    size = f"{shape.layers} x {shape.width}, {count.total:,} parameters ({blocks})"
    yield "model", f"{shape.family} {size}"
    flops = f"{work.flops_per_token / 1e9:.2f} GFLOP a token"
    yield "compute", f"{flops}, {work.flops_per_token * work.tokens:.2e} FLOP in all"
    peak = f"{gpu.bf16_flops / 1e12:.1f} TFLOP/s each (dense bf16)"
    batch = f"{plan.text} accumulation"
    yield "machine", f"{estimate.main.gpus} x {gpu.name}, {peak}; {batch}"
    memory = f"{choice.memory.peak / 1e9:.1f} GB of {gpu.memory_gib * 2**30 / 1e9:.1f} GB a GPU"
    fits = "fits" if estimate.main.fits else "does NOT fit"
    yield "memory", f"{memory} at the peak, ZeRO-{choice.zero.stage}: {fits}"
    mirror = "; no mirror"
    if storage.mirror:
        mirror = (
            f", {size_text(storage.mirror)} in the mirror (${estimate.bucket_month_usd:,.2f} a "
        )
        mirror += f"month), {size_text(storage.upload_per_second)}/s to keep up"
    disk = f"{size_text(storage.checkpoint)}: {size_text(storage.disk)} of disk"
    yield "saves", f"{work.count('save'):,} of {disk}{mirror}"
    tokens = count_text(work.validation_tokens)
    parts = [f"{work.count('validation'):,} x {tokens} tokens of validation"]
    if estimate.tasks:
        tasks = ", ".join(f"{name} {counted(items, 'item')}" for name, items, _ in estimate.tasks)
        tokens = count_text(int(float(f"{work.task_tokens:.3g}")))
        parts.append(f"{work.count('tasks'):,} x tasks ({tasks}; about {tokens} tokens)")
    if samples := work.count("sample"):
        tokens = f"{work.config.evaluation.sample_tokens:,}"
        parts.append(f"{samples:,} x a sample of {tokens} tokens")
    if estimate.missing_tasks:
        parts.append(f"WITHOUT missing files: {', '.join(estimate.missing_tasks)}")
    yield "evaluation", "; ".join(parts)
    data = f"up to {size_text(storage.data)} of tokens, {size_text(storage.data_per_second)}/s"
    out = f"out of the bucket to another provider up to ${estimate.data_out_usd:,.2f}"
    yield "data", f"{data}; {out}"
    bucket, days = estimate.prices.bucket, sorted(offer.looked_up for offer in estimate.offers)
    machines = f"no machine with {gpu.name}"
    if days:
        when = f"{days[0]}" if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
        machines = f"machines below looked up {when}"
    looked_up = f"{bucket.provider} looked up {bucket.looked_up}, {machines}"
    yield "prices", f"TO BE CHECKED, from config/prices.yaml: {looked_up}"


def _scenario_table(on: OnGpus) -> list[str]:
    from refocused.system.number_text import duration

    def price(usd: float | None, per_million_usd: float | None) -> str:
        known = usd is not None and per_million_usd is not None
        return f"${usd:,.2f} (${per_million_usd:.4f}/M tokens)" if known else "-"

    head = ("MFU", "tokens/s", "step", "steps/h", "training", "eval", "saves", "total", "cost")
    rows = [
        [
            f"{scenario.mfu_fraction:.1%}",
            f"{scenario.tokens_per_second:,.0f}",
            f"{scenario.step_seconds:.3g} s",
            f"{3600 / scenario.step_seconds:,.0f}",
            duration(scenario.training_seconds),
            duration(scenario.evaluation_seconds),
            duration(scenario.save_seconds),
            duration(scenario.hours * 3600),
            price(scenario.cost_usd, scenario.usd_per_million_tokens),
        ]
        for scenario in on.scenarios
    ]
    paid = "no price: give --per-hour, or see the offers below"
    if on.per_hour_usd is not None:
        paid = f"at ${on.per_hour_usd:,.2f} an hour"
    assumed = "saves at 2 GB/s of disk, start-up of 3 min: assumed"
    paces = "0.75, 1 and 1.25 times the expected speed"
    return [*table(rows, *head, numbers=True), f"{paid}; {paces}; {assumed}"]


def _budget_lines(estimate: Estimate, budget_usd: float) -> list[str]:
    lines, work = [], estimate.main.work
    for scenario in estimate.main.scenarios:
        reach, cost = scenario.affordable_steps, scenario.cost_usd
        if reach is None or cost is None:
            return [f"budget ${budget_usd:,.2f}: give --per-hour to see how far it reaches"]
        answer = f"all steps, ${budget_usd - cost:,.2f} are left"
        if reach < work.steps:
            tokens = count_text(reach * work.plan.tokens)
            answer = f"step {reach:,} of {work.steps:,} ({reach / work.steps:.1%}), {tokens} tokens"
        lines.append(f"budget ${budget_usd:,.2f} at {scenario.mfu_fraction:.1%} MFU: {answer}")
    if any(scenario.affordable_steps != work.steps for scenario in estimate.main.scenarios):
        lines.append("To end a run there, set run.steps: the schedule follows.")
    return lines


def _sweep_table(sweep: Mapping[int, OnGpus | str]) -> list[str]:
    rows = []
    for gpus, on in sweep.items():
        if isinstance(on, str):
            rows.append([str(gpus), *"---------", on.split(". ")[0]])
            continue
        others = [choice for choice in on.by_zero if choice.choice.zero != on.choice.zero]
        rows += [_sweep_row(choice, on) for choice in sorted([on, *others], key=_zero_name)]
    head = ("GPUs", "nodes", "ZeRO", "tokens/step", "inside a node", "between nodes", "memory")
    notes = (
        "each at its expected speed, with the same price per GPU; * as the run has it",
        "inside, between: what a GPU sends in a step and its time, without latency and overlap; "
        "nodes of 8 GPUs with a 400 Gbit/s card each: assumed",
    )
    return [*table(rows, *head, "step", "total", "cost", "", numbers=True), *notes]


def _zero_name(on: OnGpus) -> str:
    zero = on.choice.zero
    offloads = zero.offload_parameters != "none" or zero.offload_optimizer != "none"
    return f"{zero.stage}{' offload' * offloads}{' hpZ' * (zero.partition == 'node')}"


def _sweep_row(on: OnGpus, of: OnGpus) -> list[str]:
    from refocused.estimate.step_time import GPUS_A_MACHINE
    from refocused.system.number_text import duration

    cost, sent, below = on.likely, on.step.traffic, of.hpz_pays_below
    assert sent is not None  # of an expected step
    notes = [] if on.fits else ["does NOT fit"]
    if on.choice.zero.partition == "node" and below is not None:
        rate = f"below {8 * below / 1e9:.3g} Gbit/s a GPU"
        notes += [f"pays {rate}" if below else "does not pay"]
    links = (sent.inside_bytes, sent.inside_seconds), (sent.between_bytes, sent.between_seconds)
    return [
        str(on.gpus),
        str(-(-on.gpus // GPUS_A_MACHINE)),
        f"{'* ' * (on is of)}{_zero_name(on)}",
        f"{on.plan.tokens:,}",
        *(f"{size / 1e9:.3g} GB, {seconds:.3g} s" if size else "-" for size, seconds in links),
        f"{on.choice.memory.peak / 1e9:.1f} GB",
        f"{cost.step_seconds:.3g} s",
        duration(cost.hours * 3600),
        "-" if cost.cost_usd is None else f"${cost.cost_usd:,.2f}",
        "; ".join(notes),
    ]
