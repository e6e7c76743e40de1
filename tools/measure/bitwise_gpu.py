"""`python tools/measure/bitwise_gpu.py OUT` compares vLLM's numbers with the trainer's of `run.bitwise`, bit by bit.

Stage A compares kernel by kernel: random inputs, then all layers of a prompt. Stage B compares the log-probs of 20
batches of random shapes, with cached prefixes and prompts in chunks, and the gradient with that of the ordinary
backend. Each line of OUT/bitwise.jsonl is one comparison. The program ends with the status 1 if any differs.
"""

from __future__ import annotations

# pyright: reportMissingImports=false
# vLLM need not be installed where types are checked.
import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from headrace.cli.arguments import expect_gpus
from headrace.cli.command import ended

BEGIN = time.monotonic()
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 9, "num_attention_heads": 32},
}
"""Sizes of Qwen3 models; that of 4B has a quarter of its layers."""
PARTS = {
    "input_layernorm": "norm", "self_attn.qkv_proj": "linear", "self_attn.q_norm": "norm", "self_attn.k_norm": "norm",
    "self_attn.rotary_emb": "rotate", "self_attn.attn": "attend", "self_attn.o_proj": "linear",
    "post_attention_layernorm": "norm", "mlp.gate_up_proj": "linear", "mlp.act_fn": "gate",
    "mlp.down_proj": "linear",
}  # fmt: skip
"""Module of an engine's layer -> function of the trainer, in their order in a layer."""
ROOM = 16384
"""Largest number of tokens of a microbatch."""


class Report:
    """Writes comparisons to the screen and to a file, one by one."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / "bitwise.jsonl").open("a")
        self.unequal = 0

    def line(self, name: str, **facts: Any) -> None:
        facts = {"name": name, **facts, "at_s": round(time.monotonic() - BEGIN, 1)}
        print(json.dumps(facts), flush=True)
        self.file.write(json.dumps(facts) + "\n")
        self.file.flush()

    def compare(self, name: str, engine: Any, ours: Any, *, quiet: bool = False, **facts: Any) -> bool:
        """Note whether two tensors are equal; with `quiet` only if they are not."""
        if engine.shape != ours.shape or engine.dtype != ours.dtype:
            ours_, engine_ = (f"{list(one.shape)} {one.dtype}" for one in (ours, engine))
            self.unequal += 1
            self.line(name, equal=False, engine=engine_, ours=ours_, **facts)
            return False
        apart = (engine.double() - ours.double()).abs()
        count = int((engine != ours).sum())
        if count or not quiet:
            largest = float(apart.max()) if apart.numel() else 0.0
            self.line(name, equal=not count, unequal=count, of=engine.numel(), largest=largest, **facts)
        self.unequal += count > 0
        return not count

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Context manager that notes an error of a stage, and goes on with the next."""
        try:
            yield
        except Exception as error:
            self.unequal += 1
            self.line(f"{name} failed", error=repr(error)[:300], where=traceback.format_exc()[-1500:])


def write_model(folder: Path, shape: str, seed: int) -> str:
    """Write a random Qwen3 and return its folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config: Any = Qwen3Config(
        **SHAPES[shape], num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=4096,
        tie_word_embeddings=True, initializer_range=0.04, bos_token_id=1, eos_token_id=2, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
        for name, param in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.normal_(param, mean=1.0, std=0.2)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return str(folder)


def start_engine(model: str, *, chunk: int, graphs: bool) -> Any:
    """Start vLLM in this process, with the arguments of a bitwise run. chunk: largest number of tokens of a step.
    graphs: whether decoding is captured as CUDA graphs."""
    from headrace.actors.engines.vllm.bitwise.kernels import INVARIANT, normalize_sums_row_by_row

    os.environ.update(
        **INVARIANT, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_LOGGING_LEVEL="WARNING"
    )
    from vllm import LLM

    normalize_sums_row_by_row()
    kind: Any = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    build: Any = LLM
    return build(
        model, dtype="bfloat16", enable_prefix_caching=True, generation_config="vllm", seed=0,
        logprobs_mode="processed_logprobs", skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=64,
        max_num_batched_tokens=chunk, kv_cache_memory_bytes=8 << 30, disable_log_stats=True,
        **(kind if graphs else {"enforce_eager": True}),
    )  # fmt: skip


def forget_tables() -> None:
    """Make vLLM compute its table of cosines once more, as in a trainer's process."""
    from vllm.model_executor.layers import rotary_embedding

    rotary_embedding._ROPE_DICT.clear()


