"""Defines the section `distillation` of the configuration: the policy's teachers and the use of their log-probs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ...dataplane.config import Count, PathText, Positive, Section, Text


class TeacherConfig(Section):
    """A model whose log-probs of the policy's answers the policy learns from."""

    model: PathText
    """Folder or hub id of the teacher, a causal language model with the policy's vocabulary."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the teacher in metrics and errors. Unset: `teacher_` and its number in the list, counted from 0."""
    weight: Positive = 1.0
    """Weight of the teacher's divergence in a row, relative to the other teachers of the same row."""
    where: Literal["train", "engine"] = "train"
    """Place where the teacher runs. `train`: in the train workers beside the policy, sharded over the same ranks, with
    the code of the backend `fsdp`. `engine`: in an engine of the kind `rollout.engine` of its own, with `rollout.tp`
    processes."""
    data_source: Text | None = None
    """Source of the prompts whose answers the teacher scores: the field `data_source` of a prompt, which a mixture
    fills with the name of its source. Unset: it scores all answers."""


class DistillationConfig(Section):
    """On-policy distillation: the policy samples answers, and teachers say how likely they find each token of them."""

    teachers: tuple[TeacherConfig, ...] = ()
    """Teachers, a list of sections with the keys below. Empty: there is no distillation."""
    kind: Literal["reverse_kl", "topk"] = "reverse_kl"
    """Divergence from the teacher that the policy lowers. `reverse_kl` estimates the reverse KL divergence from each
    sampled token alone. `topk` computes it over the teacher's `distillation.k` most likely tokens at each position;
    all other tokens together count as one more."""
    k: Count = 16
    """Number of tokens of the teacher at each position, with `topk`."""
    coef: Positive = 1.0
    """Weight of the divergence."""
    kl_in: Literal["loss", "advantage"] | None = None
    """Place where the divergence enters the objective. `advantage` adds `log p_teacher - log p_prev` to each token's
    advantage, so that `loss.kind` clips it like any other. `loss` adds a loss term with the gradient of the divergence.
    Unset: `advantage` with `reverse_kl`, and `loss` with `topk`, which has no other."""
    max_log_ratio: Positive | None = 20.0
    """Bound in nats of the difference between the log-probs of teacher and policy, with `reverse_kl`, so that one token
    that the teacher rules out cannot own the update. Unset: there is no bound."""

    @model_validator(mode="after")
    def _fits(self) -> DistillationConfig:
        for name in self.names:
            if self.names.count(name) > 1:
                raise ValueError(f"teachers: got the name {name!r} twice, expected a different `name` for each teacher")
        if self.kind == "topk" and self.kl_in == "advantage":
            raise ValueError(
                "kl_in: got 'advantage' with distillation.kind='topk', expected 'loss', because an advantage belongs "
                "to the sampled token alone"
            )
        general, own = self._number_of(None), [source for source in self.sources if self._number_of(source) > 1]
        if self.kind == "topk" and (general > 1 or own or (general and self.sources)):
            raise ValueError(
                "teachers: got several teachers for the same rows with distillation.kind='topk', expected one for "
                "each row, because teachers have different most likely tokens"
            )
        return self

    def _number_of(self, source: str | None) -> int:
        return sum(teacher.data_source == source for teacher in self.teachers)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the teachers, in order."""
        return tuple(teacher.name or f"teacher_{index}" for index, teacher in enumerate(self.teachers))

    @property
    def in_engines(self) -> dict[str, str]:
        """Teachers that have engines of their own, in order: name -> folder or hub id."""
        named = zip(self.names, self.teachers, strict=True)
        return {name: one.model for name, one in named if one.where == "engine"}

    @property
    def sources(self) -> tuple[str, ...]:
        """Data sources that have teachers of their own, sorted. Rows name them by their index."""
        return tuple(sorted({teacher.data_source for teacher in self.teachers if teacher.data_source is not None}))

    @property
    def covers_all(self) -> bool:
        """True if every row has a teacher, whatever its data source."""
        return self._number_of(None) > 0

    @property
    def top_k(self) -> int:
        """Number of the teacher's tokens that rows carry at each position; 0 with `reverse_kl`."""
        return self.k if self.teachers and self.kind == "topk" else 0

    @property
    def in_advantage(self) -> bool:
        """True if the divergence is part of the advantages."""
        return bool(self.teachers) and self.kind == "reverse_kl" and self.kl_in != "loss"

    @property
    def in_loss(self) -> bool:
        """True if the divergence is a loss term."""
        return bool(self.teachers) and not self.in_advantage
