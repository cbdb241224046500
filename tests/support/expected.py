"""Expected results of random batchers, computed by the loops of ``support.by_hand``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from rlpool import AgentError, EnvError
from rlpool.agents.noise import NoiseStarts
from rlpool.seeding import LaneSeeds, episode_seeds, noise_keys, root_from

from support.by_hand import (
    Episode,
    Failed,
    Lane,
    Together,
    Values,
    assert_same,
    options_of,
    played,
    row_of,
)
from support.random_batchers import Setting


@dataclass
class Expected:
    """Expected result of ``get``, or the failures that it may raise.

    Attributes:
        rows: The steps of each row.
        info: The info of each row.
        failures: Episode number to the step in which it fails.
        breaks: Whether the agent fails.
        truncated: Rows, or lanes, in which an episode was truncated because of a failure.
        late_info: Returns further infos that are known only once the result is returned.
    """

    rows: list[list[Values]]
    info: Values
    failures: dict[int, int]
    breaks: bool = False
    truncated: Sequence[int] = ()
    late_info: Callable[[list[list[Values]]], Values] | None = None

    def check(self, get: Any) -> Any:
        """Call a function that returns the result, compare the result, and return it."""
        if self.breaks or self.failures:
            with pytest.raises(AgentError if self.breaks else EnvError) as caught:
                get()
            where = caught.value.where
            if not self.breaks:
                assert (where.row, where.step) in self.failures.items(), (where, self.failures)
            return None
        got = get()
        if self.late_info is not None:
            self.info, self.late_info = self.info | self.late_info(self.rows), None
        assert_same(got, self.rows, self.info)
        return got


class ByHand:
    """Common part of both kinds of batcher."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.root = setting, root_from(setting.seeds)
        self.agent, self.version = setting.agent(), 0

    def update(self, info: Any) -> None:
        self.agent.update(info)
        self.version += 1

    def info(
        self, episodes: list[int], seeds: list[int], *infos: Any, truncated: Sequence[int] = ()
    ) -> Values:
        """Return the infos of a result's rows."""
        named = {"agent_info": infos[0], "env_info": infos[1]}
        failed = {"failed": np.isin(episodes, truncated)} if self.setting.truncates else {}
        return failed | {
            "episode": np.array(episodes),
            "seed": np.array(seeds),
            "policy_version": np.full(len(episodes), self.version),
            **{
                f"{name}/{key}": np.asarray(values)[episodes]
                for name, info in named.items()
                for key, values in info.items()
            },
        }


class EpisodesByHand(ByHand):
    """An ``EpisodeBatcher``."""

    n_before = 0

    def execute(self, n: int, agent_info: Any, env_info: Any, seeds: Any = None) -> Expected:
        setting, agent = self.setting, self.agent
        first, n_rows = self.n_before, setting.n_rows
        seeds = seeds or episode_seeds(self.root, first, n)
        keys = noise_keys(self.root, first, n)
        noise = NoiseStarts(keys, agent.n_noise) if agent.n_noise else [None] * n
        self.n_before += n
        rows, failures = [], {}
        breaks, truncated = False, []
        for i, seed in enumerate(seeds):
            env = setting.observed_env()
            try:
                current = env.reset(seed, options_of(env_info, i))
                episode = Episode(agent, (first + i) % n_rows, n_rows, noise[i], current)
                rows.append(played(episode, env, row_of(agent_info, i)))
            except Failed as failed:
                failures[i] = failed.step
            except RuntimeError:  # of the agent
                breaks = True
            if env.n_truncated:
                truncated.append(i)
        info = self.info(list(range(n)), seeds, agent_info, env_info, truncated=truncated)
        return Expected(rows, info, failures, breaks, truncated)

    def resume(self, n_pending: int) -> None:
        """Go back to the first episode that was not returned."""
        self.n_before -= n_pending


