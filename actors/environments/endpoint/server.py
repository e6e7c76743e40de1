"""`EndpointServer` serves the policy to agents over HTTP in several dialects, with a session and a secret per episode.

caller    must know the secret of an open episode, else 401
calls     at most max_calls, and max_episode_calls of one episode, else 429, before the body is read
body      at most max_body_mib, within body_timeout_s, valid, else 413, 408, 400
idle      at most as many connections without a request as strangers at any port of the run, else the oldest is closed
answer    waits for the engine for as long as it takes; weights may change meanwhile
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import resource
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from ....dataplane.listen_address import join_host, listening
from ....dataplane.security.authenticated_listener import Strangers, has_unread, listen
from ....dataplane.security.few_lines import few_lines, limit_accept_errors
from ...engines.protocol import BASE, Which
from ..config import EndpointConfig
from ..episode import EndpointAddress, Episode
from .chat_completions import CHAT, TEXT
from .dialects import BadRequest, CallAnswer, Dialect, Json, json_object
from .messages import MESSAGES
from .responses import RESPONSES
from .session import Call, Session, digest_of

EPISODE_HEADER = "x-headrace-episode"
"""Header in which a client can name its episode. A call with the secret of another episode is then refused."""
IGNORED_HEADER = "x-headrace-ignored"
"""Header of an answer that lists the fields of the request that had no effect."""
UNTRAINED_HEADER = "x-headrace-untrained"
"""Header of an answer whose tokens are not trained on; its value is the field of the request that is the reason."""
COUNT_PATH = "/v1/messages/count_tokens"
DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": CHAT, "/v1/completions": TEXT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES,
    COUNT_PATH: MESSAGES,
}  # fmt: skip
"""Paths to which calls are posted, with the dialect of each."""
HEAD_S = 10.0
"""Seconds within which a connection must send the head of its first request, and of the next one after an answer."""
DRAIN_S = 2.0
"""Seconds for which the rest of a body that is too large is read and dropped, so that its sender sees the answer."""

_log = logging.getLogger(__name__)
_http_log = few_lines(f"{__name__}.http")
"""Logger of uvicorn's lines about connections, which any client can cause."""


class _ClientGone(Exception):
    """Raised when the client has closed its connection before the answer."""


