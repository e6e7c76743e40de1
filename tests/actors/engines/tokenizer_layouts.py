"""The layouts of twelve published tokenizers over a vocabulary of bytes, for tests.

A layout has the special tokens, the post-processor, the end tokens of the generation config and a chat template in the
shape of the real ones. Llama 3, Phi-4 and SmolLM2 stand for folders whose config does not know the tokenizer's end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Layout:
    name: str
    specials: str
    """Special tokens, separated by spaces."""
    bos: str | None
    eos: str
    config: str | None
    """End tokens of the generation config; None if no config names one."""
    turn_end: str
    """Token after an assistant's answer."""
    template: str
    front: str = ""
    """Tokens that the post-processor puts in front of a text."""
    pieces: str = ""
    """Way in which spaces become pieces, as with SentencePiece: `first` also puts one in front of a text; "" for a
    byte-level tokenizer."""


def chatml(role: str, before: str = "", end: str = "\n", answer: str = "") -> str:
    """A template of turns between <|im_start|> and <|im_end|>. role: what stands between role and text."""
    return (
        f"{before}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}{role}"
        f"{{% if m.role == 'assistant' %}}{answer}{{% endif %}}{{{{ m.content }}}}<|im_end|>{end}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant{role}{{% endif %}}"
    )


def system(text: str) -> str:
    return f"{{% if messages[0].role != 'system' %}}<|im_start|>system\n{text}<|im_end|>\n{{% endif %}}"


LLAMA = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>"
    "{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GPT_OSS = (
    "<|start|>system<|message|>You are ChatGPT.<|end|>{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
OLMO = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}\n{% else %}"
    "<|assistant|>\n{{ m.content }}{{ eos_token }}{% if not loop.last %}\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
QWEN = "<|endoftext|> <|im_start|> <|im_end|>"
QWEN_CHAT = chatml("\n", system("You are Qwen, created by Alibaba Cloud."))
# Qwen3 shows the thinking of the last turn only.
QWEN_3 = chatml("\n", answer="{% if loop.last %}<think>\n\n</think>\n\n{% endif %}")
SMOL = chatml("\n", system("You are a helpful AI assistant named SmolLM."))

LAYOUTS = (
    Layout(
        "Llama 3", "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        "<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>", "<|eot_id|>", LLAMA, "<|begin_of_text|>",
    ),
    Layout("Qwen2.5 base", QWEN, None, "<|endoftext|>", "<|endoftext|>", "<|im_end|>", QWEN_CHAT),
    Layout("Qwen2.5 instruct", QWEN, None, "<|im_end|>", "<|im_end|> <|endoftext|>", "<|im_end|>", QWEN_CHAT),
    Layout("Qwen3", QWEN, None, "<|im_end|>", "<|im_end|> <|endoftext|>", "<|im_end|>", QWEN_3),
    Layout(
        "Gemma 3", "<pad> <eos> <bos> <start_of_turn> <end_of_turn>", "<bos>", "<eos>", "<eos> <end_of_turn>",
        "<end_of_turn>", GEMMA, "<bos>", "inside",
    ),
    Layout("Mistral v3", "<unk> <s> </s> [INST] [/INST]", "<s>", "</s>", "</s>", "</s>", MISTRAL, "<s>", "first"),
    Layout(
        "Phi-4", "<|endoftext|> <|im_start|> <|im_end|> <|im_sep|>", "<|endoftext|>", "<|im_end|>", "<|endoftext|>",
        "<|im_end|>", chatml("<|im_sep|>", end=""),
    ),
    Layout(
        "DeepSeek-V3", "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>",
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", DEEPSEEK,
        "<｜begin▁of▁sentence｜>",
    ),
    Layout(
        "GLM-4", "<|endoftext|> [gMASK] <sop> <|user|> <|assistant|> <|observation|>", None, "<|endoftext|>",
        "<|endoftext|> <|user|> <|observation|>", "<|user|>", GLM, "[gMASK] <sop>",
    ),
    Layout(
        "gpt-oss", "<|endoftext|> <|return|> <|start|> <|message|> <|channel|> <|end|> <|call|>", "<|endoftext|>",
        "<|return|>", "<|return|> <|endoftext|> <|call|>", "<|return|>", GPT_OSS,
    ),
    Layout("OLMo 2", "<|endoftext|>", "<|endoftext|>", "<|endoftext|>", "<|endoftext|>", "<|endoftext|>", OLMO),
    Layout("SmolLM2", QWEN, "<|im_start|>", "<|im_end|>", None, "<|im_end|>", SMOL),
)  # fmt: skip


def make_tokenizer(layout: Layout) -> PreTrainedTokenizerFast:
    """The tokenizer of a layout: one token per byte, and its special tokens."""
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)] if layout.pieces else pre_tokenizers.ByteLevel.alphabet()
    vocab: dict[str, int] = {
        str(token): index for index, token in enumerate([*sorted(alphabet), *(["▁"] if layout.pieces else [])])
    }
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=bool(layout.pieces)))
    if layout.pieces:
        first = [normalizers.Prepend("▁")] if layout.pieces == "first" else []
        inner.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, normalized=False) for token in layout.specials.split()])
    if layout.front:
        added = [(token, inner.token_to_id(token)) for token in layout.front.split()]
        inner.post_processor = processors.TemplateProcessing(single=f"{layout.front} $A", special_tokens=added)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=layout.bos, eos_token=layout.eos)
    tokenizer.chat_template = layout.template
    return tokenizer


def save_config(layout: Layout, tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    """Write the configs of a layout's model, and return the path of their folder."""
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (layout.config or "").split()]
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": ends or None}))
    if ends:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return str(folder)
