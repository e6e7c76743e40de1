"""`Transcript` collects the tokens of a conversation, given or chosen by the policy, as the columns of one row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .engines.protocol import Completion
from .protocols import RowTokens


class Transcript:
    """The tokens of one conversation so far. Tokens are only ever appended, so that those of earlier turns stay exactly
    as the engine saw them."""

    def __init__(self, prompt_ids: Sequence[int] | np.ndarray) -> None:
        """prompt_ids: token ids that the conversation begins with, `[P]`; the policy did not choose them."""
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._routes: list[tuple[int, np.ndarray]] = []
        self._length = 0
        self.give(prompt_ids)
        self.num_prompt = self._length
        """Number of tokens that the conversation began with."""

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> list[int]:
        """All token ids so far."""
        return [token for part in self._ids for token in part.tolist()]

    def give(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens that the policy did not choose, such as a user's words or the result of a tool. They are not
        trained on."""
        count = len(ids)
        given = np.asarray(ids, np.int32).reshape(count)
        self._append(given, np.zeros(count, np.uint8), np.zeros(count, np.float32), np.full(count, -1, np.int32))

    @property
    def num_routes(self) -> int:
        """Number of the first tokens whose routes are known; 0 if the engine records none."""
        return max((start + len(routes) for start, routes in self._routes), default=0)

    def choose(self, completion: Completion, routes_from: int = 0) -> None:
        """Append the tokens of one turn of the policy, and the routes that came with them. routes_from: index of the
        first token whose route the engine was asked for."""
        if completion.routes is not None:
            self._routes.append((routes_from, completion.routes))
        ids = np.asarray(completion.token_ids, np.int32)
        self._append(ids, np.ones(len(ids), np.uint8), completion.logprobs, completion.versions)

    def _append(self, ids: np.ndarray, mask: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> None:
        self._ids.append(ids)
        self._masks.append(mask)
        self._logprobs.append(np.asarray(logprobs, np.float32))
        self._versions.append(np.asarray(versions, np.int32))
        self._length += len(ids)

    def row(self) -> RowTokens:
        """Return the columns of all tokens so far."""
        return RowTokens(
            np.concatenate(self._ids),
            np.concatenate(self._masks),
            np.concatenate(self._logprobs),
            np.concatenate(self._versions),
            tuple(self._routes),
        )
