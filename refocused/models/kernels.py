"""Set the kernels of the sequence mixer and of the loss, and try those that may fail here."""

import contextlib
import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from refocused.config.batch_plan import BatchPlan
from refocused.config.model_shape import Attention, Mixer, Resonators
from refocused.config.run_config import ModelConfig
from refocused.models.attention import compiled_within_documents, document_blocks
from refocused.models.causal_lm import CausalLM
from refocused.models.head_loss import head_loss
from refocused.system.errors import ConfigError, RefocusedError, short_reason
from refocused.system.world import World

FORMS = {"chunked": "in chunks", "fused": "by torch's fused form", "kernel": "by the Triton kernel"}
HOPPER = 9  # compute capability of the GPUs that FlashAttention-3 is for
TRIED_TOKENS = 100


def choose_kernels(
    model: CausalLM,
    mixer: Mixer,
    *,
    config: ModelConfig,
    dtype: torch.dtype,
    plan: BatchPlan,
    world: World,
) -> str:
    """Set the kernels before blocks are compiled; return which, in words. Collective.

    Raises:
        ConfigError: On every rank: a kernel does not work on one of them.
    """
    if isinstance(mixer, Attention):
        shared = config.sequence_parallel
        heads, length = mixer.heads // shared, plan.sequence_length
        shape = (plan.micro_batch_size, heads, length, mixer.head_width)
        query = torch.randn(shape, dtype=dtype, device=world.device, requires_grad=True)
        key = query[:, : mixer.key_heads // shared]
        mixing = _set_attention(model, config, query, key, world)
        if plan.sequence_parallel > 1:
            mixing = f"{mixing}, {plan.sequence_parallel} ranks share the tokens of a sequence"
    else:
        # Each is a `recall.ScanModule`, which only the families with scans import.
        scans: list[Any] = [part for part in model.modules() if hasattr(part, "kernel_module")]
        kinds = {scan.scanned: scan for scan in scans}

        def try_scans() -> None:
            for scan in scans:
                scan.kernel = importlib.import_module(scan.kernel_module).kernel_scan
            shape = (1, TRIED_TOKENS, model.network.config.hidden_size)
            for scan in kinds.values():
                inputs = torch.randn(shape, dtype=dtype, device=world.device, requires_grad=True)
                outputs = copy.deepcopy(scan).to(world.device, dtype)(inputs)
                _differentiate(outputs[0] if isinstance(outputs, tuple) else outputs, inputs)

        if config.scan == "kernel":
            _try(try_scans, world, what="model.scan=kernel", remedy=". Set model.scan=chunked.")
        words = [f"{scanned} {FORMS[config.scan]}" for scanned in kinds]
        mixing = ", ".join(["resonators by FFT"] * isinstance(mixer, Resonators) + words)
    head = model.network.get_output_embeddings()
    head.form = config.head

    def trial() -> None:
        hidden, weight = torch.randn(
            (2, TRIED_TOKENS, 64), dtype=dtype, device=world.device, requires_grad=True
        )
        labels = torch.arange(TRIED_TOKENS, device=world.device)
        loss = head_loss(config.head, hidden, weight, labels, chunk=64, terms=head.terms)
        if loss.dtype != torch.float32:
            raise TypeError(f"its loss is in {loss.dtype}")
        _differentiate(loss, hidden)

    if config.head != "chunked":
        _try(trial, world, what=f"model.head={config.head}", remedy=". Set model.head=chunked.")
    return f"{mixing}, loss {FORMS[config.head]}"


def _set_attention(
    model: CausalLM, config: ModelConfig, query: Tensor, key: Tensor, world: World
) -> str:
    """Set the kernel of attention; return which, in words. Collective.

    `query` `[B, H, T, E]` and `key` have training's shapes.
    """
    asked, masking, mask = config.attention, "", None
    if model.document_id is not None:
        rows, _, length, _ = query.shape
        try:
            _try_flex_attention(config, query, key, world)
            model.block_shape = (rows, length)
            return "attention by FlexAttention, within documents by a block mask"
        except ConfigError as error:
            reason = error
        key = query  # with a mask transformers repeats shared keys
        mask = query.new_ones((1, 1, length, length), dtype=torch.bool)
        masking = f", within documents by a dense mask ({reason})"
    name, why = "", f"(model.attention={asked})"
    if asked != "auto":
        torch.backends.cuda.enable_cudnn_sdp(asked == "cudnn")
        torch.backends.cuda.enable_flash_sdp(asked == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(asked != "math")  # supports masks
    if asked == "flash":
        name = f"FlashAttention-{flash_version(query.device, dropout=config.dropout)}"
    given: Any = (query, key, key, mask, config.dropout)
    named: Any = {"is_causal": mask is None, "enable_gqa": len(key[0]) < len(query[0])}
    # Torch asks what a kernel supports, and prefers one by device and version.
    chosen = SDPBackend(torch._fused_sdp_choice(*given, **named)).name.lower()
    runs = chosen.removesuffix("_attention").replace("efficient", "memory-efficient")

    def trial() -> None:
        if asked not in ("auto", runs):
            raise ConfigError(
                f"model.attention is {asked}, but torch uses {runs} for this model (because of the "
                "device, precision.dtype, the width of a head or data.mask_documents). Set "
                "model.attention=auto."
            )
        if world.device_kind == "cuda":  # a kernel may fail although torch chooses it
            _differentiate(F.scaled_dot_product_attention(*given, **named), query)

    remedy = ". Set model.attention to another kernel: cudnn, flash or math."
    _try(trial, world, what=f"attention by {runs} {why}", remedy=remedy)
    why = ", torch's choice" if asked == "auto" else f" {why}"
    return f"attention by {name or runs}{why}{masking}"


def _try_flex_attention(config: ModelConfig, query: Tensor, key: Tensor, world: World) -> None:
    """Raise ConfigError on all ranks if FlexAttention does not work on one of them. Collective."""
    if world.device_kind != "cuda":
        raise ConfigError("FlexAttention does not train on a CPU")
    if config.attention != "auto":
        raise ConfigError(f"model.attention={config.attention}")
    if config.dropout:
        raise ConfigError("FlexAttention has no dropout")

    def trial() -> None:
        rows, _, length, _ = query.shape
        blocks = document_blocks(torch.arange(length, device=query.device).expand(rows, -1))
        _differentiate(compiled_within_documents()(query, key, key, blocks), query)

    _try(trial, world, what="FlexAttention")


def _try(trial: Callable[[], None], world: World, *, what: str, remedy: str = "") -> None:
    """Run a trial; if it fails on any rank, raise ConfigError on all. Collective."""

    def outcome() -> None:
        try:
            trial()
        except (RefocusedError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # compilers and drivers raise any type
            reason = short_reason(error).rstrip(".")
            raise ConfigError(f"{what} does not work here: {reason}{remedy}") from error

    world.on_all_ranks(outcome)


def _differentiate(output: Tensor, inputs: Tensor) -> None:
    (gradient,) = torch.autograd.grad(output.float().sum(), inputs)
    gradient.sum().item()  # waits for the device, which reports a kernel's errors late


def flash_version(device: torch.device, *, dropout: float) -> int:
    """Return the version of sdpa's FlashAttention: 3, switched on here if it is installed, or 2."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER
    if is_hopper and not dropout:  # which version 3 lacks
        with contextlib.suppress(ImportError, RuntimeError, ValueError):
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")
            return 3
    return 2
