from __future__ import annotations

import pytest

from refocused.config import suggestions


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("optimizer", "learning_rate", "optimizer.lr"),
        ("optimizer", "weight_deacy", "optimizer.weight_decay"),
        ("batch", "batch_size", "batch.micro"),
        ("batch", "gradient_accumulation_steps", "batch.accumulation"),
        ("optimizer", "warmup_steps", "schedule.warmup_steps"),
        ("run", "lr", "optimizer.lr"),
        ("run", "interval", "checkpoint.interval or evaluation.interval or log.interval"),
    ],
)
def test_an_unknown_setting_points_to_its_place(section: str, key: str, meant: str) -> None:
    assert suggestions.unknown_setting(section, key).endswith(f"Did you mean {meant}?")


def test_a_strange_setting_gets_the_list_of_its_section() -> None:
    known = ", ".join(suggestions.SECTIONS["log"].model_fields)
    assert (
        suggestions.unknown_setting("log", "zzz") == f"log.zzz is not a setting. log has {known}."
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("training", "Did you mean run?"),
        ("optimiser", "Did you mean optimizer?"),
        ("max_steps", "Did you mean run.steps?"),
        ("optimizer.lr", "Write lr below optimizer:."),
        ("zzz", "There are run, model, batch"),
    ],
)
def test_an_unknown_section_points_to_its_place(name: str, hint: str) -> None:
    assert hint in suggestions.unknown_section(name)


def test_every_synonym_leads_to_a_setting_and_hides_none() -> None:
    for synonym, meant in suggestions._SYNONYMS.items():
        section, _, key = meant.partition(".")
        assert key in suggestions.SECTIONS[section].model_fields, synonym
    assert set(suggestions._SECTION_SYNONYMS.values()) <= set(suggestions.SECTIONS)
    assert not set(suggestions._SECTION_SYNONYMS) & set(suggestions.SECTIONS)


@pytest.mark.parametrize(
    ("section", "key", "text"),
    [
        ("run", "name", True),
        ("checkpoint", "mirror", True),
        ("data", "include", True),
        ("optimizer", "lr", False),
        ("schedule", "kind", False),
        ("data", "disk_limit_gb", False),
    ],
)
def test_text_settings_are_known_from_others(section: str, key: str, text: bool) -> None:
    assert suggestions.wants_text(section, key) is text