class EndpointServer:
    """The endpoint of one rollout actor. It runs in the actor's event loop, from the first episode to `close`."""

    def __init__(self, config: EndpointConfig, *, adapters: bool = False) -> None:
        """adapters: whether the policy is an adapter, so that requests name the policy or the model without it."""
        self._config = config
        self._names: dict[str, Which] = {BASE: BASE, config.model: ""} if adapters else {}
        self._sessions: dict[bytes, Session] = {}
        self._secrets: dict[Episode, bytes] = {}
        self._num_calls = 0
        self._warned = False
        self._idle = Strangers[_Connection]("endpoint")
        """Connections without a request. Any client can open them."""
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url = ""

    async def open(self, episode: Episode) -> EndpointAddress:
        """Open a session for an episode, and return the address at which its agent reaches the policy. The first call
        starts to listen. Raises OSError if the address cannot be bound."""
        await self._start()
        secret = secrets.token_urlsafe(32)
        digest = _digest(secret)
        self._sessions[digest] = Session(
            episode, self._config.rows, self._names, own_sampling=self._config.sampling == "request"
        )
        self._secrets[episode] = digest
        return EndpointAddress(self._url, secret, self._config.model)

    async def end(self, episode: Episode) -> None:
        """End the session of an episode: its secret is refused from now on, and its calls in flight end. Idempotent."""
        digest = self._secrets.pop(episode, None)
        if digest is not None:
            await self._sessions.pop(digest).close()

    async def close(self) -> None:
        """End all sessions and stop listening. Idempotent."""
        for episode in list(self._secrets):
            await self.end(episode)
        server, serving, self._server, self._serving = self._server, self._serving, None, None
        if server is not None and serving is not None:
            server.should_exit = True
            with suppress(asyncio.CancelledError):
                await asyncio.wait({serving}, timeout=5.0)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    # ---------------- These private methods start the server.

    async def _start(self) -> None:
        if self._server is None:
            self._listen()
        server, serving = self._server, self._serving
        assert server is not None and serving is not None
        async with asyncio.timeout(30.0):
            while not server.started:
                if serving.done():
                    serving.result()
                    raise RuntimeError("rollout.endpoint: the server ended before it had started")
                await asyncio.sleep(0.005)

    def _listen(self) -> None:
        """Begin to start the server. From now on `close` ends it, even if the task that waits for the start is
        cancelled."""
        host = _own_host(self._config.host)
        settings = uvicorn.Config(
            self._app(), log_config=None, access_log=False, lifespan="off", ws="none",
            http=cast(Any, partial(_Connection, self._idle)), timeout_graceful_shutdown=1, server_header=False,
        )  # fmt: skip
        limit_accept_errors()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # Each open call takes a file descriptor.
        listener = _listen(host)
        self._server = _Server(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self._url = f"http://{join_host(host, listener.getsockname()[1])}/v1"
        _log.info("endpoint: %s", self._url)

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                *(Route(path, self._answered, methods=["POST"]) for path in DIALECTS),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/", _alive, methods=["GET"]),
            ],
            exception_handlers={404: _no_such_path, 405: _no_such_path},
        )

    # ---------------- These private methods answer requests.

    async def _models(self, request: Request) -> Response:
        try:
            self._session_of(request)
        except BadRequest as refused:
            return _refusal(request, refused)
        return _json(_models_body(list(self._names or (self._config.model,)), _dialect_of(request)))

    async def _answered(self, request: Request) -> Response:
        dialect = _dialect_of(request)
        try:
            session = self._session_of(request)
            with self._place(session):
                body = await self._body(request)
                if request.url.path == COUNT_PATH:
                    return _json({"input_tokens": await session.count(dialect.read(json_object(body)))})
                call = self._call_of(request, session, body, dialect)
                answer = await self._wait(request, session, call)
                return _shown(dialect, call, answer, own_sampling=self._config.sampling == "request")
        except BadRequest as refused:
            return _refusal(request, refused)
        except (_ClientGone, ClientDisconnect):
            return Response(status_code=499)  # The client has disconnected.
        except Exception as error:  # The engine failed. The rollout also reports its error.
            _log.warning("endpoint: a call failed: %s: %s", type(error).__name__, error)
            failed = BadRequest(f"the policy cannot answer: {type(error).__name__}", status=503, code="engine")
            return _refusal(request, failed)

    def _session_of(self, request: Request) -> Session:
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        secrets_given = [bearer if kind.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
        found = [self._sessions.get(_digest(secret.strip())) for secret in secrets_given]
        session = found[0] or found[1]
        if session is None:
            raise BadRequest(
                "expected the header Authorization: Bearer, or x-api-key, with the secret of an episode that has not "
                "ended",
                status=401, code="invalid_api_key",
            )  # fmt: skip
        named = request.headers.get(EPISODE_HEADER)
        if named is not None and named != session.episode.name:
            raise BadRequest(f"{EPISODE_HEADER}: the secret belongs to another episode", status=403, code="episode")
        return session

    @contextmanager
    def _place(self, session: Session) -> Iterator[None]:
        if session.num_requests >= self._config.max_episode_calls:
            raise _too_many(session.num_requests)
        if self._num_calls >= self._config.max_calls:
            raise BadRequest(
                f"{self._num_calls} calls are open, as many as rollout.endpoint.max_calls allows",
                status=429, code="rate_limit_exceeded",
            )  # fmt: skip
        self._num_calls += 1
        session.num_requests += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            session.num_requests -= 1

    async def _body(self, request: Request) -> bytes:
        most, got = self._config.max_body_mib << 20, bytearray()
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                length = request.headers.get("content-length", "")
                too_long = length.isdigit() and int(length) > most
                async for piece in request.stream():
                    got += piece
                    too_long = too_long or len(got) > most
                    if too_long:
                        break
        except TimeoutError:
            raise BadRequest(
                f"the body did not arrive within {self._config.body_timeout_s:g} s", status=408, code="timeout"
            ) from None
        if too_long:
            await _drain(request, 16 * most)
            raise BadRequest(
                f"the body has more than {self._config.max_body_mib} MiB", status=413, code="request_too_large"
            )
        return bytes(got)

    def _call_of(self, request: Request, session: Session, body: bytes, dialect: Dialect) -> Call:
        key, digest = request.headers.get("idempotency-key", "")[:256], digest_of(request.url.path, body)
        retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        call = session.find(key, retry, digest)
        if call is not None:
            return call
        if session.closed:
            raise _ended()
        asked, most = dialect.read(json_object(body)), self._config.max_episode_calls
        if asked.n > most:
            raise BadRequest(f"n: got {asked.n}, expected at most rollout.endpoint.max_episode_calls={most}")
        if session.num_open + asked.n > most:
            raise _too_many(session.num_open)
        if asked.schema and not self._warned:
            self._warned = True
            _log.warning("endpoint: %s: answers under a JSON schema are not trained on", asked.schema_field)
        return session.begin(asked, key, digest)

    async def _wait(self, request: Request, session: Session, call: Call) -> CallAnswer:
        """Wait for the answer of a call, and record it unless the client has disconnected."""
        call.waiters += 1
        gone = asyncio.create_task(_until_gone(request))
        try:
            await asyncio.wait({call.task, gone}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # The event loop can now notice a client that disconnected at the same moment.
            if gone.done():
                raise _ClientGone
            if call.task.cancelled() or session.closed:
                raise _ended()
            answer = call.task.result()
            session.record(call)
            return answer
        finally:
            gone.cancel()
            session.leave(call)


class _Server(uvicorn.Server):
    """A server inside another program. It does not install signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """A connection that is closed if a request does not begin in time, or if too many others wait for one, too.

    uvicorn would wait forever for the rest of a head, or would answer all calls with 503."""

    def __init__(self, idle: Strangers[_Connection], **settings: Any) -> None:
        """idle: connections without a request, which this one joins and leaves."""
        super().__init__(**settings)
        self.logger = _http_log
        self._idle = idle
        self._ending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave_idle()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._leave_idle()

    def on_response_complete(self) -> None:
        self._expect_request()
        super().on_response_complete()

    def is_slow(self) -> bool:
        """Return whether the client has sent nothing that is still to be read."""
        return self.transport.is_closing() or not has_unread(self.transport.get_extra_info("socket"))

    def end(self) -> None:
        """Close the connection at once, even if its client does not read the last answer."""
        self.transport.abort()

    def _expect_request(self) -> None:
        self._leave_idle()
        self._ending = self.loop.call_later(HEAD_S, self.end)
        self._idle.add(self)

    def _leave_idle(self) -> None:
        self._idle.remove(self)
        if self._ending is not None:
            self._ending.cancel()


def _own_host(host: str) -> str:
    """Return the address at which the endpoint listens.

    If `host` means all addresses, it is the address of the run's interface, if there is one, because agents on other
    hosts need one address to connect to."""
    own = listening()
    return own.address() if host in ("0.0.0.0", "::") and own.interface is not None and not own.one_host else host


def _listen(host: str) -> socket.socket:
    try:
        listener = listen(host)
    except OSError as error:
        raise OSError(error.errno, f"rollout.endpoint.host: got {host!r}, which cannot be bound: {error}") from error
    listener.setblocking(False)
    return listener


def _digest(secret: str) -> bytes:
    # Secrets are looked up by digest, so that the time of a look-up does not reveal anything about them.
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()


def _dialect_of(request: Request) -> Dialect:
    """Return the dialect of a path, and for other paths the one whose clients send such headers."""
    return DIALECTS.get(request.url.path, MESSAGES if "anthropic-version" in request.headers else CHAT)


def _json(body: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body).encode(), status, headers=headers, media_type="application/json")


def _shown(dialect: Dialect, call: Call, answer: CallAnswer, *, own_sampling: bool) -> Response:
    asked, headers = call.request, {}
    if ignored := [name for name in asked.ignored if not (own_sampling and name in asked.sampling)]:
        headers[IGNORED_HEADER] = ",".join(ignored)
    if asked.schema:
        headers[UNTRAINED_HEADER] = asked.schema_field
    if asked.stream:
        return Response(b"".join(dialect.events(asked, answer)), media_type="text/event-stream", headers=headers)
    return _json(dialect.body(asked, answer), headers=headers)


def _models_body(names: list[str], dialect: Dialect) -> Json:
    if dialect is MESSAGES:
        about = {"type": "model", "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
        shown = [{"id": name, "display_name": name, **about} for name in names]
        return {"data": shown, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    shown = [{"id": name, "object": "model", "created": 0, "owned_by": "headrace"} for name in names]
    return {"object": "list", "data": shown}


def _refusal(request: Request, refused: BadRequest) -> Response:
    headers = {"retry-after": "1"} if refused.status == 429 else {}
    return _json(_dialect_of(request).error(refused), refused.status, headers)


def _too_many(num_open: int) -> BadRequest:
    return BadRequest(
        f"{num_open} calls of the episode are open, rollout.endpoint.max_episode_calls allows no more",
        status=429, code="rate_limit_exceeded",
    )  # fmt: skip


def _ended() -> BadRequest:
    return BadRequest("the episode has ended", status=410, code="episode_ended")


async def _alive(request: Request) -> Response:
    """Answer clients that check the connection before they call."""
    return Response()


async def _no_such_path(request: Request, error: Exception) -> Response:
    paths = ", ".join(f"POST {path}" for path in DIALECTS)
    words = f"{request.method} {request.url.path[:100]}: expected {paths} or GET /v1/models"
    return _refusal(request, BadRequest(words, status=getattr(error, "status_code", 404), code="not_found"))


async def _drain(request: Request, most: int) -> None:
    with suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(DRAIN_S):
            while most > 0:
                message = await request.receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
                most -= len(message.get("body", b""))


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
