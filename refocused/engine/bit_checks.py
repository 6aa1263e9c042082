"""Find flipped bits: replay a micro-batch, and compare the state before an update."""

import contextlib
import functools
import itertools
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from deepspeed import comm
from torch import Tensor, nn

from refocused.engine import shard_files
from refocused.engine.deepspeed_patches import unreduced
from refocused.engine.finite_updates import FiniteUpdates
from refocused.system.errors import TrainingError
from refocused.system.world import World

KERNELS = "try model.attention=math and model.head=chunked, or run.replay_every=null."
SMALL_BYTES = 2**18  # smaller tensors are summed together, to launch fewer kernels


class BitChecks:
    """Stops a run before an update whose gradient or state was changed by a flipped bit.

    A replay computes a micro-batch twice and compares loss and gradients of this rank. A digest of
    its weights and optimizer state, taken after an update, is compared before the next one and
    after each copy for a checkpoint. The device skips the update; the host reads the reason late.
    """

    def __init__(self, engine: Any, *, replay_every: int, world: World) -> None:
        """Check a DeepSpeed engine; replay in the steps 1, N + 1, 2 N + 1, ..."""
        self._engine, self._world, self._every = engine, world, replay_every
        self._state: list[Tensor] = []  # bytes of this rank's state after the last update
        self._digest: Tensor | None = None  # of that state; None before the first update
        # On this rank, from the first difference on: passes differ, the state has changed.
        self._found = torch.zeros(2, dtype=torch.int32, device=world.device)

    def accumulate(self, train: Callable[[], Tensor]) -> Tensor:
        """Return the result of a training pass; compare the first of a due step with a second one.

        The second one has the same random numbers, accumulates and reduces nothing, and leaves
        all states as the first one does. Both use deterministic kernels.

        Raises:
            TrainingError: On every rank: an operation has no deterministic form.
        """
        engine, module = self._engine, self._engine.module
        place = engine.micro_steps % engine.gradient_accumulation_steps()
        if place or engine.global_steps % self._every:
            return train()
        begin = shard_files.capture()
        with _deterministic():
            first = _Pass(module, discards=False)
            result, trained = train(), first.digests()
            end = shard_files.capture()
            shard_files.restore(begin)
            with unreduced(engine.optimizer):
                second = _Pass(module, discards=True)
                loss = module(*first.inputs)
                weights = [one for one in module.parameters() if one.requires_grad]
                torch.autograd.grad(loss, weights, first.gradient_of_loss, allow_unused=True)
            shard_files.restore(end)
        self._note(0, (trained != second.digests()).any())
        return result

    def failed(self, guard: FiniteUpdates | None = None) -> bool:
        """Return whether the state of any rank changed, or its passes differed; collective.

        With a guard the device skips the next update then, and the host goes on, with False.
        """
        if self._digest is not None:
            self._note(1, (digest(self._state) != self._digest).any())
        failed = self._found.max()
        if self._world.world_size > 1:
            comm.all_reduce(failed, op=comm.ReduceOp.MAX)
        if guard is None:
            return bool(failed)
        guard.skip_if(failed)
        return False

    def after_update(self) -> None:
        """Take the digest of the updated state."""
        self._state = _state_of(self._engine)
        self._digest = digest(self._state)

    def forget(self) -> None:
        """Begin anew, since another state was loaded."""
        self._digest = None
        self._found.zero_()

    def explain(self, updates: int) -> None:
        """Raise TrainingError on every rank if a check failed after so many updates; collective."""
        told = self._world.gather((self._found.tolist(), self._place()))
        kind = int(any(flags[1] for flags, _ in told))
        places = [f"rank {n} ({place})" for n, (flags, place) in enumerate(told) if flags[kind]]
        if not places:
            return
        what = f"weights or optimizer state changed after the update of step {updates:,}"
        part, advice = "memory" if self._world.device_kind == "cpu" else "GPU (dcgmi diag -r 3)", ""
        if kind == 0:
            what = f"two passes of one micro-batch differ at step {updates + 1:,}"
            advice = f" If all ranks differ, a kernel is likely not deterministic: {KERNELS}"
        raise TrainingError(
            f"Silent corruption: {what} on {'; '.join(places)}. Stopped before the next optimizer "
            f"step, and saved nothing of it. Test that {part} or use another host, then start the "
            f"same command again to resume from the last checkpoint.{advice}"
        ).agreed()

    def _place(self) -> str:
        host, device = socket.gethostname(), self._world.device
        if device.type == "cpu":
            return f"CPU of host {host}"
        properties: Any = torch.cuda.get_device_properties(device)
        return f"GPU {device.index} of host {host}, {properties.name}, GPU-{properties.uuid}"

    def _note(self, kind: int, failed: Tensor) -> None:
        self._found[kind] |= failed.to(self._found.device, non_blocking=True)


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """Return sums `[k]` of the 8-byte words of tensors of bytes `[n]`, exact in int64.

    Any single flipped bit changes one. Tensors are read once; only small ones are copied.
    """
    sums = []
    for _, group in itertools.groupby(tensors, lambda one: one.device):
        rest = []
        for one in group:
            whole = 0 if one.numel() < SMALL_BYTES else one.numel() // 8 * 8
            if whole:
                sums.append(one[:whole].view(torch.int64).sum())
            rest.append(one[whole:])
        small = torch.cat(rest)
        sums.append(nn.functional.pad(small, (0, -len(small) % 8)).view(torch.int64).sum())
    return torch.stack([one.to(sums[0].device, non_blocking=True) for one in sums])


