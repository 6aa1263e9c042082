import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from ranks import ROOT

from refocused.config import shipped_files
from refocused.config.batch_plan import plan_batch
from refocused.config.load_run import load_run, render_run
from refocused.config.optimization import BatchConfig
from refocused.config.setting_help import REQUIRED, SettingInfo, list_settings
from refocused.config.yaml_source import parse_yaml
from refocused.system.errors import ConfigError

SETTINGS = {
    "run.steps": ("whole number from 1 | null", "null"),
    "batch.micro_batch_size": ("whole number from 1 | auto", REQUIRED),
    "checkpoint.keep_remote": ("whole number from 2 | all", '"all"'),
    "data.fetch_threads": ("whole number from 1 to 64", "8"),
    "data.mixture.NAME.weight": ("number from 0", REQUIRED),
    "optimizer.betas": ("list", "[0.9, 0.95]"),
    "zero.stage": ("0 | 1 | 2 | 3 | auto", "3"),
}
RUNS = sorted((shipped_files() / "runs").glob("*.yaml"))


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_every_shipped_run_loads_and_reads_back(file: Path, tmp_path: Path) -> None:
    config = load_run(file).config
    assert config.run.name == file.stem
    resolved = tmp_path / "run.yaml"
    resolved.write_text(render_run(config))
    assert load_run(resolved).config == config


def test_every_setting_is_listed_with_its_values_its_default_and_its_meaning() -> None:
    listed = {one.name: one for one in list_settings()}
    written = parse_yaml(render_run(load_run("demo").config))
    names = {f"{section}.{key}" for section, keys in written.items() for key in keys}
    assert {name for name in listed if ".NAME." not in name} >= names
    assert [one.name for one in listed.values() if not one.meaning.endswith(".")] == []
    optional = {one.name: one.default for one in listed.values() if one.default != REQUIRED}
    given = [f"{name}={value}" for name, value in optional.items() if ".NAME." not in name]
    load_run("demo", [one for one in given if not one.startswith(("data.", "batch.", "run.steps"))])
    found = {name: (listed[name].kind, listed[name].default) for name in SETTINGS}
    assert found == SETTINGS


@pytest.mark.parametrize("setting", list_settings(), ids=lambda one: one.name)
def test_every_example_is_accepted_and_is_not_the_default(setting: SettingInfo) -> None:
    assert setting.example
    name, beside = setting.name, [key for key in WITH if setting.name in WITH[key].split()]
    if name.startswith(("data.mixture.", "data.stages")):
        sources = [f"data.mixture.{one}={{source: {one}, weight: 2}}" for one in ("web", "code")]
        stage = ["from_step=1", "weights={web: 3, code: 1}"]
        stage = [f"data.stages.web.{one}" for one in stage if "stages.NAME" in name]
        own = [one for one in stage if ("weights" in one) == ("from" in name)]
        beside, name = ["data.source=null", *sources, *own], name.replace("NAME", "web")
    config = load_run(ANNOTATED, [*beside, f"{name}={setting.example}"]).config
    section, key = name.split(".", 1)
    if setting.default != REQUIRED and ".NAME." not in setting.name:
        assert config.model_dump(mode="json")[section][key] != json.loads(setting.default)


WITH = {  # what an example needs beside it
    "batch.global_batch_size=null": "batch.gradient_accumulation_steps",
    "data.source=null": "data.mixture",
    "data.tokenizer=gpt2": "data.bpe_folder",
    "data.tokenizer=bytes": "evaluation.tasks evaluation.sample_prompt",
    "data.document_id=50256": "data.mask_documents",
    "model.preset=ten_small_32k": "model.scan",
    "model.preset=nanochat_d20": (
        "model.head_std optimizer.head_lr optimizer.head_betas optimizer.head_decay"
    ),
    "model.start_from=hub:openai-community/gpt2": "model.resize_vocabulary",
    "optimizer.kind=muon": (
        "optimizer.matrix_lr optimizer.matrix_decay optimizer.cautious_decay "
        "optimizer.normuon optimizer.momentum optimizer.momentum_warmup_steps "
        "optimizer.momentum_end"
    ),
    "schedule.kind=warm_restarts": "schedule.cycle_steps",
    "schedule.kind=wsd": "schedule.decay schedule.decay_fraction schedule.decay_steps",
    "tracking.tensorboard=true": "tracking.histogram_interval",
    "cost.per_hour_usd=24": "cost.budget_usd cost.credit_usd",
}
ANNOTATED = shipped_files() / "annotated.yaml"