class WindowsByHand(ByHand):
    """A ``Batcher``."""

    n_resets = n_windows = 0
    is_reset = False

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        # Episode and next step number of each lane.
        self.positions = {lane: [0, 0] for lane in range(setting.n_all_lanes)}

    def resume(self, n_pending: int) -> None:
        """Begin episodes that no lane has begun before."""
        self.n_resets += self.n_windows * self.setting.n_timesteps
        self.n_windows = 0
        self.positions = {lane: [self.n_resets, 0] for lane in self.positions}

    def moved(self, lanes: list[int], rows: list[list[Values]]) -> Values:
        """Return where the rows of a window begin, and advance past them."""
        before = np.array([self.positions[lane] for lane in lanes])
        for lane, row in zip(lanes, rows, strict=True):
            for step in row:
                episode, number = self.positions[lane]
                is_end = bool(step["_done"])
                self.positions[lane] = [episode + is_end, 0 if is_end else number + 1]
        batchers = np.full(len(lanes), self.root >> 65)
        columns = batchers, np.array(lanes), before[:, 0], before[:, 1]
        return dict(zip(("batcher", "lane", "episode", "first_step"), columns, strict=True))

    def reset(self, agent_info: Any, env_info: Any) -> None:
        setting = self.setting
        n_restarts = self.n_windows * setting.n_timesteps if setting.restarts else 0
        self.seeds = LaneSeeds(self.root, self.n_resets, n_restarts)
        self.n_resets += 1
        self.agent_info, self.env_info = agent_info, env_info
        self.lanes = {k: self.lane(k) for k in range(setting.n_all_lanes)}
        self.is_reset = True
        self.positions = {k: [episode + (n > 0), 0] for k, (episode, n) in self.positions.items()}

    def lane(self, lane: int) -> Lane | None:
        if self.setting.over == "together":
            return None
        setting, agent, seeds = self.setting, self.agent, self.seeds

        def begin(n_restarts: int, current: Values) -> Episode:
            noise = seeds.noise(lane, n_restarts, agent.n_noise) if agent.n_noise else None
            return Episode(agent, lane % setting.n_rows, setting.n_rows, noise, current)

        options = options_of(self.env_info, lane)
        numbers = (seeds.seed(lane, n) for n in itertools.count())
        return Lane(setting.observed_env(), options, setting.restarts, begin, numbers)

    def execute(self, agent_info: Any, env_info: Any = None) -> Expected | None:
        """Return the next window, ``None`` if all lanes have stopped."""
        self.n_windows += 1
        if agent_info is not None:
            self.agent_info = agent_info
        if env_info is not None:
            self.env_info = env_info
            for k, lane in self.lanes.items():
                lane.options = options_of(env_info, k)
        running = [k for k, lane in self.lanes.items() if not lane.is_over]
        rows, failures, truncated = [], {}, []
        for k in running:
            info, env = row_of(self.agent_info, k), self.lanes[k].env
            env.n_truncated = 0
            try:
                rows.append(self.lanes[k].window(self.setting.n_timesteps, info))
            except Failed as failed:
                failures[k] = failed.step
            if env.n_truncated:
                truncated.append(k)
        seeds = [self.seeds.seed(k, 0) for k in running]
        info = self.info(running, seeds, self.agent_info, self.env_info, truncated=truncated)
        late_info = partial(self.moved, running)
        return Expected(rows, info, failures, False, truncated, late_info) if running else None