def _state_of(engine: Any) -> list[Tensor]:
    """Return the bytes `[n]` of this rank's state, each storage once, those of GPUs first.

    It is the weights, buffers, float32 masters and the optimizer's states.
    """
    state: list[Tensor] = list(engine.module.buffers())
    for weight in engine.module.parameters():
        state.append(getattr(weight, "ds_tensor", weight.data))
        if getattr(weight, "ds_persist", False):
            state.append(weight.data)  # gathered until the next update
    optimizer = engine.optimizer
    for master, states in getattr(optimizer, "optimizer", optimizer).state.items():
        state += [master.data, *(one for one in states.values() if isinstance(one, Tensor))]
    storages = {}
    for tensor in state:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            storages[tensor.device, storage.data_ptr()] = raw
    return sorted(storages.values(), key=lambda raw: raw.device.type, reverse=True)


class _Pass:
    """Records the next pass: the digests of its loss, and of gradients before they are reduced."""

    inputs: tuple[Tensor, ...]
    gradient_of_loss: Tensor

    def __init__(self, module: nn.Module, *, discards: bool) -> None:
        """Attach hooks, until `digests`; discarded gradients need no memory."""
        self._discards = discards
        self._sums: dict[int, Tensor] = {}
        self._hooks = [module.register_forward_hook(self._loss)]
        for number, weight in enumerate(module.parameters()):
            hook: Any = functools.partial(self._add, number)
            self._hooks += [weight.register_hook(hook)] if weight.requires_grad else []  # type: ignore[no-untyped-call]

    def digests(self) -> Tensor:
        """Remove the hooks; return the digests of loss and gradients."""
        for one in self._hooks:
            one.remove()
        return torch.stack([self._sums[number] for number in sorted(self._sums)])

    def _loss(self, module: nn.Module, inputs: tuple[Tensor, ...], loss: Tensor) -> None:
        self.inputs = inputs
        self._add(-1, loss)
        loss.register_hook(lambda one: setattr(self, "gradient_of_loss", one))  # type: ignore[no-untyped-call]

    def _add(self, number: int, values: Tensor) -> Tensor | None:
        raw = values.detach().reshape(-1).view(torch.uint8)
        raw = raw.clone() if raw.storage_offset() % 8 else raw
        self._sums[number] = self._sums.get(number, 0) + digest([raw]).sum()
        return values.new_zeros(()).expand_as(values) if self._discards else None


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Use deterministic kernels inside; raise TrainingError if an operation has none."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        text = f"run.replay_every needs deterministic kernels, {KERNELS} {error!s:.200}"
        raise TrainingError(text).agreed() from error
    finally:
        torch.use_deterministic_algorithms(before)
