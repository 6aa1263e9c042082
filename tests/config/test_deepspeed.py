import dataclasses
from pathlib import Path
from typing import Any

import pytest

from refocused.config import shipped_files
from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import (
    ALLOWED,
    deepspeed_config,
    fragment_problems,
    idle_offloads,
    read_fragment,
)
from refocused.config.load_run import load_run
from refocused.config.optimization import OptimizerConfig, PrecisionConfig, ZeroConfig
from refocused.system.errors import ConfigError

BATCH = BatchPlan(
    micro_batch_size=4, gradient_accumulation_steps=16, world_size=8, sequence_length=2048
)


def generated(
    *,
    zero: ZeroConfig | None = None,
    dtype: Any = "bf16",
    parameters: int = 759_905_280,
    own: dict[str, Any] | None = None,
    batch: BatchPlan = BATCH,
) -> dict[str, Any]:
    return deepspeed_config(
        batch=batch,
        optimizer=OptimizerConfig(lr=1e-3, clip=0.5),
        precision=PrecisionConfig(dtype=dtype, initial_scale_power=12),
        zero=zero or ZeroConfig(),
        parameters=parameters,
        fragment=own or {},
    )


def test_the_batch_the_clipping_and_one_precision_come_from_the_run() -> None:
    config = generated()
    assert config["train_batch_size"] == 512
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 16
    assert config["gradient_clipping"] == 0.5
    assert config["bf16"] == {"enabled": True}
    half = generated(dtype="fp16")["fp16"]
    assert (half["initial_scale_power"], half["loss_scale"]) == (12, 0)
    for dtype in ("bf16", "fp16", "fp32"):
        assert {"bf16", "fp16"} & set(generated(dtype=dtype)) == {dtype} - {"fp32"}


def test_stage_3_keeps_the_gathered_model_unless_parameters_are_offloaded() -> None:
    small = generated()["zero_optimization"]
    assert small["stage3_max_live_parameters"] == 1_000_000_000
    assert small["stage3_max_reuse_distance"] == 3 * 759_905_280
    large = generated(parameters=1_414_455_296)["zero_optimization"]
    assert large["stage3_max_live_parameters"] == 1_414_455_296
    offloaded = generated(zero=ZeroConfig(offload_parameters="cpu"), parameters=1_414_455_296)[
        "zero_optimization"
    ]
    assert offloaded["stage3_max_live_parameters"] == 1_000_000_000
    assert offloaded["stage3_max_reuse_distance"] == 1_000_000_000


def test_gradients_leave_in_about_16_buckets_of_a_sensible_size() -> None:
    assert generated(parameters=1000)["zero_optimization"]["reduce_bucket_size"] == 1000
    sizes = {760_000_000: 50_000_000, 1_410_000_000: 88_125_000, 9_000_000_000: 100_000_000}
    for parameters, elements in sizes.items():
        zero = generated(parameters=parameters)["zero_optimization"]
        assert zero["reduce_bucket_size"] == elements


def test_offloads_name_their_device_and_their_folder() -> None:
    zero = generated(
        zero=ZeroConfig(offload_optimizer="nvme", offload_parameters="cpu", nvme_path="/nvme")
    )["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "nvme", "pin_memory": True, "nvme_path": "/nvme"}
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}


def test_a_fragment_is_laid_over_level_by_level() -> None:
    own = {
        "communication_data_type": "fp32",
        "zero_optimization": {
            "overlap_comm": False,
            "reduce_bucket_size": 6e8,
            "offload_optimizer": {"pin_memory": False},
        },
        "aio": None,
    }
    config = generated(zero=ZeroConfig(offload_optimizer="cpu"), own=own)
    assert config["communication_data_type"] == "fp32"
    assert "aio" not in config
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"]) == (3, False)
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    elements = zero["reduce_bucket_size"]  # a number as DeepSpeed wants it
    assert (elements, type(elements)) == (600_000_000, int)


