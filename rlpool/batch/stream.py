"""Requests that follow each other: some are in flight while a result is learned from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlpool.data.infos import Info
from rlpool.data.temporal_dict_tensor import TemporalDictTensor

InfoOf = Info | Callable[[int], Info]
"""``agent_info`` or ``env_info`` of all requests, or a function of the request's number."""


def stream(
    batcher: Any, n_episodes: int, n_pending: int, agent_info: InfoOf, env_info: InfoOf
) -> Iterator[TemporalDictTensor]:
    """Results of requests of a batcher, see ``EpisodeBatcher.stream``."""
    n_requests = batcher.n_pending
    pending = batcher._dispatcher.pending
    try:
        while True:
            while batcher.n_pending < n_pending:
                given = agent_info, env_info
                infos = (info(n_requests) if callable(info) else info for info in given)
                batcher.execute(n_episodes, *infos)
                n_requests += 1
            result = batcher._oldest().trajectories
            age: torch.Tensor = batcher.policy_version - result.info["policy_version"]
            result.info.set("policy_age", age)
            del pending[0]  # the last act: no signal's handler runs before the caller has it
            yield result
    finally:
        if not batcher.closed:
            batcher._leave_stream()
