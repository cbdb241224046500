"""The schema of a trace file, and what follows from it: read, checked, sorted by what happened.

The schema says what the public description of the format ("Trace Event Format") asks of the two
kinds of events that rlpool writes: complete events (``X``) and metadata (``M``).
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NUMBER = {"type": "number", "minimum": 0}
_NAMED = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}

COMPLETE = {
    "type": "object",
    "required": ["name", "cat", "ph", "ts", "dur", "pid", "tid", "args"],
    "properties": {
        "name": {"type": "string"},
        "cat": {"enum": ["call", "episode", "wait", "worker", "request"]},
        "ph": {"enum": ["X"]},
        "ts": _NUMBER,  # microseconds
        "dur": _NUMBER,
        "pid": {"type": "integer", "minimum": 1},
        "tid": {"type": "integer", "minimum": 0},
        "args": {"type": "object"},
    },
}

METADATA = {
    "type": "object",
    "required": ["name", "ph", "pid", "tid", "args"],
    "properties": {
        "name": {"enum": ["process_name", "thread_name"]},
        "ph": {"enum": ["M"]},
        "pid": {"type": "integer", "minimum": 1},
        "tid": {"type": "integer", "minimum": 0},
        "args": _NAMED,
    },
}

TRACE = {
    "type": "object",
    "required": ["traceEvents", "displayTimeUnit", "otherData"],
    "properties": {
        "traceEvents": {"type": "array", "items": {"anyOf": [COMPLETE, METADATA]}},
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {
            "type": "object",
            "required": ["start_ns", "events_left_out"],
            "properties": {"start_ns": {"type": "integer"}, "events_left_out": _NUMBER},
        },
    },
}

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
}


def problems(value: Any, schema: dict[str, Any], at: str = "$") -> list[str]:
    """What of a value does not follow a schema, of the keywords of JSON Schema that are used here.

    Args:
        value: What ``json.load`` returns.
        schema: The schema.
        at: Where the value is.
    """
    known = {"type", "required", "properties", "items", "enum", "minimum", "anyOf"}
    assert schema.keys() <= known, "a keyword that would not be checked"
    found = []
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or isinstance(value, bool)):
        return [f"{at} is {value!r:.80}, not of type {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{at} is {value!r:.80}, none of {schema['enum']}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{at} is {value!r:.80}, below {schema['minimum']}")
    found += [f"{at} lacks {key!r}" for key in schema.get("required", ()) if key not in value]
    for key, part in schema.get("properties", {}).items():
        if key in value:
            found += problems(value[key], part, f"{at}.{key}")
    for number, item in enumerate(value if "items" in schema else ()):
        found += problems(item, schema["items"], f"{at}[{number}]")
    if "anyOf" in schema:
        tried = [problems(value, part, at) for part in schema["anyOf"]]
        found += [] if [] in tried else tried[0]
    return found


@dataclass
class Trace:
    """A trace that was read.

    Attributes:
        spans: Its complete events.
        names: The names of processes and tracks, by ``(pid, tid)``; the name of a process at -1.
        n_left_out: Events for which there was no room.
    """

    spans: list[dict[str, Any]]
    names: dict[tuple[int, int], str]
    n_left_out: int

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == name]

    def of(self, category: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["cat"] == category]

    @property
    def complete_episodes(self) -> list[dict[str, Any]]:
        return [span for span in self.of("episode") if span["args"]["complete"]]


def end_of(span: dict[str, Any]) -> float:
    return span["ts"] + span["dur"]


def is_within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    # A thousandth of a microsecond is a nanosecond, in which times are noted.
    return inner["ts"] >= outer["ts"] - 1e-3 and end_of(inner) <= end_of(outer) + 1e-3


def read_trace(path: Path) -> Trace:
    """Read a trace and check it: the schema, that every track has a name, and what it means.

    Episodes of a lane do not overlap, waits lie within them, and an episode that is complete has as
    many steps as the worker's loop has made meanwhile, but for those that it waited.
    """
    content = json.loads(path.read_text())
    assert problems(content, TRACE) == []
    events = content["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {
        (event["pid"], -1 if event["name"] == "process_name" else event["tid"]): event["args"]
        for event in events
        if event["ph"] == "M"
    }
    names = {track: args["name"] for track, args in names.items()}
    assert {(span["pid"], span["tid"]) for span in spans} <= names.keys()
    assert {(span["pid"], -1) for span in spans} <= names.keys()
    trace = Trace(spans, names, content["otherData"]["events_left_out"])
    _check_episodes(trace)
    return trace


def _check_episodes(trace: Trace) -> None:
    of_lane: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for episode in trace.of("episode"):
        of_lane[episode["pid"], episode["tid"]].append(episode)
    for episodes in of_lane.values():
        episodes.sort(key=lambda episode: episode["ts"])
        for before, after in itertools.pairwise(episodes):
            assert end_of(before) <= after["ts"] + 1e-3, "two episodes of a lane at the same time"
    waits: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for wait in trace.of("wait"):
        if wait["name"] == "waits for a slot":
            waits[wait["pid"], wait["tid"]].append(wait)
            assert any(is_within(wait, e) for e in of_lane[wait["pid"], wait["tid"]])
    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for step in trace.named("env.step"):
        steps[step["pid"]].append(step)
    if trace.n_left_out:
        return
    for track, episodes in of_lane.items():
        for episode in episodes:
            if not episode["args"]["complete"]:
                continue
            own = [step for step in steps[track[0]] if is_within(step, episode)]
            own = [step for step in own if not any(is_within(step, w) for w in waits[track])]
            n_steps = episode["args"]["steps"] - episode["args"].get("steps_before", 0)
            assert len(own) == n_steps, episode
