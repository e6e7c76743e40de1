"""Weights after eight updates of TRL's own trainer are those that the fsdp backend has after the same rows.

TRL is in no extra, because it wants other releases of its dependencies: `make test-all` skips these tests unless a
folder with TRL 1.16 (`pip install --no-deps --target FOLDER trl==1.16.0 accelerate`) is on PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.actors.adapters.peft_folder import write_adapter
from headrace.tests.trainers.backends.backend_ranks import COLUMNS, Row, micro_batch, weights_of
from headrace.trainers.backends.config import BackendConfig, TrainerConfig
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.lora_config import LoraConfig
from headrace.trainers.base_model.made_tokenizers import make_tokenizer
from headrace.trainers.base_model.prepare import TINY_QWEN3
from headrace.trainers.losses.config import LossConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,  # TRL's import looks at the machine with commands
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed"),
]

UPDATES, ROWS, TEMPERATURE, LR = 8, 8, 1.3, 5e-3
Weights = dict[str, torch.Tensor]


def save_model(folder: Path) -> str:
    torch.manual_seed(3)
    Qwen3ForCausalLM(Qwen3Config(**TINY_QWEN3)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def prompts() -> list[dict[str, str]]:
    rng = np.random.default_rng(0)
    return [{"prompt": "r" + "".join(rng.choice(list("0123456789"), rng.integers(2, 6))) + "="} for _ in range(64)]


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(sum((place + 1) * (char in "13579ace") for place, char in enumerate(text))) for text in completions]


def trained_by_trl(
    folder: str, output: Path, peft_config: Any = None, **options: Any
) -> tuple[list[dict[str, Any]], list[Weights]]:
    """Train with TRL: 2 mini-batches x 2 iterations on each of two batches of generated rows.

    options: keys of GRPOConfig; all others but the sizes, the learning rate and the temperature have TRL's defaults.
    Returns the inputs of the loss of each update, and the trained weights before the first update and after each.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    inputs_of_updates: list[dict[str, Any]] = []
    weights: list[Weights] = []

    class Recorded(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
            inputs_of_updates.append(
                {name: value.detach().clone() if torch.is_tensor(value) else value for name, value in inputs.items()}
            )
            return super()._compute_loss(model, inputs)

    class Snapshots(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
            trained = ((name, param.detach()) for name, param in model.named_parameters() if param.requires_grad)
            weights.append({name.replace(".default", ""): param.clone() for name, param in trained})

        on_step_end = on_train_begin

    config = GRPOConfig(
        output_dir=str(output), per_device_train_batch_size=ROWS, num_generations=4, steps_per_generation=2,
        num_iterations=2, max_steps=UPDATES, max_completion_length=10, learning_rate=LR, lr_scheduler_type="constant",
        temperature=TEMPERATURE, loss_type="grpo", use_cpu=True, bf16=False, gradient_checkpointing=False,
        save_strategy="no", report_to=[], disable_tqdm=True, seed=1, **options,
    )  # fmt: skip
    data = Dataset.from_list(prompts())
    trainer = Recorded(
        model=folder, reward_funcs=reward, args=config, train_dataset=data, callbacks=[Snapshots()],
        peft_config=peft_config,
    )  # fmt: skip
    trainer.train()
    return inputs_of_updates, weights


def rows_of(inputs: Mapping[str, Any]) -> list[Row]:
    """The rows of one update, without TRL's padding."""
    rows = []
    for index in range(ROWS):
        prompt = inputs["prompt_ids"][index][inputs["prompt_mask"][index].bool()]
        count = int(inputs["completion_mask"][index].sum())
        ids = torch.cat([prompt, inputs["completion_ids"][index][:count]]).numpy().astype(np.int32)
        columns = {name: np.zeros(len(ids), np.float32) for name in COLUMNS}
        for name, column in (("prev_logprobs", "old_per_token_logps"), ("ref_logprobs", "ref_per_token_logps")):
            columns[name][len(prompt) :] = inputs[column][index][:count].numpy()
        mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
        rows.append(Row(ids, mask, columns, float(inputs["advantages"][index]), index // 4))
    return rows


def largest(first: Weights, second: Weights) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in second)


def differences(
    folder: str,
    inputs: list[dict[str, Any]],
    weights: list[Weights],
    kl_kind: str,
    *,
    adapter: str | None = None,
    **options: Any,
) -> list[float]:
    """Train on the same rows with `kl_kind`. Returns the largest difference of a weight after each update. options:
    keys of TrainerConfig."""
    loss = LossConfig.model_validate(
        {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "sequence", "kl_coef": 0.04, "kl_kind": kl_kind}
    )
    trainer = TrainerConfig(**{"lr": LR, "packing": "packed", **options})
    config = BackendConfig(
        folder, trainer, loss, prev="fixed", with_reference=True, adapter=adapter, sends_adapter=adapter is not None
    )
    backend = FsdpBackend(config, 0, 1)
    found = []
    for one, expected in zip(inputs, weights[1:], strict=True):
        rows = rows_of(one)
        backend.begin_step(TEMPERATURE)
        backend.accumulate([micro_batch(rows[:3]), micro_batch(rows[3:])], 2)
        backend.finish_step()
        found.append(largest(weights_of(backend), expected))
    return found


@pytest.mark.parametrize(
    ("options", "kl_kind", "other"),
    [({}, "k3_is", "k3"), ({"use_bias_correction_kl": False}, "k3", "k3_is")],
    ids=["TRL's defaults", "without the ratio"],
)
def test_weights_after_eight_updates(tmp_path: Path, options: dict[str, Any], kl_kind: str, other: str) -> None:
    torch.set_num_threads(1)
    folder = save_model(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what TRL imports and trains with
        inputs, weights = trained_by_trl(folder, tmp_path / "trl", beta=0.04, **options)
    assert len(inputs) == len(weights) - 1 == UPDATES
    moved = largest(weights[-1], weights[0])
    equal, unequal = (differences(folder, inputs, weights, kind) for kind in (kl_kind, other))
    # With TRL 1.16 in both cases: moved 0.039, equal to 6.4e-5, and 0.018 apart with the other estimator.
    assert moved > 0.03 and max(equal) < 1e-4 and unequal[-1] > 1e-3


def test_adapters_after_eight_updates(tmp_path: Path) -> None:
    """TRL trains LoRA with PEFT. Its KL term, too, compares with the base without the adapter."""
    from peft import LoraConfig as PeftConfig

    torch.set_num_threads(1)
    folder, rank = save_model(tmp_path / "model"), 4
    peft_config = PeftConfig(r=rank, lora_alpha=3 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what TRL imports and trains with
        inputs, weights = trained_by_trl(folder, tmp_path / "trl", peft_config, beta=0.04)
    assert len(inputs) == len(weights) - 1 == UPDATES
    adapter = str(tmp_path / "adapter")
    write_adapter(adapter, base=folder, rank=rank, alpha=3.0 * rank, dropout=0.0, tensors=weights[0])
    lora = LoraConfig(rank=rank, alpha=3.0 * rank, lr_factor=1.0)
    padded, packed, unequal = (
        differences(folder, inputs, weights, kind, adapter=adapter, lora=lora, packing=packing)
        for kind, packing in (("k3_is", "none"), ("k3_is", "packed"), ("k3", "none"))
    )
    # With TRL 1.16: moved 0.038, padded as TRL's rows equal to 4.2e-6, packed to 1.3e-5, and 0.0045 apart.
    assert largest(weights[-1], weights[0]) > 0.03 and max(padded) < 1e-5 and max(packed) < 2e-5
    assert unequal[-1] > 1e-3