def test_the_annotated_run_file_is_up_to_date_and_holds_every_default() -> None:
    sys.path.append(str(ROOT / "docs"))
    generate_reference = importlib.import_module("generate_reference")
    assert ANNOTATED.read_text() == generate_reference.annotated_run()
    written = load_run(ANNOTATED).config.model_dump(mode="json")
    for one in list_settings():
        section, key = one.name.split(".", 1)
        if (
            one.default != REQUIRED
            and one.name not in generate_reference.CHOSEN
            and ".NAME." not in key
        ):
            assert written[section][key] == json.loads(one.default), one.name


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_the_arithmetic_of_each_run_is_that_of_its_header(file: Path) -> None:
    config, text = load_run(file).config, file.read_text()
    [step_tokens] = re.findall(r"^#   step .*= ([\d,]+) tokens", text, re.M)
    [run] = re.findall(r"^#   run .*?([\d,]+) steps = ([\d.]+) ([MB]) tokens", text, re.M)
    steps, unit = int(run[0].replace(",", "")), {"M": 1e6, "B": 1e9}[run[2]]
    batch = config.batch
    if batch.micro_batch_size == "auto":
        batch = batch.model_copy(update={"micro_batch_size": 1})
    for ranks in (1, 2, 4, 8) if batch.global_batch_size else (1,):  # the same step on any number
        plan = plan_batch(batch, world_size=ranks, sequence_length=config.model.sequence_length)
        assert f"{plan.tokens:,}" == step_tokens
    assert config.run.steps == steps
    digits = len(run[1].partition(".")[2])
    assert f"{plan.tokens * steps / unit:.{digits}f}" == run[1]
    assert (batch.global_batch_size is None) == (file.stem in ("test", "production"))
    in_cloud = str(config.data.source).startswith("gs://")  # where a start without GPUs costs money
    assert (config.run.device == "cuda") is in_cloud


def test_a_batch_grows_by_whole_passes_of_all_ranks() -> None:
    batch = BatchConfig(micro_batch_size=2, gradient_accumulation_steps=4, warmup_steps=9)
    plan = plan_batch(batch, world_size=3, sequence_length=8)
    assert [plan.micro_batches(step) for step in range(11)] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]
    assert (plan.global_batch_size, plan.tokens) == (24, 192)  # once it is grown
    assert plan.sequences_between(0, 11) == 6 * (3 * (1 + 2 + 3) + 2 * 4)
    assert plan.sequences_between(5, 7) == 6 * (2 + 3)
    assert plan.sequences_between(12, 20) == 8 * 24
    assert plan.sequences_between(4, 4) == 0
    with pytest.raises(ConfigError, match="warmup_steps=9: a step has only one micro-batch"):
        plan_batch(
            batch.model_copy(update={"gradient_accumulation_steps": 1}),
            world_size=3,
            sequence_length=8,
        )


def test_a_batch_that_the_ranks_cannot_share_is_refused_with_what_would_fit() -> None:
    for micro_batch_size, ranks, message in (
        (4, 3, "a multiple of 12"),
        (4, 256, "a multiple of 1024"),
        ("auto", 2, r"batch.micro_batch_size=auto is chosen on the GPUs"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_batch(
                BatchConfig(micro_batch_size=micro_batch_size, global_batch_size=512),
                world_size=ranks,
                sequence_length=8,
            )