def remove_overrides() -> None:
    """Give this process torch's own functions back, which vLLM's batch-invariant mode has replaced.

    Its product of float32 tensors, `aten::bmm`, has the 10 bits of TF32. With it transformers computes other angles of
    rotary positions, in float32, too. So a gradient in this process was compared with that of another model.
    """
    from vllm.model_executor.layers.batch_invariant import _batch_invariant_LIB as overrides

    overrides._destroy()


def build_trainer(model: str, *, bitwise: bool, half: bool = True) -> Any:
    """Build the train backend on this GPU. half: whether it computes in bfloat16."""
    from headrace.trainers.backends.config import BackendConfig, TrainerConfig
    from headrace.trainers.backends.factory import build_backend

    trainer = TrainerConfig(mixed_precision=half, packing="packed", tokens_per_microbatch=ROOM, recompute="none")
    config = BackendConfig(model, trainer, context=4096, prev="train_pass", bitwise="vllm" if bitwise else None)
    return build_backend(config, 0, 1)


class Recorder:
    """Keeps the results of a trainer's functions in their order."""

    def __init__(self, functions: Any) -> None:
        self.functions, self.results = functions, []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.functions, name)
        if not callable(found):
            return found

        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            self.results.append((name, result))
            return result

        return recorded


# ---------------- Stage A


def compare_kernels(report: Report, engine: Any, functions: Any) -> None:
    """Compare each module of the engine's first layer, on random rows, with the trainer's function on more rows."""
    import torch

    layer, width = engine.model.layers[0], functions.cos_sin.shape[-1]
    own, mlp, size = layer.self_attn, layer.mlp, engine.config.hidden_size
    report.compare("cosines and sines", own.rotary_emb.cos_sin_cache, functions.cos_sin)
    torch.manual_seed(1)

    def rows(width: int) -> Any:
        return torch.randn(777, width, device="cuda").bfloat16()

    x, other, epsilon = rows(size), rows(size), engine.config.rms_norm_eps
    qkv = functions.linear(x, own.qkv_proj.weight)
    query, key, _ = qkv.split([own.q_size, own.kv_size, own.kv_size], dim=-1)
    heads = query.unflatten(-1, (-1, width))
    turned = functions.rotate(query.contiguous(), key.contiguous(), torch.arange(777, device="cuda"))
    both, mixed = functions.linear(x, mlp.gate_up_proj.weight), rows(own.q_size)
    gated = functions.gate(both)
    for begin, count in ((0, 777), (0, 1), (5, 1), (100, 3), (300, 64), (500, 129)):
        part = slice(begin, begin + count)
        added = layer.post_attention_layernorm(x[part].clone(), other[part].clone())
        places = torch.arange(777, device="cuda")[part]
        pairs: dict[str, tuple[Any, Any]] = {
            "input norm": (
                layer.input_layernorm(x[part].clone()), functions.norm(x, layer.input_layernorm.weight, epsilon)
            ),
            "queries, keys and values": (own.qkv_proj(x[part])[0], qkv),
            "norm of queries": (own.q_norm(heads[part]), functions.norm(heads, own.q_norm.weight, epsilon)),
            "rotated queries": (own.rotary_emb(places, query[part].clone(), key[part].clone())[0], turned[0]),
            "rotated keys": (own.rotary_emb(places, query[part].clone(), key[part].clone())[1], turned[1]),
            "output projection": (own.o_proj(mixed[part])[0], functions.linear(mixed, own.o_proj.weight)),
            "sum": (added[1], x + other),
            "norm of a sum": (added[0], functions.norm(x + other, layer.post_attention_layernorm.weight, epsilon)),
            "gate and up": (mlp.gate_up_proj(x[part])[0], both),
            "gate": (mlp.act_fn(both[part]), gated),
            "down": (mlp.down_proj(gated[part])[0], functions.linear(gated, mlp.down_proj.weight)),
        }  # fmt: skip
        for name, (theirs, ours) in pairs.items():
            report.compare(name, theirs, ours[part], rows=count)
        if count < 200:
            logits = engine.compute_logits(x[part])
            wanted = functions.linear(x[part.start : part.stop + 7], engine.lm_head.weight)
            report.compare("logits", logits, wanted[:count], rows=count)


