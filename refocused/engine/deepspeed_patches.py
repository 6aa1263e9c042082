"""Everything of DeepSpeed (and of torch for it) that is replaced at run time, in one place.

Each function says why. All were read in, and tested with, DeepSpeed 0.19.8 and torch 2.13. The test
beside each covers it. With a new version, leave one out: if its test passes, the function goes.

    function                  replaces                                   tests/engine/test_*.py
    load_deepspeed            torch.compile, while it imports its Muon   traffic -k no_compiler
    quieten_deepspeed         profiler ranges, logger, warnings          engine -k only_warnings
    use_plain_collectives     the C++ all-reduce of CPUs                 (35-80 s of a start)
    undo_warm_up_step         an update while stage 0 is built           engine -k first_update
    own_engine                checkpoint files, clipping at stage 0      engine -k "disk or plain"
    loss_factor               the omitted loss scale of stage 0          engine -k half_precision
    without_copying_swapped   the copy of an NVMe drive's files          saved_states
    count_waits               collectives, to time them                  slow_ranks
    guard_partitioned         the host's check of the gradient norm      waits
    hold_as_zero_3            torch's linear function, early             compiled -k one_graph
    without_regathering       a gather after each save                   traffic -k save
    gathered_once             a gather in each forward pass              traffic -k sample
    unreduced                 the reduction of a replayed gradient       bit_checks

`shard_files.py` replaces the classes in its checkpoint files by plain values, `resharding.py` loads
them into its optimizers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from refocused.engine.finite_updates import FiniteUpdates
    from refocused.metrics.meter import Meter

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_reduce"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor"),
)
_HOLDER = -1  # DeepSpeed numbers the modules that use a weight from 0


def load_deepspeed() -> None:
    """Import what `deepspeed.initialize` needs; `DS_ACCELERATOR` must be set.

    DeepSpeed's own Muon, unused here, calls torch.compile when imported, which imports inductor:
    1.3 s on every rank, avoided here.
    """

    def unchanged(function: Any = None, **_: Any) -> Any:
        return unchanged if function is None else function  # a decorator, with or without arguments

    compile_ = torch.compile
    torch.compile = unchanged  # type: ignore[assignment]
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer
    finally:
        torch.compile = compile_
    import deepspeed.runtime.zero.stage3  # noqa: F401


def quieten_deepspeed() -> None:
    """Turn off per-operation profiler ranges (3 % of host time) and messages below warnings."""
    import deepspeed.utils.nvtx

    deepspeed.utils.nvtx.enable_nvtx = False
    # DeepSpeed 0.19 uses names of collectives that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", "`torch.distributed", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It warns of our Muon, an "untested optimizer".
    logging.getLogger("DeepSpeed").addFilter(lambda one: "untested" not in one.getMessage())


def use_plain_collectives() -> None:
    """Let gloo reduce on a CPU: with bit-identical results, and nothing to compile at the start.

    DeepSpeed would compile a C++ all-reduce (35-80 s, needs g++).
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def own_engine(engine: Any, files: Any) -> None:
    """Write an engine's checkpoints by `files`, and leave the clipping at stage 0 to `Engine`."""
    engine.checkpoint_engine = files
    # Its converters fail on tied weights, and `checkpoints export` does their work.
    engine._copy_recovery_script = lambda folder: None
    engine.clip_fp32_gradients = lambda: None  # it discards the norm


def loss_factor(optimizer: Any) -> float:
    """Return the factor for the loss that DeepSpeed omits: stage 0's loss scale, else 1.

    Its optimizer of stage 0 divides fp16's gradients by the scale without multiplying the loss by
    it, and reports the norm of the scaled gradient.
    """
    return float(optimizer.loss_scale) if hasattr(optimizer, "fp32_groups") else 1.0


@contextlib.contextmanager
def without_copying_swapped(engine: Any) -> Iterator[Path | None]:
    """Let an engine save without an NVMe drive's files; yield their folder, if there is one.

    DeepSpeed would copy them itself, and raise on one rank only.
    """
    is_swapped = engine.zero_nvme_offload_optimizer()
    engine.zero_nvme_offload_optimizer = lambda: False
    try:
        yield Path(engine.optimizer.optimizer_swapper.swap_folder) if is_swapped else None
    finally:
        del engine.zero_nvme_offload_optimizer


