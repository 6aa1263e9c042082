"""How a run ends: the mirror's queue, the final model, the summary, the exit code."""

import dataclasses
import logging
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rich.box import ASCII
from rich.console import Console
from rich.table import Table
from rich.text import Text

from refocused.checkpoints.mirror.mirror import MirrorStatus
from refocused.checkpoints.step.checkpoint_directory import saved_steps
from refocused.config.optimization import ROLES
from refocused.config.prices import cost_usd
from refocused.engine.schedule import TOLERANCE
from refocused.evaluate.final_model import FinalModel
from refocused.metrics.history import EVENTS_FILE, perplexity
from refocused.metrics.jsonl import JsonLinesTail
from refocused.system.errors import ExitCode, as_typed
from refocused.system.number_text import duration, known
from refocused.train.lifecycle.launch_session import write_summary
from refocused.train.step.loop import Trainer
from refocused.train.step.reporter import TRACKERS_END_S
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopReason

logger = logging.getLogger(__name__)

SAMPLE_WIDTH = 100  # columns of the lines with text samples, without a terminal
LEAST_SAMPLE_WIDTH = 66  # for two samples side by side
_MAX_STEPS = re.compile(r" (?:--max-steps[= ]|run\.(?:steps|tokens|epochs)=)\S+")
FINISHED_TRACKERS_END_S = 30.0  # limit for closing the trackers of a finished run
INTERRUPTED_DRAIN_S = 5.0  # the launcher kills a stopping rank after 30 s; the mirror goes on
REPORT_SOON_S = 3.0  # after the last line, if something starts to block the mirror
REPORT_AGAIN_S = 60.0  # a longer silence would look like a hang


def finish(
    trainer: Trainer,
    state: TrainState,
    stopped: StopReason,
    *,
    command: str,
    final_model: FinalModel | None,
) -> ExitCode:
    """Export, wait for the mirror, report how the run ended and where its time went.

    A stop ends the wait for the mirror too, which then goes on by itself. `final_model` is made of
    a finished run, if it is not None. `command` resumes the run.
    """
    config, reporter, saver = trainer.config, trainer.reporter, trainer.saver
    agreed, sample = trainer.stop.agreed, None
    if trainer.sampler is not None and not stopped:
        sample = trainer.sampler.write(trainer.engine, stopping=agreed)
    if sample is not None:
        reporter.event("sample", "", step=state.step, sample=sample)
    if stopped or saver.saved_step != state.step:
        final_model = None
    if final_model is not None:
        final_model.begin(state.step)
    drain_s = config.checkpoint.drain_minutes * 60
    timeout_s = INTERRUPTED_DRAIN_S if stopped else drain_s
    progress = DrainProgress(
        trainer.folder / "checkpoints",
        timeout_s,
        per_hour_usd=config.cost.per_hour_usd,
        setting=None if stopped else "checkpoint.drain_minutes",
    )
    mirrored = saver.mirror.drain(timeout_s, progress, *(() if stopped else (agreed,)))
    code = stopped.exit_code if mirrored or stopped else ExitCode.NOT_MIRRORED
    if final_model is not None:
        answer = final_model.wait(drain_s, agreed)
        text = "it goes on in the background" if answer is None else answer.text
        if answer is not None and answer.status == "failed":
            code = ExitCode.FAILED
            reporter.event("export_failed", f"final model NOT made: {text}")
        else:
            kind, mirror = "export", config.checkpoint.mirror
            if answer is None or (mirror is not None and answer.status != "uploaded"):
                kind, code = "export_warning", ExitCode.NOT_MIRRORED
            reporter.event(kind, f"final model {final_model.folder}: {text}")
    if saver.failures:
        code = ExitCode.FAILED
    state = reporter.end(state)
    if trainer.world.is_rank_0:
        for line in _last_lines(trainer, state, stopped, command, sample, mirrored=mirrored):
            logger.info("%s", line)
    status = "stopped" if stopped else "finished"
    reporter.event(status, "", step=state.step, exit_code=code)
    reporter.write_state(
        state,
        status,
        exit_code=code,  # of the command
        stopped_by=stopped.name if stopped else None,  # why it stopped before the last step
        mirrored=mirrored,  # whether the mirror holds everything
    )
    limit_seconds = TRACKERS_END_S if stopped else FINISHED_TRACKERS_END_S
    reporter.end_tracking(code, limit_seconds=limit_seconds)
    reporter.close()
    if trainer.world.is_rank_0:
        if trouble := write_summary(trainer.folder):
            logger.warning("%s", trouble)
        else:
            page = trainer.folder / "summary.html"
            logger.info("      summary: %s = %s", page, page.absolute().as_uri())
        logger.info("      monitor: %s %s", as_typed("monitor"), trainer.folder)
    return code


