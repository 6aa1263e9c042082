"""The scan of a memory as Triton kernels: one read of all inputs, one write of all results.

A program processes one head of one sequence, chunk after chunk, with the state in registers. The
last column of the values, the weights of a memory's averages, is computed apart from the others:
with it, 65 columns of products would be padded to 128. Both widths are padded to powers of two.

The forward pass saves the state before each chunk, in the type in which the products read it: in 16
bits K V / 64 numbers a token, a third of q, k and v for heads of 64. Without them the backward pass
would read keys, values and decays twice: dividing a state by its decay to go back is not stable.
The backward pass goes through the chunks in reverse, with u, the gradient of the state after a
chunk, in registers.

With p_j = sum over t <= j of ln a_t, token s counts for token j by exp(p_j - p_s), as in
`matrix_scan`. The gradient of p_j is what row j of the products adds to the loss minus what column
j does. That of ln a_t is its sum over j >= t of the chunk, plus <S, u> at the chunk's end.

Custom torch operators, for compiled blocks. Tested in Triton's interpreter but not yet on a GPU, so
`model.scan` has to name them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNKS = {2: 64, 4: 16}  # tokens, by bytes of a number: tiles of float32 do not fit the registers
WARPS = 8
PRECISION = tl.constexpr("tf32x3")  # of float32; TF32 alone would round states to 11 bits


@triton.jit  # type: ignore[untyped-decorator]
def _read_chunks(  # type: ignore[no-untyped-def]
    query, key, value, log_decay, out, states, last, length, chunks,
    KEY: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write y, S before each chunk, and S after the last."""
    head = tl.program_id(0).to(tl.int64)
    j, x, z = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.arange(0, VALUES)
    by_key, by_value = head * length * KEY, head * length * WIDTH
    cell, column = x[:, None] * WIDTH + z[None, :], x * WIDTH + WIDTH - 1
    real = (x < KEY)[:, None] & (z < WIDTH - 1)[None, :]
    state, own = tl.zeros((KEYS, VALUES), tl.float32), tl.zeros((KEYS,), tl.float32)
    for n in range(chunks):
        token = n * CHUNK + j
        there = token < length
        keys = token[:, None] * KEY + x[None, :]
        values, owns = token[:, None] * WIDTH + z[None, :], token * WIDTH + WIDTH - 1
        keyed, valued = there[:, None] & (x < KEY)[None, :], there[:, None] & (z < WIDTH - 1)
        q = tl.load(query + by_key + keys, mask=keyed, other=0.0)
        k = tl.load(key + by_key + keys, mask=keyed, other=0.0)
        v = tl.load(value + by_value + values, mask=valued, other=0.0)
        w = tl.load(value + by_value + owns, mask=there, other=0.0)
        passed = tl.cumsum(tl.load(log_decay + head * length + token, mask=there, other=0.0))
        whole = tl.sum(tl.where(j == CHUNK - 1, passed, 0.0))
        later = j[:, None] >= j[None, :]
        between = tl.exp(tl.where(later, passed[:, None] - passed[None, :], float("-inf")))
        from_start, to_end = tl.exp(passed), tl.exp(whole - passed)[:, None]
        before, saved = state.to(q.dtype), states + (head * chunks + n) * KEY * WIDTH
        tl.store(saved + cell, before, mask=real)
        tl.store(saved + column, own, mask=x < KEY)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        y = from_start[:, None] * tl.dot(q, before, input_precision=PRECISION)
        y += tl.dot(scores.to(q.dtype), v, input_precision=PRECISION)
        tl.store(out + by_value + values, y, mask=valued)
        y_own = from_start * tl.sum(q * own[None, :], axis=1) + tl.sum(scores * w[None, :], axis=1)
        tl.store(out + by_value + owns, y_own, mask=there)
        kept = (k * to_end).to(k.dtype)
        state = tl.exp(whole) * state + tl.dot(tl.trans(kept), v, input_precision=PRECISION)
        own = tl.exp(whole) * own + tl.sum(k * to_end * w[:, None], axis=0)
    tl.store(last + head * KEY * WIDTH + cell, state, mask=real)
    tl.store(last + head * KEY * WIDTH + column, own, mask=x < KEY)


