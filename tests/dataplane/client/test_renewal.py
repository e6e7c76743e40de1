"""Leases are renewed although single renewals fail, and given up once none has succeeded for as long as they last."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

from headrace.codecs import messages
from headrace.dataplane.client import grants as renewal
from headrace.dataplane.client.grants import LeaseRenewal
from headrace.dataplane.directory import requests
from headrace.dataplane.errors import DirectoryLost
from headrace.dataplane.rpc.links import Link

LEASE_S = 0.4


class OwnLink:
    """Answers renewals with what `answer` says for each call's number, from 1; None is no answer."""

    def __init__(self, answer: Callable[[int], list[int] | None], enough: int) -> None:
        """enough: number of calls after which `asked` is set."""
        self.asked = threading.Event()
        self._answer, self._enough = answer, enough
        self._calls = 0

    def call(self, op: str, payload: bytes, timeout_s: float, undo: Any = None) -> bytes:
        assert (op, messages.decode(payload, requests.Renew).lease_ids) == ("renew", (5,))
        self._calls += 1
        if self._calls >= self._enough:
            self.asked.set()
        live = self._answer(self._calls)
        if live is None:
            raise DirectoryLost("the directory did not answer", op=op)
        return requests.reply(messages.encode(live))


def renewing(link: OwnLink) -> LeaseRenewal:
    leases = LeaseRenewal(cast(Link, link), LEASE_S)
    leases.add(5, ("a.0", "a.1"))
    return leases


def test_a_renewal_that_fails_is_tried_again() -> None:
    link = OwnLink(lambda call: None if call % 2 else [5], enough=6)
    leases = renewing(link)
    assert link.asked.wait(10), "every other renewal fails, and the lease is renewed all the same"
    leases.end()


def test_leases_that_ended_or_could_not_be_renewed_for_as_long_as_they_last_are_given_up() -> None:
    ended, lost = OwnLink(lambda call: [], enough=1), OwnLink(lambda call: None, enough=renewal.RENEWALS)
    for link in (ended, lost):
        leases = renewing(link)
        thread = leases._renewer._thread
        assert thread is not None
        thread.join(10)
        assert not thread.is_alive() and link.asked.is_set() and not leases._renewer._held
        leases.end()
