"""The training loops that benchmarks compare; a call of each takes one step."""

import contextlib
import dataclasses
import io
import itertools
import os
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from measuring import ROOT
from torch import Tensor

from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import deepspeed_config
from refocused.config.model_shape import shape_from
from refocused.config.optimization import OptimizerConfig, PrecisionConfig, ZeroConfig
from refocused.config.run_config import ModelConfig
from refocused.data.order.sequences import Position
from refocused.engine.build_engine import build_engine, set_product_precision
from refocused.engine.compiled import DTYPES, CompileChoice, compile_blocks
from refocused.engine.engine import Engine
from refocused.engine.optimizer import build_optimizer
from refocused.models.causal_lm import CausalLM, counted_parameters
from refocused.models.families import build_model, transformers_config
from refocused.models.fp8 import compute_in_fp8
from refocused.system.world import World, join_world

sys.path.insert(0, str(ROOT / "tests"))

Step = Callable[[], None]
WARM_STEPS = 2
OPTIMIZER = OptimizerConfig(lr=1e-4)
FLOAT32 = PrecisionConfig(dtype="fp32")


class Clock:
    """Measures the milliseconds between two places of a loop.

    On a CPU the CPU time of this process, all threads together: other programs do not count. On a
    GPU the time between two events in its queue, so that waiting for the host counts as well.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._is_cuda = torch.device(device).type == "cuda"

    def begin(self) -> None:
        """Mark the first place, after emptying the GPU's queue."""
        if self._is_cuda:
            torch.cuda.synchronize()
        self._began = self._mark()

    def end(self) -> float:
        """Return the milliseconds since then; waits for the GPU."""
        ended = self._mark()
        if not self._is_cuda:
            return float(ended - self._began) * 1000
        ended.synchronize()
        return float(self._began.elapsed_time(ended))

    def timed_ms(self, call: Callable[[], Any]) -> float:
        """Return the milliseconds of a call."""
        self.begin()
        call()
        return self.end()

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.process_time()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model and its batch."""

    layers: int  # blocks of a GPT-2
    width: int  # of its residual stream
    vocabulary: int  # rows of its embedding
    length: int  # tokens of a sequence
    micro_batch_size: int  # sequences of a pass
    gradient_accumulation_steps: int  # passes of a step
    # A model in transformers' form, in place of the GPT-2 of these sizes
    given: Mapping[str, Any] | None = None
    precision: PrecisionConfig = FLOAT32  # what passes compute in
    checkpointing: bool = False  # recompute each block in the backward pass
    offload: Literal["none", "cpu"] = "none"  # where the optimizer's states are
    chunk_tokens: int = 512  # tokens whose logits exist at once; 512 are the best on a CPU

    @property
    def name(self) -> str:
        """Return a short description."""
        return (
            f"{self.layers} x {self.width}, V {self.vocabulary:,}, "
            f"{self.micro_batch_size} x {self.length} x {self.gradient_accumulation_steps}"
        )

    def shape(self) -> Mapping[str, Any]:
        """Return the model as transformers' configuration."""
        return self.given or {
            "model_type": "gpt2",
            "vocab_size": self.vocabulary,
            "n_positions": self.length,
            "n_embd": self.width,
            "n_layer": self.layers,
            "n_head": max(1, self.width // 64),
        }

    def model(self) -> CausalLM:
        """Build the model with a fixed seed."""
        torch.manual_seed(0)
        return build_model(
            self.shape(),
            vocabulary=self.vocabulary,
            dropout=0.0,
            activation_checkpointing=self.checkpointing,
            chunk_tokens=self.chunk_tokens,
        )

    def batch(self, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
        """Return a micro-batch."""
        ids = torch.randint(
            self.vocabulary, (self.micro_batch_size, self.length + 1), device=device
        )
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def alone(device: str = "cpu") -> World:
    """Join a world of one rank, whose CPU part computes on one core."""
    from ranks import free_port

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update({**alone, **address, "DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    return join_world(device)


def settings_of(
    setup: Setup, stage: Literal[0, 1, 2, 3], world: World, *, parameters: int
) -> dict[str, Any]:
    """Return the DeepSpeed settings of our runs."""
    return deepspeed_config(
        batch=BatchPlan(
            setup.micro_batch_size,
            setup.gradient_accumulation_steps,
            world.world_size,
            setup.length,
        ),
        optimizer=OPTIMIZER,
        precision=setup.precision,
        zero=ZeroConfig(stage=stage, offload_optimizer=setup.offload),
        parameters=parameters,
        fragment={},
    )


def engine_of(
    setup: Setup,
    model: CausalLM,
    stage: Literal[0, 1, 2, 3],
    world: World,
    *,
    parameters: int | None = None,
    replay_every: int | None = None,
) -> Engine:
    """Build an engine of ours; `parameters` are counted before the model is changed."""
    parameters = counted_parameters(model) if parameters is None else parameters
    return build_engine(
        model,
        block_class=model.block_class,
        settings=settings_of(setup, stage, world, parameters=parameters),
        optimizer=OPTIMIZER,
        precision=setup.precision,
        world=world,
        replay_every=replay_every,
    )


def ours(
    setup: Setup,
    stage: Literal[0, 1, 2, 3],
    world: World,
    *,
    compiled: CompileChoice = "off",
    told: list[str] | None = None,
    replay_every: int | None = None,
) -> Step:
    """Train as the loop does: passes, update, and the look at the verdict one step later.

    What computes attention and blocks is added to `told`.
    """
    from refocused.models.kernels import choose_kernels
    from refocused.train.step.guards import FiniteSteps, StepTaken

    set_product_precision(setup.precision)
    model = setup.model()
    parameters = counted_parameters(model)
    if setup.precision.fp8 != "none":
        compute_in_fp8(
            model, block_class=model.block_class, scaling=setup.precision.fp8, world=world
        )
    mixing = choose_kernels(
        model,
        shape_from(setup.shape(), where=setup.name).mixer,
        config=ModelConfig(preset="compared", sequence_length=setup.length, compile=compiled),
        dtype=DTYPES[setup.precision.resolved],
        plan=BatchPlan(
            setup.micro_batch_size,
            setup.gradient_accumulation_steps,
            world.world_size,
            setup.length,
        ),
        world=world,
    )
    compilation = compile_blocks(
        model,
        block_class=model.block_class,
        batch_shape=(setup.micro_batch_size, setup.length),
        dtype=setup.precision.resolved,
        choice=compiled,
        world=world,
        is_partitioned=stage == 3,
    )
    if told is not None:
        told += [mixing, compilation.text]
    engine = engine_of(setup, model, stage, world, parameters=parameters, replay_every=replay_every)
    inputs, labels = setup.batch(world.device)
    finite, numbers = FiniteSteps(world, overflows=False), itertools.count(1)
    # What the error of a non-finite step names as its data.
    drawn: Any = [
        types.SimpleNamespace(describe=lambda: "random tokens")
    ] * setup.gradient_accumulation_steps

    def step() -> None:
        losses = [
            engine.accumulate(inputs, labels) for _ in range(setup.gradient_accumulation_steps)
        ]
        verdict, place = engine.update(OPTIMIZER.lr), Position()
        finite.add(StepTaken(next(numbers), torch.stack(losses), verdict, drawn, place, place))

    return step


def bare_deepspeed(setup: Setup, stage: Literal[0, 1, 2, 3], world: World) -> Step:
    """Train with DeepSpeed's documented loop and its defaults: no leaf blocks, its own limits."""
    import deepspeed
    import deepspeed.utils.nvtx

    # Otherwise it first compiles its own all-reduce for CPUs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = setup.model()
    settings = settings_of(setup, stage, world, parameters=counted_parameters(model))
    settings["zero_optimization"] = {"stage": stage}
    settings.pop("data_types", None)
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(model, OPTIMIZER), config=settings
        )
    inputs, labels = setup.batch(world.device)

    def step() -> None:
        deepspeed.utils.nvtx.enable_nvtx = True
        for _ in range(setup.gradient_accumulation_steps):
            engine.backward(engine(inputs, labels))
            engine.step()
        deepspeed.utils.nvtx.enable_nvtx = False

    return step


def bare_torch(
    setup: Setup,
    *,
    compiled: Literal["no", "blocks", "whole"] = "no",
    all_logits: bool = False,
    device: str | torch.device = "cpu",
) -> Step:
    """Train with a plain torch loop, the same model and fused AdamW.

    In bf16 by autocast, which casts float32 weights in each pass. `all_logits`: nanoGPT's loss.
    """
    model = setup.model().to(device)
    kind, is_bf16 = torch.device(device).type, setup.precision.resolved == "bf16"
    if compiled == "blocks":
        for module in model.modules():
            if isinstance(module, model.block_class):
                module.compile(dynamic=False)

    @torch.compile(dynamic=False, disable=compiled != "blocks")
    def logits_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    @torch.compile(dynamic=False, disable=compiled != "whole")
    def pass_loss(inputs: Tensor, labels: Tensor) -> Any:
        if all_logits:
            return logits_loss(model.network(input_ids=inputs, use_cache=False).logits, labels)
        return model(inputs, labels)

    optimizer = build_optimizer(model, OPTIMIZER)
    inputs, labels = setup.batch(device)

    def step() -> None:
        for _ in range(setup.gradient_accumulation_steps):
            with torch.autocast(kind, torch.bfloat16, enabled=is_bf16):
                loss = pass_loss(inputs, labels)
            (loss / setup.gradient_accumulation_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trainer(
    setup: Setup,
    stage: int,
    *,
    steps: int,
    folder: Path,
    clock: Clock,
    after_step: Callable[[float], None],
    compiled: bool = False,
) -> None:
    """Train with transformers' Trainer and DeepSpeed as its documentation shows it.

    `after_step` gets the milliseconds of each step; the Trainer writes to `folder`.
    """
    import transformers

    class Turns(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **named: Any) -> None:
            clock.begin()

        def on_step_end(self, *args: Any, **named: Any) -> None:
            after_step(clock.end())

    zero: dict[str, Any] = {"stage": stage}
    if setup.offload != "none":
        zero["offload_optimizer"] = {"device": setup.offload, "pin_memory": True}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=setup.micro_batch_size,
        gradient_accumulation_steps=setup.gradient_accumulation_steps,
        max_steps=steps,
        learning_rate=OPTIMIZER.lr,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        bf16=setup.precision.resolved == "bf16",
        gradient_checkpointing=setup.checkpointing,
        torch_compile=compiled,
        disable_tqdm=True,
        deepspeed={
            "zero_optimization": zero,
            "bf16": {"enabled": "auto"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            # It would synchronize the device in each pass, which torch 2.13 cannot compile.
            "timers": {"throughput": {"enabled": False}},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        },
    )
    source = transformers_config(setup.shape(), vocabulary=setup.vocabulary, dropout=0.0)
    model = transformers.AutoModelForCausalLM.from_config(
        source, attn_implementation="sdpa", trust_remote_code=False
    )
    ids, _ = setup.batch()
    rows = [
        {"input_ids": row, "labels": row}
        for row in ids.repeat(steps * setup.gradient_accumulation_steps, 1)
    ]
    transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, callbacks=[Turns()]
    ).train()
