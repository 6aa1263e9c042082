"""The commands of the recipe's page, as they stand there, from the hub to an exported model."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from data.text_samples import random_texts, tiny_bpe
from fakes import Emulator, storage_emulator
from hub_site import DATASET, HubSite, hub_site, parquet_bytes
from ranks import ROOT

from refocused.bucket.open_bucket import open_bucket

PAGE = ROOT / "docs" / "guides" / "recipe_1b.md"
LLAMA = {
    **{"model_type": "llama", "vocab_size": 263, "max_position_embeddings": 64},
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 128, "tie_word_embeddings": False},
}
# In place of the sizes of the page.
SMALL = """
run.steps=12 model.preset=tiny.json model.sequence_length=64 data.document_id=262
batch.global_batch_size=8 batch.micro_batch_size=1 schedule.warmup_steps=2 precision.dtype=fp32
checkpoint.interval=4 evaluation.interval=4 evaluation.sequences=4 evaluation.task_interval=8
evaluation.task_items=4 evaluation.sample_interval=8 evaluation.sample_tokens=4 log.interval=1
"""


def commands_of(page: str) -> list[str]:
    """Return the commands of the page's blocks, each as a line."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def here(command: str, site: HubSite, store: Emulator) -> str:
    """Return a command of the page with other addresses and sizes."""
    package = f"{shlex.quote(sys.executable)} -P -m refocused"
    for public in ("https://huggingface.co", "https://raw.githubusercontent.com"):
        command = command.replace(public, site.environment["HF_ENDPOINT"])
    command = command.replace("gs://my-bucket", store.url).replace("--gcs-credentials key.json", "")
    command = command.replace("--val-ratio 0.001", "--val-ratio 0.1")
    command = command.replace("./launch/train.sh", f"{package} launch")
    command = re.sub(r"\./launch/(\w+)\.py", rf"{package} \1", command)
    planned = "--plan" in command or "--for" in command  # for GPUs, without one
    settings = " ".join([*SMALL.split(), *([] if planned else ["run.device=cpu"])])
    return command.replace("--config fineweb-1b.yaml", f"--config fineweb-1b.yaml {settings}")


@pytest.mark.slow
@pytest.mark.bucket
@pytest.mark.timeout(900)
def test_the_pages_commands_lead_from_the_hub_to_an_exported_model(tmp_path: Path) -> None:
    page = PAGE.read_text().partition("## Rented machines")[0]
    commands = commands_of(page)
    assert len(commands) == 15
    (run_file,) = re.findall(r"^```yaml\n(# fineweb-1b.yaml.*?)^```", page, re.M | re.S)
    (tmp_path / "tiny.json").write_text(json.dumps(LLAMA))
    bpe, items = tiny_bpe(tmp_path / "published"), []
    for number, text in enumerate(random_texts(8, words=12)):
        endings = [f"ends as {word}" for word in ("one", "two", "three", "four")]
        items.append({"ind": number, "ctx": text, "endings": endings, "label": number % 4})
    printed = ""
    with hub_site() as site, storage_emulator() as store:
        (tmp_path / "fineweb-1b.yaml").write_text(run_file.replace("gs://my-bucket", store.url))
        for number in range(4):  # the last one is outside the pattern
            texts = random_texts(120, seed=number)
            site.files[DATASET][f"sample/100BT/{number:03d}_00000.parquet"] = parquet_bytes(texts)
        site.pages = {
            "/openai-community/gpt2/resolve/main/merges.txt": (bpe / "vocab.bpe").read_bytes(),
            "/openai-community/gpt2/resolve/main/vocab.json": (bpe / "encoder.json").read_bytes(),
            "/rowanz/hellaswag/master/data/hellaswag_val.jsonl": "\n".join(
                map(json.dumps, items)
            ).encode(),
        }
        environment = {**os.environ, **site.environment, "RANKS": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", here(command, site, store)],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
            )
            printed += (output := f"$ {command}\n{done.stdout}{done.stderr}")
            assert done.returncode == 0 and "Traceback" not in output, output
        mirrored = {blob.name for blob in open_bucket(f"{store.url}/checkpoints").list("")}
    assert "of 360 documents" in printed
    assert {"fineweb-1b/checkpoints/checkpoint_step_12/COMMITTED"} <= mirrored
    assert re.search(r"hellaswag", printed) and "The reason that the sky is blue" in printed
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "fineweb-1b-model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "llama" and tokenizer.decode([1, 2]) != ""
    assert tokenizer.eos_token_id == 262 and tokenizer("the cat").input_ids[0] != 262
