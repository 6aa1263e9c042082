"""Models to start from: found, opened and matched, with transformers' own logits."""

import contextlib
import hashlib
import http.server
import json
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.step_samples import make_step
from data.text_samples import word_file
from safetensors.torch import load_file, save_file
from small_families import SHAPES, build, every_family, tokens
from torch import Tensor

from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.config.model_shape import shape_from
from refocused.evaluate.export import push_folder
from refocused.evaluate.load_model import load_model
from refocused.evaluate.model_weights import network_class
from refocused.evaluate.origin import find_model, kept_tokenizer, match, open_model
from refocused.models.families import transformers_config
from refocused.system.errors import RefocusedError
from refocused.tokenizers.encoders import TokenizerChoice
from refocused.tokenizers.tokenizer_json import tokenizer_file

ONE_FILE = "model.safetensors"


def write_model(folder, family="gpt2", *, size="1GB", **changes):
    """Write a transformers folder as its users do; return the model."""
    settings = SHAPES[family] | {"initializer_range": 0.2} | changes
    config = transformers_config(settings, vocabulary=settings["vocab_size"], dropout=0.0)
    torch.manual_seed(4)
    network = network_class(config)(config).eval()
    network.save_pretrained(folder, max_shard_size=size)
    return network


def change(folder, tensors):
    """Replace tensors of a folder; None removes one."""
    file = folder / ONE_FILE
    changed = load_file(file) | tensors
    save_file({name: one for name, one in changed.items() if one is not None}, file)


def start(folder, family="gpt2", *, resizes=False, **changes):
    """Build a run's model with random weights, padded to 600 rows, and start it from a folder."""
    stored = open_model(folder, trusts_pickles=False)
    shape = shape_from(SHAPES[family] | changes, where="here")
    fill = match(stored, shape, where=str(folder), preset="mine", resizes=resizes)
    model = build(family, vocabulary=600, **changes).eval()
    model.network.get_output_embeddings().vocabulary = shape.vocabulary
    with torch.no_grad():
        for name, weight in model.named_parameters():
            parts = weight.view(-1).tensor_split((77, 30_000))  # as fragments of ranks
            for part, begin in zip(parts, (0, 77, 30_000), strict=True):
                fill(part, name, begin)
    return model


@pytest.mark.parametrize("size", ["1GB", "100KB"])
@every_family
def test_loss_and_logits_equal_those_of_transformers(family, size, tmp_path):
    network = write_model(tmp_path, family, size=size)
    assert (tmp_path / f"{ONE_FILE}.index.json").exists() == (size == "100KB")
    model, ids = start(tmp_path, family), tokens()
    with torch.no_grad():
        logits = network(ids).logits
        wanted = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )
        assert model.logits(ids)[..., :512].sub(logits).abs().max() < 1e-5 * logits.abs().max()
        loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)


def test_files_of_the_body_alone_and_their_old_buffers_are_read(tmp_path):
    network = write_model(tmp_path)
    whole = load_file(tmp_path / ONE_FILE)
    body = {name.removeprefix("transformer."): one for name, one in whole.items()}
    save_file(body | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / ONE_FILE)
    model = start(tmp_path)
    assert model.network.transformer.h[1].mlp.c_fc.weight.equal(
        network.transformer.h[1].mlp.c_fc.weight
    )


@pytest.mark.parametrize("vocabulary", [400, 560])
def test_a_vocabulary_is_cut_or_padded_on_request(tmp_path, vocabulary):
    network = write_model(tmp_path, "gpt_neox", vocab_size=vocabulary)
    with pytest.raises(RefocusedError, match=f"vocabulary of {vocabulary} ids, and this run 512"):
        start(tmp_path, "gpt_neox")
    model, both = start(tmp_path, "gpt_neox", resizes=True), min(vocabulary, 512)
    untrained = build("gpt_neox", vocabulary=600)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        found, given, new = (
            getattr(one, name)().weight for one in (model.network, network, untrained.network)
        )
        assert found[:both].equal(given[:both])
        added = given.mean(dim=0, dtype=torch.double).float()
        assert found[vocabulary:512].equal(new[vocabulary:512] + added)
        assert found[max(vocabulary, 512) :].equal(new[max(vocabulary, 512) :])  # padding


def test_new_ids_leave_the_probabilities_of_a_model_whose_logits_are_far_below_zero(tmp_path):
    network = write_model(tmp_path, "gpt_neox", vocab_size=400)
    ids = tokens() % 400
    with torch.no_grad():  # as in trained models: a direction of all rows that every state has
        network.gpt_neox.final_layer_norm.bias += 3
        network.lm_head.weight -= 0.2
    network.save_pretrained(tmp_path)
    model = start(tmp_path, "gpt_neox", resizes=True)
    with torch.no_grad():
        logits, before = model.logits(ids)[..., :512], network(ids).logits
    assert before.mean() < -30
    of_new = logits.softmax(-1)[..., 400:].sum(-1).mean()
    assert of_new < 2 * 112 / 512  # around 0 it would be 1 - e^-30


