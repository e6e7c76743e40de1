r"""`Episode` is the object with which an environment plays one episode; `Environment` is the protocol for users' code.

    async def play(episode: Episode) -> float:
        turn = await episode.generate()            # the policy continues from the tokens so far
        episode.add_text(f"\n{answer_to(turn.text)}\n")
        turn = await episode.generate()
        return float(turn.text == episode.prompt.answer)

Tokens are only appended, so the row that is trained on has exactly the tokens that the engine generated.
`Clock` limits the time that the environment takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ...codecs import messages
from ...codecs.blobs import Blob
from ..columns import TokenValues, column_named
from ..engines.protocol import SESSION_SEPARATOR, Completion, SamplingParams, Which
from ..engines.tokenizer import encode_prompts, response_texts
from ..failures import FailureKind
from ..process.user_errors import storable
from ..process.user_function_timeouts import TooManyHang
from ..protocols import EPISODE_ERRORS, Prompt, Sample, Turn
from .conversations import Conversation, EpisodeServices
from .recovery import RecoveringEngine, SavedTurn, tokens_hash
from .turns import Transcript, generate_whole

if TYPE_CHECKING:
    from ..images.processor import Prepared  # It imports transformers, which takes seconds.

T = TypeVar("T")
_ANYTHING: Any = Any
REWARD = "reward"
"""Name of the reward that `play` returns."""


class Clock:
    """Limits the time that an environment takes in an episode, by turn and in all.

    It stops while the policy generates, because the environment does not cause the delays of a slow or paused engine.
    """

    def __init__(self, turn_s: float, episode_s: float) -> None:
        """turn_s: seconds that the environment may take between two turns of the policy. episode_s: seconds that it may
        take in the whole episode."""
        self._turn_s = turn_s
        self._episode_s = episode_s
        # These seconds were spent in earlier turns.
        self._spent_s = 0.0
        self._since = time.monotonic()
        self._generating = 0

    def restart(self) -> None:
        """Start the count now. Called when the episode begins."""
        self._since = time.monotonic()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context manager that stops the clock while the policy generates. Several may be open at the same time."""
        if not self._generating:
            self._spent_s += time.monotonic() - self._since
        self._generating += 1
        try:
            yield
        finally:
            self._generating -= 1
            self._since = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds until the environment may run out of time. While the policy generates, the value is the smaller of
        the two limits, and must be read a second time afterwards."""
        if self._generating:
            return max(0.001, min(self._turn_s, self._episode_s - self._spent_s))
        taken_s = time.monotonic() - self._since
        return min(self._turn_s, self._episode_s - self._spent_s) - taken_s

    @property
    def exceeded(self) -> str:
        """Text that names the limit that was exceeded. It is valid once no time is left."""
        if self._episode_s - self._spent_s < self._turn_s:
            return f"the environment took longer than environment.episode_timeout_s={self._episode_s:g} s in all"
        return f"the environment took longer than environment.turn_timeout_s={self._turn_s:g} s for one turn"


class OutOfTokens(RuntimeError):
    """Raised when the policy has no tokens left for another turn. An environment does not have to catch this error: the
    episode then ends with the finish reason `length` and keeps its rewards."""


class Environment(Protocol):
    """Protocol of an environment: an object with a coroutine `play` that plays one whole episode. A coroutine function
    of the same form is also an environment.

    An environment that can play all episodes of a prompt at once has a coroutine `play_group(episodes)` instead of
    `play`. An environment may have a coroutine `close`, which is awaited when the run ends.

    An environment with `play` may also have the methods `save(episode)`, which returns its state as bytes or JSON
    values, and `load(episode, state)`, after which `play` continues from there (`environment.recover`).
    """

    async def play(self, episode: Episode) -> float | None:
        """Play the episode and return its reward. The reward function `environment` reads it; None returns no reward.

        An error makes only this episode fail: its row is not trained on, and counts as failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """Address at which the client of an agent reaches the policy in one episode."""

    url: str
    """Base URL as OpenAI's clients want it, such as `http://127.0.0.1:40123/v1`."""
    secret: str = field(repr=False)
    """API key of this episode alone. It is refused once the episode has ended."""
    model: str
    """Name of the model."""

    @property
    def root_url(self) -> str:
        """Base URL without the version, as Anthropic's clients want it."""
        return self.url.removesuffix("/v1")


