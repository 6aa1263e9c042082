"""The scan of temporal eigenstates as a Triton kernel: one read and one write of each token.

A program processes one mode of one sequence, in tiles of ROWS x CHUNK tokens. Within a tile all
chunks are computed in parallel: Toeplitz products for the tokens of a chunk, a small lower
triangular matrix for the states between chunks. The state stays in registers between tiles. Powers
come from tables computed in float64 (`ten.powers`). The backward pass is the same kernel on the
gradient in reversed time, u_s = g_s + a u_{s+1}: u and its conjugate are the gradient of the input,
and d loss / d ln a is the sum over s of u_s (c_s - beta_s), with c recomputed: saving it would take
8 bytes per token and mode, as much as the input, and save a third of the time.

A custom torch operator (`refocused::eigenstate_scan`), for compiled blocks. Tested in Triton's
interpreter but not yet on a GPU, so `model.scan` has to name it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from refocused.models.ten import powers

CHUNK = 64
ROWS = 16  # chunks of a tile; Triton's products need at least 16 rows
WARPS = 8  # with 4 the Toeplitz matrices do not fit the registers


@triton.jit  # type: ignore[untyped-decorator]
def _scan_tiles(  # type: ignore[no-untyped-def]
    beta, within, between, onward, out, modes, rows, length, plane, tiles,
    WHOLE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write Re(c), or with WHOLE both parts of c; the tables are those of `_tables`.

    `plane` is the distance from real to imaginary parts. It is an argument because
    modes * rows * length would overflow Triton's 32-bit integers here.
    """
    row, mode = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j, r = tl.arange(0, CHUNK), tl.arange(0, ROWS)
    # Input s of a chunk (rows) to its token j (columns).
    cell = mode * CHUNK * CHUNK + j[:, None] * CHUNK + j[None, :]
    into_re = tl.load(within + cell)
    into_im = tl.load(within + modes * CHUNK * CHUNK + cell)
    square = mode * ROWS * ROWS + r[:, None] * ROWS + r[None, :]
    between_re = tl.load(between + square)
    between_im = tl.load(between + modes * ROWS * ROWS + square)
    # onward: [4, 2, K, CHUNK], a^(j+1), a^(CHUNK-1-j), a^(CHUNK r), a^CHUNK
    part = modes * CHUNK
    first = onward + mode * CHUNK
    on_re, on_im = tl.load(first + j), tl.load(first + part + j)
    end_re, end_im = tl.load(first + 2 * part + j), tl.load(first + 3 * part + j)
    start_re, start_im = tl.load(first + 4 * part + r), tl.load(first + 5 * part + r)
    step_re, step_im = tl.load(first + 6 * part), tl.load(first + 7 * part)
    c_re, c_im = tl.sum(start_re) * 0.0, tl.sum(start_im) * 0.0
    at_re = (mode * rows + row) * length
    at_im = at_re + plane
    last = r == ROWS - 1
    for tile in range(tiles):
        token = tile * ROWS * CHUNK + r[:, None] * CHUNK + j[None, :]
        inside = token < length
        b_re = tl.load(beta + at_re + token, mask=inside, other=0.0)
        b_im = tl.load(beta + at_im + token, mask=inside, other=0.0)
        # The state that each chunk adds, and from it the state before each chunk.
        e_re = tl.sum(b_re * end_re[None, :] - b_im * end_im[None, :], axis=1)
        e_im = tl.sum(b_re * end_im[None, :] + b_im * end_re[None, :], axis=1)
        s_re = tl.sum(between_re * e_re[None, :] - between_im * e_im[None, :], axis=1)
        s_im = tl.sum(between_re * e_im[None, :] + between_im * e_re[None, :], axis=1)
        s_re += start_re * c_re - start_im * c_im
        s_im += start_re * c_im + start_im * c_re
        o_re = tl.dot(b_re, into_re, input_precision="ieee")
        o_re -= tl.dot(b_im, into_im, input_precision="ieee")
        o_re += s_re[:, None] * on_re[None, :] - s_im[:, None] * on_im[None, :]
        tl.store(out + at_re + token, o_re, mask=inside)
        if WHOLE:
            o_im = tl.dot(b_re, into_im, input_precision="ieee")
            o_im += tl.dot(b_im, into_re, input_precision="ieee")
            o_im += s_re[:, None] * on_im[None, :] + s_im[:, None] * on_re[None, :]
            tl.store(out + at_im + token, o_im, mask=inside)
        l_re = tl.sum(tl.where(last, s_re, 0.0))
        l_im = tl.sum(tl.where(last, s_im, 0.0))
        c_re = tl.sum(tl.where(last, e_re, 0.0)) + step_re * l_re - step_im * l_im
        c_im = tl.sum(tl.where(last, e_im, 0.0)) + step_re * l_im + step_im * l_re


