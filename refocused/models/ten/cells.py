"""The sequence mixer of TEN: cells of eigenstates at one or several time scales."""

import dataclasses
import functools

import torch
from torch import Tensor, nn

from refocused.models.recall import ScanModule
from refocused.models.sequence_parallel import SequenceGroup
from refocused.models.ten.scan import (
    Spectrum,
    arrived_state,
    chunked_scan,
    initial_spectrum,
    last_state,
    shifted_spectrum,
)

CELLS = 2  # per scale; their outputs are averaged
COUPLING = 0.01  # epsilon of R = I + epsilon M / ||M||_F


@dataclasses.dataclass(slots=True)
class ScaleState:
    """The state of one scale after the tokens so far; its size is constant."""

    eigenstates: Tensor  # c after the last complete group, `[2, K, B]`, float32 or better
    latest: Tensor  # the output of the last complete group, `[B, 1, D]`
    pending: Tensor  # the tokens of the incomplete group, `[B, fewer than scale, D]`

    def select(self, rows: Tensor) -> None:
        """Select sequences by index `[B]`, for beam search."""
        self.eigenstates = self.eigenstates.index_select(2, rows)
        self.latest = self.latest.index_select(0, rows)
        self.pending = self.pending.index_select(0, rows)


class TenCells(ScanModule):
    """Cells with a common input: y_t = mean over cells of W_out Re(c_t R).

    c_t = a c_{t-1} + g W_in x_t, where g equalizes the variance of the modes. R = I + epsilon M /
    ||M||_F couples the eigenstates at read-out only, to keep the recurrence diagonal. The
    recurrence is computed in float32, never in TF32 (see `scan`); the products into and out of it
    have the precision of the passes.
    """

    scanned, kernel_module = "eigenstates", "refocused.models.ten.scan_kernel"

    def __init__(self, width: int, *, eigenstates: int, longest: int, chunk: int) -> None:
        """Create cells with uninitialized parameters.

        Args:
            width: D.
            eigenstates: Modes of each cell, K.
            longest: Longest initial horizon, in tokens of this scale.
            chunk: Tokens of a chunk of `chunked_scan`.
        """
        super().__init__()
        modes = CELLS * eigenstates
        self.longest, self.chunk = longest, chunk
        self.in_weight = nn.Parameter(torch.empty(2, modes, width))
        self.mixing = nn.Parameter(torch.empty(CELLS, eigenstates, eigenstates))
        self.out_weight = nn.Parameter(torch.empty(CELLS, eigenstates, width))
        self.rate_shift = nn.Parameter(torch.empty(modes))
        self.frequency_shift = nn.Parameter(torch.empty(modes))

    def spectrum(self) -> Spectrum:
        """Return the present modes, `[2 K]`."""
        return shifted_spectrum(
            self.initial_spectrum(),
            rate_shift=self.rate_shift,
            frequency_shift=self.frequency_shift,
        )

    def initial_spectrum(self) -> Spectrum:
        """Return the initial modes, `[2 K]`."""
        cells, eigenstates, _ = self.mixing.shape
        initial = initial_spectrum(
            cells * eigenstates, longest=self.longest, device=self.rate_shift.device
        )
        # Neighbours in horizon go to different cells, so each cell spans the whole range.
        return Spectrum(
            initial.log_decay.view(eigenstates, cells).T.flatten(),
            initial.frequency.view(eigenstates, cells).T.flatten(),
        )

    def forward(
        self,
        inputs: Tensor,
        state: Tensor | None = None,
        *,
        want_state: bool = False,
        group: SequenceGroup | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs `[B, T, D]`, and c after the last token `[2, 2 K, B]` if wanted.

        `inputs` are `[B, T, D]`, T at least 1; `state` is c before the first token, default zero,
        or what arrives from the other ranks of a `group`.
        """
        spectrum = self.spectrum()
        exact = torch.promote_types(inputs.dtype, torch.float32)
        in_weight = self.in_weight * spectrum.gain.to(exact)[:, None]
        # One product over all tokens of all sequences; modes come first, as in the scan.
        beta = in_weight.flatten(0, 1).to(inputs.dtype) @ inputs.flatten(0, 1).T
        beta = beta.view(2, -1, *inputs.shape[:2]).to(exact)
        modes = (spectrum.log_decay, spectrum.frequency)
        if group is not None:
            last, length = last_state(beta, *modes), inputs.shape[1]
            state = arrived_state(last, *modes, length=length, group=group)
        if self.kernel is None or state is not None or exact != torch.float32:
            real = chunked_scan(beta, *modes, chunk=self.chunk, state=state)
        else:
            real = self.kernel(beta, *modes)
        read_out = self._read_out(exact).to(inputs.dtype)
        outputs = (real.flatten(1).to(inputs.dtype).T @ read_out).view_as(inputs)
        return outputs, last_state(beta, *modes, state=state) if want_state else None

    def _read_out(self, dtype: torch.dtype) -> Tensor:
        """Return R W_out of all cells, divided by their number, `[2 K, D]`."""
        out_weight, mixing = self.out_weight.to(dtype), self.mixing.to(dtype)
        norm = torch.linalg.vector_norm(mixing, dim=(1, 2), keepdim=True)
        coupled = torch.baddbmm(out_weight, mixing * (COUPLING / norm), out_weight)
        return coupled.flatten(0, 1) / len(coupled)


class TenMixer(nn.Module):
    """Cells at several time scales, each on averages of s tokens; their outputs are summed.

    Position t uses only groups that ended at or before it: the output of group g, of the tokens
    g s to g s + s - 1, applies from its last token until the next group ends.
    """

    def __init__(
        self, width: int, *, eigenstates: int, longest: int, chunk: int, scales: list[int]
    ) -> None:
        """Create a `TenCells` for each scale; arguments as there."""
        super().__init__()
        self.scales = tuple(scales)
        self.cells = nn.ModuleList(
            TenCells(width, eigenstates=eigenstates, longest=max(longest // scale, 2), chunk=chunk)
            for scale in scales
        )

    def forward(
        self,
        inputs: Tensor,
        states: list[ScaleState | None] | None = None,
        group: SequenceGroup | None = None,
    ) -> Tensor:
        """Return the mixed tokens `[B, T, D]` of inputs `[B, T, D]`.

        `states`, one per scale, continue from earlier tokens and are updated in place. The ranks of
        a `group` have slices of the tokens, whose length the scales divide.
        """
        outputs = []
        for place, (scale, cells) in enumerate(zip(self.scales, self.cells, strict=True)):
            if states is not None:
                heard, states[place] = _at_scale(cells, inputs, scale, states[place], True)
            elif scale == 1:
                heard, _ = cells(inputs, group=group)
            else:
                heard, _ = _at_scale(cells, inputs, scale, None, False, group)
            outputs.append(heard)
        return functools.reduce(torch.add, outputs)


def _at_scale(
    cells: nn.Module,
    inputs: Tensor,
    scale: int,
    before: ScaleState | None,
    want_state: bool,
    group: SequenceGroup | None = None,
) -> tuple[Tensor, ScaleState | None]:
    """Apply cells to averages of `scale` tokens; see `TenMixer`."""
    length = inputs.shape[1]
    if before is not None:
        inputs = torch.cat((before.pending, inputs), dim=1)
    pending, groups = inputs.shape[1] - length, inputs.shape[1] // scale
    exact = torch.promote_types(inputs.dtype, torch.float32)
    whole = inputs[:, : groups * scale].reshape(len(inputs), groups, scale, inputs.shape[2])
    # Index g applies after g groups have ended.
    heard = torch.zeros_like(inputs[:, :1]) if before is None else before.latest
    eigenstates = None if before is None else before.eigenstates
    if groups:
        means = whole.mean(dim=2, dtype=exact).to(inputs.dtype)
        outputs, eigenstates = cells(means, eigenstates, want_state=want_state, group=group)
        if group is not None:
            heard = group.from_previous(outputs[:, -1:])
        heard = torch.cat((heard, outputs), dim=1)
    repeated = heard.repeat_interleave(scale, dim=1)[:, pending + 1 : pending + 1 + length]
    if not want_state:
        return repeated, None
    if eigenstates is None:
        modes = cells.rate_shift.numel()  # type: ignore[operator]
        eigenstates = inputs.new_zeros((2, modes, len(inputs)), dtype=exact)
    return repeated, ScaleState(eigenstates, heard[:, -1:], inputs[:, groups * scale :])
