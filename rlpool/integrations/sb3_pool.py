"""A ``Pool`` as a replay buffer of Stable-Baselines3."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.preprocessing import get_obs_shape
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.integrations.sb3_policies import mapped, parts_of, whole
from rlpool.machine.arguments import whole_number
from rlpool.pool.ingest import converted
from rlpool.pool.pool import Pool
from rlpool.slots.blocks import successor_key

_MOST_SEED = 2**31 - 1


class PoolReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    """A ``Pool`` as the replay buffer of an off-policy algorithm of Stable-Baselines3.

    It takes dict observations as well, stores the observation after a step only once (half the
    memory), may be larger than memory, and finds stacked frames. Each environment has a sub-pool.
    A model's ``save_replay_buffer`` and ``load_replay_buffer`` keep it, so that the next samples
    are those that would have been. An algorithm that is seeded gets the same samples again.

    Args:
        buffer_size: Transitions of all environments together.
        observation_space: Of a single environment, as the algorithm gives it; nested dicts are
            not supported by Stable-Baselines3.
        action_space: Likewise.
        device: Where samples go.
        n_envs: Environments.
        optimize_memory_usage: Not to be used: the pool does so anyway.
        handle_timeout_termination: Whether a truncation is not a termination.
        n_steps: Steps of n-step returns.
        gamma: Their discount per step; give it the algorithm's.
        seed: Root seed of the samples; drawn from NumPy's generator by default, which the algorithm
            seeds.
        storage: ``"local"``, ``"shared"`` or ``"memmap"``, see ``Pool``.
        directory: Directory of the file of ``"memmap"``.
        frame_stack: See ``Pool``; channels are first here.

    Attributes:
        pool: The ``Pool``. It holds actions as the algorithm stores them: scaled to [-1, 1].

    Raises:
        SpecError: With ``optimize_memory_usage``, and for what ``Pool`` refuses.

    Example::

        model = SAC(
            "MlpPolicy",
            "Pendulum-v1",
            replay_buffer_class=PoolReplayBuffer,
            replay_buffer_kwargs={"storage": "memmap"},
        )
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        seed: int | None = None,
        storage: str = "local",
        directory: str | Path | None = None,
        frame_stack: Any = None,
    ) -> None:
        if optimize_memory_usage:
            fix = "leave optimize_memory_usage out: a pool stores every observation once"
            raise SpecError("a PoolReplayBuffer has no optimize_memory_usage", fix=fix)
        # Past the constructor of ReplayBuffer, which makes arrays for everything.
        super(ReplayBuffer, self).__init__(
            buffer_size, observation_space, action_space, device, n_envs=n_envs
        )
        self.pos, self.full = 0, False  # what size() tells, in steps of all environments
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps = whole_number("n_steps", n_steps, 1)
        self.gamma = gamma
        self._is_dict = isinstance(observation_space, spaces.Dict)
        after = map(successor_key, self._keys)
        self._pool_arguments = {
            "keys": [*self._keys, "action", *after, "_reward", "_done", "_terminated"],
            "pool_size": self.buffer_size * n_envs,
            "processes": n_envs,
            "random": False,
            "seed": int(np.random.randint(_MOST_SEED)) if seed is None else seed,  # noqa: NPY002
            "storage": storage,
            "directory": directory,
            "frame_stack": frame_stack,
        }
        self.pool = Pool(**self._pool_arguments)

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: NDArray,
        reward: NDArray,
        done: NDArray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Add a transition of each environment; see ``ReplayBuffer.add``."""
        before, after, actions = self._parts(obs), self._parts(next_obs), self._actions(action)
        for env, info in enumerate(infos):
            is_timeout = self.handle_timeout_termination and info.get("TimeLimit.truncated", False)
            ended, here = bool(done[env]), (0, env)
            state, next_state = (mapped(each, itemgetter(here)) for each in (before, after))
            self.pool(
                state,
                actions[here],
                next_state,
                float(reward[env]),
                ended,
                env,
                terminated=ended and not is_timeout,
            )
        self._count(1)

    def add_steps(
        self,
        obs: Any,
        next_obs: Any,
        action: NDArray,
        reward: NDArray,
        done: NDArray,
        is_timeout: NDArray,
        begins: NDArray,
    ) -> None:
        """Add several steps of each environment, arrays ``[n_steps, n_envs, ...]``.

        Unlike ``add``, this is told where steps begin that do not continue those before them, and
        none of them continues what was added before.

        Args:
            obs: Observations, as for ``add``.
            next_obs: Observations after the steps.
            action: Actions.
            reward: Rewards.
            done: Whether episodes ended, bool.
            is_timeout: Whether they were cut off, bool.
            begins: Whether an episode, or a piece of one, begins, bool.
        """
        values = {
            **self._parts(obs),
            **{successor_key(key): array for key, array in self._parts(next_obs).items()},
            "action": self._actions(action),
            "_reward": reward,
            "_done": done,
            "_terminated": done & ~is_timeout if self.handle_timeout_termination else done,
            "initial_state": begins,
        }
        for env in range(self.n_envs):
            rows = {key: torch.from_numpy(array[None, :, env]) for key, array in values.items()}
            self.pool.extend(TemporalDictTensor(rows), env)
        self._count(len(done))

    def _count(self, n_steps: int) -> None:
        self.full = self.full or self.pos + n_steps >= self.buffer_size
        self.pos = (self.pos + n_steps) % self.buffer_size

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw transitions with replacement; see ``ReplayBuffer.sample``.

        Args:
            batch_size: How many.
            env: A ``VecNormalize`` that normalises observations and rewards.

        Raises:
            NotEnoughDataError: If there is no transition.
            SpecError: If rewards of several steps are to be normalised.
        """
        if self.n_steps > 1 and env is not None and env.norm_reward:
            fix = "use VecNormalize(..., norm_reward=False), or n_steps=1"
            raise SpecError("sums of several rewards cannot be normalised one by one", fix=fix)
        n_step = self.n_steps if self.n_steps > 1 else None
        # Algorithms ask for more than there is when they begin; drawing twice is no different.
        n_held = max(len(self.pool), 1)
        sizes = [min(n_held, batch_size - start) for start in range(0, batch_size, n_held)]
        batch = DictTensor.cat(
            [self.pool.sample(n, n_step=n_step, discount=self.gamma) for n in sizes]
        )
        discounts = None
        rewards, ended = batch["_reward"], batch["_terminated"]
        if n_step is not None:
            rewards, discounts = batch["n_step_return"], batch["n_step_discount"]
            ended, discounts = discounts == 0, self.to_torch(discounts[:, None].numpy(), copy=False)
        normalised = self._normalize_reward(rewards[:, None].numpy(), env)
        observed = [self._seen(batch, prefix, env) for prefix in ("", "_")]
        kind = DictReplayBufferSamples if self._is_dict else ReplayBufferSamples
        return kind(
            observations=observed[0],
            actions=self.to_torch(batch["action"].numpy(), copy=False),
            next_observations=observed[1],
            dones=self.to_torch(ended[:, None].float().numpy(), copy=False),
            rewards=self.to_torch(normalised, copy=False),
            discounts=discounts,
        )

    def reset(self) -> None:
        """Drop all transitions."""
        super().reset()
        self.pool.clear()

    @property
    def _keys(self) -> list[str]:
        """The names of the parts of an observation."""
        return list(parts_of(self.observation_space))

    def _parts(self, observations: Any) -> dict[str, NDArray]:
        """The parts of observations ``[n_steps, n_envs, ...]``, in the dtypes of their spaces.

        Those of a ``Discrete`` come without a dimension.
        """
        parts = {}
        for key, space in parts_of(self.observation_space).items():
            part = observations[key] if self._is_dict else observations
            array = converted(key, np.asarray(part), np.dtype(space.dtype))
            parts[key] = array.reshape(-1, self.n_envs, *get_obs_shape(space))
        return parts

    def _actions(self, action: NDArray) -> NDArray:
        """Actions ``[n_steps, n_envs, action_dim]``, in the dtype that the algorithm stores."""
        dtype = np.dtype(self._maybe_cast_dtype(self.action_space.dtype))
        actions = converted("action", np.asarray(action), dtype)
        return actions.reshape(-1, self.n_envs, self.action_dim)

    def _seen(self, batch: DictTensor, prefix: str, env: Any) -> Any:
        """The observations of a sample, normalised, on the device."""
        arrays = {key: batch[prefix + key].numpy() for key in self._keys}
        normalised = self._normalize_obs(whole(self.observation_space, arrays), env)
        return mapped(normalised, lambda array: self.to_torch(array, copy=False))

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in vars(self).items() if key != "pool"}
        return {**state, "_pool_state": self.pool.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_pool_state")
        self.__dict__.update(state)
        self.pool = Pool(**self._pool_arguments)
        self.pool.load_state_dict(saved)
