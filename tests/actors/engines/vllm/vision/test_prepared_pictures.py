"""Tests that vLLM sees the pictures that the trainer sees, so that its log-probs are those of transformers."""

# pyright: reportMissingImports=false
# vLLM need not be installed where types are checked.
from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from headrace.actors.engines.protocol import Completion, CutOff, SamplingParams
from headrace.codecs.weights.parameter_digests import DigestTaker
from headrace.tests.actors.engines.hf.test_pictures import blob, expect_twins, turns
from headrace.tests.actors.engines.vllm.builder import build
from headrace.tests.actors.weight_sync.weight_updates import Publisher, close_updated
from headrace.tests.trainers.backends.vision.tiny_vlms import (
    IMAGE,
    MODELS,
    TOWERS,
    TWIN,
    PlainVlm,
    Shown,
    picture,
    save_vlm,
    shown_rows,
)

pytestmark = pytest.mark.vllm
PARAMS = SamplingParams(n=2, temperature=1.0, max_new_tokens=6)
LARGEST_ERROR = 1e-4
"""In nats, in float32. vLLM's kernels for CPUs give up to 2e-5."""
BOUND_S = 120.0


def save_model(folder: Path, name: str) -> str:
    """Write a tiny model whose attention heads have a size for which vLLM has kernels on CPUs."""
    text: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    if "rope_parameters" in (made := MODELS[name]["text_config"]):
        text["rope_parameters"] = {**made["rope_parameters"], "mrope_section": [4, 6, 6]}
    # With the file of an image processor, which all real models have, vLLM would normalise pixels a second time.
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    return save_vlm(folder, name, twins=True, **text)


class Seeing:
    """A vLLM engine of a model that takes pictures, the model as transformers has it, and prompts with pictures."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.shown, self.tower = save_model(folder / name, name), shown_rows(name), TOWERS[name]
        self.prompts = [row.ids[row.mask == 0] for row in self.shown.rows]
        self.engine = build(self.folder, max_model_len=256)
        self.model: Any = PlainVlm(self.folder, self.shown).model
        self.publisher = Publisher(folder / "weights")
        self.runner = asyncio.Runner()

    def run(self, main: Any) -> Any:
        return self.runner.run(asyncio.wait_for(main, BOUND_S))

    async def answers(self, tag: str, params: SamplingParams = PARAMS) -> list[list[Completion]]:
        """Return the completions of all prompts, which run at once."""
        calls = [
            self.engine.generate(f"{tag}{index}", prompt.tolist(), replace(params, pictures=tuple(map(blob, pictures))))
            for index, (prompt, pictures) in enumerate(zip(self.prompts, self.shown.pictures, strict=True))
        ]
        return await asyncio.gather(*calls)

    def error(self, found: list[list[Completion]]) -> float:
        """Return the largest difference of the log-probs of completions from those of transformers.

        Only tokens that the newest weights generated count.
        """
        rows, pictures, own = [], [], []
        for index, completions in enumerate(found):
            for one in completions:
                newest = one.versions == self.engine.version
                if newest.any() and IMAGE not in one.token_ids:  # A sampled placeholder has no features.
                    ids = np.concatenate([self.prompts[index], one.token_ids])
                    rows.append(replace(self.shown.rows[index], ids=ids))
                    pictures.append(self.shown.pictures[index])
                    own.append(one.logprobs[newest])
        assert len(rows) >= len(found)
        plain = PlainVlm(self.folder, Shown(rows, pictures))
        plain.model = self.model
        with torch.no_grad():
            wanted = [plain.row_logprobs(row, 1.0).numpy()[-len(one) :] for row, one in zip(rows, own, strict=True)]
        return max(float(np.abs(left - right).max()) for left, right in zip(wanted, own, strict=True))

    def weights(self, begin: str) -> dict[str, torch.Tensor]:
        """Change the weights whose names begin with `begin`, and return all."""
        generator = torch.Generator().manual_seed(self.engine.version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name.startswith(begin):
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            embedding = self.model.get_input_embeddings().weight
            embedding[TWIN] = embedding[IMAGE]
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def close(self) -> None:
        close_updated(self.runner, self.engine, self.publisher)


@pytest.fixture(scope="module")
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    made = Seeing(tmp_path_factory.mktemp("seeing"), request.param)
    yield made
    made.close()


@pytest.mark.parametrize(
    "seeing",
    ["qwen2_5_vl", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_vl", "internvl"))],
    indirect=True,
    scope="module",
)
class TestSeeing:
    def test_logprobs_are_those_of_transformers(self, seeing: Seeing) -> None:
        """Prompts with one picture, two and none run at once."""
        assert seeing.error(seeing.run(seeing.answers("a"))) <= LARGEST_ERROR

    def test_a_picture_of_a_group_is_sent_to_the_engine_process_once(self, seeing: Seeing) -> None:
        cache: Any = seeing.engine.process.llm.renderer.mm_processor_cache
        cache.clear_cache()
        seeing.run(seeing.answers("b", replace(PARAMS, n=4)))
        count = cache.make_stats()
        assert (count.total - count.hits, count.total) == (2, 16)

    @pytest.mark.parametrize("all_weights", [False, True])
    def test_logprobs_follow_new_weights_of_the_tower_and_of_all(self, seeing: Seeing, all_weights: bool) -> None:
        """The features and prefixes that vLLM keeps are forgotten, also those of the requests that are running."""

        async def update() -> list[list[Completion]]:
            engine, version = seeing.engine, seeing.engine.version + 1
            running = asyncio.create_task(seeing.answers("old", replace(PARAMS, n=12, max_new_tokens=100)))
            while not any(count for _, count in engine.tokens_of_newest()):
                await asyncio.sleep(0.001)
            weights = seeing.weights("" if all_weights else seeing.tower)
            await engine.prepare_weights(seeing.publisher.publish(version, weights))
            await engine.commit_weights(version, in_flight="keep")
            taker = DigestTaker(version, list(weights))
            for name, tensor in weights.items():
                taker.take(name, tensor)
            assert await engine.verify_weights(taker.result()) > 0
            both = await running
            seen = [one for row in both for one in row if IMAGE not in one.token_ids]
            mixed.append(any({version - 1, version} == {*one.versions.tolist()} for one in seen))
            return [[*old, *new] for old, new in zip(both, await seeing.answers("new"), strict=True)]

        mixed: list[bool] = []
        while not any(mixed) and len(mixed) < 10:  # On a busy machine requests can end before an update begins.
            assert seeing.error(seeing.run(update())) <= LARGEST_ERROR
        assert any(mixed)

    def test_a_sample_that_is_continued_may_have_placeholders(self, seeing: Seeing) -> None:
        """They stand for themselves. Without the words that the policy sampled them, the request is wrong."""
        prompt, pictures = [*seeing.prompts[0].tolist(), 5, IMAGE, 7], tuple(map(blob, seeing.shown.pictures[0]))
        params = replace(PARAMS, n=1, pictures=pictures)
        [one] = seeing.run(seeing.engine.generate("c", prompt, replace(params, continues=CutOff("a", 0, 3))))
        assert len(one.token_ids)
        with pytest.raises(ValueError, match="placeholders of pictures, expected"):
            seeing.run(seeing.engine.generate("d", prompt, params))

    def test_a_placeholder_of_an_earlier_turn_stands_for_itself(self, seeing: Seeing) -> None:
        expect_twins(seeing.run(turns(seeing.engine, seeing.prompts, seeing.shown)))

    def test_wrong_requests_are_refused_in_a_sentence(self, seeing: Seeing) -> None:
        first, (second, _) = map(blob, seeing.shown.pictures[0]), map(blob, seeing.shown.pictures[2])
        pictures = (*first, second)
        counts = [int(one.batch.tensor("num_tokens")[0]) for one in pictures]
        prompt = [3, *[IMAGE] * (sum(counts) - 1), 4]
        message = (
            f"request 'w': the prompt has {sum(counts) - 1} placeholders of pictures, expected {sum(counts)}, one for "
            rf"each feature of its 2 pictures \(picture 1 has {counts[1]}\)"
        )
        with pytest.raises(ValueError, match=message):
            seeing.run(seeing.engine.generate("w", prompt, replace(PARAMS, pictures=pictures)))


class Fields:
    """Stands for vLLM's processor of a model whose pictures are cut into pieces."""

    def _get_mm_fields_config(self, given: Any, options: Any) -> Any:
        from vllm.multimodal.inputs import MultiModalFieldConfig

        sizes = MultiModalFieldConfig.flat_from_sizes("image", given["num_patches"])
        return {"pixel_values": sizes, "num_patches": MultiModalFieldConfig.batched("image", keep_on_cpu=True)}


