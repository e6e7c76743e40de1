"""Reads lanes, names and overlaps from a timeline's events, for tests."""

from __future__ import annotations

from typing import Any


def complete(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def names(events: list[dict[str, Any]], what: str) -> dict[Any, str]:
    """Return the names that metadata gives to processes or threads, by (pid, tid)."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == f"{what}_name"}


def lanes(events: list[dict[str, Any]]) -> dict[str, str]:
    """Return the name of each span's lane."""
    threads = names(events, "thread")
    return {event["name"]: threads[event["pid"], event["tid"]] for event in complete(events)}


def crossing(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the pairs of spans of one lane that overlap without nesting."""
    found = []
    drawn = complete(events)
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            if (a["pid"], a["tid"]) != (b["pid"], b["tid"]):
                continue
            first, second = sorted((a, b), key=lambda event: (event["ts"], -event["dur"]))
            end = first["ts"] + first["dur"]
            if second["ts"] < end < second["ts"] + second["dur"]:
                found.append((first["name"], second["name"]))
    return found
