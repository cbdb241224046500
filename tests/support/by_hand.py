"""Expected results of batchers: loops over Gymnasium environments, one episode after another.

The agent sees one episode at a time, in its row of a batch whose other rows are copies of it.
Apart from that, an episode may depend only on its seed, its noise and its rows of the infos.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rlpool import Agent, DictTensor, TemporalDictTensor
from rlpool.agents.noise import NoiseStream
from rlpool.seeding import NoiseStart, stream_seed

from support.scripted import leaves

Values = dict[str, Any]
"""Key to the array of one row."""


class Failed(Exception):
    """An environment failed in this step of its episode."""

    def __init__(self, step: int) -> None:
        self.step = step


def stored(value: Any, keeps_float64: bool) -> Any:
    """Copy a value to the dtype in which it is stored."""
    array = np.array(value)
    return array.astype(np.float32) if array.dtype == np.float64 and not keeps_float64 else array


class ObservedEnv:
    """One environment with its current values by key.

    Args:
        env: The environment.
        infos: Info key to dtype and shape, for the infos that are kept.
        keeps_float64: Whether float64 is kept.
        limit: ``max_episode_steps``.
        truncates: Whether a failing step truncates its episode.

    Attributes:
        n_truncated: Number of episodes truncated by failures.
    """

    def __init__(
        self,
        env: Any,
        infos: Mapping[str, tuple[Any, Any]] | None = None,
        keeps_float64: bool = False,
        limit: int | None = None,
        truncates: bool = False,
    ) -> None:
        self.env, self.infos = env, infos or {}
        self.keeps_float64, self.limit = keeps_float64, limit
        self.truncates, self.n_truncated = truncates, 0

    def reset(self, seed: int, options: Any) -> Values:
        self.t = 0
        try:
            observation, info = self.env.reset(seed=seed, options=deepcopy(options))
        except RuntimeError:
            raise Failed(0) from None
        last = {
            key: stored(np.zeros(space.shape, space.dtype), self.keeps_float64)
            for key, space in leaves(self.env.action_space, "last_action")
        }
        self.before = deepcopy((observation, info))
        return self.values(observation, info, 0.0, (False, False), last)

    def step(self, action: Values) -> Values:
        last = {
            f"last_{key}": stored(action[key], False).astype(
                stored(np.zeros(0, space.dtype), self.keeps_float64).dtype
            )
            for key, space in leaves(self.env.action_space, "action")
        }
        try:
            observation, reward, *flags, info = self.env.step(native(self.env.action_space, action))
        except RuntimeError:
            if not self.truncates:
                raise Failed(self.t) from None
            self.n_truncated += 1
            (observation, info), reward, flags = self.before, 0.0, [False, True]
        self.t += 1
        self.before = deepcopy((observation, info))  # the environment may overwrite it
        flags[1] = flags[1] or self.t == self.limit
        return self.values(observation, info, reward, flags, last)

    def values(
        self, observation: Any, info: Any, reward: float, flags: Sequence[bool], last: Values
    ) -> Values:
        terminated, truncated = map(np.bool_, flags)
        return {
            **self.named(self.env.observation_space, observation),
            **{key: self.info_of(info, key, *spec) for key, spec in self.infos.items()},
            "reward": np.float32(reward),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
            "initial_state": np.bool_(self.t == 0),
            **last,
        }

    def named(self, space: Any, observation: Any) -> Values:
        """Return the parts of an observation by key."""
        values = {}
        is_dict = isinstance(space, spaces.Dict)
        for key, leaf in leaves(space, "" if is_dict else "frame"):
            part = observation
            for name in key.split("/")[not is_dict :]:
                part = part[int(name) if isinstance(part, tuple) else name]
            part = np.int64(part) if isinstance(leaf, spaces.Discrete) else part
            values[key] = stored(part, self.keeps_float64)
        return values

    def info_of(self, info: Any, key: str, dtype: Any, shape: Any) -> Any:
        """Return the kept infos, zero where missing."""
        for name in key.split("/"):
            info = info.get(name, {})
        return np.zeros(shape, dtype) if isinstance(info, dict) else np.array(info, dtype)


def native(space: Any, action: Values, key: str = "action") -> Any:
    """Convert an action to the form that the environment takes."""
    if isinstance(space, spaces.Dict):
        return {name: native(part, action, f"{key}/{name}") for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(native(part, action, f"{key}/{k}") for k, part in enumerate(space.spaces))
    value = np.array(action[key], space.dtype)
    return value[()] if isinstance(space, spaces.Discrete) else value


class Episode:
    """An agent in one episode.

    Args:
        agent: The agent.
        row: The episode's row in the batch.
        n_rows: Number of rows in the batch.
        noise: Start of its noise stream.
        current: First values of the environment.

    Attributes:
        steps: The steps so far, with all keys.
        current: Current values of the environment.
    """

    def __init__(
        self, agent: Agent, row: int, n_rows: int, noise: NoiseStart | None, current: Values
    ) -> None:
        self.agent, self.row, self.n_rows, self.current = agent, row, n_rows, current
        self.steps: list[Values] = []
        self.state: Values | None = None
        self.noise: NoiseStream | None = None
        if noise is not None:
            self.noise = NoiseStream(1, agent.n_noise)
            self.noise.start(0, noise)

    @torch.inference_mode()
    def act(self, agent_info: Values | None) -> Values:
        """Choose the next action and return the agent's output."""
        info = None if agent_info is None else self.repeated(agent_info)
        if self.state is None and self.agent.makes_initial_states():
            self.state = self.own_row(self.agent.initial_state(info, self.n_rows))
        before = dict(self.current)
        if self.noise is not None:
            self.noise.draw()
            before["noise"] = self.noise.tensor.numpy()[0].copy()
        state = None if self.state is None else self.repeated(self.state)
        history = self.so_far() if self.agent.require_history() else None
        first, output, new = self.agent(state, self.repeated(before), info, history)
        if self.state is None:
            self.state = self.own_row(first)
        done = self.own_row(output)
        self.steps.append({**before, **self.state, **done})
        self.state = self.own_row(new)
        return done

    def see(self, current: Values) -> bool:
        """Record the values after the step and return whether the episode is over."""
        self.current = current
        after = {**current, **(self.state or {})}
        self.steps[-1] |= {f"_{key}": value for key, value in after.items()}
        return bool(current["done"])

    def repeated(self, values: Values) -> DictTensor:
        # Cloned by torch, which aligns its memory: unaligned operands may round differently.
        rows = {k: np.repeat(np.asarray(v)[None], self.n_rows, 0) for k, v in values.items()}
        return DictTensor({key: torch.from_numpy(array).clone() for key, array in rows.items()})

    def own_row(self, values: DictTensor | None) -> Values:
        return {k: v[self.row].numpy().copy() for k, v in (values or DictTensor({})).items()}

    def so_far(self) -> TemporalDictTensor:
        columns = {key: np.stack([step[key] for step in self.steps]) for key in self.keys()}
        lengths = torch.full((self.n_rows,), len(self.steps))
        return TemporalDictTensor(dict(self.repeated(columns or {"none": []}).items()), lengths)

    def keys(self) -> list[str]:
        return list(self.steps[0]) if self.steps else []


