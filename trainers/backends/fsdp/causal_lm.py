"""Adapts a HF causal LM to training: log-probs of wanted tokens, packed rows, half precision, and norms on CPUs.

`CausalLM` computes logits only for wanted tokens. On a GPU, packed rows attend through torch's variable-length flash
attention; without it, HF finds the starts of packed rows from the position ids and gives SDPA a dense block-diagonal
causal mask of S x S. S is the number of tokens of the microbatch, at most `trainer.tokens_per_microbatch`.

A single rank computes in bfloat16 with copies of its float32 parameters; without training it keeps bfloat16 parameters
only. On several ranks FSDP makes such copies itself. On CPUs, RMS norms get a backward pass in closed form: autograd
takes about ten passes over memory for each norm, the closed form four. The results of the forward pass are
bit-identical.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from ....actors.engines.hf.pictures import packed_positions, picture_arguments, takes_token_types
from ....actors.train.topology import Topology
from ....actors.train_backend import MicroBatch
from ..layers import attend_rows
from ..optimizers.groups import freeze
from ..rows.row_layout import RowLayout
from ..vision.picture_layout import expect_computable, with_pictures
from ..vision.shared_features import SharedFeatures, encodes_alike
from ..vocab.candidates import candidate_logprobs, most_likely
from ..vocab.logprobs import Entropy, ExactSoftmax, VocabShard, token_logprobs
from .bitwise.engine_functions import compute_as_engine
from .fp8_layers import exact, log_layers, use_fp8


class TokenValues(NamedTuple):
    """Results of a forward pass for each of T wanted tokens."""

    logprobs: torch.Tensor
    """Log-prob of the token, float32 `[T]`."""
    entropy: torch.Tensor | None
    """Entropy in nats at the token, float32 `[T]`; None if not asked for."""
    candidates: torch.Tensor | None = None
    """Log-probs of the candidates, or of the most likely tokens, float32 `[T, k]`; None if not asked for."""
    top_ids: torch.Tensor | None = None
    """Ids of the most likely tokens, int64 `[T, k]`; None if not asked for."""


class CausalLM(nn.Module):
    """Wraps a HF model so that its forward returns log-probs instead of logits.

    The output layer and the log-probs are computed inside this one module, so that FSDP's hooks cover them.
    """

    def __init__(self, model: Any, head: Literal["selected", "full"]) -> None:
        """Wrap `model`.

        `head` "selected" applies the output layer only to the positions whose log-probs are wanted. "full" lets the
        model compute all logits, for architectures that change them after the output layer; `head_of` detects such
        architectures.
        """
        super().__init__()
        self.model = model
        self.vocab: int | VocabShard = model.config.get_text_config().vocab_size
        """Size of the vocabulary of the output layer, or this rank's part of it under tensor parallelism."""
        self._selected = head == "selected"
        self.context: dist.ProcessGroup | None = None
        """Group of the ranks over which rows are split by tokens; None for whole rows."""
        self.features: SharedFeatures | None = None
        """Gets the features of pictures from the rank that runs the vision tower; None if this rank runs it itself."""
        self.fp8: list[nn.Module] = []
        """Linear layers that compute in fp8."""
        self.engine_softmax: ExactSoftmax | None = None
        """Functions of log-probs that equal the engine's bit for bit; None for this backend's own."""

    def forward(
        self,
        layout: RowLayout,
        temperature: float,
        entropy: Entropy = "off",
        *,
        candidates: torch.Tensor | None = None,
        top_k: int = 0,
    ) -> TokenValues:
        """Return values of the layout's wanted tokens, those whose log-probs are computed.

        candidates: token ids whose log-probs are computed as well, int64 `[T, k]`, or None. top_k: number of most
        likely tokens to find at each position.
        """
        places: dict[str, Any] = {}
        if layout.position_ids is not None:
            places = {"position_ids": packed_positions(self.model, layout.position_ids)}
            if layout.plan is not None:
                places |= {"plan": layout.plan, "group": self.context}
            elif layout.ends is not None:
                places |= {"row_ends": layout.ends, "longest_row": layout.longest}
        if layout.pictures is not None:
            places |= picture_arguments(self.model, layout.input_ids, layout.pictures, self.features)
        if self._selected:
            hidden = self.model.base_model(input_ids=layout.input_ids, use_cache=False, **places).last_hidden_state
            layer = self.model.get_output_embeddings()
            plain = layer.bias is None and isinstance(self.vocab, int)
            head = layer.weight if plain else layer
        else:
            hidden = self.model(input_ids=layout.input_ids, use_cache=False, **places).logits
            head = nn.Identity()
        hidden = hidden.flatten(0, 1)[layout.source]
        values = token_logprobs(
            hidden,
            layout.targets,
            head,
            self.vocab,
            temperature=temperature,
            entropy=entropy,
            allowed=layout.allowed,
            exact=self.engine_softmax,
        )
        if candidates is None and not top_k:
            return TokenValues(*values)
        to_logits = partial(F.linear, weight=head) if isinstance(head, torch.Tensor) else head
        if candidates is not None:
            return TokenValues(*values, candidate_logprobs(hidden, candidates, to_logits, self.vocab, temperature))
        ids, found = most_likely(hidden, top_k, to_logits, self.vocab, temperature)
        return TokenValues(*values, found, ids)

    def compute_as_engine(self, engine: str, device: torch.device) -> None:
        """Compute as an engine from now on, see `engine_functions.compute_as_engine`."""
        self.engine_softmax = compute_as_engine(self.model, engine, device)

    def with_pictures(self, layout: RowLayout, micro: MicroBatch, topology: Topology, *, replays: bool) -> RowLayout:
        """Return the layout with the pictures of its rows, see `picture_layout.with_pictures`. topology: the train
        mesh. replays: true if passes replay routes. Raises ValueError if pictures cannot be computed so."""
        assert micro.pictures is not None
        expect_computable(micro.pictures, topology, replays=replays)
        return with_pictures(layout, micro, self.model, layout.input_ids.device)

    def share_features(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Let the first rank of `group` run the vision tower for the others, unless weights behind pixels are trained.

        All ranks of the group must have the same model. device: device of the features.
        """
        if encodes_alike(self.model):
            self.features = SharedFeatures(group, device)

    def use_fp8(self, recipe: str, device: torch.device, tp: int, *, trained: bool) -> None:
        """Make the linear layers of the decoder compute in fp8, see `fp8_layers.use_fp8`."""
        self.fp8 = use_fp8(self.model, recipe, device, tp, trained=trained)

    def keep_fp8(self, called: Container[nn.Module], recipe: str, device: torch.device) -> None:
        """Count only the layers in `called` as layers that compute in fp8, and log how many they are. A no-op without
        any."""
        if self.fp8:
            self.fp8 = [layer for layer in self.fp8 if layer in called]
            log_layers(self.model, recipe, self.fp8, gpu=device.type == "cuda")

    def exact(self) -> AbstractContextManager[set[nn.Module]]:
        """Context in which no layer computes in fp8, see `fp8_layers.exact`."""
        return exact(self.fp8)

    def layers(self) -> list[nn.Module]:
        """Return the decoder layers. Raises ValueError when there are none.

        They are the modules of the classes that the model's `_no_split_modules` names, else the longest list of
        modules.
        """
        names = self.model._no_split_modules or ()
        named = [child for child in self.model.modules() if type(child).__name__ in names]
        within = {id(part) for child in named for part in child.modules() if part is not child}
        found = [child for child in named if id(child) not in within]  # Mamba names a layer and its mixer.
        lists = [child for child in self.model.modules() if isinstance(child, nn.ModuleList)]
        if not found and not lists:
            raise ValueError(
                f"model.path: {type(self.model).__name__} does not name its layers, so it cannot be sharded"
            )
        return found or list(max(lists, key=len))


def freeze_weights(model: nn.Module, patterns: Sequence[str] | None, *, half: bool) -> None:
    """Exclude the parameters whose names match `patterns` from training, as `freeze` does, or all if it is None.

    With `half` the dtype of all parameters that are not trained becomes bfloat16. Passes compute with the same values
    as those in `half_parameters`.
    """
    if patterns is None:
        model.requires_grad_(False)
    else:
        freeze(model, patterns)
    for param in model.parameters() if half else ():
        if param.is_floating_point() and not param.requires_grad:
            param.data = param.data.to(torch.bfloat16)


@contextmanager
def half_parameters(module: nn.Module) -> Iterator[None]:
    """Replace the parameters of `module` by bfloat16 copies inside the context. Gradients flow to the float32
    originals.

    The backward pass must be inside the context too, because parts of the forward pass may be computed again in it. A
    parameter that several modules share has one copy. The copies take 2 bytes per parameter; a parameter that is in
    bfloat16 already is not copied.
    """
    copies: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    try:
        for child in module.modules():
            for name, param in child._parameters.items():
                if param is not None and param.is_floating_point():
                    if id(param) not in copies:
                        copies[id(param)] = param.to(torch.bfloat16)
                    replaced.append((child._parameters, name, param))
        for owner, name, param in replaced:
            owner[name] = copies[id(param)]
        yield
    finally:
        for owner, name, param in replaced:
            owner[name] = param


def use_closed_form_norms(model: nn.Module) -> None:
    """Make the RMS norms of `model` use the closed form, for inputs and weights that are plain float32 tensors. Norms
    with another formula stay as they are. The model may be on the meta device."""
    for module in model.modules():
        closed = _closed_form(type(module)) if hasattr(module, "variance_epsilon") else None
        if closed is not None:
            module.__class__ = closed


@functools.cache
def _closed_form(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return a subclass of the norms `kind` that uses the closed form; None if they have another formula."""
    width, epsilon = 8, 1e-3
    with torch.device("cpu"), torch.no_grad():
        try:  # This is code of the model's authors: what goes wrong in it means another formula.
            norm: Any = kind(width, eps=epsilon)
            steps = torch.arange(width, dtype=torch.float32)
            norm.weight.copy_(torch.sin(1 + steps))
            x = torch.stack([torch.cos(steps), torch.exp(steps / 4)])
            same = norm.weight.shape == (width,) and torch.equal(norm(x), _RmsNorm.apply(x, norm.weight, epsilon))
        except Exception:
            return None
    if not same or len(inspect.signature(kind.forward).parameters) != 2:  # A gated norm takes the gate, too.
        return None
    own: Any = kind.forward

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        plain = type(hidden_states) is torch.Tensor and type(self.weight) is nn.Parameter
        if not plain or not hidden_states.dtype == self.weight.dtype == torch.float32:
            return own(self, hidden_states)
        return _RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


class _RmsNorm(torch.autograd.Function):
    """Computes `y = w * x * r` with `r = rsqrt(mean(x^2) + epsilon)` over the last dimension. It is Zhang and Sennrich
    2019, arXiv:1910.07467.

    With the gradient `g` of `y`, that of `x` is `r * w * g - x * r^3 * mean(g * w * x)`, and that of `w` is the sum of
    `g * x * r` over all positions.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        width = x.shape[-1]
        # The product is laid out like `x`. The gradient of queries and keys is transposed and would be copied once
        # more.
        product = torch.mul(x, grads[0], out=torch.empty_like(x))
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = torch.mv(product.reshape(-1, width).t(), inverse.reshape(-1))
        factor = (product @ weight).unsqueeze(-1).mul_(inverse.pow(3)).div_(width)
        of_x = torch.mul(grads[0], weight, out=product).mul_(inverse).addcmul_(x, factor, value=-1)
        return of_x, of_weight, None


VARLEN = "headrace_varlen"
_log = logging.getLogger(__name__)


def attend_varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    row_ends: torch.Tensor,
    longest_row: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each packed row.

    `query` is `[1, heads, S, D]`, `key` and `value` are `[1, kv_heads, S, D]`. `row_ends` (int32 `[rows + 1]`) and
    `longest_row` are `ends` and `longest` of `RowLayout`. sliding_window: number of tokens that a token sees, its own
    among them; None for its whole past. Returns `[1, S, heads, D]` in the dtype of `value`. Raises ValueError for a
    layer with a soft cap or with sinks, which the kernel does not have.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__}: packed rows need attention without soft cap and sinks on a GPU")
    assert attention_mask is None, "HF makes a mask only for attention functions that have a mask function"
    # Some models leave normalised queries and keys in float32, but flash attention takes half precision only.
    q, k, v = (part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value))
    width = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v  # The kernel needs one width.
    out = attend_rows(q, k, v, row_ends, row_ends, (longest_row, longest_row), scaling, sliding_window)
    return out[None, ..., :width], None


def use_varlen_kernels(model: Any, *, packed: bool) -> None:
    """Make a HF model use kernels for sequences of many lengths, in its vision tower and for packed rows."""
    if hasattr(model.config, "vision_config"):
        from ..vision.tower_attention import use_window_attention

        use_window_attention(model)
    if packed:
        use_varlen_attention(model)


def use_varlen_attention(model: Any) -> None:
    """Make a HF model use `attend_varlen`. Its forward then needs the arguments `row_ends` and `longest_row`.

    A model whose attention function cannot be replaced, or does more than the kernel, keeps its own function and a
    dense mask. A line of the log says so. A vision tower is not changed, because it has no rows.
    """
    sees = hasattr(model.config, "vision_config")
    tokens_see_later_ones = sees and takes_token_types(model)
    if not model._supports_attention_backend or model.config._attn_implementation != "sdpa" or tokens_see_later_ones:
        name = type(model).__name__
        _log.warning("trainer.packing: %s keeps its own attention, with a mask of all packed tokens", name)
        return
    AttentionInterface.register(VARLEN, attend_varlen)
    model.set_attn_implementation({"text_config": VARLEN} if sees else VARLEN)
