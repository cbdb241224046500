"""Vector environments: Gymnasium's own over single environments, and one that uses arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from support.fragile import FragileEnv


class ArrayEnv(VectorEnv[Any, Any, Any]):
    """Lanes that return the same values as a ``FragileEnv``, without an object per lane.

    Args:
        n_lanes: Number of lanes.
        mode: Autoreset mode; restarted episodes draw their length.
        seeds: What ``reset`` seeds: ``"lanes"``; ``"unmasked"`` lanes as well; ``"starts"``, but
            not later steps; ``"all"`` lanes by one generator; or ``"nothing"``.
        wrong: Position of a result of ``step`` to replace, and its replacement.
    """

    single_observation_space = FragileEnv.observation_space
    single_action_space = FragileEnv.action_space

    def __init__(
        self,
        n_lanes: int,
        mode: AutoresetMode | None = AutoresetMode.DISABLED,
        seeds: str = "lanes",
        wrong: tuple[int, Any] | None = None,
    ) -> None:
        self.num_envs = n_lanes
        self.metadata = {"autoreset_mode": mode}
        self.observation_space = batch_space(self.single_observation_space, n_lanes)
        self.action_space = batch_space(self.single_action_space, n_lanes)
        self._mode, self._seeds, self._wrong = mode, seeds, wrong
        self._unseeded = np.random.default_rng(1)
        self._rngs = [self._unseeded] * n_lanes
        self._t, self._total, self._length = np.zeros((3, n_lanes), np.int64)
        self._seen = np.zeros((n_lanes, 3))
        self._ended = np.zeros(n_lanes, bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        options = {} if options is None else options
        mask = options.pop("reset_mask", np.ones(self.num_envs, bool))
        if self._seeds == "unmasked":
            mask[:] = True
        if self._seeds == "all":
            assert mask.all()
            assert isinstance(seed, int | None)
            self._rngs = [np.random.default_rng(seed)] * self.num_envs
        for lane in np.flatnonzero(mask):
            own = seed[lane] if isinstance(seed, list) else seed and seed + lane
            if self._seeds in ("lanes", "unmasked", "starts") and own is not None:
                self._rngs[lane] = np.random.default_rng(own)
            self._begin(lane, options.get("length", 3 + (own or 0) % 5))
            if self._seeds == "starts":
                self._rngs[lane] = self._unseeded
        options.clear()  # a copy for this call
        return self._seen.copy(), {}

    def step(self, actions: Any) -> Any:
        assert self.action_space.contains(actions)
        assert not (self._ended.any() and self._mode is AutoresetMode.DISABLED)
        steps = ~self._ended
        self._t += steps
        self._total += np.where(steps, actions, 0)
        reward = np.zeros(self.num_envs)
        for lane in np.flatnonzero(steps):
            reward[lane] = self._rngs[lane].random() + self._total[lane]
            self._show(lane)
        for lane in np.flatnonzero(self._ended):
            self._begin(lane, 2 + int(self._rngs[lane].integers(7)))
        ended = steps & (self._t >= self._length)
        infos: dict[str, Any] = {}
        if self._mode is AutoresetMode.SAME_STEP:
            infos["final_obs"] = self._seen.copy()
            for lane in np.flatnonzero(ended):
                self._begin(lane, 2 + int(self._rngs[lane].integers(7)))
        else:
            self._ended = ended.copy()
        results = [self._seen.copy(), reward, ended, np.zeros(self.num_envs, bool), infos]
        if self._wrong is not None:
            results[self._wrong[0]] = self._wrong[1]
        return tuple(results)

    def _begin(self, lane: int, length: int) -> None:
        self._t[lane] = self._total[lane] = 0
        self._length[lane], self._ended[lane] = length, False
        self._show(lane)

    def _show(self, lane: int) -> None:
        self._seen[lane] = self._t[lane], self._rngs[lane].random(), self._total[lane]


class OwnVectorEnv(VectorEnv[Any, Any, Any]):
    """A user-defined vector environment that steps single environments.

    Args:
        env_fns: Create the single environments.
        mode: Autoreset mode.
    """

    def __init__(self, env_fns: Sequence[Any], mode: AutoresetMode | str = "NextStep") -> None:
        self.inner = SyncVectorEnv(env_fns, autoreset_mode=mode)
        self.num_envs, self.metadata = self.inner.num_envs, self.inner.metadata
        self.single_observation_space = self.inner.single_observation_space
        self.single_action_space = self.inner.single_action_space
        self.observation_space = self.inner.observation_space
        self.action_space = self.inner.action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.inner.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        return self.inner.step(actions)

    def close_extras(self, **arguments: Any) -> None:
        self.inner.close(**arguments)


class Noted(VectorWrapper):  # type: ignore[type-arg]
    """Records the arguments of resets in ``resets`` and the number of steps in ``n_steps``."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self.resets: list[tuple[Any, Any]] = []
        self.n_steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.resets.append((seed, dict(options or {})))
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        self.n_steps += 1
        return super().step(actions)
