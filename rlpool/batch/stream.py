"""Requests that follow each other: some are in flight while a result is learned from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from rlpool.data.infos import Info
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import UsageError

InfoOf = Info | Callable[[int], Info]
"""``agent_info`` or ``env_info`` of all requests, or a function of the request's number."""

OpenStream = weakref.ref[Generator[TemporalDictTensor, None, None]] | None
"""The stream of a batcher that began last."""


def refuse_in_stream(call: str, stream: OpenStream) -> None:
    """Refuse a call that would mix its results with those of a stream.

    A generator that has ended in whatever way, or that nobody has any more, is not open.

    Raises:
        UsageError: If the stream is open.
    """
    iterator: Any = None if stream is None else stream()
    if iterator is not None and iterator.gi_frame is not None:
        what = f"{call} while a stream of this batcher is open, whose results would be mixed up"
        fix = "evaluate with a second batcher; to end the stream, leave its loop or close() it"
        raise UsageError(what, fix=fix)


def stream(
    batcher: Any, n_episodes: int, n_pending: int, agent_info: InfoOf, env_info: InfoOf
) -> Iterator[TemporalDictTensor]:
    """Results of requests of a batcher, see ``EpisodeBatcher.stream``."""
    itself: list[OpenStream] = []
    iterator = _results(batcher, n_episodes, n_pending, agent_info, env_info, itself)
    itself.append(weakref.ref(iterator))
    return iterator


def _results(
    batcher: Any,
    n_episodes: int,
    n_pending: int,
    agent_info: InfoOf,
    env_info: InfoOf,
    itself: list[OpenStream],
) -> Generator[TemporalDictTensor, None, None]:
    refuse_in_stream("a second stream()", batcher._stream)
    pending = batcher._dispatcher.pending
    try:
        batcher._stream = itself[0]
        batcher._n_streamed = batcher._n_streamed or batcher.n_pending
        while True:
            while batcher.n_pending < n_pending:
                given = agent_info, env_info
                infos = (info(batcher._n_streamed) if callable(info) else info for info in given)
                batcher._execute_next(n_episodes, *infos)
            result = batcher._oldest().trajectories
            age: torch.Tensor = batcher.policy_version - result.info["policy_version"]
            result.info.set("policy_age", age)
            del pending[0]  # the last act: no signal's handler runs before the caller has it
            yield result
    finally:
        if not batcher.closed:
            batcher._leave_stream()
