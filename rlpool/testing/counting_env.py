"""An environment whose every result can be written down by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from rlpool.errors import SpecError

ID_WEIGHT = 1000
"""What an episode's id adds to each of its rewards, so that rewards tell episodes apart."""

Result = tuple[Any, Any, Any, Any, dict[str, Any]]
"""What ``step`` returns."""


class CountingEnv(gymnasium.Env[Any, Any]):
    """Counts its steps: a batcher's result over it can be compared with tensors made by hand.

    With ``t`` for the number of steps since the reset, the observation is ``[t]``, float32 ``[1]``:
    ``[0.]`` after the reset, ``[length]`` after the last step. The reward of a step is
    ``1000 * id + t`` with the ``t`` after it: 1, 2, 3 ... for the id 0. The step in which ``t``
    reaches ``length`` ends the episode. Seeds and actions change nothing. ``info`` holds ``id``.

    ``reset(options={"length": 3, "id": 7})`` overrides the arguments for one episode, and so does
    ``env_info``; ``truncate`` may be there as well. Other options are ignored.

    Args:
        length: Steps of an episode.
        id: Number of an episode; part of its rewards.
        truncate: End episodes by ``truncated`` instead of ``terminated``.
        n_actions: Size of the action space, a ``Discrete``. Any action is accepted.

    Attributes:
        t: Steps since the reset.
        is_closed: Whether ``close`` was called.

    Raises:
        SpecError: If ``length`` or ``n_actions`` is less than 1.

    Example:
        >>> env = CountingEnv(length=2)
        >>> env.reset()[0].tolist()
        [0.0]
        >>> env.step(0)[:4]
        (array([1.], dtype=float32), 1.0, False, False)
        >>> env.step(0)[:4]
        (array([2.], dtype=float32), 2.0, True, False)
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (as Gymnasium declares it)

    def __init__(
        self, length: int = 10, id: int = 0, truncate: bool = False, n_actions: int = 2
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, np.inf, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(_at_least_1("n_actions", n_actions))
        self._default = {"length": _at_least_1("length", length), "id": id, "truncate": truncate}
        self._episode = self._default
        self._is_running = False
        self.t = 0
        self.is_closed = False

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode at 0.

        Args:
            seed: Changes nothing.
            options: May hold ``length``, ``id`` and ``truncate`` of this episode.
        """
        super().reset(seed=seed)
        given = options or {}
        self._episode = {key: given.get(key, value) for key, value in self._default.items()}
        _at_least_1("length", self._episode["length"])
        self.t = 0
        self._is_running = True
        return self._observation(), self._info()

    def step(self, action: Any) -> Result:
        """Count one step.

        Raises:
            gymnasium.error.ResetNeeded: Before a reset, or after the end of the episode.
        """
        if not self._is_running:
            raise gymnasium.error.ResetNeeded("step() without a running episode: call reset()")
        self.t += 1
        is_over = self.t >= int(self._episode["length"])
        self._is_running = not is_over
        truncate = bool(self._episode["truncate"])
        reward = float(ID_WEIGHT * int(self._episode["id"]) + self.t)
        return (
            self._observation(),
            reward,
            is_over and not truncate,
            is_over and truncate,
            (self._info()),
        )

    def close(self) -> None:
        """Note that it was closed."""
        self.is_closed = True

    def _observation(self) -> Any:
        return np.array([self.t], np.float32)

    def _info(self) -> dict[str, Any]:
        return {"id": int(self._episode["id"])}


def _at_least_1(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number != value or number < 1:
        raise SpecError(
            f"{name} is {value!r}", fix=f"{name} should be a whole number of at least 1"
        )
    return number
