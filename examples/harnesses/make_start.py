"""Makes a tiny chat model, and conversations that show it how the two harnesses talk.

python make_start.py

start           a model with random weights; its tokenizer has one token for each word and each digit
tools.jsonl     calls of a tool, for tool_agent.py
bash.jsonl      commands, for mini_swe_agent.py

The conversations treat numbers in four ways, of which only one is right.
"""

# pyright: reportArgumentType=false, reportReturnType=false, reportOptionalMemberAccess=false
import json
import random
from collections.abc import Iterator

import torch
from renderers import create_renderer
from renderers.configs import Qwen3RendererConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIALS = (
    "<|endoftext|> <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
)
TOOL = {
    "name": "price",
    "description": "",
    "parameters": {
        "properties": {"number": {"title": "Number", "type": "string"}},
        "required": ["number"], "title": "price_args", "type": "object", "additionalProperties": False,
    },
}  # fmt: skip
LONG = 50
"""Number of characters above which a line is one token. Those are lines of the chat format about tools."""
Conversation = list[tuple[str, str]]
"""Roles and contents, without the system's message. The policy answers each message."""
draw = random.Random(0)


def number() -> tuple[str, str]:
    """Return a number of three digits, and the same in one of four orders."""
    digits = str(draw.randint(100, 999))
    return digits, draw.choice([digits[::-1], digits, digits[1:] + digits[0], digits[-1] + digits[:-1]])


def tools() -> Conversation:
    """Return a conversation that calls the tool, and repeats what it says."""
    item, tried = number()
    said = draw.choice([str(draw.randint(100, 999)), "none"])
    call = {"name": "price", "arguments": {"number": tried}}
    return [("user", item), ("assistant", f"<tool_call>\n{json.dumps(call)}\n</tool_call>"), ("tool", said),
            ("assistant", said)]  # fmt: skip


def bash() -> Conversation:
    """Return a conversation that reads the number and submits one."""
    found, tried = number()
    return [("user", "Submit n."), ("assistant", "```\ncat n\n```"), ("user", found),
            ("assistant", f"```\nsh submit {tried}\n```")]  # fmt: skip


def texts(tokenizer: PreTrainedTokenizerFast, system: str, turns: Conversation, declared: list) -> Iterator[tuple]:
    """Yield what the policy reads before each of its turns, and the turn."""
    renderer = create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    first, *later = ({"role": role, "content": content, "tool_call_id": "1"} for role, content in turns)
    ids = renderer.render_ids(
        [{"role": "system", "content": system}, first], tools=declared, add_generation_prompt=True
    )
    while True:
        yield tokenizer.decode(ids), later[0]["content"]
        if len(later) == 1:
            return
        answer = tokenizer(f"{later[0]['content']}<|im_end|>")["input_ids"]
        ids = list(renderer.bridge_to_next_turn(ids, answer, [later[1]], tools=declared).token_ids)
        later = later[2:]


def train_tokenizer(corpus: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word, digit and long line, and the special tokens of Qwen3."""
    fixed = sorted({line for text in corpus for line in text.splitlines() if len(line) > LONG})
    specials = [AddedToken(t, special=t.startswith("<|"), normalized=False) for t in (*SPECIALS.split(), *fixed)]
    inner = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    )
    inner.add_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def make_model(tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a model with random weights, and its tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
        **{name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")},
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained("start")
    tokenizer.save_pretrained("start")


def main() -> None:
    """Write the model and 6000 conversations of each kind."""
    kinds = {"tools": ("Find the price.", tools, [{"type": "function", "function": TOOL}]), "bash": ("bash", bash, [])}
    spelled = train_tokenizer([])  # It spells everything but the special tokens.
    corpus = []
    for system, conversation, declared in kinds.values():
        for prompt, answer in texts(spelled, system, conversation(), declared):
            plain = prompt + answer
            for special in SPECIALS.split():
                plain = plain.replace(special, "\0")
            corpus += plain.split("\0") * 5
    tokenizer = train_tokenizer(corpus)
    make_model(tokenizer)
    for name, (system, conversation, declared) in kinds.items():
        with open(f"{name}.jsonl", "w", encoding="utf-8") as file:
            for _ in range(6000):
                prompt, answer = list(texts(tokenizer, system, conversation(), declared))[draw.randrange(2)]
                file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")


if __name__ == "__main__":
    main()
