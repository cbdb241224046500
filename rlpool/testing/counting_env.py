"""An environment that counts its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from rlpool.machine.arguments import whole_number


class CountingEnv(gymnasium.Env[Any, Any]):
    """Counts its steps, so that a batcher's results can be compared with tensors made by hand.

    With ``t`` for the number of steps since the reset, the observation is ``[t]``, float32 ``[1]``:
    ``[0.]`` after the reset, ``[length]`` after the last step. The reward of a step is
    ``1000 * id + t`` with the ``t`` after it: 1, 2, 3 ... for the id 0. The step in which ``t``
    reaches ``length`` ends the episode. Seeds and actions have no effect. ``info`` holds ``id``.

    ``reset(options={"length": 3, "id": 7})``, like ``env_info``, overrides the arguments for one
    episode, and so does the option ``truncate``. Other options are ignored.

    Args:
        length: Number of steps of an episode.
        id: Number of an episode; part of its rewards.
        truncate: End episodes by ``truncated`` instead of ``terminated``.
        n_actions: Size of the action space, a ``Discrete``. Actions have no effect.

    Attributes:
        t: Steps since the reset.

    Raises:
        SpecError: If ``length`` or ``n_actions`` is not an int of at least 1.

    Example:
        >>> env = CountingEnv(length=2)
        >>> env.reset()[0].tolist()
        [0.0]
        >>> env.step(0)[:4]
        (array([1.], dtype=float32), 1.0, False, False)
        >>> env.step(0)[:4]
        (array([2.], dtype=float32), 2.0, True, False)
    """

    def __init__(
        self, length: int = 10, id: int = 0, truncate: bool = False, n_actions: int = 2
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, np.inf, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(whole_number("n_actions", n_actions, 1))
        whole_number("length", length, 1)
        self._default = self._episode = {"length": length, "id": id, "truncate": truncate}
        self._is_running = False
        self.t = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode at 0.

        Args:
            seed: Has no effect.
            options: Can hold ``length``, ``id`` and ``truncate`` of this episode.
        """
        super().reset(seed=seed)
        given = options or {}
        self._episode = {key: given.get(key, value) for key, value in self._default.items()}
        whole_number("length", self._episode["length"], 1)
        self.t = 0
        self._is_running = True
        return self._observation(), {"id": int(self._episode["id"])}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Count one step.

        Raises:
            gymnasium.error.ResetNeeded: Before a reset, or after the end of the episode.
        """
        if not self._is_running:
            raise gymnasium.error.ResetNeeded("step() without a running episode: call reset()")
        self.t += 1
        number, is_over = int(self._episode["id"]), self.t >= self._episode["length"]
        self._is_running = not is_over
        # Rewards tell episodes apart.
        reward, truncate = 1000.0 * number + self.t, bool(self._episode["truncate"])
        ends = is_over and not truncate, is_over and truncate
        return self._observation(), reward, *ends, {"id": number}

    def _observation(self) -> Any:
        return np.array([self.t], np.float32)