def test_pieces_of_a_picture_may_stand_apart() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # These are of what vLLM imports.
        from headrace.actors.engines.vllm.vision.prepared_pictures import PictureTaker

    hf_config = SimpleNamespace(model_type="some", image_token_id=IMAGE)
    config = SimpleNamespace(hf_config=hf_config, dtype=torch.bfloat16, is_mm_prefix_lm=False)
    pictures = [blob(picture("internvl", seed, 2, 1)) for seed in (1, 2)]
    prompt = np.array([3, *[IMAGE] * 4, 5, *[IMAGE] * 4, 6, *[IMAGE] * 8])
    shown = PictureTaker(config, Fields()).shown("a", prompt, pictures)
    assert [(one.offset, one.length, one.get_num_embeds()) for one in shown.places] == [(1, 9, 8), (11, 8, 8)]
    pixels = shown.items[1]["pixel_values"].data
    assert torch.equal(pixels, picture("internvl", 2, 2, 1).parts["pixel_values"].bfloat16())
    other = [blob(picture("qwen3_vl", 1, 2, 2))]
    with pytest.raises(ValueError, match="request 'a': picture 0 has the part 'image_grid_thw', which vLLM does not"):
        PictureTaker(config, Fields()).shown("a", np.array([IMAGE] * 4), other)
    config.is_mm_prefix_lm = True  # So it is for Gemma 3.
    with pytest.raises(ValueError, match="request 'a': got 2 pictures, expected none, because in models of type"):
        PictureTaker(config, Fields()).shown("a", prompt, pictures)
    with pytest.raises(ValueError, match="request 'a': got 2 pictures, expected none, because vLLM takes no pictures"):
        PictureTaker(config, None).shown("a", prompt, pictures)