class Episode(Conversation):
    """One episode in progress: its prompt, the policy, and the tokens and rewards so far.

    An episode is the conversation that begins with its prompt. `new_row` and `branch` return further conversations,
    each of which becomes a row of its own once the policy has taken a turn in it.
    """

    def __init__(
        self, prompt: Prompt, index: int, params: SamplingParams, services: EpisodeServices, clock: Clock
    ) -> None:
        """index: index of the episode among those of its prompt. params: sampling parameters of the policy;
        `max_new_tokens` limits the tokens of a row after its prompt."""
        super().__init__(None)
        self.prompt = prompt
        self.index = index
        self.params = params if params.n == 1 else replace(params, n=1)
        """Sampling parameters of the policy's turns."""
        self.answer: str | None = None
        """Text that reward functions score; None is the text of the last turn."""
        self.finish_reason: str | None = None
        """Reason why the episode ended; None is that of the last turn."""
        self.fatal: BaseException | None = None
        """Error of the engine that ends the rollout, not only this episode; None if there was none."""
        self.engine_error: Exception | None = None
        """Last error of an engine that fails only this episode; None if there was none."""
        self.retries = 0
        """Number of times that the episode was played before."""
        self.out_of_tokens = False
        """True if the policy was asked for a turn when it had no tokens left."""
        self.address: EndpointAddress | None = None
        """Address of the run's endpoint for this episode; None in a run without an endpoint."""
        self.clock = clock
        self._services = services
        self._rows: list[Transcript] = []
        self._turns: list[Turn] = []
        self._rewards: dict[str, float] = {}
        self._columns: dict[str, float] = {}
        self._token_values: list[TokenValues] = []
        self._num_requests = 0
        self._error = ""
        self._failure: FailureKind | None = None
        self.save_state: Callable[[Episode], Any] | None = None
        """Function that returns the state of the environment, to be recorded with each turn; None if there is none."""
        self._asked_before = (0, 0)
        """Number and hash of the tokens that the policy continued from in its last turn, if its state was saved."""

    @property
    def name(self) -> str:
        """Name of the episode, unique in the run; the session of its requests to the engines."""
        return f"{self.prompt.uid}.{self.index}"

    @property
    def endpoint(self) -> EndpointAddress:
        """Address at which an agent reaches the policy, with the secret of this episode. Raises ValueError if the run
        has no endpoint."""
        if self.address is None:
            raise ValueError("rollout.endpoint.enabled: got false, expected true, because the environment needs it")
        return self.address

    @property
    def turns(self) -> Sequence[Turn]:
        """Turns of the policy so far."""
        return tuple(self._turns)

    def whole_text(self, turn: Turn) -> str:
        """Return the text of a turn with its special tokens, which `Turn.text` leaves out."""
        ids = self._rows[turn.row].ids[turn.start : turn.start + turn.num_tokens]
        return self._services.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def new_row(self, text: str = "") -> Conversation:
        """Return a new row of the episode with a prompt of its own.

        text: the prompt, such as a summary of the history so far or the task of a sub-agent; "" if the first messages
        of `say` are the prompt.
        """
        return Conversation(self, text)

    # ---------------- These methods set rewards and columns, and run blocking functions.

    def reward(self, value: float, name: str = REWARD) -> None:
        """Set a reward of the episode. It replaces an earlier reward of the same name. An episode that runs out of time
        or tokens keeps the reward. Raises ValueError unless the value is a finite number."""
        if isinstance(value, str) or not math.isfinite(value):
            raise ValueError(f"episode {self.name!r}: reward {name!r} is {value!r}, expected a finite number")
        self._rewards[name] = float(value)

    def set_column(self, name: str, value: float | Sequence[float], turn: Turn | None = None) -> None:
        """Set a column of `data.columns`, which a loss of your own reads.

        value: for a `per_sample` column, one number for all rows of the episode; for a `per_token` column, one number
        for all tokens of `turn`, or a sequence with one number for each token. Raises ValueError if the run has no such
        column or the value does not fit it.
        """
        column = column_named(self._services.columns, name)
        numbers = column.numbers(value)
        if column.kind == "per_sample":
            if turn is not None or numbers.ndim:
                raise ValueError(f"data.columns: column {name!r} is per_sample, expected one number without a turn")
            self._columns[name] = numbers.item()
            return
        if turn is None or numbers.shape not in ((), (turn.num_tokens,)):
            raise ValueError(
                f"data.columns: column {name!r} is per_token, expected a turn, and one number or one for each of its "
                "tokens"
            )
        values = np.broadcast_to(numbers, turn.num_tokens)
        self._token_values.append(TokenValues(name, turn.row, turn.start, values))

    async def run_blocking(self, function: Callable[..., T], *args: Any, timeout_s: float = 60.0) -> T:
        """Run a blocking function in its own thread, and return its result or raise its error.

        Raises TimeoutError after `timeout_s` seconds. Python cannot end the thread; when too many such threads hang,
        the run ends.
        """
        name = getattr(function, "__name__", type(function).__name__)
        try:
            return await self._services.threads.call(f"{name!r}", lambda: function(*args), timeout_s)
        except TooManyHang as error:
            self.fatal = error
            raise

    # ---------------- Hosts of environments use these attributes and methods.

    @property
    def services(self) -> EpisodeServices:
        """Objects that the episode shares with the others of its rollout actor."""
        return self._services

    def room(self, length: int, num_prompt: int) -> int:
        """Return how many tokens may still be added to a row of `length` tokens. Its first `num_prompt` tokens are its
        prompt."""
        return self.params.max_new_tokens - (length - min(num_prompt, self._services.max_prompt_tokens))

    def next_request(self) -> str:
        """Return the id of the episode's next request to an engine."""
        self._num_requests += 1
        return f"{self.name}{SESSION_SEPARATOR}{self._num_requests - 1}"

    async def sample_turn(
        self,
        prompt_ids: Sequence[int],
        room: int,
        *,
        stop: Sequence[str] = (),
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        routes_from: int = 0,
        adapter: Which = "",
        saved: SavedTurn | None = None,
        schema: str = "",
        cuts: Mapping[str, Any] | None = None,
        pictures: tuple[Blob, ...] = (),
        own_places: tuple[int, ...] = (),
    ) -> tuple[Completion, str]:
        """Let the policy continue from `prompt_ids`, and return its tokens with their text, without recording them.

        room: number of tokens that may be added. routes_from: index of the first token whose route is wanted, where the
        engine records routes. adapter, schema, pictures, own_places: see `SamplingParams`. cuts: `top_p`, `top_k` and
        `min_p` if they are not those of the run. saved: state that is recorded with the turn. Raises the errors of
        `generate`.
        """
        if room < 1:
            self.out_of_tokens = self.out_of_tokens or not adapter
            whose = f"the model {adapter!r}" if adapter else "the policy"
            raise OutOfTokens(f"episode {self.name!r}: {whose} has no tokens left for another turn")
        params = replace(
            self.params,
            max_new_tokens=room if max_new_tokens is None else min(room, max_new_tokens),
            stop=(*self.params.stop, *stop),
            stop_token_ids=(*self.params.stop_token_ids, *stop_token_ids),
            routes_from=routes_from,
            adapter=adapter,
            schema=schema,
            pictures=pictures,
            own_places=own_places,
            **(cuts or {}),
        )
        services, request_id = self._services, self.next_request()
        if saved is not None and isinstance(services.engine, RecoveringEngine):
            services.engine.save(request_id, saved)
        with self.clock.stopped():
            try:
                [completion] = await generate_whole(services.engine, services.tokenizer, request_id, prompt_ids, params)
            except EPISODE_ERRORS as error:
                self.engine_error = error
                raise
            except Exception as error:  # The engine failed, not this episode.
                self.fatal = error
                raise
        return completion, response_texts(services.tokenizer, [completion], params)[0]

    def own_places(self, row: Transcript, length: int) -> tuple[int, ...]:
        """Return where the policy sampled placeholders of pictures in the first tokens of a row with pictures."""
        pool = self._services.pictures
        return row.own_places(pool.processor.token_ids, length) if pool is not None and row.pictures else ()

    async def take_turn(
        self,
        row: Transcript,
        *,
        stop: Sequence[str] = (),
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> tuple[Completion, Turn]:
        """Let the policy continue a row, and record its turn, with the state of an environment that saves it. States
        are saved only as long as the episode has one row."""
        ids, routes_from = row.ids, row.num_routes  # The routes of earlier tokens came with earlier turns.
        saved = None
        if row is not self._row or row.pictures != self.prompt.prepared:  # Saved turns have no pictures.
            self.save_state = None
        if self.save_state is not None:
            (num_before, before), asked = self._asked_before, tokens_hash(ids)
            self._asked_before = len(ids), asked
            saved = SavedTurn(
                index=len(self._turns),
                prompt=asked,
                before=before if self._turns else 0,
                tail=np.array(ids[num_before:], np.int32),
                num_prompt=row.num_prompt,
                stop=tuple(stop),
                max_new_tokens=max_new_tokens,
                stop_token_ids=tuple(stop_token_ids),
                rewards=dict(self._rewards),
                columns=dict(self._columns),
                token_values=list(self._token_values),
                answer=self._checked_answer(),
                state=_encoded(self.save_state(self)),
            )
        completion, text = await self.sample_turn(
            ids, self.room(len(ids), row.num_prompt), stop=stop, max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids, routes_from=routes_from, saved=saved, pictures=row.blobs,
            own_places=self.own_places(row, len(ids)),
        )  # fmt: skip
        if len(row) != len(ids):
            raise RuntimeError(
                f"episode {self.name!r}: tokens were added to a row while the policy generated in it; use `branch` or "
                "`new_row` for several turns at the same time"
            )
        return completion, self.record(row, completion, text, routes_from)

    async def rebuild(self) -> Any:
        """Build the episode up to its last turn with a saved state, and return that state; None if there is none.

        The policy's answer to that turn is not part of the episode yet."""
        engine = self._services.engine
        chain = engine.take_saved(self.name) if isinstance(engine, RecoveringEngine) else []
        ids: list[int] = []
        for saved in chain:
            ids = [*ids, *saved.tail.tolist()]
            if self._row is None:
                self._row = Transcript(ids[: saved.num_prompt], self.prompt.prepared)
            row = self._row
            if row.ids != ids[: len(row)]:  # The recorded answers are not those of the saved turns.
                self._row, self._rows, self._turns, self._turns_here = None, [], [], []
                self._asked_before, self._num_requests = (0, 0), 0
                return None
            row.give(ids[len(row) :])
            if saved is not chain[-1]:
                await self._take_turn(
                    stop=saved.stop, max_new_tokens=saved.max_new_tokens, stop_token_ids=saved.stop_token_ids
                )
                self._asked_before = len(ids), saved.prompt
                continue
            self._rewards, self._columns = dict(saved.rewards), dict(saved.columns)
            self._token_values, self.answer = list(saved.token_values), saved.answer
            return messages.decode(saved.state, _ANYTHING)
        return None

    def record(
        self, row: Transcript, completion: Completion, text: str, routes_from: int = 0, *, trained: bool = True
    ) -> Turn:
        """Append a turn of the policy to `row`, and return the turn. routes_from: the value that was passed to
        `sample_turn`. trained: whether the tokens are trained on."""
        if row not in self._rows:
            self._rows.append(row)
        turn = Turn(text, completion.finish_reason, len(row), len(completion.token_ids), self._rows.index(row))
        row.choose(completion, routes_from, trained=trained)
        self._turns.append(turn)
        return turn

    def fail(self, error: str, kind: FailureKind = "environment") -> None:
        """Record that the episode failed; later calls change nothing. error: description of the failure."""
        if not self._error:
            self._error, self._failure = storable(error), kind

    def finish(self, max_rows: int, *, partial: bool = False) -> Sample:
        """Return the finished episode. An episode of more than `max_rows` rows counts as failed, or with `partial` has
        only the first of them."""
        rows = [row.row() for row in (self._rows or [self._begun()])]
        if len(rows) > max_rows and not partial:
            self.fail(f"the episode has {len(rows)} rows, more than environment.max_rows={max_rows}", "limit")
        try:
            answer = self._checked_answer()
        except TypeError as error:
            self.fail(str(error))
            answer = None
        turns = tuple(turn for turn in self._turns if turn.row < max_rows)
        last = turns[-1] if turns else None
        reason = self.finish_reason or (last.finish_reason if last else "stop")
        first = rows[0]
        return Sample(
            prompt=self.prompt,
            index=self.index,
            input_ids=first.input_ids,
            response_mask=first.response_mask,
            logprobs=first.logprobs,
            text=answer if answer is not None else last.text if last else "",
            finish_reason="error" if self._error else reason,
            versions=first.versions,
            routes=first.routes,
            pictures=first.pictures,
            masks=first.masks,
            error=self._error,
            failure=self._failure,
            retries=self.retries,
            turns=turns,
            rewards=dict(self._rewards),
            columns=dict(self._columns),
            token_values=tuple(self._token_values),
            more_rows=tuple(rows[1:max_rows]),
        )

    def _checked_answer(self) -> str | None:
        """Return the answer as it can be stored. Raises TypeError if the environment has set another type."""
        if not isinstance(self.answer, str | None):
            raise TypeError(f"the environment set the answer to a {type(self.answer).__name__}, expected text or None")
        return self.answer if self.answer is None else storable(self.answer)

    @property
    def _owner(self) -> Episode:
        return self  # A reference would be a cycle, and keep the tokens until the next garbage collection.

    @property
    def _prompt_pictures(self) -> Sequence[Prepared]:
        return self.prompt.prepared

    def _prompt_ids(self) -> np.ndarray:
        return encode_prompts(self._services.tokenizer, [self.prompt.text], [self.prompt.rendered])[0]


def _encoded(state: Any) -> bytes:
    """Return the state of an environment as bytes. Raises TypeError if it cannot be encoded."""
    try:
        return messages.encode(state)
    except TypeError as error:
        raise TypeError(
            f"the environment's `save` returned a {type(state).__name__}, expected bytes or JSON values: {error}"
        ) from None


async def generate_together(episodes: Sequence[Episode]) -> None:
    """Let the policy take the first turn of all episodes of a prompt, in one request."""
    first = episodes[0]
    services, pictures = first.services, first.prompt.prepared
    params = replace(first.params, n=len(episodes), pictures=tuple(picture.blob for picture in pictures))
    (prompt_ids,) = encode_prompts(services.tokenizer, [first.prompt.text], [first.prompt.rendered])
    with first.clock.stopped():
        try:
            completions = await generate_whole(
                services.engine, services.tokenizer, first.prompt.uid, prompt_ids.tolist(), params
            )
        except EPISODE_ERRORS as error:
            first.engine_error = error
            raise
        except Exception as error:
            first.fatal = error
            raise
    texts = response_texts(services.tokenizer, completions, params)
    for episode, completion, text in zip(episodes, completions, texts, strict=True):
        episode.record(Transcript(prompt_ids, pictures), completion, text)
