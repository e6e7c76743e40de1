"""The model folder that `headrace bench gpu` makes: its tokenizer, prompts, weights and the lengths of its samples."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.images.config import ImagesConfig
from headrace.actors.images.processor import PictureProcessor
from headrace.bench.gpu.works import GRPO_WORKS
from headrace.bench.models import (
    PROMPTS,
    SHAPES,
    WEIGHT_SHAPES,
    FolderTask,
    change_bytes,
    digest_of,
    end_tokens,
    num_bytes,
    random_weights,
    save_config,
    weight_shapes,
    write_folder,
)
from headrace.bench.vision_models import picture_tokens
from headrace.trainers.base_model.made_tokenizers import byte_level_tokenizer

TINY = FolderTask(SHAPES["tiny"], "float32", 24, (16, 48), num_prompts=200)


def test_the_tokenizer_keeps_every_text() -> None:
    tokenizer = byte_level_tokenizer(1000)
    text = "some words, Ünïcode 漢字 and\n  spaces"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and len(tokenizer) == 1000
    assert tokenizer.eos_token_id == 999


def test_a_vocabulary_of_a_real_size_is_made_in_full() -> None:
    tokenizer = byte_level_tokenizer(SHAPES["0.6b"].tokens)
    assert len(tokenizer) == 151646 and len(tokenizer(" abcdef")["input_ids"]) < 5


def test_a_folder_of_a_model_that_sees_has_pictures_and_their_processor(tmp_path: Path) -> None:
    task = replace(GRPO_WORKS["grpo-tiny-vl"].folder_task("float32"), num_prompts=3)
    write_folder(tmp_path, task, "cpu")
    processor = PictureProcessor(ImagesConfig(enabled=True), str(tmp_path), AutoTokenizer.from_pretrained(tmp_path))
    for line in (tmp_path / PROMPTS).read_text().splitlines():
        prompt = json.loads(line)
        seen = processor.process((tmp_path / prompt["images"][0]).read_bytes())
        assert seen.num_tokens == picture_tokens(task.picture) - 2 == 16
        assert prompt["prompt"].count(processor.placeholder) == 1
    assert picture_tokens(640) == 23 * 23 + 2 and picture_tokens(0) == 0


def test_end_tokens_are_spread_over_the_vocabulary() -> None:
    ends = end_tokens(GRPO_WORKS["grpo-0.6b"].folder_task("bfloat16"))
    assert len(ends) == len(set(ends)) == 226 and ends[-1] == 151645
    assert set(np.diff(ends)) <= {670, 671, 672}


def test_the_folder_has_all_that_a_run_reads(tmp_path: Path) -> None:
    write_folder(tmp_path, TINY, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / PROMPTS).read_text().splitlines()]
    lengths = [len(ids) for ids in tokenizer(prompts)["input_ids"]]
    assert len(set(prompts)) == 200 and 16 <= min(lengths) < 24 and 40 < max(lengths) <= 48
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == 1024 > len(tokenizer)
    engine = HfEngine(str(tmp_path), dtype=torch.float32)
    rows = asyncio.run(engine.generate("lengths", [5, 6, 7], SamplingParams(n=256, max_new_tokens=32, seed=1)))
    tokens = [len(row.token_ids) for row in rows]
    ends = set(end_tokens(TINY))
    assert all(len(row.token_ids) == 32 or int(row.token_ids[-1]) in ends for row in rows)
    # Geometric with mean 24, cut at 32: a mean of 18, and a quarter at the limit.
    assert 14 < np.mean(tokens) < 22 and 0.12 < np.mean([count == 32 for count in tokens]) < 0.4
    assert len(set(tokens)) > 20


def test_weights_without_a_model_have_the_shapes_of_one(tmp_path: Path) -> None:
    save_config(WEIGHT_SHAPES["tiny"], tmp_path, "float32")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    named = {name: tuple(one.shape) for name, one in model.named_parameters() if "_norm" not in name}
    assert {name: dims for name, dims in weight_shapes("tiny").items() if "_norm" not in name} == named
    weights = random_weights("tiny", torch.bfloat16, torch.device("cpu"))
    assert sum(one.nbytes for one in weights.values()) == num_bytes("tiny", torch.bfloat16)
    before = digest_of(weights)
    change_bytes(weights, 1)
    assert digest_of(weights) != before