EMBEDDING = torch.zeros(512, 64)
CHANGES: list[tuple[dict[str, Any], dict[str, Tensor | None], str]] = [
    (
        {"activation_function": "relu"},
        {},
        "activation_function is 'relu' there and 'gelu_new' here",
    ),
    ({"tie_word_embeddings": False}, {}, "tie_word_embeddings is False there and True here"),
    ({"n_embd": 32}, {}, "n_embd is 32 there and 64 here.*set model.preset=.*config.json"),
    ({"n_inner": 128}, {}, r"c_fc.bias has shape \(128,\), not \(256,\)"),
    ({}, {"transformer.ln_f.bias": None}, "files lack transformer.ln_f.bias"),
    ({}, {"transformer.more": EMBEDDING}, "files hold transformer.more"),
    ({}, {"lm_head.weight": EMBEDDING}, "ties .* and .*, which differ"),
]


@pytest.mark.parametrize(("settings", "tensors", "said"), CHANGES)
def test_another_model_is_refused(settings, tensors, said, tmp_path):
    write_model(tmp_path, **settings)
    change(tmp_path, tensors)
    with pytest.raises(RefocusedError, match=said):
        start(tmp_path)


def test_another_family_and_damaged_files_are_refused(tmp_path):
    write_model(tmp_path)
    with pytest.raises(RefocusedError, match=r"it is a gpt2, and model.preset = mine a gpt_neox"):
        start(tmp_path, "gpt_neox")
    file = tmp_path / ONE_FILE
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RefocusedError, match="cut off or damaged"):
        start(tmp_path)


