"""``seek``: what an episode is follows from its number, not from the request it belongs to."""

from __future__ import annotations

import pytest
import torch

from rlpool import EpisodeBatcher, GymEnv, SpecError, TemporalDictTensor, UsageError

from support.agents import GruAgent
from support.envs import CountingEnv, create_counting


class RowAgent(GruAgent):
    """A ``GruAgent`` whose output says in which row of the batch an episode was."""

    def __call__(self, state, observation, agent_info=None, history=None):
        state, output, new_state = super().__call__(state, observation)
        output.set("row", torch.arange(observation.n_elems()))
        return state, output, new_state


def collect(requests: list[tuple[int, int]], n_workers: int) -> TemporalDictTensor:
    """Requests ``(first, n_episodes)``, one after another."""
    parts = []
    arguments = {"n_envs": 3, "length": 5}
    with EpisodeBatcher(
        4, 9, RowAgent, {}, create_counting, arguments, n_workers=n_workers, seeds=5
    ) as batcher:
        for first, n_episodes in requests:
            batcher.seek(first)
            infos = {"id": torch.arange(first, first + n_episodes)}
            batcher.execute(n_episodes, env_info=infos)
            assert batcher.next_episode == first + n_episodes
            got = batcher.get()
            got.set("seed", got.info["seed"][:, None].expand(-1, got.n_timesteps()))
            parts.append(got)
    return TemporalDictTensor.cat(parts)


@pytest.mark.promise("I2")
@pytest.mark.parametrize("n_workers", [0, 2])
def test_parts_that_begin_anywhere_have_the_bits_of_the_whole(n_workers: int) -> None:
    whole = collect([(0, 16)], 0)
    parts = collect([(8, 8), (1, 7), (0, 1)], n_workers)
    order = [15, *range(8, 15), *range(8)]
    assert sorted(whole.keys()) == sorted(parts.keys())
    for key in whole:
        assert torch.equal(whole[key], parts[key][order]), key


def test_seek_is_refused_while_something_is_pending_and_for_what_is_no_number() -> None:
    batcher = EpisodeBatcher(4, 4, GruAgent, {}, lambda: GymEnv([CountingEnv()]), n_workers=0)
    for number in (-1, 1.5, "3", 2**62 + 1):
        with pytest.raises(SpecError, match="number"):
            batcher.seek(number)
    batcher.execute(2)
    with pytest.raises(UsageError, match="pending"):
        batcher.seek(0)
    batcher.get()
    batcher.seek(2**62)
    batcher.execute(2)
    assert len(batcher.get()) == 2
    batcher.close()
    with pytest.raises(UsageError):
        batcher.seek(0)
