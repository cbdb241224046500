"""ParallelVectorEnv against Gymnasium's SyncVectorEnv: spaces, seeds, modes, resets and deaths."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rlpool import ParallelVectorEnv

from support.restarting import SPACES, RestlessEnv, assert_same_bits

N = 3

# All but explaining, which traces every line, and shrinking: every example starts processes.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]

seeds = st.one_of(
    st.none(),
    st.integers(0, 2**40),
    st.lists(st.one_of(st.none(), st.integers(0, 2**31)), min_size=N, max_size=N),
)
masks = st.one_of(st.none(), st.lists(st.booleans(), min_size=N, max_size=N).filter(any))
options = st.one_of(st.none(), st.just({"length": 2}))
resets = st.tuples(st.just("reset"), seeds, masks, options)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("kill"), st.integers(0, N - 1)),
        resets,
    ),
    min_size=3,
    max_size=8,
)


def given_options(mask: Any, others: Any) -> dict[str, Any] | None:
    """New in each call: Gymnasium takes the mask out of the dict."""
    if mask is None:
        return others and dict(others)
    return {**(others or {}), "reset_mask": np.array(mask)}


@pytest.mark.promise("I2")
@pytest.mark.timeout(250)
@settings(max_examples=15, phases=PHASES)
@given(
    observations=st.sampled_from(sorted(SPACES)),
    actions=st.sampled_from(sorted(SPACES)),
    mode=st.sampled_from(AutoresetMode),
    envs_per_worker=st.integers(1, N),
    copy=st.booleans(),
    operations=operations,
    action_seed=st.integers(0, 100),
)
def test_a_parallel_vector_env_has_the_bits_of_a_sync_vector_env_whoever_dies(
    observations: str,
    actions: str,
    mode: AutoresetMode,
    envs_per_worker: int,
    copy: bool,
    operations: list[Any],
    action_seed: int,
) -> None:
    env_fns = [partial(RestlessEnv, observations, actions)] * N
    sync = SyncVectorEnv(env_fns, copy, autoreset_mode=mode)
    ours = ParallelVectorEnv(
        env_fns, copy, autoreset_mode=mode, envs_per_worker=envs_per_worker, max_restarts=None
    )
    try:
        assert ours.observation_space == sync.observation_space
        assert ours.action_space == sync.action_space
        assert ours.metadata == sync.metadata
        sync.action_space.seed(action_seed)
        assert_same_bits(ours.reset(seed=action_seed), sync.reset(seed=action_seed))
        for name, *arguments in operations:
            if name == "reset":
                seed, *rest = arguments
                one, other = given_options(*rest), given_options(*rest)
                assert_same_bits(
                    ours.reset(seed=seed, options=one), sync.reset(seed=seed, options=other)
                )
            elif name == "kill":
                workers = ours.manager.workers
                pid = workers[arguments[0] % len(workers)].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            for _ in range(arguments[0] if name == "step" else 1):
                ended = sync._autoreset_envs.copy()
                if mode is AutoresetMode.DISABLED and ended.any():
                    chosen = {"reset_mask": ended}
                    assert_same_bits(ours.reset(options={**chosen}), sync.reset(options={**chosen}))
                action = sync.action_space.sample()
                assert_same_bits(ours.step(action), sync.step(action))
        assert ours.np_random_seed == sync.np_random_seed
        assert ours.render() == sync.render()
    finally:
        ours.close()
        sync.close()