def kernel_scan(beta: Tensor, log_decay: Tensor, frequency: Tensor) -> Tensor:
    """Compute `chunked_scan` from a zero state by the kernel; beta in float32."""
    found: Tensor = _scan(beta, log_decay, frequency)
    return found


@torch.library.custom_op("refocused::eigenstate_scan", mutates_args=())
def _scan(beta: Tensor, log_decay: Tensor, frequency: Tensor) -> Tensor:
    return _launch(beta, log_decay, frequency, whole=False)


@torch.library.custom_op("refocused::eigenstate_scan_backward", mutates_args=())
def _scan_backward(given: list[Tensor]) -> list[Tensor]:
    """Return the gradients of beta, log-decay and frequency, from that of Re(c) and these."""
    gradient, beta, log_decay, frequency = given
    reversed_time = torch.stack((gradient.flip(-1), torch.zeros_like(gradient)))
    u_re, u_im = _launch(reversed_time, log_decay, frequency, whole=True).flip(-1)
    c_re, c_im = _launch(beta, log_decay, frequency, whole=True) - beta
    by_size = (u_re * c_re - u_im * c_im).sum(dim=(1, 2))
    by_angle = -(u_re * c_im + u_im * c_re).sum(dim=(1, 2))
    into_beta = torch.stack((u_re, -u_im))
    return [into_beta, by_size.to(log_decay.dtype), by_angle.to(frequency.dtype)]


_scan.register_fake(lambda beta, *_: torch.empty_like(beta[0]))
_scan_backward.register_fake(lambda given: [torch.empty_like(one) for one in given[1:]])
_scan.register_autograd(
    lambda ctx, gradient: tuple(_scan_backward([gradient, *ctx.saved_tensors])),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _launch(beta: Tensor, log_decay: Tensor, frequency: Tensor, *, whole: bool) -> Tensor:
    """Return Re(c) `[K, B, T]`, or c `[2, K, B, T]` if `whole`."""
    _, modes, rows, length = beta.shape
    beta = beta.contiguous()
    out = torch.empty_like(beta if whole else beta[0])
    tables = _tables(log_decay, frequency)
    tiles = triton.cdiv(length, CHUNK * ROWS)
    _scan_tiles[(rows, modes)](
        *(beta, *tables, out, modes, rows, length, beta.stride(0), tiles),
        **{"WHOLE": whole, "CHUNK": CHUNK, "ROWS": ROWS, "num_warps": WARPS},
    )
    return out


def _tables(log_decay: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kernel's tables of powers, real parts before imaginary ones.

    Returns:
        a^{j-s}, s <= j, `[2, K, CHUNK, CHUNK]`; a^{CHUNK (r-1-q)}, q < r, `[2, K, ROWS, ROWS]`;
        `[4, 2, K, CHUNK]`: a^{j+1}, a^{CHUNK-1-j}, a^{CHUNK r} (zero beyond ROWS), a^CHUNK.
    """
    modes = (log_decay.detach(), frequency.detach())
    tokens = torch.stack(powers(*modes, CHUNK + 1, dtype=torch.float32))
    chunks = torch.stack(powers(*modes, ROWS, step=CHUNK, dtype=torch.float32))
    onward = torch.zeros((4, *tokens.shape[:2], CHUNK), device=tokens.device)
    onward[0], onward[1] = tokens[..., 1:], tokens[..., :CHUNK].flip(-1)
    onward[2, ..., :ROWS], onward[3] = chunks, tokens[..., CHUNK:]
    j = torch.arange(CHUNK, device=tokens.device)
    r = torch.arange(ROWS, device=tokens.device)
    lag, steps = j - j[:, None], r[:, None] - 1 - r
    within = tokens[..., lag.clamp(min=0)] * (lag >= 0)
    between = chunks[..., steps.clamp(min=0)] * (steps >= 0)
    return within.contiguous(), between.contiguous(), onward
