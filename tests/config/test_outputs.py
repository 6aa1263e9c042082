from __future__ import annotations

import pydantic
import pytest

from refocused.config.outputs import CostConfig, LogConfig, TrackingConfig


@pytest.mark.parametrize("seconds", [0, 0.5, "5"])
def test_how_often_to_sample(seconds: float) -> None:
    assert LogConfig(sample_seconds=seconds).sample_seconds == float(seconds)


@pytest.mark.parametrize("seconds", [0.1, -1])
def test_sampling_too_often_is_refused(seconds: float) -> None:
    with pytest.raises(pydantic.ValidationError):
        LogConfig(sample_seconds=seconds)


@pytest.mark.parametrize("name", ["budget_usd", "credit_usd"])
def test_limits_of_money_need_a_price(name: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=f"{name} needs per_hour_usd"):
        CostConfig.model_validate({name: 100})
    assert CostConfig.model_validate({name: 100, "per_hour_usd": 8})


@pytest.mark.parametrize("project", ["demo", "my-team/demo_1.5"])
def test_a_project_of_wandb(project: str) -> None:
    assert TrackingConfig(wandb=project).wandb == project


@pytest.mark.parametrize("project", ["", "/demo", "a/b/c", "a b", "team/", "demo#1"])
def test_what_is_no_project_of_wandb_is_refused(project: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="PROJECT or ENTITY/PROJECT is wanted"):
        TrackingConfig(wandb=project)


def test_histograms_need_somebody_who_draws_them() -> None:
    assert TrackingConfig(tensorboard=True, histogram_interval=100).histogram_interval == 100
    assert TrackingConfig(wandb="demo", histogram_interval=100).histogram_interval == 100
    with pytest.raises(pydantic.ValidationError, match="needs wandb or tensorboard"):
        TrackingConfig(openmetrics="run.prom", histogram_interval=100)


def test_node_exporter_reads_no_other_files() -> None:
    assert TrackingConfig(openmetrics="node/run.prom").openmetrics == "node/run.prom"
    with pytest.raises(pydantic.ValidationError, match=r"ends in \.prom is wanted"):
        TrackingConfig(openmetrics="node/run.txt")
