"""The ways to train one model that step.py and peers.py compare; a call of each makes a step."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import deepspeed_config
from refocused.config.optimization import OptimizerConfig, PrecisionConfig, ZeroConfig
from refocused.engine.build import build_engine
from refocused.engine.compiled import CompileChoice, compile_blocks
from refocused.engine.optimizer import build_optimizer
from refocused.models.build import build_model
from refocused.models.causal_lm import CausalLM, counted_parameters
from refocused.world import World

Step = Callable[[], None]
OPTIMIZER = OptimizerConfig(lr=1e-4)
PRECISION = PrecisionConfig(dtype="fp32")


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model and its batch.

    Attributes:
        layers: Blocks of a GPT-2.
        width: Of its residual stream.
        vocabulary: Rows of its embedding.
        length: Tokens of a window.
        micro: Windows of a pass.
        accumulation: Passes of a step.
    """

    layers: int
    width: int
    vocabulary: int
    length: int
    micro: int
    accumulation: int

    @property
    def name(self) -> str:
        """Say it shortly."""
        return (
            f"{self.layers} x {self.width}, V {self.vocabulary:,}, "
            f"{self.micro} x {self.length} x {self.accumulation}"
        )

    def shape(self) -> dict[str, Any]:
        """Return the model as transformers' configuration."""
        return {
            "model_type": "gpt2",
            "vocab_size": self.vocabulary,
            "n_positions": self.length,
            "n_embd": self.width,
            "n_layer": self.layers,
            "n_head": max(1, self.width // 64),
        }

    def model(self, *, checkpointing: bool = False) -> CausalLM:
        """Build it, the same each time."""
        torch.manual_seed(0)
        return build_model(
            self.shape(),
            vocabulary=self.vocabulary,
            dropout=0.0,
            activation_checkpointing=checkpointing,
            chunk_tokens=256,  # the best on a CPU
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return a micro-batch."""
        ids = torch.randint(self.vocabulary, (self.micro, self.length + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def settings_of(setup: Setup, stage: Literal[0, 1, 2, 3], world: World) -> dict[str, Any]:
    """Return what a run of ours gives DeepSpeed."""
    return deepspeed_config(
        batch=BatchPlan(setup.micro, setup.accumulation, world.world_size, setup.length),
        optimizer=OPTIMIZER,
        precision=PRECISION,
        zero=ZeroConfig(stage=stage),
        parameters=counted_parameters(setup.model()),
        fragment={},
    )


def ours(
    setup: Setup, stage: Literal[0, 1, 2, 3], world: World, *, compiled: CompileChoice = "off"
) -> Step:
    """Train as the loop does: passes, update, and the look at the verdict one step later."""
    from refocused.training.finite_steps import FiniteSteps, StepTaken

    model = setup.model()
    compile_blocks(
        model,
        block_class=model.block_class,
        batch_shape=(setup.micro, setup.length),
        dtype=PRECISION.dtype,
        choice=compiled,
        world=world,
    )
    engine = build_engine(
        model,
        block_class=model.block_class,
        settings=settings_of(setup, stage, world),
        optimizer=OPTIMIZER,
        precision=PRECISION,
        world=world,
    )
    inputs, labels = setup.batch()
    finite = FiniteSteps(world, overflows=False)

    def step() -> None:
        losses = [engine.accumulate(inputs, labels) for _ in range(setup.accumulation)]
        finite.add(StepTaken(0, torch.stack(losses), engine.update(OPTIMIZER.lr), ()))

    return step


def bare_deepspeed(setup: Setup, stage: Literal[0, 1, 2, 3], world: World) -> Step:
    """Train with DeepSpeed's documented loop and its defaults: no leaf blocks, its own limits."""
    import deepspeed
    import deepspeed.utils.nvtx

    # Or it compiles an all-reduce of its own for CPUs first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings = settings_of(setup, stage, world)
    settings["zero_optimization"] = {"stage": stage}
    settings.pop("data_types", None)
    model = setup.model()
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(model, OPTIMIZER), config=settings
        )
    inputs, labels = setup.batch()

    def step() -> None:
        deepspeed.utils.nvtx.enable_nvtx = True
        for _ in range(setup.accumulation):
            engine.backward(engine(inputs, labels))
            engine.step()
        deepspeed.utils.nvtx.enable_nvtx = False

    return step


def bare_torch(setup: Setup, *, compiled: bool = False) -> Step:
    """Train with a plain torch loop, the same model, head and fused AdamW."""
    model = setup.model()
    if compiled:
        for module in model.modules():
            if isinstance(module, model.block_class):
                module.compile(dynamic=False)
    optimizer = build_optimizer(model, OPTIMIZER)
    inputs, labels = setup.batch()

    def step() -> None:
        for _ in range(setup.accumulation):
            (model(inputs, labels) / setup.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformers_own(setup: Setup) -> Step:
    """Train with transformers' own model, its loss over all logits, and torch's default AdamW."""
    import transformers

    source = setup.model().network.config
    model = transformers.AutoModelForCausalLM.from_config(source, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER.lr)
    inputs, _ = setup.batch()

    def step() -> None:
        for _ in range(setup.accumulation):
            (model(input_ids=inputs, labels=inputs).loss / setup.accumulation).backward()
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
    after_step: Callable[[float], None],
) -> None:
    """Train with transformers' Trainer and DeepSpeed as its documentation shows it.

    Args:
        setup: The model and its batch.
        stage: Of ZeRO.
        steps: To make.
        folder: For what it writes.
        after_step: Called after each step with its CPU milliseconds.
    """
    import transformers

    class Turns(transformers.TrainerCallback):  # type: ignore[misc]
        began = 0.0

        def on_step_begin(self, *args: Any, **named: Any) -> None:
            self.began = time.process_time()

        def on_step_end(self, *args: Any, **named: Any) -> None:
            after_step((time.process_time() - self.began) * 1000)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=setup.micro,
        gradient_accumulation_steps=setup.accumulation,
        max_steps=steps,
        learning_rate=OPTIMIZER.lr,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        deepspeed={
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        },
    )
    source = setup.model().network.config
    model = transformers.AutoModelForCausalLM.from_config(source, attn_implementation="sdpa")
    ids, _ = setup.batch()
    rows = [{"input_ids": row, "labels": row} for row in ids.repeat(steps * setup.accumulation, 1)]
    transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, callbacks=[Turns()]
    ).train()