def played(episode: Episode, env: ObservedEnv, agent_info: Values | None) -> list[Values]:
    """Play a whole episode and return its steps."""
    is_over = False
    while not is_over:
        is_over = episode.see(env.step(episode.act(agent_info)))
    return episode.steps


class Lane:
    """An environment of a ``Batcher``.

    Args:
        env: The environment.
        options: Options of its resets.
        restarts: Whether it restarts automatically.
        begin: Creates its next episode from the first values.
        seeds: Seeds of its episodes.
    """

    def __init__(
        self,
        env: ObservedEnv,
        options: Any,
        restarts: bool,
        begin: Callable[[int, Values], Episode],
        seeds: Iterator[int],
    ) -> None:
        self.env, self.options, self.restarts = env, options, restarts
        self.begins_with: Any = None  # a window's first episode was reset by the previous window
        self.begin, self.seeds, self.n_begun = begin, seeds, 0
        self.episode: Episode | None = None
        self.is_over = False

    def window(self, n_steps: int, agent_info: Values | None) -> list[Values]:
        """Return its next steps."""
        steps: list[Values] = []
        is_new = self.episode is not None or not self.n_begun
        options = self.options if is_new else self.begins_with
        while len(steps) < n_steps and not self.is_over:
            if self.episode is None:
                current = self.env.reset(next(self.seeds), options)
                self.episode = self.begin(self.n_begun, current)
                self.n_begun += 1
            ends = self.episode.see(self.env.step(self.episode.act(agent_info)))
            steps.append(self.episode.steps[-1])
            if ends:
                self.is_over, self.episode, options = not self.restarts, None, self.options
        self.begins_with = self.options
        return steps


def row_of(infos: Mapping[str, Any], row: int) -> Values | None:
    """Return one row of ``agent_info``."""
    return {key: np.asarray(values)[row] for key, values in infos.items()} or None


