"""DeepSpeed's configuration from the run's sections and a file of `config/deepspeed/`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from refocused.config import shipped_files
from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import ALLOWED, deepspeed_config, idle_offloads, read_fragment
from refocused.config.load_run import load_run
from refocused.config.optimization import OptimizerConfig, PrecisionConfig, ZeroConfig
from refocused.system.errors import ConfigError

BATCH = BatchPlan(
    micro_batch_size=4, gradient_accumulation_steps=16, world_size=8, sequence_length=2048
)


def generated(*, zero: ZeroConfig | None = None, dtype: Any = "bf16", **changes: Any) -> Any:
    return deepspeed_config(
        optimizer=OptimizerConfig(lr=1e-3, clip=0.5),
        precision=PrecisionConfig(dtype=dtype, initial_scale_power=12),
        zero=zero or ZeroConfig(),
        **{"batch": BATCH, "parameters": 759_905_280, "fragment": {}, **changes},
    )


def zero_of(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = generated(**changes)["zero_optimization"]
    return found


def fragment_of(folder: Path, content: object) -> dict[str, Any]:
    (folder / "own.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return read_fragment(folder / "own.json")


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


@pytest.mark.parametrize(
    ("parameters", "offload", "live", "reuse"),
    [
        (759_905_280, "none", 10**9, 3 * 759_905_280),
        (1_414_455_296, "none", 1_414_455_296, 3 * 1_414_455_296),
        (1_414_455_296, "cpu", 10**9, 10**9),
    ],
)
def test_stage_3_keeps_the_gathered_model_unless_parameters_are_offloaded(
    parameters: int, offload: Any, live: int, reuse: int
) -> None:
    zero = zero_of(zero=ZeroConfig(offload_parameters=offload), parameters=parameters)
    assert zero["stage3_max_live_parameters"] == live
    assert zero["stage3_max_reuse_distance"] == reuse


def test_gradients_leave_in_about_16_buckets_of_a_sensible_size() -> None:
    sizes = {1000: 1000, 760_000_000: 50_000_000, 1_410_000_000: 88_125_000}
    sizes |= {9_000_000_000: 100_000_000}
    for parameters, elements in sizes.items():
        assert zero_of(parameters=parameters)["reduce_bucket_size"] == elements


def test_offloads_name_their_device_and_their_folder() -> None:
    offloads = {"offload_optimizer": "nvme", "offload_parameters": "cpu", "nvme_path": "/nvme"}
    zero = zero_of(zero=ZeroConfig.model_validate(offloads))
    assert zero["offload_optimizer"] == {"device": "nvme", "pin_memory": True, "nvme_path": "/nvme"}
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}


def test_a_fragment_is_laid_over_level_by_level(tmp_path: Path) -> None:
    own = {"overlap_comm": False, "reduce_bucket_size": 6e8}
    own["offload_optimizer"] = {"pin_memory": False}
    content = {"communication_data_type": "fp32", "zero_optimization": own, "aio": None}
    fragment = fragment_of(tmp_path, content)
    config = generated(zero=ZeroConfig(offload_optimizer="cpu"), fragment=fragment)
    assert config["communication_data_type"] == "fp32"
    assert "aio" not in config
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"]) == (3, False)
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    elements = zero["reduce_bucket_size"]  # a number as DeepSpeed wants it
    assert (elements, type(elements)) == (600_000_000, int)


@pytest.mark.parametrize(("ranks", "here"), [(8, 8), (4, 1), (6, 4)])
def test_a_partition_by_nodes_needs_equal_nodes_of_several_ranks(ranks: int, here: int) -> None:
    batch = dataclasses.replace(BATCH, world_size=ranks)
    with pytest.raises(ConfigError, match=f"here are {here} of {ranks} ranks"):
        generated(zero=ZeroConfig(partition="node"), batch=batch, ranks_here=here)
    with pytest.raises(ValueError, match="partition: node needs stage: 3"):
        ZeroConfig(stage=2, partition="node")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object of DeepSpeed settings."),
        ('{"aio": {}, "aio": {}}', "not JSON: aio is set twice."),
        (
            {"train_batch_size": 8},
            "train_batch_size belongs in the run file: set batch.global_batch_size there and "
            "remove it here.",
        ),
        ({"comms_loger": {}}, "comms_loger is not allowed here. Did you mean comms_logger?"),
        (
            {"elasticity": {"enabled": True}},
            "elasticity was removed from DeepSpeed 0.19. Remove it; instead, keep "
            "batch.global_batch_size and resume on any number of ranks.",
        ),
        (
            {"zero_optimization": {"mics_shard_size": 8}},
            "zero_optimization.mics_shard_size was removed from DeepSpeed 0.19. Remove it; "
            "instead, set zero.partition=node in the run file.",
        ),
        ({"steps_per_print": 10}, "steps_per_print is set by the trainer. Remove it."),
        (
            {"aio": {"block_size": "auto"}},
            'aio.block_size = "auto": expected a number such as 1000 or 2.5e-4, without quotes',
        ),
    ],
)
def test_what_a_fragment_may_not_hold_is_refused_all_at_once(
    tmp_path: Path, content: Any, problem: str
) -> None:
    place = f"{tmp_path / 'own.json'}: "
    with pytest.raises(ConfigError) as failure:
        fragment_of(tmp_path, content)
    assert str(failure.value).startswith(place + problem)
    if isinstance(content, dict):
        with pytest.raises(ConfigError) as failure:
            fragment_of(tmp_path, {**content, "bf16": {}})
        lines = str(failure.value).splitlines()
        assert lines[0].startswith(place) and lines[0] != lines[1]
        assert {f"{place}{problem}", f"{place}bf16 belongs in the run file"} == {
            line.partition(": set precision")[0] for line in lines
        }


def test_buffers_of_an_offload_need_the_offload() -> None:
    content = {"zero_optimization": {"offload_param": {"buffer_count": 5}}}
    [problem] = idle_offloads(content, zero=ZeroConfig())
    assert "zero.offload_parameters: cpu or nvme" in problem
    with pytest.raises(ConfigError, match=r"zero\.offload_parameters: cpu or nvme"):
        generated(fragment=content)
    offloaded = ZeroConfig(offload_optimizer="cpu", offload_parameters="cpu")
    assert idle_offloads(content, zero=offloaded) == []


@pytest.mark.parametrize("file", sorted((shipped_files() / "deepspeed").iterdir()), ids=str)
def test_every_shipped_fragment_may_be_used(file: Path) -> None:
    assert read_fragment(file) == json.loads(file.read_text())


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
    stage, dtype = loaded.config.zero.stage, loaded.config.precision.dtype
    assert taken.zero_config.stage == stage
    assert any("stage3" in name for name in config["zero_optimization"]) == (stage == 3)
    assert taken.bfloat16_config.enabled is (dtype == "bf16")
    assert taken.float16_config.enabled is (dtype == "fp16")
    assert taken.grad_accum_dtype == (None if dtype == "fp32" else "fp32")


def test_every_name_a_fragment_may_hold_is_one_of_deepspeeds() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero import offload_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = ALLOWED["zero_optimization"]
    for names, model in (
        (zero, DeepSpeedZeroConfig),
        (zero["offload_optimizer"], offload_config.DeepSpeedZeroOffloadOptimizerConfig),
        (zero["offload_param"], offload_config.DeepSpeedZeroOffloadParamConfig),
        (ALLOWED["comms_logger"], CommsLoggerConfig),
    ):
        spellings = {field.alias or name for name, field in model.model_fields.items()}
        assert set(names) <= spellings
    assert set(ALLOWED["aio"]) <= set(AIO_DEFAULT_DICT)
