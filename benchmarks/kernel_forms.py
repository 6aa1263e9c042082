"""Compare the forms of the loss, of attention and of scans; a slice of `certify_gpu.py`.

Outputs and gradients of each form are compared with those of the form in torch in float64: the
error may be twice that of the torch form in the same type, or the limit of its kind. Correct forms
are then timed, forward and backward, at the sizes of a pass of 0.76 B (the loss), of 32,768 tokens
(scans) and of three models (attention). The defaults of their settings rest on these rows.
"""

import dataclasses
import functools
import gc
import itertools
import statistics
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from kernel_errors import errors_of, results_of
from measuring import Record
from step_contenders import Clock
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from refocused.models.head_loss import IGNORED_LABEL, HeadForm, head_loss
from refocused.models.recall import MEMORY_CHUNK, matrix_scan
from refocused.models.ten import chunked_scan, initial_spectrum
from refocused.system.errors import short_reason

Form = Callable[..., Any]  # of the inputs; returns a tensor or several
TIMES = 6
PASS, CHUNKS = (8192, 1536, 50304), (1024, 2048, 4096, 8192)  # of 0.76 B; 2,048 is what GPUs take
ATTENTIONS = ((8, 24, 2048, 64), (32, 12, 1024, 64), (8, 16, 2048, 128))  # rows, heads, tokens


@dataclasses.dataclass(frozen=True)
class Kind:
    """Forms of one computation, the first of them in torch."""

    title: str
    setting: str  # that names a form
    values: Collection[str]  # the forms that it can name; others are there to compare with
    default: str  # the form that is used when nothing is set
    forms: Mapping[str, Form]
    checked: list[Tensor]  # inputs whose results are compared with float64
    timed: list[Tensor]
    limit: float  # of relative errors, where twice that of the torch form is smaller


def measure(device: torch.device, *, tiny: bool, tell: Callable[..., None]) -> None:
    """Check and time all forms; `tell` gets what is known of one as soon as it is known."""
    torch.manual_seed(2)
    for kind in itertools.chain(*(kinds(device, tiny) for kinds in (heads, attention, scans))):
        in_torch = next(iter(kind.forms.values()))
        own = errors_of(in_torch, in_torch, kind.checked)
        for name, form in kind.forms.items():
            facts: Record = {"case": kind.title, "form": name, "default": name == kind.default}
            if name in kind.values and name != kind.default:
                facts["instead"] = f"{kind.setting}={name}"
            failed = "error" if name == kind.default else "left_out"
            try:
                errors = errors_of(form, in_torch, kind.checked)
                # NaN fails this comparison.
                right = all(e <= max(kind.limit, 2 * o) for e, o in zip(errors, own, strict=True))
                facts |= {"error_of_results": max(errors), "error_in_torch": max(own)}
                if right:
                    facts |= _cost(functools.partial(results_of, form, kind.timed), device)
            except Exception as error:  # Triton's compiler and driver raise any type
                tell("form", **facts, **{failed: short_reason(error)})
            else:
                tell(
                    "form",
                    **facts,
                    **({} if right else {failed: f"errors {errors}; in torch {own}"}),
                )


