"""The entry of the sampler's process, and how a rank starts it.

`python -m refocused.monitor.sampler.sampler_process SETTINGS`
"""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING

from refocused.system.errors import RefocusedError
from refocused.system.processes import detach, start_detached

if TYPE_CHECKING:  # what starts quickly, the trainer waits for a shorter time
    from refocused.monitor.sampler.start_sampler import SamplerSettings


class SamplerError(RefocusedError):
    """The sampler could not be started; training goes on without it."""


def start_sampler(settings: SamplerSettings) -> int:
    """Start a machine's sampler, which outlives any rank but ends with the one in its settings.

    Returns:
        Its process id.

    Raises:
        SamplerError: It could not be started.
    """
    try:
        return start_detached(
            "refocused.monitor.sampler.sampler_process",
            settings.model_dump_json(),
            log=settings.log,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SamplerError(
            f"The sampler of GPUs and machine could not be started ({error}); what it said is in "
            f"{settings.log}. Training goes on without its figures and alarms."
        ) from error


def main(argv: list[str]) -> int:
    """Detach, then sample until the end; `argv` is one JSON text of SamplerSettings."""
    detach()
    from refocused.monitor.sampler.sampler import Sampler, take_turn
    from refocused.monitor.sampler.start_sampler import SamplerSettings
    from refocused.system import logs

    try:
        settings = SamplerSettings.model_validate_json(argv[0])
        logs.start_file_of("sampler", settings.alarm_log)
        if take_turn(settings):
            Sampler(settings).run()
    except Exception:
        # The edge of a background owner: nobody waits for it; its log says why it ended.
        logging.basicConfig(stream=sys.stderr)
        logging.getLogger(__name__).exception("the sampler stops")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