def compare_attention(report: Report, functions: Any, heads: int) -> None:
    """Compare attention with pages of 16 tokens, as the engine calls it, with that of packed rows."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    lengths, kv_heads, width, device = [700, 33, 1, 129, 16, 400], 8, 128, "cuda"
    ends = [0, *np.cumsum(lengths).tolist()]
    torch.manual_seed(2)
    query, key, value = (torch.randn(ends[-1], n, width, device=device).bfloat16() for n in (heads, kv_heads, kv_heads))
    scale = width**-0.5
    borders = torch.tensor(ends, device=device, dtype=torch.int32)
    whole = functions.attend(query, key, value, borders, max(lengths), scale)
    blocks = [-(-length // 16) for length in lengths]
    starts = np.cumsum([3, *blocks]).tolist()
    cache = torch.zeros(starts[-1] + 5, kv_heads, 16, 2 * width, device=device, dtype=torch.bfloat16).transpose(1, 2)
    keys, values = cache.split(width, dim=-1)
    table = torch.zeros(len(lengths), max(blocks), device=device, dtype=torch.int32)
    for row, length in enumerate(lengths):
        table[row, : blocks[row]] = torch.arange(starts[row], starts[row + 1], device=device)
        for pages, part in ((keys, key), (values, value)):
            padded = torch.zeros(blocks[row] * 16, kv_heads, width, device=device, dtype=torch.bfloat16)
            padded[:length] = part[ends[row] : ends[row + 1]]
            pages[starts[row] : starts[row + 1]] = padded.unflatten(0, (-1, 16))
    for name, chunk in (("whole", 4096), ("chunks of 37", 37), ("chunks of 128", 128), ("tokens one by one", 1)):
        got, done = torch.empty_like(query), 0
        while done < max(lengths):
            live = [row for row, length in enumerate(lengths) if length > done]
            sizes = [min(chunk, lengths[row] - done) for row in live]
            begins = [ends[row] + done for row in live]
            index = np.concatenate([np.arange(a, a + n) for a, n in zip(begins, sizes, strict=True)])
            place = torch.from_numpy(index).to(device)
            own_ends = torch.tensor([0, *np.cumsum(sizes)], device=device, dtype=torch.int32)
            seen = torch.tensor([done + n for n in sizes], device=device, dtype=torch.int32)
            attend: Any = flash_attn_varlen_func
            got[place] = attend(
                query[place], keys, values, cu_seqlens_q=own_ends, max_seqlen_q=max(sizes), seqused_k=seen,
                max_seqlen_k=int(seen.max()), softmax_scale=scale, causal=True, block_table=table[live], num_splits=1,
                fa_version=3,
            )  # fmt: skip
            done += chunk
        report.compare(f"attention in pages, {name}", got, whole, heads=heads)


def compare_layers(report: Report, llm: Any, engine: Any, trainer: Any, prompt: list[int]) -> None:
    """Compare each function of each layer for one prompt, as the engine computes it for a request."""
    from vllm import SamplingParams

    seen: dict[tuple[int, str], Any] = {}
    hooks, places = [], dict[Any, list[tuple[int, str]]]()
    for number, layer in enumerate(engine.model.layers):
        for name in PARTS:  # Layers share the module of rotary positions.
            places.setdefault(layer.get_submodule(name), []).append((number, name))
    places[engine.model.norm] = [(-1, "norm")]

    def keep(module: Any, _inputs: Any, output: Any) -> None:
        if places[module]:
            place = places[module].pop(0)
            first = output[0] if isinstance(output, tuple) and place[1] != "self_attn.rotary_emb" else output
            parts = first if isinstance(first, tuple) else (first,)
            seen[place] = tuple(one.detach().clone().flatten(1) for one in parts)

    for module in places:
        hooks.append(module.register_forward_hook(keep))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    for hook in hooks:
        hook.remove()

    recorder = use_recorder(trainer)
    trainer.logprobs([micro_batch([prompt + [5]], [len(prompt)])], 1)
    results = iter(recorder.results)
    unequal = 0
    for number in range(len(engine.model.layers)):
        for name, kind in PARTS.items():
            got_name, result = next(results)
            assert got_name == kind, (got_name, kind)
            ours = result if isinstance(result, tuple) else (result,)
            for theirs, own in zip(seen[number, name], ours, strict=True):
                if unequal < 12:
                    theirs = theirs[: len(own)]  # The engine may pad its batches.
                    same = report.compare(f"layer {number} {name}", theirs, own.flatten(1), quiet=number > 0)
                    unequal += not same
    _, last = next(results)
    report.compare("last norm", seen[-1, "norm"][0][: len(last)], last)
    report.line("layers", compared=len(engine.model.layers), unequal=unequal)


def use_recorder(trainer: Any) -> Any:
    """Make the trainer's model compute with recorded functions."""
    from headrace.trainers.backends.fsdp.bitwise.engine_functions import use_functions

    recorder: Any = Recorder(trainer_functions(trainer))
    trainer._policy.engine_softmax = use_functions(trainer._policy.model, recorder)
    return recorder