def undo_warm_up_step(optimizer: Any) -> None:
    """Undo the update that DeepSpeed's 16-bit optimizer of stage 0 makes when built.

    It allocates Adam's moments by a step with zero gradients, which decays the weights once and
    leaves the bias correction one step ahead.
    """
    if not hasattr(optimizer, "fp32_groups"):
        return
    optimizer.optimizer.state.clear()
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def count_waits(engine: Any, meter: Meter) -> None:
    """Count the time in which the queue of the computation waits for other ranks as `wait`.

    Under ZeRO-3 that is before each block, until its weights are gathered, and at the end of a
    backward pass, until its gradients are reduced. A collective itself counts where it is issued in
    that queue: in an update, below stage 3 and on a CPU. In another stream it delays nothing.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm import comm

    offload = getattr(engine.optimizer, "parameter_offload", None)
    for owner, name in (
        (getattr(offload, "param_coordinator", None), "fetch_sub_module"),
        (engine.optimizer, "independent_gradient_partition_epilogue"),
        (engine.optimizer, "_post_step"),  # gathers small weights
    ):
        if hasattr(owner, name):
            setattr(owner, name, meter.as_wait(getattr(owner, name)))

    def computes() -> bool:
        accelerator = get_accelerator()
        return bool(accelerator.current_stream() == accelerator.default_stream())

    for name in COLLECTIVES:
        # All engines of a process share it: wrap the class's own method, not an earlier wrapper.
        method = getattr(type(comm.cdb), name).__get__(comm.cdb)
        setattr(comm.cdb, name, meter.as_wait(method, if_=computes))


def guard_partitioned(optimizer: Any, guard: FiniteUpdates) -> None:
    """Make a ZeRO optimizer use the guard instead of reading the norm on the host.

    Each of DeepSpeed's optimizer modules calls its global `is_invalid_grad_norm` with the norm (-1
    if not finite). That is replaced during a step, and so is what makes the host wait for a norm.
    """
    from deepspeed.runtime import utils

    module, step = sys.modules[type(optimizer).__module__], optimizer.step
    places = vars(module), vars(utils)  # the bf16 optimizer computes its norm in `utils`

    def check(norm: Tensor) -> bool:
        guard.check(norm)
        vars(module)["is_invalid_grad_norm"] = lambda norm: False  # stages 1 and 2: for each group
        return False

    def mask(norm: Tensor, **_: Any) -> None:
        norm.masked_fill_(~torch.isfinite(norm), -1.0)  # DeepSpeed's value is read by the host

    def clip(
        input_tensors: list[Tensor], *, max_norm: float, global_norm: Tensor, **_: Any
    ) -> Tensor:
        """Clip as DeepSpeed's bf16 optimizer does, without reading the norm on the host."""
        factor = torch.clamp(max_norm / (global_norm + 1e-6), max=1.0)
        torch._foreach_mul_([tensor.detach() for tensor in input_tensors], factor)
        return global_norm

    # `torch.tensor` copies a number to the device, and waits for the copy; `full` fills it in.
    filling = types.ModuleType("torch")
    vars(filling).update(vars(torch), tensor=functools.partial(torch.full, ()))
    replaced: dict[str, Any] = {
        "is_invalid_grad_norm": check,
        "clip_tensors_by_global_norm": clip,
        "mask_nan_or_inf_with_val_inplace": mask,
        "torch": filling,
    }

    def step_on_device(*args: Any, **named: Any) -> None:
        kept = [{name: names[name] for name in replaced.keys() & names} for names in places]
        for names in places:
            names.update(replaced)
        try:
            step(*args, **named)
        finally:
            for names, own in zip(places, kept, strict=True):
                names.update(own)

    # Stages 1 and 2 would check once more, by a pass over all gradients.
    optimizer.check_overflow = lambda *args, **named: None
    optimizer.step = step_on_device
    if (stream := getattr(optimizer, "reduce_and_partition_stream", None)) is not None:
        # Stage 3 makes the host wait for the gradients' stream after each pass. Only the device
        # reads the gradients here, so let its current stream wait instead.
        from deepspeed.accelerator import get_accelerator

        stream.synchronize = lambda: get_accelerator().current_stream().wait_stream(stream)