def options_of(infos: Mapping[str, Any], row: int) -> dict[str, Any] | None:
    """Return one row of ``env_info`` as an environment gets it."""
    return {key: np.asarray(values)[row].tolist() for key, values in infos.items()} or None


def assert_same(got: TemporalDictTensor, rows: Sequence[Sequence[Values]], info: Values) -> None:
    """Check that a result has exactly these steps and ``info``, and zeros as padding."""
    lengths = [len(row) for row in rows]
    assert got.lengths.tolist() == lengths, (got.lengths.tolist(), lengths)
    assert got.n_timesteps() >= max(lengths)
    first = next(row[0] for row in rows if row)
    assert set(got.keys()) == set(first), set(got.keys()) ^ set(first)
    for key, value in first.items():
        dtype, shape = np.asarray(value).dtype, np.shape(value)
        expected = np.zeros((len(rows), got.n_timesteps(), *shape), dtype)
        for number, row in enumerate(rows):
            if row:
                expected[number, : len(row)] = [step[key] for step in row]
        same_bits(key, got[key].numpy(), expected)
    assert set(got.info.keys()) == set(info), (set(got.info.keys()), set(info))
    for key, value in info.items():
        same_bits(key, got.info[key].numpy(), np.asarray(value))


def same_bits(key: str, got: Any, expected: Any) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), key
    if got.tobytes() != expected.tobytes():
        where = np.argwhere(got != expected)[:1].tolist()
        at = tuple(where[0]) if where else ()
        raise AssertionError(f"{key!r} at {list(at)} is {got[at]}, not {expected[at]}")


class Together:
    """Lanes that are reset together and then restart by themselves.

    Args:
        env: A vector environment with observations ``frame`` and numbers as actions.
        begin: Creates a lane's next episode from the first values; ``None`` if it has none.
        keeps_float64: Whether float64 is kept.
        limit: ``max_episode_steps``.
    """

    def __init__(
        self,
        env: Any,
        begin: Callable[[int, Values], Episode | None],
        keeps_float64: bool = False,
        limit: int | None = None,
    ) -> None:
        self.env, self.begin = env, begin
        self.keeps_float64, self.limit = keeps_float64, limit
        self.restarts_within = env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        self.running: dict[int, Episode] = {}
        self.has_begun = False

    def reset(self, seed: int, options: Any) -> None:
        self.begun = seed, options
        self.seen, _ = self.env.reset(seed=seed, options=dict(options or {}))
        self.at_start = np.ones(self.env.num_envs, bool)
        self.ended = np.zeros(self.env.num_envs, bool)

    def step(self, agent_info: Callable[[int], Values | None]) -> dict[int, bool]:
        """Begin episodes in lanes at their start, step all, and return which episodes are over."""
        lanes = range(self.env.num_envs)
        for lane in lanes:
            if self.at_start[lane] and lane not in self.running:
                current = self.values_of(self.seen[lane], 0.0, (False, False), np.int64(0), True)
                episode = self.begin(lane, current)
                if episode is not None:
                    self.running[lane] = episode
        if not self.running and not self.ended.any():  # they would not end soon
            seed, options = self.begun
            self.reset(stream_seed(seed, 1), options)
            return {}
        self.has_begun = True
        actions = {k: e.act(agent_info(k))["action"] for k, e in self.running.items()}
        if actions:
            of_idle = actions[min(actions)]
            self.actions = np.array([actions.get(lane, of_idle) for lane in lanes])
        self.seen, rewards, terminated, _, infos = self.env.step(self.actions)
        self.at_start = terminated if self.restarts_within else self.ended
        self.ended = np.zeros_like(terminated) if self.restarts_within else terminated
        last = infos["final_obs"] if self.restarts_within else self.seen
        over = {}
        for lane, action in actions.items():
            episode = self.running[lane]
            flags = terminated[lane], len(episode.steps) == self.limit
            current = self.values_of(last[lane], rewards[lane], flags, action, False)
            over[lane] = episode.see(current)
        return over

    def values_of(
        self, seen: Any, reward: float, flags: tuple[Any, Any], action: Any, is_first: bool
    ) -> Values:
        return {
            "frame": stored(seen, self.keeps_float64),
            "reward": np.float32(reward),
            "terminated": np.bool_(flags[0]),
            "truncated": np.bool_(flags[1]),
            "done": np.bool_(any(flags)),
            "initial_state": np.bool_(is_first),
            "last_action": action,
        }
