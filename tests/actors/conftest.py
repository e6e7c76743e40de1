"""Fixtures of a tiny random Qwen3 and a character tokenizer, made once per session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from headrace.dataplane.handle import DataPlaneHandle
from headrace.tests.actors.train.replica_ranks import data_plane

ALPHABET = "0123456789=+r abcdefghijklmnopqstuvwxyz"
PAD, BOS, EOS = 0, 1, 2
VOCAB = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *ALPHABET])}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A HF folder with config, weights and tokenizer; context 64, tied embeddings."""
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    save_tokenizer(folder)
    save_model(folder, tied=True)
    return str(folder)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("untied-qwen3")
    save_tokenizer(folder)
    save_model(folder, tied=False)
    return str(folder)


@pytest.fixture(scope="session")
def tokenizer(model_folder: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def handle() -> Iterator[DataPlaneHandle]:
    """A data plane over shared memory that other processes can join."""
    with data_plane("shm") as handle:
        yield handle


def save_model(folder: Path, *, tied: bool) -> None:
    config = Qwen3Config(
        vocab_size=len(VOCAB),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # vLLM has no CPU attention for 16
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    torch.random.set_rng_state(generator)


def save_tokenizer(folder: Path) -> None:
    """One token a character; no token is added around a text."""
    inner = Tokenizer(BPE(vocab=VOCAB, merges=[]))
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
