"""`checkpoints compare`: two steps side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser
from refocused.commands.local_steps import brought_here
from refocused.commands.run_selection import (
    FoundStep,
    add_local_option,
    add_run_options,
    find_steps,
)

if TYPE_CHECKING:
    from refocused.checkpoints.resume.comparison import Comparison, Difference, LossChange
    from refocused.checkpoints.resume.step_contents import StepContents
    from refocused.evaluate.weight_norms import NormChange


def add_compare_arguments(parser: Parser) -> None:
    """Describe the command line."""
    for name, which in (("a", "first"), ("b", "second")):
        text = f"the {which}: latest, best, a number, a name, or a path in another run"
        parser.add_argument(name, metavar=name.upper(), help=text)
    parser.add_argument(
        "--weights",
        action="store_true",
        help="show how far the weights are apart too; downloads steps that are not here",
    )
    add_run_options(parser)
    add_local_option(parser)


def run_compare(arguments: argparse.Namespace) -> int:
    """Show how two steps differ."""
    from refocused.checkpoints.resume.comparison import compare
    from refocused.checkpoints.resume.step_contents import read_contents

    found = find_steps([arguments.a, arguments.b], arguments)
    a, b = (read_contents(step.catalog, step.entry) for step in found)
    comparison = compare(a, b)
    changes = _weights(found, (arguments.a, arguments.b)) if arguments.weights else None
    if arguments.json:
        print(json.dumps(_record(a, b, comparison, changes), indent=1))
    else:
        _print(a, b, comparison)
        _print_weights(changes or [])
    return max(step.outcome for step in found)


def _weights(found: Sequence[FoundStep], requests: Sequence[str]) -> list[NormChange]:
    """Bring both steps here and compare their tensors."""
    from refocused.evaluate.weight_norms import norm_changes
    from refocused.evaluate.weights import open_weights

    a, b = (
        open_weights(brought_here(step, must_be_copy="://" in request))
        for step, request in zip(found, requests, strict=True)
    )
    return norm_changes(a, b)


def _record(
    a: StepContents,
    b: StepContents,
    comparison: Comparison,
    changes: Sequence[NormChange] | None,
) -> dict[str, Any]:
    losses = [dataclasses.asdict(loss) | {"change": loss.change} for loss in comparison.losses]
    record = {"a": a.where, "b": b.where, **dataclasses.asdict(comparison), "losses": losses}
    if changes is not None:
        rows = [dataclasses.asdict(change) | {"relative": change.relative} for change in changes]
        record["weights"] = rows
    return record


def _print(a: StepContents, b: StepContents, comparison: Comparison) -> None:
    print(f"A  {a.where}\nB  {b.where}")
    _print_rows("losses", [_loss_row(loss) for loss in comparison.losses])
    _print_rows("facts that differ", [_row(fact) for fact in comparison.facts])
    _print_rows("settings that differ", [_row(setting) for setting in comparison.settings])


def _print_weights(changes: Sequence[NormChange]) -> None:
    """Print the norms of each kind of tensor, and of the difference."""
    if not changes:
        return
    head = ("tensors", "norm of A", "of B", "of B - A", "of A")
    rows = [
        (
            f"{change.tensors:,}",
            *(f"{norm:,.4g}" for norm in (change.a, change.b, change.difference)),
            "-" if change.relative is None else f"{change.relative:.2%}",
        )
        for change in changes
    ]
    width = max(len(change.name) for change in changes)
    print(f"\n{'weights (float32)':<{width + 2}}", *(f"{title:>10}" for title in head))
    for change, row in zip(changes, rows, strict=True):
        print(f"  {change.name:<{width}}", *(f"{value:>10}" for value in row))


def _print_rows(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print a table of names, A and B below its title."""
    print(f"\n{title}" if rows else f"\n{title}: none")
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, first, second in rows:
        print(f"  {name:<{widths[0]}}   {first:<{widths[1]}}   {second}".rstrip())


def _loss_row(loss: LossChange) -> tuple[str, str, str]:
    a, b = ("unknown" if value is None else f"{value:.4f}" for value in (loss.a, loss.b))
    return loss.name, a, b if loss.change is None else f"{b}   {loss.change:+.4f}"


def _row(difference: Difference) -> tuple[str, str, str]:
    a = "-" if difference.only_in == "b" else _text(difference.a)
    b = "-" if difference.only_in == "a" else _text(difference.b)
    return difference.name, a, b


def _text(value: object) -> str:
    """Spell a value as a run file would."""
    if value is None:
        return "null"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.10g}" if isinstance(value, float) else str(value)
