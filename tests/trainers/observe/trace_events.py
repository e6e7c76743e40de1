"""What tests ask of a timeline's events."""

from __future__ import annotations

from typing import Any


def complete(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def names(events: list[dict[str, Any]], what: str) -> dict[Any, str]:
    """(pid, tid) -> the name that metadata gives it; what: process or thread."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == f"{what}_name"}


def lanes(events: list[dict[str, Any]]) -> dict[str, str]:
    """Span -> its lane's name."""
    threads = names(events, "thread")
    return {event["name"]: threads[event["pid"], event["tid"]] for event in complete(events)}


def crossing(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of spans of one lane that neither nest nor stay apart."""
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
