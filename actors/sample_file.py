"""Writes samples.jsonl in the run folder: what the policy wrote, how it was scored, and what training made of it.

    rollout actor   a line `episode` for each row of a picked group, when the group is finished
    train worker    a line `trained` for each of these rows, when a step trains on them: step, advantage, log-probs

Both lines have the row's key, by which readers join them (`trainers/observe/samples.py`). The lines do not pass through
the driver. Which groups are picked depends on the position of their prompts alone, so that both sides agree without a
message. A failure to write is logged and never ends a run.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dataplane.config import Count, CountOrZero, Section
from ..dataplane.owned_folder import try_lock
from .process.json_lines import append, encoded, read_lines

if TYPE_CHECKING:  # The configuration imports this module, and must report mistakes without loading torch.
    from .protocols import Sample, Score

EPISODE, TRAINED = "episode", "trained"
"""Values of `kind`, the first entry of every line."""
TRAINING = "train"
"""Value of `set` for episodes of training prompts; others carry the name of their evaluation set."""
LOCK_S = 5.0
"""Seconds that a writer waits for the lock of the file; after that its lines are left out."""
_POLL_S = 0.01
_DIGITS = 4
_LONGEST_CHARACTER = 8
"""Number of tokens after which incomplete bytes are no longer taken for the start of a character; UTF-8 needs fewer."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_log = logging.getLogger(__name__)


class SamplesConfig(Section):
    """The episodes that are written to samples.jsonl in the run folder, for `headrace samples` and the report."""

    every: CountOrZero = 10
    """Number of steps between two steps whose episodes are written, from the first step on. Here a step is
    `algorithm.prompts_per_step` prompts of the prompt stream. With 0, no episodes are written, neither of training nor
    of validation."""
    groups: Count = 2
    """Number of groups per such step, and of prompts per validation, whose episodes are written."""
    max_tokens: Count = 2048
    """Largest number of tokens written per answer, tool results included. The middle of a longer answer is left out."""
    max_mib: Count = 16
    """Largest size of samples.jsonl in MiB. When it is reached, every second of the steps in the file is removed, so
    that earlier steps become sparser."""


@dataclass(frozen=True, slots=True)
class SampleFile:
    """Access to the samples.jsonl of one run, as plain data that can be sent to the processes that write to it. Several
    processes may write at the same time."""

    path: str
    """Path of the file, which all rollout actors and train workers can write to."""
    config: SamplesConfig
    prompts_per_step: int
    """Number of positions in the prompt stream that count as one step."""

    def picks(self, position: int) -> bool:
        """Return whether the group of the prompt at `position` of the prompt stream is written."""
        step, place = divmod(position, self.prompts_per_step)
        return step % self.config.every == 0 and place < self.config.groups

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append `lines`, each as one JSON object. If the file would exceed its largest size, older lines are thinned
        out first. A failure is logged, and the lines are then missing."""
        if not lines:
            return
        data = encoded(lines)
        try:
            with _locked(Path(f"{self.path}.lock")):
                self._make_room(len(data))
                append(self.path, data)
        except OSError as error:
            _log.warning("%d samples are not written to %s: %s", len(lines), self.path, error)

    def _make_room(self, nbytes: int) -> None:
        limit = self.config.max_mib << 20
        size = os.path.getsize(self.path) if os.path.exists(self.path) else 0
        if not size or size + nbytes <= limit:
            return
        lines = [(self._moment(line), encoded([line])) for _, line in read_lines(self.path)]
        while lines and sum(len(data) for _, data in lines) + nbytes > limit:
            moments = sorted({moment for moment, _ in lines})
            kept = set(moments[::2]) if len(moments) > 1 else set()
            lines = [line for line in lines if line[0] in kept]
        draft = Path(f"{self.path}.tmp")
        draft.write_bytes(b"".join(data for _, data in lines))
        draft.replace(self.path)

    def _moment(self, line: Mapping[str, Any]) -> int:
        """Return the time in the run at which a line was written, in steps. The lines of one row have the same
        value."""
        if line.get("set", TRAINING) == TRAINING:
            return int(line["key"].partition(".")[0], 36) // self.prompts_per_step
        return line["version"]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context manager that holds the lock of the file at `path`. Raises TimeoutError, an OSError, when other processes
    hold it for LOCK_S."""
    path.touch()
    deadline = time.monotonic() + LOCK_S
    while (descriptor := try_lock(path)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} is locked by another process")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(descriptor)


# ---------------- These functions make the lines of the file.


