"""Makes a tiny vision-language model of the family Qwen2.5-VL that answers with a number, mostly a wrong one.

It has random weights and is trained on answers of which three of four are drawn by chance, so that it has the form of
an answer and only a weak idea of counting. It takes a minute on a CPU and needs no download.

python make_model.py tiny-vl-model
python make_model.py tiny-vl-model 0        without this training
"""

import random
import sys

import torch
from make_pictures import picture
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PAD, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
SPECIALS = ("<|endoftext|>", "<|im_end|>", START, END, PAD, VIDEO)
WORDS = ("?", "user", "assistant", "count", "squares", *map(str, range(10)))
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|> {% else %}{{ p.text }} {% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word."""
    whole = Tokenizer(WordLevel({word: number for number, word in enumerate((*SPECIALS, *WORDS))}, unk_token="?"))
    whole.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=whole, unk_token="?", pad_token=SPECIALS[0], eos_token=SPECIALS[1], padding_side="left",
        additional_special_tokens=list(SPECIALS[2:]),
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_random(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """Return a model with random weights, two layers of text and two of vision."""
    text = {
        "vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]},
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    ids = dict(zip(SPECIALS, range(len(SPECIALS)), strict=True))
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids[PAD], video_token_id=ids[VIDEO],
        vision_start_token_id=ids[START], vision_end_token_id=ids[END], tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


def warm_up(model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, images, steps: int) -> None:
    """Train the model on answers of which three of four are drawn by chance."""
    draw = random.Random(0)
    prompt = f"user {START} {' '.join([PAD] * 4)} {END} count squares assistant"
    ids = torch.tensor(tokenizer(prompt)["input_ids"])
    end = torch.tensor(tokenizer.convert_tokens_to_ids(SPECIALS[1]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        counts = [draw.randint(1, 4) for _ in range(32)]
        shown = images([picture(draw, count) for count in counts], return_tensors="pt")
        said = [count if draw.random() < 0.25 else draw.randint(1, 4) for count in counts]
        answers = torch.tensor(tokenizer.convert_tokens_to_ids([str(number) for number in said]))
        rows = torch.cat([ids.expand(32, -1), answers[:, None], end.expand(32, 1)], dim=1)
        labels = torch.full_like(rows, -100)
        labels[:, -2:] = rows[:, -2:]
        kinds = (rows == model.config.image_token_id).int()
        loss = model(input_ids=rows, labels=labels, mm_token_type_ids=kinds, **shown).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


def make_model(folder: str, steps: int = 300, seed: int = 0) -> None:
    """Write the model, its tokenizer and its image processor into `folder`."""
    torch.manual_seed(seed)
    tokenizer, images = make_tokenizer(), Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 50176})
    model = make_random(tokenizer)
    warm_up(model, tokenizer, images, steps)
    for part in (model, tokenizer, images):
        part.save_pretrained(folder)


if __name__ == "__main__":
    make_model(sys.argv[1], *map(int, sys.argv[2:]))
