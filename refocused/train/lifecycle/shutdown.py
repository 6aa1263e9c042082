"""How a run ends: the mirror's queue, the summary, the exit code."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from refocused.checkpoints.mirror.mirror_status import MirrorStatus
from refocused.checkpoints.step.branches import saved_steps
from refocused.config.outputs import CheckpointConfig
from refocused.config.prices import cost_usd
from refocused.evaluate.final_model import FinalModel
from refocused.metrics.step_metrics import dollars, duration, perplexity
from refocused.system.errors import ExitCode
from refocused.train.step.loop import Outcome
from refocused.train.step.parts import Parts
from refocused.train.step.reporter import TRACKERS_END_S
from refocused.train.step.stopping import StopReason, StopRequest

logger = logging.getLogger(__name__)

_MAX_STEPS = re.compile(r" --max-steps[= ]\S+")  # reached: another takes its place
FINISHED_TRACKERS_END_S = 30.0  # nobody waits for the end of a run that has finished
_GRAVITY = (ExitCode.OK, ExitCode.NOT_MIRRORED, ExitCode.FAILED)
INTERRUPTED_DRAIN_S = 5.0  # the launcher kills a stopping rank after 30 s; the mirror goes on
SAY_SOON_S = 3.0  # after the last line, when something has begun to hold up the mirror
SAY_AGAIN_S = 60.0  # a wait that is silent for longer looks like one that hangs


def finish(
    parts: Parts,
    outcome: Outcome,
    stop: StopRequest,
    *,
    sample: str | None,
    folder: Path,
    settings: CheckpointConfig,
    command: str,
    final_model: FinalModel | None = None,
    per_hour_usd: float | None = None,
) -> ExitCode:
    """Export, wait for the mirror, say how the run ended and where its time went; return the code.

    Args:
        parts: The run's parts.
        outcome: How training ended.
        stop: Ends the wait for the mirror too, which then goes on by itself.
        sample: What the model writes; None: nothing was asked for.
        folder: The run's folder.
        settings: How long to wait for the mirror.
        command: What was typed: typed again, it resumes.
        final_model: What a finished run becomes; None: nothing is made.
        per_hour_usd: Price of the machine, which the wait for the mirror holds; None: unknown.
    """
    exporting = None
    if not outcome.stopped and parts.saver.saved_step == outcome.state.step:
        exporting = final_model
    if exporting is not None:
        exporting.begin(outcome.state.step)
    timeout_s = INTERRUPTED_DRAIN_S if outcome.stopped else settings.drain_minutes * 60
    progress = DrainProgress(
        folder / "checkpoints",
        timeout_s,
        per_hour_usd=per_hour_usd,
        setting=None if outcome.stopped else "checkpoint.drain_minutes",
    )
    if outcome.stopped:
        mirrored = parts.saver.mirror.drain(timeout_s, progress)
    else:
        mirrored = parts.saver.mirror.drain(timeout_s, progress, stop.agreed)
    code = outcome.stopped.exit_code
    if not mirrored and not outcome.stopped:
        code = ExitCode.NOT_MIRRORED
    if exporting is not None:
        code = max(code, _await_export(parts, exporting, stop, settings), key=_GRAVITY.index)
    if parts.saver.last_save_failed:
        code = ExitCode.FAILED
    outcome = dataclasses.replace(outcome, state=parts.reporter.end(outcome.state))
    if parts.world.is_rank_0:
        for line in _summary(parts, outcome, sample, folder, settings, command, mirrored=mirrored):
            logger.info("%s", line)
    status = "stopped" if outcome.stopped else "finished"
    parts.reporter.event(status, "", step=outcome.state.step, exit_code=code)
    parts.reporter.write_state(
        outcome.state,
        status,
        exit_code=code,
        stopped_by=outcome.stopped.name if outcome.stopped else None,
        mirrored=mirrored,
    )
    parts.reporter.end_tracking(
        code, limit_seconds=TRACKERS_END_S if outcome.stopped else FINISHED_TRACKERS_END_S
    )
    parts.reporter.close()
    if parts.world.is_rank_0:
        leave_summary(folder)
    return code


def _await_export(
    parts: Parts, exporting: FinalModel, stop: StopRequest, settings: CheckpointConfig
) -> ExitCode:
    """Wait for the final model; return the exit code that it alone would give."""
    answer = exporting.wait(settings.drain_minutes * 60, stop.agreed)
    if answer is None:
        text = "goes on in the background"
        parts.reporter.event("export_warning", f"final model {exporting.folder}: it {text}")
        return ExitCode.NOT_MIRRORED
    if answer.status == "failed":
        parts.reporter.event("export_failed", f"final model NOT made: {answer.text}")
        return ExitCode.FAILED
    missing = settings.mirror is not None and answer.status != "uploaded"
    kind = "export_warning" if missing else "export"
    parts.reporter.event(kind, f"final model {exporting.folder}: {answer.text}")
    return ExitCode.NOT_MIRRORED if missing else ExitCode.OK


def leave_summary(folder: Path) -> None:
    """Write SUMMARY.md and its pictures into a run's folder, as far as that can be done."""
    from refocused.monitor.run_reader import RunFollower
    from refocused.monitor.screen.summary import write_summary  # draws: not needed before

    now = time.time()
    try:
        follower = RunFollower(folder, liveness=lambda _state: None, saved_steps=saved_steps)
        write_summary(folder, follower.view(now=now), now=now)
    except Exception as error:
        # The edge of the end: everything is saved and said, and no picture may change its outcome.
        logger.warning(
            "SUMMARY.md was not written (%s: %s). Try: python launch/monitor.py %s --summary",
            type(error).__name__,
            error,
            folder,
        )