def trainer_functions(trainer: Any) -> Any:
    """Return the functions with which the trainer's model computes."""
    return trainer._policy.engine_softmax.linear.__self__


# ---------------- Stage B


def micro_batch(rows: list[list[int]], prompts: list[int], logprobs: Any = None) -> Any:
    """Return a microbatch of rows whose first `prompts` tokens are not trained on. logprobs: the engine's, of the other
    tokens, float32; None for zeros."""
    import torch

    from headrace.actors.protocols import ROLLOUT_SCHEMA
    from headrace.actors.train_backend import MicroBatch
    from headrace.codecs.batch import Batch, Jagged

    lengths = np.array([len(row) for row in rows], np.int64)
    mask = [np.arange(len(row)) >= prompt for row, prompt in zip(rows, prompts, strict=True)]
    flat = {
        "input_ids": torch.from_numpy(np.concatenate(rows).astype(np.int32)),
        "response_mask": torch.from_numpy(np.concatenate(mask).astype(np.uint8)),
        "rollout_logprobs": torch.zeros(int(lengths.sum())),
    }
    if logprobs is not None:
        flat["rollout_logprobs"][flat["response_mask"] != 0] = logprobs
    schema = ROLLOUT_SCHEMA.subset(tuple(flat))
    batch = Batch(schema, len(rows), {name: Jagged(values, lengths) for name, values in flat.items()})
    return MicroBatch(batch, lengths, np.ones(len(rows), np.float32), np.arange(len(rows)))


def trainer_logprobs(trainer: Any, rows: list[list[int]], prompts: list[int], temperature: float) -> Any:
    """Return the trainer's log-probs of the sampled tokens of all rows, in order."""
    import torch

    found, start = [], 0
    while start < len(rows):
        stop, tokens = start, 0
        while stop < len(rows) and tokens + len(rows[stop]) <= ROOM:
            tokens, stop = tokens + len(rows[stop]), stop + 1
        micro = micro_batch(rows[start:stop], prompts[start:stop])
        [column] = trainer.logprobs([micro], 1, temperature=temperature)
        found.append(column[micro.batch.jagged("response_mask").values != 0])
        start = stop
    return torch.cat(found)


