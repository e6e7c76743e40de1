"""`OpenPipeline` keeps a training pipeline full between calls, which fills and drains once per step, not per chunk.

Megatron's own schedules need to know the number of microbatches at their start, and drain at their end. A step that is
trained on chunk by chunk learns of its microbatches as its groups become ready.

    stage 0   F F . . F B F B | F B F B | ...  B B        F, B: forward and backward pass of a microbatch
    stage 2       F B F B F B | F B F B | ...             |   : end of a call; the last B of each stage is still to be
                                                               sent to the stage before, which takes it at its next F
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import library


@dataclass(frozen=True, slots=True)
class _Stage:
    neighbours: Any
    """Megatron's `P2PCommunicator`."""
    config: Any
    shapes: Any
    """Shapes of activations as Megatron expects them. When lengths vary, neighbours send each other the real shapes."""
    first: bool
    last: bool
    depth: int
    """Number of microbatches whose backward pass is still to come while this stage runs the next forward pass: the
    number of stages behind it."""


class OpenPipeline:
    """One rank's stage of a pipeline that alternates forward and backward passes (1F1B). It is PipeDream-Flush,
    arXiv:2006.09503.

    Between calls no message is on its way. A stage then holds the activations of as many microbatches as there are
    stages behind it. Gradients are whole after `drain`. All ranks must make the same calls with the same counts.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._waiting: deque[tuple[Any, Any]] = deque()
        """Received and sent activations of each microbatch whose backward pass is still to come."""
        self._unsent: Any = None
        """Gradient of the last backward pass, for the stage before; None if there is none to send."""
        self._num_forward = 0

    def run(self, micros: Iterator[Any], count: int, forward: Any) -> None:
        """Run the forward passes of `count` microbatches, and the backward passes that become possible. Collective.

        forward: function that Megatron calls with `micros` and the model for each microbatch.
        """
        stage = self._stage()
        for _ in range(count):
            received = self._received(stage)
            sent, _ = library.forward_step(
                forward,
                micros,
                self._model,
                count,
                received,
                [],
                stage.config,
                cp_group_size=library.parallel_state.get_context_parallel_world_size(),
                is_first_microbatch=self._num_forward == 0,
                current_microbatch=self._num_forward,
                is_last_stage=stage.last,
            )
            self._num_forward += 1
            self._waiting.append((received, sent))
            if len(self._waiting) <= stage.depth:
                stage.neighbours.send_forward(sent, stage.last)
            else:
                self._backward(stage.neighbours.send_forward_recv_backward(sent, stage.shapes, stage.last))

    def drain(self) -> None:
        """Run the backward passes that are still to come. Collective. Does nothing if there is none."""
        if not self._num_forward:
            return
        stage = self._stage()
        self._send(stage)
        while self._waiting:
            self._backward(stage.neighbours.recv_backward(stage.shapes, stage.last))
            self._send(stage)
        self._num_forward = 0

    def drop(self) -> None:
        """Forget the microbatches whose backward pass is still to come. Idempotent; not collective."""
        self._waiting.clear()
        self._unsent, self._num_forward = None, 0

    def _stage(self) -> _Stage:
        state, config = library.parallel_state, library.get_model_config(self._model)
        group = state.get_pipeline_model_parallel_group()
        shapes = library.get_tensor_shapes(
            seq_length=1,
            micro_batch_size=1,
            decoder_seq_length=None,
            config=config,
            tp_group=state.get_tensor_model_parallel_group(),
            cp_group=state.get_context_parallel_group(),
        )
        rank, last = group.rank(), group.size() - 1
        return _Stage(library.P2PCommunicator(group, config), config, shapes, rank == 0, rank == last, last - rank)

    def _received(self, stage: _Stage) -> Any:
        """Return the activations of the next microbatch from the stage before. That stage takes the last gradient at
        the same time if there is one."""
        unsent, self._unsent = self._unsent, None
        if unsent is None:
            return stage.neighbours.recv_forward(stage.shapes, stage.first)
        return stage.neighbours.send_backward_recv_forward(unsent, stage.shapes, stage.first)

    def _backward(self, gradient: Any) -> None:
        """Run the backward pass of the microbatch that has waited longest. gradient: that of its sent activations."""
        received, sent = self._waiting.popleft()
        self._unsent = library.backward_step(received, sent, gradient, self._model)

    def _send(self, stage: _Stage) -> None:
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            stage.neighbours.send_backward(unsent, stage.first)