def hold_as_zero_3(block: nn.Module) -> None:
    """Prepare a block as DeepSpeed's stage 3 will, so that the graph's guards hold.

    The guards check the type of the parameter dictionaries, and the linear function, which
    DeepSpeed replaces for the whole process and which reads an attribute of a weight.
    """
    from deepspeed.runtime.zero import linear
    from deepspeed.runtime.zero.parameter_offload import ensure_zero_ordered_dict
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    nn.functional.linear = linear.zero3_linear_wrap
    # DeepSpeed looks for `ds_id`. torch 2.11 guards the value of a number that `hasattr` finds, and
    # each parameter has its own: every block would get graphs of its own, up to torch's limit.
    linear.is_zero_param = lambda parameter: hasattr(parameter, "ds_status")
    for parameter in block.parameters():
        parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    for module in block.modules():
        ensure_zero_ordered_dict(module)
        module._parameters._in_forward = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def without_regathering(optimizer: Any) -> Iterator[None]:
    """Let DeepSpeed's optimizer save without gathering the small weights again afterwards.

    It partitions all weights before a save, and then gathers those below
    `stage3_param_persistence_threshold` again: half of the time that training waits for a
    background save (deepspeed 0.19, gloo). They have not changed, so the full tensors are kept and
    put back. Does nothing at other stages, or with weights on an NVMe drive, whose buffers are
    released by partitioning.
    """
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    small = getattr(optimizer, "persistent_parameters", [])
    gathered = [
        (weight, weight.data)
        for weight in small
        if weight.ds_status is ZeroParamStatus.AVAILABLE
        and weight.ds_tensor.final_location != OffloadDeviceEnum.nvme
    ]
    if len(gathered) < len(small) or not gathered:  # not gathered yet at step 0
        yield
        return
    optimizer.checkpoint_event_epilogue = optimizer.invalidate_secondary_tensor
    try:
        yield
    finally:
        del optimizer.checkpoint_event_epilogue
        for weight, data in gathered:
            weight.data = data
            weight.ds_status = ZeroParamStatus.AVAILABLE


@contextlib.contextmanager
def gathered_once(module: nn.Module) -> Iterator[None]:
    """Gather the weights once for all forward passes inside; collective.

    DeepSpeed partitions a block's weights after each pass unless another module uses them, so they
    are marked as in use. Does nothing at other stages.
    """
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    weights: list[Any] = [weight for weight in module.parameters() if hasattr(weight, "ds_status")]
    missing = [w for w in weights if w.ds_status is not ZeroParamStatus.AVAILABLE]
    with GatheredParameters(missing):
        for weight in weights:
            weight.ds_active_sub_modules.add(_HOLDER)
        try:
            yield
        except BaseException:  # the modules of an interrupted pass are still marked
            for weight in weights:
                weight.ds_active_sub_modules.clear()
            raise
        finally:
            for weight in weights:
                weight.ds_active_sub_modules.discard(_HOLDER)


@contextlib.contextmanager
def unreduced(optimizer: Any) -> Iterator[None]:
    """Let a backward pass by `torch.autograd.grad` reduce no gradients.

    It accumulates none, so that DeepSpeed's hooks of weights do not run; ZeRO-3's of blocks do.
    """
    unused: dict[str, Callable[..., Any]] = {
        "should_refresh_expected_hook_count": lambda: False,
        "reenter_backward_if_needed": lambda: None,
        "reduce_ready_partitions_and_remove_grads": lambda weight: setattr(weight, "grad", None),
        "update_hook_state_and_maybe_run_epilogue": lambda expected: None,
    }
    vars(optimizer).update(unused)
    yield
    for name in unused:
        delattr(optimizer, name)
    if hasattr(optimizer, "parameter_offload"):
        optimizer.parameter_offload.release_backward_leftovers()
