"""This process's session: who asks it to stop, who started it, when it began."""

from __future__ import annotations

import dataclasses
import os
import time

from refocused.training.ancestors import Ancestors
from refocused.training.launch import Launch, Presence, launch_of
from refocused.training.signals import Notices, Signals

UNSUPERVISED = Notices(
    "^C    stopping after this step and saving; the launcher allows 30 s. A STOP file in the run's "
    "folder stops without a limit."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """What a rank knows before it has joined the others.

    Attributes:
        signals: Installed.
        ancestors: As they were at the start.
        presence: Its notes to the supervisor.
        began_seconds: When the command began, on this machine's monotonic clock.
        rank_began_seconds: When this process did; the launcher may have started others before.
        launch: The supervisor's; None without one.
    """

    signals: Signals
    ancestors: Ancestors
    presence: Presence
    began_seconds: float
    rank_began_seconds: float
    launch: Launch | None

    @property
    def training_notices(self) -> Notices:
        """What signals lead to while there is something to save."""
        if self.launch is None:
            return UNSUPERVISED
        return Notices(
            "^C    stopping after this step and saving; "
            f"{self.launch.grace_seconds:.0f} s are allowed for it. Once more leaves less time, a "
            "third time ends it unsaved."
        )


def begin_session(rank: int) -> Session:
    """Take over the signals and tell the supervisor that this rank is here."""
    now = time.monotonic()
    signals = Signals(speaks=rank == 0)
    signals.install()
    launch = launch_of(os.environ)
    return Session(
        signals=signals,
        ancestors=Ancestors(launch),
        presence=Presence(launch, rank),
        began_seconds=launch.began_seconds if launch is not None else now,
        rank_began_seconds=now,
        launch=launch,
    )