class DrainProgress:
    """Says every ten percent how far the mirror is; soon what holds it up, and that again."""

    def __init__(
        self,
        checkpoints: Path,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        per_hour_usd: float | None = None,
        setting: str | None = None,
    ) -> None:
        """Begin to wait.

        Args:
            checkpoints: The folder of the local steps.
            timeout_s: Longest wait, in seconds.
            clock: Monotonic seconds.
            per_hour_usd: Price of the machine that waits; None: unknown.
            setting: What bounds the wait; None: nothing that can be set.
        """
        self._checkpoints = checkpoints
        self._clock = clock
        self._per_hour_usd = per_hour_usd
        self._setting = setting
        self._ends_at = clock() + timeout_s
        self._said_at = clock()
        self._said_tenth = -1
        self._said_trouble = False

    def __call__(self, status: MirrorStatus | None) -> None:
        """Look at what the mirror said last; None: nothing yet."""
        goes_on = status is not None and bool(status.waiting) and status.last_error is None
        self._said_trouble = self._said_trouble and not goes_on
        if status is not None and goes_on:
            self._say_tenth(status)
        soon = not goes_on and not self._said_trouble
        if self._clock() - self._said_at >= (SAY_SOON_S if soon else SAY_AGAIN_S):
            self._say_waiting(status)
            self._said_trouble = not goes_on

    def _say_tenth(self, status: MirrorStatus) -> None:
        tenth = 10 * status.done_bytes // (status.total_bytes or 1)  # 0: none could be begun yet
        if tenth != self._said_tenth:
            self._said_tenth = tenth
            waiting = status.waiting
            self._say(f"upload of step {waiting[0]:,}: {10 * tenth} % ({len(waiting)} waiting)")

    def _say_waiting(self, status: MirrorStatus | None) -> None:
        said = "it has said nothing yet, see logs/mirror.log"
        if status is not None:
            said = status.progress(saved_steps(self._checkpoints))
        left_s = max(0.0, self._ends_at - self._clock())
        price = cost_usd(left_s, self._per_hour_usd)
        known = [
            *([f"${price:,.2f}"] if price is not None else []),
            *([f"set by {self._setting}"] if self._setting is not None else []),
        ]
        more = f"{duration(left_s)} more" + (f" ({'; '.join(known)})" if known else "")
        self._say(f"waiting for the mirror, for at most {more}: {said}")

    def _say(self, text: str) -> None:
        self._said_at = self._clock()
        logger.info("      %s", text)


def _summary(
    parts: Parts,
    outcome: Outcome,
    sample: str | None,
    folder: Path,
    settings: CheckpointConfig,
    command: str,
    *,
    mirrored: bool,
) -> list[str]:
    state, saved = outcome.state, parts.saver.saved_step == outcome.state.step
    lines = [
        f"done  step {state.step:,} of {parts.total_steps:,}, {state.tokens:,} tokens, "
        f"{duration(state.seconds)}{dollars(state.cost_usd, before=', ')}"
        + (f" | stopped by {outcome.stopped.text}" if outcome.stopped else "")
    ]
    used = parts.reporter.run_time()
    if used.spent.computing_seconds:
        lines.append(f"      {used.as_line()}")
    if state.best_loss is not None:
        lines.append(
            f"      best validation loss {state.best_loss:.4f} (perplexity "
            f"{perplexity(state.best_loss):.2f}) at step {state.best_step:,}"
        )
    if saved:
        lines.append(f"      checkpoint {folder}/checkpoints/checkpoint_step_{state.step}")
    elif parts.saver.last_save_failed:
        lines.append("      the last step is NOT saved (see the warnings above)")
    if settings.mirror is not None:
        skipped = parts.saver.mirror.skipped_uploads
        lines.append(
            f"      mirror {settings.mirror}: everything is there"
            + (f" but {skipped} older steps that newer ones replace" if skipped else "")
            if mirrored
            else f"      mirror {settings.mirror}: NOT complete yet, see {folder}/mirror.json; the "
            "upload goes on in the background"
        )
    if sample is not None:
        lines += ["      sample of what it writes:", *(f"      | {s}" for s in sample.splitlines())]
    if state.step < parts.total_steps:
        first = "raise cost.budget_usd, then " if outcome.stopped is StopReason.BUDGET else ""
        lines.append(f"      resume: {first}{command}")
    else:
        lines.append(f"      train on: {_MAX_STEPS.sub('', command)} --max-steps N")
    return lines
