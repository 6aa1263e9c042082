"""Exports of our own families carry their code, which runs where this package is not installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from evaluate.small_models import CONTEXT, FAMILIES, small_model

from refocused.evaluate.export import add_modeling_file, modeling_source
from refocused.evaluate.model_weights import network_class
from refocused.models.families import transformers_config

SHAPES = {
    "resonance": FAMILIES["resonance"],
    "ten": FAMILIES["ten"] | {"learned_positions": False, "scales": [1, 2]},
}
# Another process, in which nothing but torch and transformers can be imported.
CLEAN = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("refocused", "deepspeed", "triton"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

for folder in sys.argv[1:]:
    network = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = tokenizer("def main(argv):", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = network(ids).logits
    written = network.generate(ids, max_new_tokens=20, do_sample=False)
    torch.save((ids, logits, written), folder + "/answers.pt")
assert not any(name.partition(".")[0] == "refocused" for name in sys.modules)
"""


def saved(folder: Path, family: str) -> Path:
    """Write a small model as an export does."""
    model = small_model(**SHAPES[family] | {"family": family})
    model.network.save_pretrained(folder / family)
    model.tokenizer.save_pretrained(folder / family)
    config = model.network.config
    add_modeling_file(config, folder / family)
    config.save_pretrained(folder / family)
    return folder / family


@pytest.mark.slow  # another process imports torch and transformers
def test_an_export_answers_alike_where_this_package_is_missing(tmp_path: Path) -> None:
    folders = {family: saved(tmp_path, family) for family in SHAPES}
    clean = [sys.executable, "-I", "-c", CLEAN, *map(str, folders.values())]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run(clean, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for family, folder in folders.items():
        ids, logits, written = torch.load(folder / "answers.pt", weights_only=True)
        config = transformers_config(SHAPES[family], vocabulary=300, dropout=0.0)
        network = network_class(config).from_pretrained(folder)
        assert len(ids[0]) < CONTEXT
        with torch.no_grad():
            assert torch.equal(network(ids).logits, logits)
        assert torch.equal(network.generate(ids, max_new_tokens=20, do_sample=False), written)


@pytest.mark.parametrize("family", SHAPES)
def test_its_modules_share_one_namespace_without_taking_each_others_names(family: str) -> None:
    tree = ast.parse(modeling_source(f"refocused.models.{family}.{family}"))
    defined: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origins = [getattr(node, "module", None) or node.names[0].name]
            assert not origins[0].startswith("refocused"), ast.unparse(node)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] += 1
        elif isinstance(node, ast.Assign):
            defined.update(ast.unparse(target) for target in node.targets)
    twice = [name for name, count in defined.items() if count > 1]
    assert twice == []
    assert len(defined) > 20


def test_families_of_transformers_own_carry_no_code(tmp_path: Path) -> None:
    config = small_model("gpt2").network.config
    add_modeling_file(config, tmp_path)
    assert not hasattr(config, "auto_map")
    assert list(tmp_path.iterdir()) == []
