"""The section `rollout` of the configuration: how the policy generates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, field_validator

from ...dataplane.config import Count, CountOrZero, Positive, Share
from ..engines.config import EngineKeys
from ..environments.config import EndpointConfig


class RolloutConfig(EngineKeys):
    """Kind and number of engines, the sampling of the policy's tokens, and the endpoint for agents."""

    max_new_tokens: Count = 256
    """Largest number of response tokens of a sample. With `tool_use` it limits everything after the episode's prompt,
    including the results of tools."""
    temperature: Positive = 1.0
    """Sampling temperature of training rollouts; that of validation is `validation.temperature`."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass of the likeliest tokens from which each token is drawn; 1 draws from all tokens."""
    top_k: CountOrZero = 0
    """Number of likeliest tokens from which each token is drawn; 0 draws from all tokens."""
    min_p: Share = 0.0
    """Smallest probability of the tokens from which each token is drawn, as a share of the likeliest token's; 0 draws
    from all tokens."""
    mask_limit: CountOrZero = 512
    """Largest number of likeliest tokens from which each token is drawn where `rollout.top_p`, `rollout.top_k` or
    `rollout.min_p` cuts tokens off. Engines `hf` and `vllm` then report the set of each token, rows carry it as the
    column `sampling_masks`, and the trainer computes its log-probs over the same set. With 0 there is no limit and no
    such column, and the trainer computes log-probs over all tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a sample, in training and validation; the text itself stays in the sample. A special token of the
    tokenizer, such as `<|im_end|>`, can be one of them; it is then a token that ends a sample."""
    stop_token_ids: tuple[CountOrZero, ...] = ()
    """Ids of tokens that end a sample, in training and validation. They are added to the end tokens that the model's
    generation config, its tokenizer and its chat template name."""
    endpoint: EndpointConfig = EndpointConfig()
    """OpenAI-compatible endpoint through which agents speak to the policy."""

    @property
    def cuts(self) -> bool:
        """True if training rollouts are not drawn from all tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def masked(self) -> bool:
        """True if rows carry the set of tokens from which each token was drawn."""
        return (self.cuts or self.endpoint.own_sampling) and self.mask_limit > 0 and self.engine != "scripted"

    def mask_problems(self, *, takes_logprobs: bool, distils: bool) -> Iterator[str]:
        """Yield one sentence for each contradiction between the sampling and its masks. takes_logprobs: whether the
        engines' log-probs are the old ones of the ratio. distils: whether the run has teachers."""
        cuts = f"rollout.top_p={self.top_p:g}, rollout.top_k={self.top_k}, rollout.min_p={self.min_p:g}"
        found, expected = f"rollout.mask_limit: got {self.mask_limit} with {cuts} and", "0"
        if not self.cuts:
            found, expected = "rollout.endpoint.sampling: got 'request' with", "'run'"
        if takes_logprobs and self.cuts and not self.masked:
            yield (
                f"algorithm.prev_logprobs: got 'rollout' with {cuts} and rollout.mask_limit={self.mask_limit}, expected"
                " 'recompute' or a mask limit above 0 with the engine hf or vllm, because the engine's log-probs then "
                "belong to a truncated distribution"
            )
        if not self.masked:
            if self.endpoint.own_sampling:
                yield (
                    f"rollout.endpoint.sampling: got 'request' with rollout.mask_limit={self.mask_limit} and "
                    f"rollout.engine={self.engine!r}, expected 'run', or a limit above 0 and the engine hf or vllm"
                )
            return
        for key, value, sound in (
            ("top_k", self.top_k, "0 (off) or at least 2"),
            ("mask_limit", self.mask_limit, "0 (off) or at least 2"),
            ("min_p", self.min_p, "below 1"),
        ):
            if value == 1:
                why = "because it leaves one token, whose log-prob is 0, so that nothing is learned"
                yield f"rollout.{key}: got 1, expected {sound}, {why}"
        if self.top_k > self.mask_limit:
            yield f"rollout.top_k: got {self.top_k}, expected at most rollout.mask_limit={self.mask_limit}"
        if self.engine == "vllm" and (self.logprobs == "vllm" or "speculative_config" in self.vllm):
            why = "rollout.logprobs='vllm'" if self.logprobs == "vllm" else "rollout.vllm.speculative_config"
            yield f"{found} {why}, expected {expected}, because log-probs in vLLM's own way come without masks"
        if distils:
            yield (
                f"{found} distillation.teachers, expected {expected} or sampling from all tokens, because teachers "
                "score tokens over the whole vocabulary"
            )

    @field_validator("stop")
    @classmethod
    def _stops_are_texts(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if not all(stop):
            raise ValueError(f"got {list(stop)}, expected texts that are not empty")
        return stop
