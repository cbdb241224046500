"""EnvPool's vector environments as lanes."""

from __future__ import annotations

from typing import Any

from rlpool.envs.envpool_lanes import EnvPoolLanes
from rlpool.envs.info_keys import InfoKeys
from rlpool.envs.vector_gym_env import VectorGymEnv


class EnvPoolEnv(VectorGymEnv):
    """What ``envpool.make(..., env_type="gymnasium")`` returns, one lane per environment.

    EnvPool takes its seed when it is made and never again, so ``seeding`` is ``"stream"``: see
    ``VectorGymEnv``. Make it with the ``seed`` that ``create_env`` gets. Lanes restart by
    themselves; the steps in which they do are not in the data.

    Args:
        pool: The environments. This object closes them.
        auto_reset: Whether lanes of a ``Batcher`` or of ``step`` restart on their own.
        max_episode_steps: Truncate episodes after this many steps, see ``VectorGymEnv``; a limit
            given to ``envpool.make`` costs less.
        keep_float64: Store float64 values as float64, see ``VectorGymEnv``.
        info_keys: Keys of the infos that become keys of a step, such as ``["lives"]``, see
            ``GymEnv``. Those of ``players`` cannot be asked for.

    Raises:
        SpecError: For anything else, for actions that are not one array, and for a pool whose
            ``batch_size`` is less than its ``num_envs``: all lanes step together.

    Example:
        >>> import envpool
        >>> def create_env(seed):
        ...     return EnvPoolEnv(
        ...         envpool.make("CartPole-v1", env_type="gymnasium", num_envs=8, seed=seed)
        ...     )
        >>> evaluate(create_agent(), create_env, n_episodes=8).returns.shape
        torch.Size([8])
    """

    def __init__(
        self,
        pool: Any,
        *,
        auto_reset: bool = False,
        max_episode_steps: int | None = None,
        keep_float64: bool = False,
        info_keys: InfoKeys = None,
    ) -> None:
        super().__init__(
            EnvPoolLanes(pool),
            seeding="stream",
            auto_reset=auto_reset,
            max_episode_steps=max_episode_steps,
            keep_float64=keep_float64,
            info_keys=info_keys,
        )