def compare_batches(report: Report, llm: Any, trainer: Any, count: int, seed: int) -> None:
    """Compare the log-probs of `count` batches of random shapes."""
    import torch
    from vllm import SamplingParams

    rng = np.random.default_rng(seed)
    shared = rng.integers(3, 151000, 600).tolist()
    for number in range(count):
        requests, longest = int(rng.integers(1, 49)), int(rng.choice([4, 40, 700]))
        temperature, top = float(rng.choice([1.0, 0.7])), int(rng.choice([4, 24, 64]))
        prompts = []
        for _ in range(requests):
            own = rng.integers(3, 151000, int(rng.integers(1, longest))).tolist()
            prompts.append(shared[: int(rng.integers(0, 600))] + own if rng.random() < 0.4 else own)
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=int(rng.integers(1, top)), logprobs=0, ignore_eos=True,
                detokenize=False,
            )
            for _ in prompts
        ]  # fmt: skip
        began = time.monotonic()
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        took = time.monotonic() - began
        rows, theirs, cached = [], [], 0
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            rows.append(prompt + tokens)
            theirs += [found[token].logprob for token, found in zip(tokens, output.outputs[0].logprobs, strict=True)]
            cached += output.num_cached_tokens or 0
        ours = trainer_logprobs(trainer, rows, [len(one) for one in prompts], temperature)
        engine = torch.tensor(theirs, dtype=torch.float32)
        facts = {"requests": requests, "temperature": temperature, "cached": cached, "engine_s": round(took, 2)}
        report.compare(f"batch {number}", engine, ours, **facts, prompt_tokens=sum(map(len, prompts)))
        if sum(map(len, rows)) <= ROOM:  # The pass that trains has the same log-probs.
            trainer.begin_step(temperature)
            trainer.accumulate([micro_batch(rows, [len(one) for one in prompts], engine)], 1)
            largest = float(trainer._step._largest[0])
            trainer.abort_step()
            report.unequal += largest != 0.0
            report.line(f"batch {number}, train pass", equal=largest == 0.0, largest=largest)


def with_plain(functions: Any, name: str) -> Any:
    """Return the engine's functions, but the one called `name`, if there is one, with the plain formula."""
    from torch.nn.functional import linear

    from headrace.trainers.backends.fsdp.bitwise import exact_layers as layers

    plain: dict[str, Any] = {
        "linear": linear,
        "norm": lambda x, weight, epsilon: layers._rms_norm(epsilon, x, weight),
        "rotate": lambda query, key, positions: layers._rotate(positions, functions.cos_sin, query, key),
        "gate": layers._gate,
        "attend": lambda *parts, ends, longest, scale: layers._attend(ends, longest, scale, *parts),
    }
    own = {one: getattr(functions, one) for one in (*plain, "cos_sin", "divide", "token_logprobs")}
    return SimpleNamespace(**own | ({name: plain[name]} if name in plain else {}))