@dataclasses.dataclass
class DrainProgress:
    """Logs every ten percent of an upload, and repeatedly what blocks the mirror."""

    checkpoints: Path  # the folder of the local steps
    timeout_s: float  # longest wait, in seconds
    clock: Callable[[], float] = time.monotonic  # monotonic seconds
    per_hour_usd: float | None = None  # price of the machine that waits; None: unknown
    setting: str | None = None  # the setting that bounds the wait, if one does

    def __post_init__(self) -> None:
        self._logged_at = self.clock()
        self._ends_at = self._logged_at + self.timeout_s
        self._logged_tenth = -1
        self._logged_trouble = False

    def __call__(self, status: MirrorStatus | None) -> None:
        """Check the mirror's last status; None: there is none yet."""
        goes_on = status is not None and bool(status.waiting) and status.last_error is None
        self._logged_trouble = self._logged_trouble and not goes_on
        if status is not None and goes_on:
            tenth = 10 * status.done_bytes // (status.total_bytes or 1)  # 0: none could begin yet
            if tenth != self._logged_tenth:
                self._logged_tenth = tenth
                waiting = status.waiting
                self._log(f"upload of step {waiting[0]:,}: {10 * tenth} % ({len(waiting)} waiting)")
        soon = not goes_on and not self._logged_trouble
        if self.clock() - self._logged_at >= (REPORT_SOON_S if soon else REPORT_AGAIN_S):
            text = "it has reported nothing yet, see logs/mirror.log"
            if status is not None:
                text = status.progress(saved_steps(self.checkpoints))
            left_s = max(0.0, self._ends_at - self.clock())
            price = cost_usd(left_s, self.per_hour_usd)
            known = [f"${price:,.2f}"] if price is not None else []
            known += [f"set by {self.setting}"] if self.setting is not None else []
            more = f"{duration(left_s)} more" + (f" ({'; '.join(known)})" if known else "")
            self._log(f"waiting for the mirror, for at most {more}: {text}")
            self._logged_trouble = not goes_on

    def _log(self, text: str) -> None:
        self._logged_at = self.clock()
        logger.info("      %s", text)


def _last_lines(
    trainer: Trainer,
    state: TrainState,
    stopped: StopReason,
    command: str,
    sample: str | None,
    *,
    mirrored: bool,
) -> list[str]:
    folder, saver, mirror = trainer.folder, trainer.saver, trainer.config.checkpoint.mirror
    lines = [
        f"done  step {state.step:,} of {trainer.total_steps:,}, {state.tokens:,} tokens, "
        f"{duration(state.seconds)}{known(', ${:,.2f}', state.cost_usd)}"
        + (f" | stopped by {stopped.text}" if stopped else "")
    ]
    used = trainer.reporter.run_time()
    if used.spent.computing_seconds:
        lines.append(f"      {used.as_line()}")
    if state.best_loss is not None:
        bits = known(", {:.4f} bits per byte", state.best_bits_per_byte)
        lines.append(
            f"      best validation loss {state.best_loss:.4f} (perplexity "
            f"{perplexity(state.best_loss):.2f}{bits}) at step {state.best_step:,}"
        )
    if saver.saved_step == state.step:
        name = saver.checkpointer.branch.name_of(state.step)
        lines.append(f"      checkpoint {folder}/checkpoints/{name}")
    elif saver.failures:
        lines.append("      the last step is NOT saved (see the warnings above)")
    if mirror is not None:
        skipped = saver.mirror.skipped_uploads
        lines.append(
            f"      mirror {mirror}: everything is there"
            + (f" but older steps that newer ones replace: {skipped}" if skipped else "")
            if mirrored
            else f"      mirror {mirror}: NOT complete yet, see {folder}/mirror.json; the "
            "upload goes on in the background"
        )
    if sample is not None:
        lines += _sample_lines(folder, state.step, sample)
    if state.step < trainer.total_steps:
        first = "raise cost.budget_usd, then " if stopped is StopReason.BUDGET else ""
        lines.append(f"      resume: {first}{command}")
    else:
        rates, last = trainer.rates, trainer.rates.at(state.step - 1)
        separate = any(rates.optimizer.peak(role) != rates.optimizer.lr for role in ROLES)
        hint = " (the learning rate, which has fallen, jumps: see schedule.kind=wsd)"
        if last > (1 - TOLERANCE) * rates.optimizer.lr:
            hint = ""
        elif last > 0 and not separate and rates.schedule.kind != "wsd":
            hint = f" optimizer.lr={last:.1e} schedule.kind=constant"
        lines.append(f"      train on: {_MAX_STEPS.sub('', command)} --max-steps N{hint}")
    return lines


def _sample_lines(folder: Path, step: int, sample: str) -> list[str]:
    """Return the last text sample, beside that of untrained weights if there is room for both."""
    texts = {f"text sample after step {step:,}": sample}
    for record in JsonLinesTail(folder / EVENTS_FILE).records():
        if record.get("kind") == "sample" and record.get("step") == 0:
            texts = {"text sample of untrained weights": str(record.get("sample")), **texts}
    # A model may write anything, even commands to a terminal.
    for title, text in texts.items():
        kept = (char if char.isprintable() or char == "\n" else "?" for char in text.expandtabs(4))
        texts[title] = "".join(kept).rstrip()
    width = shutil.get_terminal_size((SAMPLE_WIDTH, 24)).columns - len("      ")
    if len(texts) == 1 or width < LEAST_SAMPLE_WIDTH:
        texts = {title: text.replace("\n", "\n| ") for title, text in texts.items()}
        lines = [line for both in texts.items() for line in ":\n| ".join(both).splitlines()]
    else:
        table = Table(box=ASCII, show_edge=False, pad_edge=False, expand=True, header_style="")
        for title in texts:
            table.add_column(title, ratio=1, overflow="fold")
        table.add_row(*map(Text, texts.values()))
        console = Console(width=width, color_system=None)
        with console.capture() as captured:
            console.print(table)
        lines = captured.get().splitlines()
    return [f"      {line}".rstrip() for line in lines]
