"""Makes a tiny model with random weights that reads and writes the words of textarena's games, for runs on a laptop.

python make_model.py tiny-game-model
"""

import argparse

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = """
You are Player Playing playing Guess The Number have to guess the number between and within turns As you enter your game
will provide with hints such as higher or lower may response in any manner Only that is wrapped square brackets be
considered For example play history of guesses appended below Use information complete before run out Enter target
attempted an invalid move Reason Invalid format did not respond valid outside range specified has already guessed Please
resubmit a remember follow rules avoid penalties
"""
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '>' }}{% endfor %}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, signs and the numbers from 0 to 50; other words are unknown to it."""
    words = dict.fromkeys([*WORDS.split(), *map(str, range(51)), *"_.,:;'[]()->\n", "<unk>"])
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex(r"[A-Za-z]+|\d+|\S|\n"), "isolated")]
    )
    inner.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    inner.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<eos>", special=True)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left",
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(folder: str, seed: int) -> None:
    """Write the model and its tokenizer into `folder`."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=True,
        **{name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")},
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make_model(given.folder, given.seed)