def compare_gradients(report: Report, exact: Any, model: str) -> None:
    """Compare the gradient and the time of a step with those of the ordinary backend. The gradients with one function
    replaced, and those by kind of weight, show where an error comes from."""
    import torch

    from headrace.trainers.backends.fsdp.bitwise.engine_functions import use_functions

    functions = trainer_functions(exact)
    rng = np.random.default_rng(7)
    rows = [rng.integers(3, 151000, int(rng.integers(20, 800))).tolist() for _ in range(24)]
    micro = micro_batch(rows, [5] * len(rows))
    found: dict[str, dict[str, Any]] = {}
    plain = [f"plain {name}" for name in dict.fromkeys(PARTS.values())]
    for name in ("exact", "repeated", *plain, "ordinary", "ordinary, repeated", "float32"):
        ours = name in ("exact", "repeated", *plain)
        backend = exact if ours else build_trainer(model, bitwise=False, half=name != "float32")
        if ours:
            mixed = with_plain(functions, name.removeprefix("plain "))
            backend._policy.engine_softmax = use_functions(backend._policy.model, mixed)
        took = 0.0
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.monotonic()
            backend.begin_step(1.0)
            backend.accumulate([micro], 1)
            torch.cuda.synchronize()
            took = time.monotonic() - began
            found[name] = {key: one.grad.clone() for key, one in backend._policy.named_parameters()}
            backend.abort_step()
        whole = flat(found[name])
        report.line(f"{name} step", seconds=round(took, 3), tokens=sum(map(len, rows)), norm=float(whole.norm()))
    for one, other in (("exact", "repeated"), ("ordinary", "ordinary, repeated")):
        apart = [key for key, grad in found[one].items() if not torch.equal(grad, found[other][key])]
        report.line(f"{one} gradient, repeated", equal=not apart, unequal=len(apart), first=apart[:6])
    kinds = sorted({name.split(".")[-2] for name in found["float32"]})
    for name in ("exact", *plain, "ordinary"):
        whole, *parts = (
            distance(found[name], found["float32"], part) for part in ("", *(f".{kind}." for kind in kinds))
        )
        by_kind = dict(zip(kinds, parts, strict=True))
        report.line(f"{name} gradient against float32", relative_distance=whole, by_kind=by_kind)


def distance(own: dict[str, Any], reference: dict[str, Any], part: str) -> float:
    """Return the norm of the difference of gradients, of the weights with `part` in their names, relative to theirs."""
    ours, theirs = (flat({name: one for name, one in some.items() if part in name}) for some in (own, reference))
    return float((ours - theirs).norm() / theirs.norm())


def flat(gradients: dict[str, Any]) -> Any:
    """Return all gradients as one tensor."""
    import torch

    return torch.cat([one.flatten() for one in gradients.values()])


def main() -> int:
    """Run the stages, and return the exit status. Raises UserError without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b", help="shape of the model (default: 0.6b)")
    parser.add_argument("--graphs", action="store_true", help="capture decoding as CUDA graphs")
    parser.add_argument("--batches", type=int, default=20, help="number of random batches (default: 20)")
    parser.add_argument("--chunk", type=int, default=512, help="largest number of tokens of a step (default: 512)")
    given = parser.parse_args()
    expect_gpus(1, f"--shape: got {given.shape}")
    given.out.mkdir(parents=True, exist_ok=True)
    report = Report(given.out)
    import torch

    report.line(
        "start", torch=torch.__version__, gpu=torch.cuda.get_device_name(), shape=given.shape, graphs=given.graphs
    )
    model = write_model(given.out / f"model-{given.shape}", given.shape, seed=3)
    report.line("model written")
    llm = start_engine(model, chunk=given.chunk, graphs=given.graphs)
    [engine] = llm.apply_model(lambda one: one)
    report.line("engine started")
    forget_tables()
    trainer = build_trainer(model, bitwise=True)
    functions = trainer_functions(trainer)
    report.line("trainer built")
    with torch.inference_mode(), report.stage("kernels"):
        compare_kernels(report, engine, functions)
    for heads in (16, 32):
        with torch.inference_mode(), report.stage("attention"):
            compare_attention(report, functions, heads)
    with report.stage("layers"):
        compare_layers(report, llm, engine, trainer, np.random.default_rng(5).integers(3, 151000, 300).tolist())
    from headrace.trainers.backends.fsdp.bitwise.engine_functions import use_functions

    trainer._policy.engine_softmax = use_functions(trainer._policy.model, functions)
    with report.stage("batches"):
        compare_batches(report, llm, trainer, given.batches, seed=11)
    remove_overrides()
    with report.stage("gradients"):
        compare_gradients(report, trainer, model)
    report.line("end", unequal=report.unequal)
    return int(report.unequal > 0)


if __name__ == "__main__":
    sys.exit(ended(main))
