"""Tests that a GGUF file becomes a Hugging Face folder with its dequantized weights, and what is said about it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace import load_config
from headrace.tests.trainers.fetch.gguf_files import write_gguf
from headrace.trainers.errors import UserError
from headrace.trainers.fetch import gguf_folder
from headrace.trainers.fetch.gguf_folder import SOURCE_FILE, drafted, gguf_file, readable_model, rounding_note


@pytest.mark.parametrize(("kind", "dtype"), [("Q4_1", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)])
def test_the_folder_has_the_values_of_the_file(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    write_gguf(tmp_path / "tiny.gguf", kind)
    told: list[str] = []
    folder = Path(readable_model(str(tmp_path), told.append))
    assert folder == tmp_path / "tiny-hf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == dtype
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    [down] = [tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_down.weight"]
    wanted = torch.from_numpy(gguf.quants.dequantize(down.data, down.tensor_type).copy()).to(dtype)
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, wanted)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("r12=")["input_ids"]) == "r12="
    assert ("dequantized from Q4_1" in told[0]) == (kind == "Q4_1")
    assert bool(rounding_note(str(folder))) == (kind == "Q4_1")


def test_special_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    heads = []
    for begins in (False, True):
        write_gguf(tmp_path / f"{begins}.gguf", "F16", begins=begins)
        tokenizer = AutoTokenizer.from_pretrained(readable_model(str(tmp_path / f"{begins}.gguf"), lambda line: None))
        names = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
        assert names == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        heads.append(tokenizer.decode(tokenizer("r12=")["input_ids"]))
    assert heads == ["r12=", "<|im_start|>r12="]


def test_digits_are_cut_apart_where_the_file_says_so(tmp_path: Path) -> None:
    cut = []
    for split in ("default", "smollm"):
        write_gguf(tmp_path / f"{split}.gguf", "F16", split=split)
        tokenizer = AutoTokenizer.from_pretrained(readable_model(str(tmp_path / f"{split}.gguf"), lambda line: None))
        cut.append([text for text, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")])
    assert cut == [["a", "\u0120", "\u012012"], ["a", "\u0120\u0120", "1", "2"]]


def test_a_configuration_reads_the_folder_and_converts_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    file = tmp_path / "my.yaml"
    file.write_text(f"model: {{path: {tmp_path}/tiny.gguf}}\ndata: {{train: 'task:reverse'}}\n")
    config = load_config(file)
    made = (tmp_path / "tiny-hf" / "model.safetensors").stat().st_mtime_ns
    assert config.model.path == str(tmp_path / "tiny-hf")
    teachers = [
        f"distillation.teachers=[{{model: {tmp_path}}}]",
        f"loss.reference_model={tmp_path}",
        "loss.kl_coef=0.1",
    ]
    config = load_config(file, teachers)
    assert config.distillation.teachers[0].model == config.loss.reference_model == config.model.path
    assert (tmp_path / "tiny-hf" / "model.safetensors").stat().st_mtime_ns == made


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder = readable_model(str(tmp_path), lambda line: None)
    write_gguf(tmp_path / "tiny.gguf", seed=1)
    with pytest.raises(UserError, match=r"tiny-hf was not made from the present tiny\.gguf"):
        readable_model(str(tmp_path))
    assert gguf_file(folder) is None  # A folder with a config.json is a model of its own.
    (tmp_path / "damaged.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:3000])
    with pytest.raises(UserError, match=r"damaged\.gguf cannot be converted, expected a GGUF file"):
        readable_model(str(tmp_path / "damaged.gguf"))
    with pytest.raises(UserError, match=r"2 GGUF files \(damaged\.gguf, tiny\.gguf\), expected the path of one"):
        readable_model(str(tmp_path))


def test_a_file_in_the_place_of_the_folder_is_refused_at_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "tiny-hf").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"tiny-hf was not made from the present tiny\.gguf"):
        readable_model(str(tmp_path))
    with drafted(tmp_path) as one, drafted(tmp_path) as other:
        assert one != other  # Two threads can convert the same file.


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    whole = gguf_folder._write_folder

    def interrupted(*arguments: object, **options: object) -> None:
        whole(*arguments, **options)  # pyright: ignore[reportArgumentType]
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_folder, "_write_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        readable_model(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    monkeypatch.undo()

    def replaced(file: Path, *arguments: object, **options: object) -> None:
        whole(file, *arguments, **options)  # pyright: ignore[reportArgumentType]
        os.utime(file)  # As a copy that is still going on.

    monkeypatch.setattr(gguf_folder, "_write_folder", replaced)
    with pytest.raises(UserError, match=r"tiny\.gguf has changed while it was read"):
        readable_model(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    monkeypatch.undo()
    folder = readable_model(str(tmp_path))
    assert json.loads((Path(folder) / SOURCE_FILE).read_text())["file"] == "tiny.gguf"