@triton.jit  # type: ignore[untyped-decorator]
def _write_gradients(  # type: ignore[no-untyped-def]
    query, key, value, log_decay, states, gradient, last_gradient,
    into_query, into_key, into_value, into_decay, length, chunks,
    KEY: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write the gradients, from those of y (`gradient`) and of S after the last token."""
    head = tl.program_id(0).to(tl.int64)
    j, x, z = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.arange(0, VALUES)
    by_key, by_value = head * length * KEY, head * length * WIDTH
    cell, column = x[:, None] * WIDTH + z[None, :], x * WIDTH + WIDTH - 1
    real = (x < KEY)[:, None] & (z < WIDTH - 1)[None, :]
    u = tl.load(last_gradient + head * KEY * WIDTH + cell, mask=real, other=0.0)
    u_own = tl.load(last_gradient + head * KEY * WIDTH + column, mask=x < KEY, other=0.0)
    for done in range(chunks):
        n = chunks - 1 - done
        token = n * CHUNK + j
        there = token < length
        keys = token[:, None] * KEY + x[None, :]
        values, owns = token[:, None] * WIDTH + z[None, :], token * WIDTH + WIDTH - 1
        keyed, valued = there[:, None] & (x < KEY)[None, :], there[:, None] & (z < WIDTH - 1)
        q = tl.load(query + by_key + keys, mask=keyed, other=0.0)
        k = tl.load(key + by_key + keys, mask=keyed, other=0.0)
        v = tl.load(value + by_value + values, mask=valued, other=0.0)
        w = tl.load(value + by_value + owns, mask=there, other=0.0)
        dy = tl.load(gradient + by_value + values, mask=valued, other=0.0)
        dy_own = tl.load(gradient + by_value + owns, mask=there, other=0.0)
        saved = states + (head * chunks + n) * KEY * WIDTH
        state = tl.load(saved + cell, mask=real, other=0.0)
        own = tl.load(saved + column, mask=x < KEY, other=0.0).to(tl.float32)
        passed = tl.cumsum(tl.load(log_decay + head * length + token, mask=there, other=0.0))
        whole = tl.sum(tl.where(j == CHUNK - 1, passed, 0.0))
        later = j[:, None] >= j[None, :]
        between = tl.exp(tl.where(later, passed[:, None] - passed[None, :], float("-inf")))
        from_start, to_end = tl.exp(passed), tl.exp(whole - passed)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        pulls = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        pulls += dy_own[:, None] * w[None, :].to(tl.float32)
        both = tl.where(j[:, None] > j[None, :], scores * pulls, 0.0)
        dv = to_end[:, None] * tl.dot(k, u.to(q.dtype), input_precision=PRECISION)
        dv += tl.dot(tl.trans(scores.to(q.dtype)), dy, input_precision=PRECISION)
        tl.store(into_value + by_value + values, dv, mask=valued)
        dw = to_end * tl.sum(k * u_own[None, :], axis=1)
        dw += tl.sum(scores * dy_own[:, None], axis=0)
        tl.store(into_value + by_value + owns, dw, mask=there)
        dq = tl.dot(dy, tl.trans(state), input_precision=PRECISION)
        dq = from_start[:, None] * (dq + dy_own[:, None] * own[None, :])
        dk = tl.dot(v, tl.trans(u.to(q.dtype)), input_precision=PRECISION)
        dk = to_end[:, None] * (dk + w[:, None] * u_own[None, :])
        written = tl.sum(k * dk, axis=1)
        sums = tl.sum(both, axis=1) - tl.sum(both, axis=0) + tl.sum(q * dq, axis=1) - written
        end = tl.exp(whole) * (tl.sum(state * u) + tl.sum(own * u_own)) + tl.sum(written)
        tl.store(
            into_decay + head * length + token, tl.cumsum(sums, reverse=True) + end, mask=there
        )
        pulls = (pulls * between).to(q.dtype)
        dq += tl.dot(pulls, k, input_precision=PRECISION)
        tl.store(into_query + by_key + keys, dq, mask=keyed)
        dk += tl.dot(tl.trans(pulls), q, input_precision=PRECISION)
        tl.store(into_key + by_key + keys, dk, mask=keyed)
        kept = q * from_start[:, None]
        u = tl.exp(whole) * u + tl.dot(tl.trans(kept.to(q.dtype)), dy, input_precision=PRECISION)
        u_own = tl.exp(whole) * u_own + tl.sum(kept * dy_own[:, None], axis=0)


def kernel_scan(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `matrix_scan` of q, k, v and ln a in float32, from a zero state, by the kernel."""
    outputs, last, _ = _scan(*inputs)
    return outputs, last


@torch.library.custom_op("refocused::matrix_scan", mutates_args=())
def _scan(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    outputs, last, states = _results(query, key, value, log_decay)
    _launch(_read_chunks, (query, key, value, log_decay), outputs, states, last)
    return outputs, last, states


def _results(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors for y, S after the last token, and S before each chunk."""
    heads, state = query.shape[:2], (query.shape[-1], value.shape[-1])
    chunks = triton.cdiv(query.shape[2], CHUNKS[query.itemsize])
    states = query.new_empty((*heads, chunks, *state))
    return value.new_empty(value.shape), log_decay.new_empty((*heads, *state)), states


@torch.library.custom_op("refocused::matrix_scan_backward", mutates_args=())
def _scan_backward(given: list[Tensor]) -> list[Tensor]:
    """Return the gradients of q, k, v and ln a; given are these, states, and two gradients."""
    gradients = _like_inputs(given)
    _launch(_write_gradients, given, *gradients)
    return gradients


def _like_inputs(given: list[Tensor]) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in given[:4]]


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, output[2])
    ctx.set_materialize_grads(False)  # zeros of the size of the states


def _backward(ctx: Any, gradient: Tensor | None, last_gradient: Tensor | None, _: None) -> Any:
    *_, value, log_decay, states = ctx.saved_tensors
    if gradient is None:
        gradient = torch.zeros_like(value)
    if last_gradient is None:
        last_gradient = log_decay.new_zeros(states[:, :, 0].shape)
    return tuple(_scan_backward([*ctx.saved_tensors, gradient, last_gradient]))


_scan.register_fake(_results)
_scan_backward.register_fake(_like_inputs)
_scan.register_autograd(_backward, setup_context=_keep)


def _launch(kernel: Any, given: Sequence[Tensor], *results: Tensor) -> None:
    rows, heads, length, key = given[0].shape
    width, chunk = given[2].shape[-1], CHUNKS[given[0].itemsize]
    padded = [max(16, triton.next_power_of_2(one)) for one in (key, width - 1)]
    tensors = (*(one.contiguous() for one in given), *results)
    kernel[(rows * heads,)](
        *(*tensors, length, triton.cdiv(length, chunk), key, width, *padded, chunk), num_warps=WARPS
    )
