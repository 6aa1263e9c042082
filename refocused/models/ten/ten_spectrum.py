"""The spectrum of temporal eigenstates: how long each mode remembers, and how fast it turns.

A mode's horizon is 1 / (1 - |a|) tokens. Two numbers of each mode are learned, and both are kept as
differences from where they began, which the shape alone gives:

    |a|   = exp(-exp(nu_0 + rate_shift))            nu_0 = ln(-ln(1 - 1 / H_0))
    omega = omega_0 + frequency_shift * exp(nu_0)

DeepSpeed casts every parameter to bf16 in a bf16 run, eight significant bits. Of nu itself, 10.4
for a horizon of 32,768, that would be a horizon wrong by 3 %; of omega itself, at 1 radian a token,
a phase wrong by up to 128 radians when the horizon is reached, and a jump of that size at each
update that rounds differently. Of the differences it is at most 0.2 % of how far the mode moved: a
horizon that doubled is wrong by 0.14 %, a frequency that moved by a whole radian over its horizon
ends 0.002 radians off, at every horizon alike.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

GOLDEN_FRACTION = (math.sqrt(5) - 1) / 2
SUMMING = 2  # modes of four that begin by summing up; neighbours go to different cells


@dataclasses.dataclass(frozen=True, slots=True)
class Spectrum:
    """The modes of a recurrence, `[K]` each, in float64.

    Attributes:
        log_decay: ln|a|, below 0.
        frequency: omega in radians a token.
    """

    log_decay: Tensor
    frequency: Tensor

    @property
    def horizon_tokens(self) -> Tensor:
        """After how many tokens a mode has forgotten 63 % of what it saw, 1 / (1 - |a|)."""
        return -1 / torch.expm1(self.log_decay)

    @property
    def gain(self) -> Tensor:
        """What keeps a mode's variance at that of its input, whatever its horizon.

        sqrt(1 - |a|^2) (Orvieto et al. 2023, Resurrecting Recurrent Neural Networks, 3.4).
        """
        return (-torch.expm1(2 * self.log_decay)).sqrt()


def initial_spectrum(modes: int, *, longest: int, device: torch.device | str = "cpu") -> Spectrum:
    """Return the modes that training begins with.

    Horizons are log-uniform over 1..longest. Two modes of four turn by at most a radian within
    their horizon, and so sum up what they see, wherever it was; the frequencies of the other two
    fill 0..pi, and tell places apart. Both kinds do so at every horizon alike (multiples of the
    golden ratio, the sequence of least discrepancy).

    Args:
        modes: K.
        longest: The longest horizon, in tokens; above 1.
        device: Where the tensors are.
    """
    number = torch.arange(modes, dtype=torch.float64, device=device)
    horizons = torch.exp(math.log(longest) * (number + 0.5) / modes)
    rate = -torch.log1p(-1 / horizons)
    highest = torch.where(number % 4 < SUMMING, rate, math.pi)
    of_its_kind = torch.floor(number / 4) * 2 + number % 2
    turns = (of_its_kind + 1) * GOLDEN_FRACTION
    return Spectrum(-rate, highest * (turns - turns.floor()))


def shifted_spectrum(initial: Spectrum, *, rate_shift: Tensor, frequency_shift: Tensor) -> Spectrum:
    """Return where the learned differences `[K]` have moved the modes."""
    rate = -initial.log_decay
    return Spectrum(
        -rate * torch.exp(rate_shift.double()),
        initial.frequency + frequency_shift.double() * rate,
    )