def test_pickled_weights_need_trust_and_execute_nothing(tmp_path):
    network = write_model(tmp_path)
    (tmp_path / ONE_FILE).unlink()
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        RefocusedError, match=r"pickled weights alone \(pytorch_model.bin\).*--trust"
    ):
        open_model(tmp_path, trusts_pickles=False)
    stored = open_model(tmp_path, trusts_pickles=True)
    name = "transformer.ln_f.weight"
    assert stored.read(name, 8, 64).equal(network.state_dict()[name][8:])
    torch.save({"x": Path("code")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(RefocusedError, match="Weights only load failed"):
        open_model(tmp_path, trusts_pickles=True)


def test_an_export_in_a_bucket_is_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "there")
    found = find_model(
        "gs://mine/model",
        runs=tmp_path,
        open_url=lambda url: DirectoryBucket(tmp_path / "there"),
        trusts_pickles=False,
    )
    assert found == (Path("data/models/mine/model"), "")
    assert open_model(found[0], trusts_pickles=False).shapes
    make_step(tmp_path / "there" / "checkpoints", 3)
    for _ in range(2):  # the second time it is there
        folder, revision = find_model(
            "gs://mine/run/checkpoints/latest",
            runs=tmp_path,
            open_url=lambda url: DirectoryBucket(tmp_path / "there" / url[len("gs://mine/run/") :]),
            trusts_pickles=False,
        )
        assert (folder.parts[-1], revision.partition(" ")[2]) == ("checkpoint_step_3", "step 3")
    (folder / "trainer.json").write_text("{}")
    with pytest.raises(RefocusedError, match=r"is corrupt: .*trainer.json"):
        find_model(str(folder), runs=tmp_path, open_url=DirectoryBucket, trusts_pickles=False)
    for wrong in ("nothing", "nothing:7"):
        with pytest.raises(RefocusedError, match="nor a run in"):
            find_model(wrong, runs=tmp_path, open_url=DirectoryBucket, trusts_pickles=False)


@pytest.mark.parametrize(
    ("name", "what"), [("adapter_config.json", "is an adapter"), ("model-q8.gguf", "as GGUF")]
)
def test_what_is_no_whole_model_is_named(name, what, tmp_path):
    (tmp_path / name).write_text("{}")
    for path in (tmp_path, tmp_path / name) if "gguf" in name else (tmp_path,):
        with pytest.raises(RefocusedError, match=what):
            find_model(str(path), runs=tmp_path, open_url=DirectoryBucket, trusts_pickles=False)
        with pytest.raises(RefocusedError, match=what):
            load_model(path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RefocusedError, match=what):
        open_model(tmp_path, trusts_pickles=False)


@pytest.mark.parametrize(
    ("tokenizer", "vocabulary", "kept"),
    [("unknown", 300, True), ("unknown", 200, False), ("bytes", 300, None), ("words", 300, False)],
)
def test_a_tokenizer_travels_where_the_datas_is_unknown(
    tokenizer, vocabulary, kept, tmp_path, caplog
):
    content = tokenizer_file(TokenizerChoice("bytes"), vocabulary=257)
    (tmp_path / "tokenizer.json").write_bytes(content)
    words = str(word_file(tmp_path / "words.json"))
    data = DataConfig(source="x", tokenizer=words if tokenizer == "words" else tokenizer)
    found = kept_tokenizer(tmp_path, data, vocabulary)
    saved = {"tokenizer.json": content, "tokenizer_config.json": b'{"eos_token": "<|endoftext|>"}'}
    assert found == (saved if kept else {})
    assert ("is not the tokenizer of the data" in caplog.text) == (kept is False)


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files and their download need."""

    models: dict[str, dict[str, bytes]]
    commit = "c" * 40

    def do_GET(self):
        name, files = self._model()
        if files is None:
            self._reply({"error": "not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
        elif found := re.search(r"/resolve/c+/(.+)", self.path):
            content = files.get(found[1], b"")
            self._reply(content, 200, ETag=f'"{hash(content)}"', **{"X-Repo-Commit": self.commit})
        elif "/tree/" in self.path:
            oids = {file: hashlib.sha1(content).hexdigest() for file, content in files.items()}
            listed = [{"type": "file", "path": file, "oid": oids[file]} for file in files]
            self._reply([{**one, "size": len(files[one["path"]])} for one in listed])
        else:
            listed = [{"rfilename": file} for file in files]
            self._reply({"id": name, "sha": self.commit, "siblings": listed, "tags": []})

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self):
        import base64

        sent = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            asked = json.loads(sent)
            assert asked["visibility" if "visibility" in asked else "private"] in ("private", True)
            self.models["me/model"] = {}
            self._reply({"url": f"http://{self.headers['Host']}/me/model"})
        elif "/preupload/" in self.path:
            files = [
                {**one, "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(sent)["files"]
            ]
            self._reply({"files": files})
        elif self.path == "/api/validate-yaml":  # of the model card
            self._reply({"errors": [], "warnings": []})
        else:
            for one in map(json.loads, sent.splitlines()):
                if one["key"] == "file":
                    content = base64.b64decode(one["value"]["content"])
                    self.models["me/model"][one["value"]["path"]] = content
            url = f"http://{self.headers['Host']}/me/model/commit/{self.commit}"
            self._reply({"commitUrl": url, "commitOid": self.commit})

    def _model(self):
        found = re.match(r"/(?:api/models/|(?:api/)?datasets/)?(\w+/\w+)", self.path)
        name = found[1] if found else ""
        return name, self.models.get(name)

    def _reply(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    models: dict[str, dict[str, bytes]] = {}
    handler = type("Handler", (Hub,), {"models": models})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,)).start()
    url = f"http://127.0.0.1:{server.server_port}"
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None, raising=False)
    yield models
    server.shutdown()
    server.server_close()


def test_an_export_is_pushed_to_the_hub_and_started_from(hub, tmp_path):
    network = write_model(tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("---\nlibrary_name: transformers\n---\n")
    with pytest.raises(RefocusedError, match=r"hub:me/model cannot be downloaded.*127.0.0.1"):
        find_hub("hub:me/model")
    assert push_folder(tmp_path / "out", "hub:me/model").endswith(f"/me/model/commit/{Hub.commit}")
    assert hub["me/model"][ONE_FILE] == (tmp_path / "out" / ONE_FILE).read_bytes()
    folder, revision = find_hub("hub:me/model")
    assert revision == Hub.commit
    weight = start(folder).network.transformer.wte.weight
    assert weight[:512].equal(network.transformer.wte.weight)
    with pytest.MonkeyPatch.context() as without:
        without.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert find_hub("hub:me/model") == (folder, revision)
    hub["me/old"] = {"config.json": hub["me/model"]["config.json"], "pytorch_model.bin": b"x"}
    folder, _ = find_hub("hub:me/old")  # without the pickled file
    with pytest.raises(RefocusedError, match=r"no model.safetensors"):
        open_model(folder, trusts_pickles=False)


def test_a_hub_out_of_reach_is_one_message(monkeypatch):
    from huggingface_hub import constants

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", where)
        for module in ("export", "export_copy"):
            monkeypatch.setattr(f"refocused.evaluate.{module}.HUB_SECONDS", 0.3)
        with pytest.raises(RefocusedError, match=f"cannot be downloaded .*connection to {where}"):
            find_hub("hub:me/model")
        with pytest.raises(
            RefocusedError, match="is complete, but was not uploaded to hub:me/model"
        ):
            push_folder(Path("out"), "hub:me/model")


def find_hub(address):
    return find_model(address, runs=Path(), open_url=DirectoryBucket, trusts_pickles=False)