def episode_line(
    tokenizer: Any, sample: Sample, score: Score, key: str, max_tokens: int, name: str = TRAINING
) -> dict[str, Any]:
    """Return the line of one episode.

    tokenizer: a Hugging Face tokenizer. key: the row's key. max_tokens: largest number of tokens that are kept of the
    answer. name: name of the evaluation set of the prompt; `train` for a training prompt.
    """
    chosen = sample.versions[sample.response_mask > 0]
    versions = [int(version) for version in (chosen.min(), chosen.max())] if len(chosen) else []
    shown = zip(sample.prompt.pictures, sample.prompt.prepared, strict=False)
    named = [(prepared.text, f"[picture {picture.address or picture.place}]") for picture, prepared in shown]
    turns, left_out = _turns(tokenizer, sample, max_tokens)
    return {
        "kind": EPISODE,
        "set": name,
        "key": key,
        "prompt": _with_names(sample.prompt.text, deque(named)),
        "answer": sample.prompt.answer,
        "turns": turns,
        "tokens_left_out": left_out,
        "rewards": {reward: _number(value) for reward, value in score.components.items()},
        "reward": _number(score.reward) if score.valid else None,
        "error": score.error,
        "failure": score.failure,
        "finish_reason": sample.finish_reason,
        "version": versions[0] if versions else -1,
        "versions": versions,
        "response_tokens": int(np.count_nonzero(sample.response_mask)),
        "time": round(time.time(), 3),
    }


def trained_line(
    key: str, step: int, advantage: float, response_mask: np.ndarray, logprobs: np.ndarray, max_tokens: int
) -> dict[str, Any]:
    """Return the line that says what training made of one row.

    step: number of the step that trains on the row. response_mask: uint8 `[L]`. logprobs: float32 `[L]`, log-probs of
    the row's tokens under the policy before the update. max_tokens: as for `episode_line`.
    """
    kept = _kept(response_mask, max_tokens)
    chosen = kept[response_mask[kept] > 0]
    return {
        "kind": TRAINED,
        "key": key,
        "step": step,
        "advantage": _number(advantage),
        "logprobs": [_number(value) for value in logprobs[chosen]],
    }


def _with_names(text: str, pictures: deque[tuple[str, str]]) -> str:
    """Return a text with the names of its pictures in place of their placeholder tokens, which can be thousands.

    pictures: text of the tokens and name of each picture, in order. Those that are found are removed."""
    done = ""
    while pictures and pictures[0][0] in text:
        tokens, name = pictures.popleft()
        before, _, text = text.partition(tokens)
        done += before + name
    return done + text


def _number(value: float) -> float | None:
    """Return `value` with at most _DIGITS decimals; None for NaN and infinity, which JSON does not have."""
    return round(float(value), _DIGITS) if math.isfinite(value) else None


def _kept(response_mask: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return the ascending indices of an answer's tokens that are written. The answer begins at the first token that
    the policy chose. Of a longer answer, the first and the last half of `max_tokens` are written."""
    chosen = np.flatnonzero(response_mask)
    answer = np.arange(chosen[0] if len(chosen) else len(response_mask), len(response_mask))
    if len(answer) <= max_tokens:
        return answer
    tail = max_tokens // 2
    return np.concatenate([answer[: max_tokens - tail], answer[len(answer) - tail :]])


def _turns(tokenizer: Any, sample: Sample, max_tokens: int) -> tuple[list[dict[str, Any]], int]:
    """Return the turns of an episode after its prompt, and the number of tokens that are left out between them.

    A turn is {"role", "text"}. The role is `policy` for tokens that the policy chose, `environment` for others, such as
    the results of tools. A turn of the policy also has `lengths`, the number of characters of each of its tokens, and
    `logprobs`, the engine's log-probs of these tokens.
    """
    kept = _kept(sample.response_mask, max_tokens)
    if not len(kept):
        return [], 0
    mask = sample.response_mask[kept] > 0
    gaps = np.diff(kept) > 1
    begins = np.flatnonzero(np.concatenate([[True], (mask[1:] != mask[:-1]) | gaps]))
    later = sample.pictures[len(sample.prompt.prepared) :]
    pictures = deque((one.text, f"[picture of {one.num_tokens} tokens]") for one in later)
    turns = []
    for part in np.split(kept, begins[1:]):
        texts = token_texts(tokenizer, sample.input_ids[part].tolist())
        turn: dict[str, Any] = {"role": "environment", "text": _with_names("".join(texts), pictures)}
        if sample.response_mask[part[0]]:
            logprobs = [_number(value) for value in sample.logprobs[part]]
            turn |= {"role": "policy", "lengths": [len(text) for text in texts], "logprobs": logprobs}
        turns.append(turn)
    answer = len(sample.response_mask) - int(kept[0])
    return turns, answer - len(kept)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, special tokens included, so that all texts together are the text of `ids`.

    A character whose bytes are spread over several tokens belongs to the last of these; the others get "".
    """
    alone = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    if "".join(alone) == _decoded(tokenizer, ids) and not any(_REPLACEMENT in text for text in alone):
        return alone
    texts: list[str] = []
    start, read = 0, 0
    for end in range(1, len(ids) + 1):
        # Decoding begins one token early, because tokenizers treat the first token of a text specially.
        before, whole = _decoded(tokenizer, ids[start:read]), _decoded(tokenizer, ids[start:end])
        if end < min(len(ids), read + _LONGEST_CHARACTER) and whole.endswith(_REPLACEMENT):
            texts.append("")
            continue
        texts.append(whole[len(before) :])
        start, read = read, end
    return texts


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