@pytest.mark.parametrize(("ranks", "here"), [(8, 8), (4, 1), (6, 4)])
def test_a_partition_by_nodes_needs_equal_nodes_of_several_ranks(ranks: int, here: int) -> None:
    with pytest.raises(ConfigError, match=f"here are {here} of {ranks} ranks"):
        deepspeed_config(
            batch=dataclasses.replace(BATCH, world_size=ranks),
            optimizer=OptimizerConfig(lr=1e-3),
            precision=PrecisionConfig(dtype="bf16"),
            zero=ZeroConfig(partition="node"),
            parameters=1000,
            fragment={},
            ranks_here=here,
        )
    with pytest.raises(ValueError, match="partition: node needs stage: 3"):
        ZeroConfig(stage=2, partition="node")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (content, f"{name} belongs in the run file: set {owner} there and remove it here.")
            for content, name, owner in (
                ({"train_batch_size": 8}, "train_batch_size", "batch.global_batch_size"),
                ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "zero.stage"),
            )
        ),
        ({"comms_loger": {}}, "comms_loger is not allowed here. Did you mean comms_logger?"),
        *(
            (content, f"{name} was removed from DeepSpeed 0.19. Remove it; instead, {instead}")
            for content, name, instead in (
                (
                    {"elasticity": {"enabled": True}},
                    "elasticity",
                    "keep batch.global_batch_size and resume on any number of ranks.",
                ),
                (
                    {"zero_optimization": {"mics_shard_size": 8}},
                    "zero_optimization.mics_shard_size",
                    "set zero.partition=node in the run file.",
                ),
            )
        ),
        ({"steps_per_print": 10}, "steps_per_print is set by the trainer. Remove it."),
        (
            {"aio": {"block_size": "auto"}},
            'aio.block_size = "auto": expected a number such as 1000 or 2.5e-4, without quotes',
        ),
    ],
)
def test_what_is_not_known_or_of_a_wrong_type_is_refused(
    content: dict[str, Any], message: str
) -> None:
    assert fragment_problems(content) == [message]
    with pytest.raises(ConfigError, match="bf16 belongs") as failure:  # all that is wrong at once
        generated(own={"bf16": {}, **content})
    assert len(str(failure.value).splitlines()) == 2


def test_buffers_of_an_offload_need_the_offload() -> None:
    content = {"zero_optimization": {"offload_param": {"buffer_count": 5}}}
    [problem] = idle_offloads(content, zero=ZeroConfig())
    assert "zero.offload_parameters: cpu or nvme" in problem
    offloaded = ZeroConfig(offload_optimizer="cpu", offload_parameters="cpu")
    assert idle_offloads(content, zero=offloaded) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object of DeepSpeed settings"),
        ('{"aio": {}, "aio": {}}', "aio is set twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as failure:
        read_fragment(file)
    assert str(file) in str(failure.value)


@pytest.mark.parametrize("file", sorted((shipped_files() / "deepspeed").iterdir()), ids=str)
def test_every_shipped_fragment_may_be_used(file: Path) -> None:
    assert fragment_problems(read_fragment(file)) == []


OFFLOADED = ["zero.fragment=nvme", "zero.offload_optimizer=nvme", "zero.nvme_path=/nvme"]


@pytest.mark.parametrize(
    ("run", "overrides"),
    [
        ("gpt2_1b_8xh100", ["precision.dtype=fp16"]),
        ("gpt2_1b_8xh100_fast", ["precision.dtype=fp32"]),
        ("production_8gpu", ["precision.dtype=bf16", *OFFLOADED]),
        ("gpt2_124m", ["precision.dtype=bf16"]),
    ],
)
def test_deepspeed_itself_takes_what_is_generated(run: str, overrides: list[str]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    loaded = load_run(run, overrides)
    config = deepspeed_config(
        batch=BatchPlan(2, 3, 1, 64),
        optimizer=loaded.config.optimizer,
        precision=loaded.config.precision,
        zero=loaded.config.zero,
        parameters=10**9,
        fragment=loaded.fragment,
    )
    taken = DeepSpeedConfig(config)
    assert taken.train_batch_size == 6
    stage = loaded.config.zero.stage
    assert taken.zero_config.stage == stage
    assert any("stage3" in name for name in config["zero_optimization"]) == (stage == 3)
    assert taken.bfloat16_config.enabled is (loaded.config.precision.dtype == "bf16")
    assert taken.float16_config.enabled is (loaded.config.precision.dtype == "fp16")
    half = loaded.config.precision.dtype != "fp32"
    assert taken.grad_accum_dtype == ("fp32" if half else None)


def test_every_name_a_fragment_may_hold_is_one_of_deepspeeds() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero import offload_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    def spellings(model: Any) -> set[str]:
        return {field.alias or name for name, field in model.model_fields.items()}

    ours = ALLOWED
    zero = ours["zero_optimization"]
    assert set(zero) <= spellings(DeepSpeedZeroConfig)
    assert set(zero["offload_optimizer"]) <= spellings(
        offload_config.DeepSpeedZeroOffloadOptimizerConfig
    )
    assert set(zero["offload_param"]) <= spellings(offload_config.DeepSpeedZeroOffloadParamConfig)
    assert set(ours["comms_logger"]) <= spellings(CommsLoggerConfig)
    assert set(ours["aio"]) <= set(AIO_DEFAULT_DICT)