class EpisodesTogether(EpisodesByHand):
    """An ``EpisodeBatcher`` whose lanes are reset together."""

    def execute(self, n: int, agent_info: Any, env_info: Any, seeds: Any = None) -> Expected:
        n_workers, first = self.setting.n_workers, self.n_before
        seeds = episode_seeds(self.root, first, n)
        keys = noise_keys(self.root, first, n)
        self.n_before += n
        workers = [(first + i) % n_workers for i in range(n)]
        seeds = [seeds[workers.index(worker)] for worker in workers]
        rows: dict[int, list[Values]] = {}
        for worker in set(workers):
            share = [i for i, other in enumerate(workers) if other == worker]
            rows |= self.played(share, first, seeds[share[0]], keys, agent_info, env_info)
        info = self.info(list(range(n)), seeds, agent_info, env_info)
        return Expected([rows[i] for i in range(n)], info, {})

    def played(
        self, share: list[int], first: int, seed: int, keys: Any, agent_info: Any, env_info: Any
    ) -> dict[int, list[Values]]:
        """Return the episodes of one worker."""
        setting, agent = self.setting, self.agent
        noise = NoiseStarts(keys, agent.n_noise) if agent.n_noise else [None] * len(keys)
        coming = list(share)
        running: dict[int, int] = {}
        rows: dict[int, list[Values]] = {}

        def begin(lane: int, current: Values) -> Episode | None:
            if not coming:
                return None
            running[lane] = coming.pop(0)
            row = (first + running[lane]) % setting.n_rows if setting.agent_rows else lane
            return Episode(agent, row, setting.n_rows, noise[running[lane]], current)

        together = Together(setting.arrays(), begin, setting.keep_float64, setting.limit)
        together.reset(seed, options_of(env_info, 0))
        while len(rows) < len(share):
            over = together.step(lambda lane: row_of(agent_info, running[lane]))
            for lane, is_over in over.items():
                if is_over:
                    rows[running[lane]] = together.running.pop(lane).steps
        return rows


class WindowsTogether(WindowsByHand):
    """A ``Batcher`` whose lanes are reset together."""

    def reset(self, agent_info: Any, env_info: Any) -> None:
        super().reset(agent_info, env_info)
        self.workers = [self.worker(k) for k in range(self.setting.n_workers)]

    def worker(self, worker: int) -> Together:
        setting, agent, seeds = self.setting, self.agent, self.seeds
        n_begun = [0] * setting.n_lanes
        first = worker * setting.n_lanes

        def begin(lane: int, current: Values) -> Episode | None:
            n = n_begun[lane]
            if n and not setting.restarts:
                return None
            n_begun[lane] += 1
            noise = seeds.noise(first + lane, n, agent.n_noise) if agent.n_noise else None
            return Episode(agent, (first + lane) % setting.n_rows, setting.n_rows, noise, current)

        together = Together(setting.arrays(), begin, setting.keep_float64, setting.limit)
        together.reset(seeds.seed(first, 0), options_of(self.env_info, first))
        return together

    def execute(self, agent_info: Any, env_info: Any = None) -> Expected | None:
        setting = self.setting
        self.n_windows += 1
        if agent_info is not None:
            self.agent_info = agent_info
        rows: dict[int, list[Values]] = {}
        for number, worker in enumerate(self.workers):
            first = number * setting.n_lanes
            rows |= {first + k: steps for k, steps in self.window(worker, first).items()}
        if not rows:
            return None
        seeds = [self.seeds.seed(lane - lane % setting.n_lanes, 0) for lane in rows]
        info = self.info(list(rows), seeds, self.agent_info, self.env_info)
        late_info = partial(self.moved, list(rows))
        return Expected(list(rows.values()), info, {}, late_info=late_info)

    def window(self, worker: Together, first: int) -> dict[int, list[Values]]:
        """Return the next steps of a worker's lanes, until one of them is full."""
        lanes = range(self.setting.n_lanes)
        if worker.has_begun and not self.setting.restarts:
            lanes = sorted(worker.running)
        rows: dict[int, list[Values]] = {lane: [] for lane in lanes}
        is_full = not rows
        while not is_full:
            over = worker.step(lambda lane: row_of(self.agent_info, first + lane))
            for lane, is_over in over.items():
                rows[lane].append(worker.running[lane].steps[-1])
                if is_over:
                    del worker.running[lane]
            longest = max(map(len, rows.values()))
            has_stopped = not worker.running and not self.setting.restarts
            is_full = has_stopped or longest == self.setting.n_timesteps
        return rows


def expectations(setting: Setting, windows: bool) -> Any:
    """Return the object that computes a batcher's expected results."""
    kinds: Any = (EpisodesByHand, WindowsByHand)
    if setting.over == "together":
        kinds = (EpisodesTogether, WindowsTogether)
    return kinds[windows](setting)
