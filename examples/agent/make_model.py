"""Makes a tiny chat model with random weights, so that the examples of agents run on a laptop without a download.

python make_model.py tiny-chat-model
"""

import sys

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIALS = (
    "<|endoftext|> <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the special tokens of Qwen3, whose chat format it has."""
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(t, special=t.startswith("<|"), normalized=False) for t in SPECIALS.split()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(folder: str, seed: int = 0) -> None:
    """Write the model and its tokenizer into `folder`."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=True,
        **{name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")},
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    make_model(sys.argv[1])
