"""Rows of observations to call an agent with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.envs.columns import Columns
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import FLAGS, REWARD_SPEC, LaneError, VecEnv
from rlpool.errors import SpecError
from rlpool.generators import seeded_generators
from rlpool.memory.storage import batch_array
from rlpool.record.failures import described
from rlpool.specs import (
    DEFAULT_OBSERVATION_KEY,
    Leaf,
    TensorSpec,
    leaves_of,
    structure_of_space,
)
from rlpool.testing.env_subject import EnvSubject
from rlpool.testing.episodes import ActionArrays
from rlpool.testing.findings import CannotCheck

N_ROWS = 16
"""How many different rows there are of each kind."""

_STEPS = 4  # of an episode, before the next one is started
_MAX_RESETS = 8 * N_ROWS

Rows = dict[str, torch.Tensor]


class ObservationRows:
    """Observations as an agent gets them, of starting rows and of later ones.

    Args:
        starting: Key to tensor ``[R, ...]``: right after a reset.
        later: The same keys: after a step.
        action_space: Where actions have to be in, ``None`` if unknown.
    """

    def __init__(self, starting: Rows, later: Rows, action_space: Any) -> None:
        self.starting = starting
        self.later = later
        self.action_space = action_space

    @property
    def action_leaves(self) -> dict[str, Leaf] | None:
        """Keys of the actions, ``None`` if unknown."""
        if self.action_space is None:
            return None
        structure = structure_of_space(self.action_space, keep_float64=False, name="action_space")
        return leaves_of({"action": structure}, "")

    def draw(self, n: int, variant: int, step: int) -> Rows:
        """A batch of rows.

        Args:
            n: Number of rows.
            variant: Different variants give different rows at every place.
            step: Step of the episodes; starting rows for 0.

        Returns:
            Key to tensor ``[n, ...]``, copies.
        """
        rows = self.later if step else self.starting
        n_rows = len(next(iter(rows.values())))
        # n consecutive rows of a circle; variants start elsewhere on it.
        numbers = (torch.arange(n) + 7 * variant + 3 * step) % n_rows
        return {key: tensor[numbers] for key, tensor in rows.items()}


def rows_of(
    source: Any,
    env_args: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
    action_space: Any,
    seed: int,
) -> ObservationRows:
    """Get rows from whatever describes the observations.

    Args:
        source: An environment or what makes one, as for ``check_env``; an observation space; or a
            ``DictTensor`` (or dict) of examples; or a dict of ``TensorSpec``s or of spaces.
        env_args: Arguments of what makes one.
        options: ``options`` of resets.
        action_space: The action space where ``source`` has none.
        seed: Root of all seeds.

    Raises:
        SpecError: If there is nothing to be had from it.
    """
    if isinstance(source, Mapping):
        source = _of_mapping(source)
    if isinstance(source, gymnasium.Space):
        return _of_space(source, action_space, seed)
    if isinstance(source, DictTensor):
        return _of_examples(source, action_space)
    subject = EnvSubject(source, env_args, options, None, seed)
    try:
        with subject.opened() as opened, seeded_generators(seed):
            env = opened.vec if opened.vec is not None else GymEnv([opened.made])
            return _collected(env, subject, subject.actions(0), opened.action_space)
    except (CannotCheck, LaneError) as failure:
        text = str(failure)
        if isinstance(failure, LaneError) and failure.__cause__ is not None:
            text = f"{failure.call} raised {described(failure.__cause__)}"
        raise SpecError(
            f"no observations to call the agent with: {text}",
            fix="check_env(create_env) says what is wrong; or give an observation space, or a "
            "DictTensor of example observations, instead of the environment",
        ) from failure.__cause__


def _collected(
    env: VecEnv, subject: EnvSubject, actions: Any, action_space: Any
) -> ObservationRows:
    """Step lane 0 with sampled actions."""
    arrays = ActionArrays(action_space, actions[0])
    starting: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []
    n_steps = 0
    for number in range(_MAX_RESETS):
        env.reset_lanes([0], [subject.seeds[0] ^ number], [subject.options])
        arrays.declare(env)
        starting.append(_row(env))
        for _ in range(_STEPS):
            action = actions[n_steps % len(actions)]
            n_steps += 1
            ended = env.step_lanes([0], arrays.of([action] * env.n_lanes))
            if ended:
                break
            later.append(_row(env))
        if len(starting) >= N_ROWS and len(later) >= N_ROWS:
            break
    # Where every episode ends with its first step, no call but the first ever happens.
    return ObservationRows(_stacked(starting), _stacked(later or starting), action_space)


def _row(env: VecEnv) -> dict[str, Any]:
    return {key: np.array(array[0]) for key, array in env.current.items()}


def _stacked(rows: list[dict[str, Any]]) -> Rows:
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}


def _of_mapping(source: Mapping[str, Any]) -> Any:
    """A space, or examples."""
    values = list(source.values())
    if values and all(isinstance(value, gymnasium.Space) for value in values):
        return gymnasium.spaces.Dict(dict(source))
    if values and all(isinstance(value, TensorSpec) for value in values):
        return gymnasium.spaces.Dict({key: _box(spec) for key, spec in source.items()})
    if values and all(isinstance(value, torch.Tensor) for value in values):
        return DictTensor(dict(source))
    raise SpecError(
        f"observations are described by a dict of {sorted({type(v).__name__ for v in values})}",
        fix="give a dict of tensors [R, ...] (examples), of TensorSpec or of spaces",
    )


def _box(spec: TensorSpec) -> gymnasium.Space[Any]:
    if spec.dtype.kind == "b":
        return gymnasium.spaces.MultiBinary(spec.shape)
    low, high = (-1, 1) if spec.dtype.kind == "f" else (0, 100)
    return gymnasium.spaces.Box(low, high, spec.shape, spec.dtype.type)


def _of_space(space: Any, action_space: Any, seed: int) -> ObservationRows:
    columns = Columns(
        structure_of_space(space, keep_float64=False, name="observation_space"),
        DEFAULT_OBSERVATION_KEY,
        2 * N_ROWS,
    )
    space.seed(seed)
    columns.write(range(2 * N_ROWS), [space.sample() for _ in range(2 * N_ROWS)])
    rows = {key: torch.from_numpy(array) for key, array in columns.arrays.items()}
    starting = _completed({key: rows[key][:N_ROWS] for key in rows}, True)
    later = _completed({key: rows[key][N_ROWS:] for key in rows}, False)
    if action_space is not None:
        action_space.seed(seed)
        arrays = ActionArrays(action_space, None).of([action_space.sample() for _ in range(N_ROWS)])
        for key, array in arrays.items():
            later[f"last_{key}"] = torch.from_numpy(array)
            starting[f"last_{key}"] = torch.zeros_like(later[f"last_{key}"])
    return ObservationRows(starting, later, action_space)


def _of_examples(examples: DictTensor, action_space: Any) -> ObservationRows:
    if examples.empty() or not examples.n_elems():
        raise SpecError("the examples have no rows", fix="give a few observations")
    rows = dict(examples.clone().items())
    return ObservationRows(_completed(rows, True), _completed(rows, False), action_space)


def _completed(rows: Rows, starts: bool) -> Rows:
    """Rows with the keys that every environment has."""
    n = len(next(iter(rows.values())))
    own = {"reward": torch.from_numpy(batch_array(REWARD_SPEC, n))}
    own |= {key: torch.zeros(n, dtype=torch.bool, device="cpu") for key in FLAGS}
    own["initial_state"] |= starts
    if not starts:
        own["reward"] += torch.linspace(-1.0, 1.0, n)
    return {**rows, **{key: tensor for key, tensor in own.items() if key not in rows}}
