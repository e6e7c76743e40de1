"""The column of routes: joined from what the engine reported, checked, counted, and kept by the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.actors.engines.config import RouterReplayConfig
from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine, scripted_routes
from headrace.actors.protocols import Prompt, Sample, Score
from headrace.actors.rewards.builtin import exact_match
from headrace.actors.rewards.rubric import Rubric
from headrace.actors.rollout.journal import GroupJournal, JournalConfig, encode_record, read_group
from headrace.actors.rollout.results import merge_reports
from headrace.actors.rollout.rows import RolloutRows, RouteCounts, RouteRules, checked_routes
from headrace.codecs.jagged import select_rows
from headrace.codecs.tokens.routes import ROUTES, RouteSpec, check_routes, missing_tokens
from headrace.tests.actors.rollout.journal_runs import segments
from headrace.tests.actors.rollout.test_rollout import FakeClient, worker

SPEC = RouteSpec(tuple(range(8)), 4, 16, 8)
RULES = RouteRules(SPEC, RouterReplayConfig(enabled=True))
GOOD = Score(1.0, {"exact_match": 1.0}, valid=True, error="")
PROMPT = 5


def sample(routes: tuple[tuple[int, np.ndarray], ...], *, length: int = 12, newer_from: int = 99) -> Sample:
    """A row of 5 prompt tokens; response tokens from `newer_from` on are of version 4, others of version 3."""
    tokens = np.arange(length)
    return Sample(
        Prompt("p", "", "", {}),
        0,
        tokens.astype(np.int32),
        (tokens >= PROMPT).astype(np.uint8),
        np.zeros(length, np.float32),
        "",
        "stop",
        np.where(tokens < PROMPT, -1, np.where(tokens < newer_from, 3, 4)).astype(np.int32),
        routes=routes,
    )


def routes_of(length: int) -> np.ndarray:
    return scripted_routes(np.arange(length), SPEC)


def test_pieces_fill_a_row_but_its_last_token() -> None:
    whole = routes_of(11)
    found = checked_routes([sample(((0, whole[:7]), (7, whole[7:])))], [GOOD], RULES)
    [column], [score], [counts] = found.columns, found.scores, found.counts
    assert (column[:11] == whole).all() and missing_tokens(column, SPEC).tolist() == [False] * 11 + [True]
    assert score is GOOD
    size = 12 * SPEC.token_bytes
    assert replace(counts, seconds=0.0) == RouteCounts(possible=11, sampled=7, num_tokens=12, num_bytes=size)
    assert counts.seconds > 0


def test_missing_tokens_and_contexts_of_two_versions_are_counted() -> None:
    whole = routes_of(11)
    found = checked_routes([sample(((0, whole[:4]), (6, whole[6:])), newer_from=8)], [GOOD], RULES)
    assert missing_tokens(found.columns[0], SPEC).sum() == 3
    assert replace(found.counts[0], seconds=0.0) == RouteCounts(
        possible=11, missing=2, rows_missing=1, sampled=7, mixed_context=4, num_tokens=12,
        num_bytes=12 * SPEC.token_bytes,
    )  # fmt: skip
    assert found.scores == [GOOD]


@pytest.mark.parametrize(
    ("token", "experts", "text"),
    [(3, [1, 1, 2, 3], "twice"), (9, [1, 2, 3, 16], "out of range"), (0, [255, 255, 255, 255], "in part")],
)
def test_impossible_routes_fail_their_row_alone(token: int, experts: list[int], text: str) -> None:
    wrong = routes_of(11)
    wrong[token, 2] = experts
    found = checked_routes([sample(((0, routes_of(11)),)), sample(((0, wrong),))], [GOOD, GOOD], RULES)
    fine, failed = found.scores
    assert fine is GOOD and not failed.valid and failed.reward == 0.0, text
    assert failed.error.startswith(f"p.0: token {token}, layer 2: experts {experts}, expected 4 different ids")
    assert missing_tokens(found.columns[1], SPEC).all() and found.counts[1] == RouteCounts()


def test_rows_with_too_many_missing_routes_are_masked_if_so_configured() -> None:
    half = sample(((0, routes_of(6)),))
    masking = RouteRules(SPEC, RouterReplayConfig(enabled=True, missing="mask", max_missing_share=0.4))
    found = checked_routes([half], [GOOD], masking)
    assert found.scores[0].error == (
        "p.0: 5 of 11 tokens have no route, more than router_replay.max_missing_share=0.4 allows"
    )
    assert missing_tokens(found.columns[0], SPEC).all() and found.counts[0].missing == 5
    some = RouteRules(SPEC, RouterReplayConfig(enabled=True, missing="mask", max_missing_share=0.5))
    assert checked_routes([half], [GOOD], some).scores == [GOOD]


def test_failed_rows_have_no_routes_and_count_for_nothing() -> None:
    bad = Score(0.0, {}, valid=False, error="no answer")
    found = checked_routes([sample(((0, routes_of(11)),))], [bad], RULES)
    assert missing_tokens(found.columns[0], SPEC).all() and found.scores == [bad]
    assert replace(found.counts[0], seconds=0.0) == RouteCounts()


class Damaging(ScriptedEngine):
    """An engine whose second sample of each prompt has the same expert twice somewhere."""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        first, second, *rest = await super().generate(request_id, prompt_ids, params)
        assert second.routes is not None
        second.routes[2, 1] = 7
        return [first, second, *rest]


def test_rollouts_write_routes_and_the_journal_keeps_them(tokenizer: Any, tmp_path: Path) -> None:
    """Rows of a group share their prompt in the journal's file, too."""
    client = FakeClient()

    async def main() -> Any:
        engine = Damaging(lambda name, ids, index: [7 + index, *range(3, 20), 2], routes=SPEC)
        journal = GroupJournal(JournalConfig(str(tmp_path), "one", purpose="record"), "rollout 0")
        exact = Rubric([("exact_match", exact_match, 1.0)])
        rollouts = worker(engine, tokenizer, client, exact, held_out={}, journal=journal, routes=RULES)
        reports = [await rollouts.rollout([at], "train", SamplingParams(n=3, max_new_tokens=30)) for at in (0, 1)]
        await rollouts.close()
        return merge_reports(reports)

    report = asyncio.run(main())
    assert report.failed == 2 and "expected 4 different ids" in report.first_error
    assert report.routes.missing == 0 and report.routes.possible > 0 and report.routes.mixed_context == 0
    assert len(client.puts) == 2
    batches = [batch for _, batch, _ in client.puts]
    for batch in batches:
        column = batch.jagged(ROUTES)
        rows = np.split(column.values.numpy(), np.cumsum(column.lengths)[:-1])
        assert missing_tokens(rows[1], SPEC).all(), "the row with impossible routes carries them"
        for row in (rows[0], rows[2]):
            check_routes(row, SPEC, "0.0")
            assert missing_tokens(row, SPEC).tolist() == [False] * (len(row) - 1) + [True]
        assert batch.jagged("response_mask").values.numpy().sum() == 2 * 19
    [path] = segments(tmp_path)
    group = read_group(path, 0)
    found = group.rows.batch.jagged(ROUTES)
    np.testing.assert_array_equal(found.values.numpy(), batches[0].jagged(ROUTES).values.numpy())
    assert group.figures.routes.possible == sum(found.lengths[[0, 2]] - 1)

    def record_bytes(rows: list[int]) -> int:
        batch = select_rows(group.rows.batch, rows)
        two = RolloutRows(group.rows.keys[:2], group.rows.versions[:2], {}, batch)
        return len(encode_record(replace(group, rows=two), 0, 1))

    assert found.lengths[0] == found.lengths[1] == found.lengths[2]
    saved = record_bytes([0, 1]) - record_bytes([0, 2])
    assert saved > 3 * SPEC.token_bytes, "the prompt's routes are written twice"