def _cost(run: Callable[[], Any], device: torch.device) -> Record:
    if device.type == "cpu":
        return {"ms": timed_ms(run, device)}
    gc.collect()  # what earlier forms leave in cycles would be freed during this one
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ms = timed_ms(run, device)
    return {"ms": ms, "peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}


def timed_ms(call: Callable[[], Any], device: torch.device, *, times: int = TIMES) -> float:
    """Return the median milliseconds of a call, after two others."""
    clock = Clock(device)
    return statistics.median([clock.timed_ms(call) for _ in range(times + 2)][2:])


def heads(device: torch.device, tiny: bool) -> Iterator[Kind]:
    """The forms of the loss, and the chunks of the default form."""
    sizes = (256, 64, 1000) if tiny else PASS
    labels: dict[int, Tensor] = {}

    def inputs(tokens: int, width: int, rows: int) -> list[Tensor]:
        labels[tokens] = torch.randint(rows, (tokens,), device=device)
        labels[tokens][::8] = IGNORED_LABEL
        draws = (torch.randn(size, width, device=device) for size in (tokens, rows))
        return [draw.mul_(0.5).bfloat16() for draw in draws]

    def loss(form: HeadForm, chunk: int, hidden: Tensor, weight: Tensor) -> Tensor:
        return head_loss(form, hidden, weight, labels[len(hidden)], chunk=chunk)

    def all_logits(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.T
        exact = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(exact), labels[len(hidden)])

    title = f"loss, {sizes[0]:,} tokens, width {sizes[1]:,}, vocabulary {sizes[2]:,}"
    samples = {"checked": inputs(500, 64, 5000), "timed": inputs(*sizes)}
    values = typing.get_args(HeadForm)
    forms: dict[str, Form] = {form: functools.partial(loss, form, CHUNKS[1]) for form in values}
    forms["all logits"] = torch.compile(all_logits, dynamic=False, disable=device.type == "cpu")
    yield Kind(title, "model.head", values, "chunked", forms, **samples, limit=1e-5)
    forms = {str(chunk): functools.partial(loss, "chunked", chunk) for chunk in CHUNKS}
    title, setting = f"{title}, tokens a chunk", "model.head_chunk_tokens"
    yield Kind(title, setting, forms, str(CHUNKS[1]), forms, **samples, limit=1e-5)


def scans(device: torch.device, tiny: bool) -> Iterator[Kind]:
    """The scans of TEN's eigenstates and of memories, in a block of `ten_small_32k_recall`."""

    def modes(length: int) -> list[Tensor]:
        spectrum = initial_spectrum(128, longest=32768, device=device)
        beta = torch.randn((2, 128, 1, length), device=device)
        return [beta, spectrum.log_decay, spectrum.frequency]

    def memories(length: int) -> list[Tensor]:
        query, key = torch.randn((2, 1, 16, length, 64), device=device).softmax(dim=-1).bfloat16()
        value = torch.randn((1, 16, length, 65), dtype=torch.bfloat16, device=device)
        return [query, key, value, -(torch.rand((1, 16, length), device=device) ** 8)]  # decays

    in_torch = functools.partial(chunked_scan, chunk=256)
    chunks = functools.partial(matrix_scan, chunk=MEMORY_CHUNK)

    def kernel(name: str, *leaves: Tensor) -> Any:
        from refocused.models import memory_kernel, scan_kernel  # these import Triton

        return {"ten": scan_kernel, "memory": memory_kernel}[name].kernel_scan(*leaves)

    for name, draw, form in (("ten", modes, in_torch), ("memory", memories, chunks)):
        forms: dict[str, Form] = {"chunked": form}
        if device.type == "cuda":  # blocks are compiled there
            forms = {"chunked": torch.compile(form, dynamic=False), "not compiled": form}
        forms["kernel"] = functools.partial(kernel, name)
        samples = {"checked": draw(300 if tiny else 2500), "timed": draw(256 if tiny else 32768)}
        title, values = f"scan, {name}", ("chunked", "kernel")
        yield Kind(title, "model.scan", values, "chunked", forms, **samples, limit=1e-4)


def attention(device: torch.device, tiny: bool) -> Iterator[Kind]:
    """The kernels of causal attention."""

    def by(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    of = SDPBackend
    backends = (of.MATH, of.CUDNN_ATTENTION, of.FLASH_ATTENTION, of.EFFICIENT_ATTENTION)
    forms = {_name(backend): functools.partial(by, backend) for backend in backends}
    for rows, heads, length, width in ((1, 2, 64, 32),) if tiny else ATTENTIONS:
        timed = list(torch.randn((3, rows, heads, length, width), device=device).bfloat16())
        samples = {"checked": [one[:1, :2] for one in timed], "timed": timed}
        query, key, value = (one.detach().requires_grad_() for one in timed)
        chosen = torch._fused_sdp_choice(query, key, value, is_causal=True)  # when nothing is set
        title, default = f"attention, {rows} x {length:,}, {heads} heads of {width}", _name(chosen)
        values = ("cudnn", "flash", "math")
        yield Kind(title, "model.attention", values, default, forms, **samples, limit=1e-2)


def _name(backend: SDPBackend | int) -> str:
    return SDPBackend(backend).name.partition("_")[0].lower()
