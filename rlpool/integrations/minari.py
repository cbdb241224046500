"""Minari: writing episodes to datasets, and reading datasets as trajectories."""

from __future__ import annotations

import inspect
import logging
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.infos import options_of
from rlpool.data.rows import instance, kind
from rlpool.data.specs import (
    DEFAULT_OBSERVATION_KEY,
    FLAGS,
    TensorSpec,
    fitted,
    fitted_rewards,
    flattener,
    join_key,
    leaves_of,
    nester,
    refuse_collisions,
    refuse_missing,
    stored_dtype,
    structure_of_space,
)
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.machine.imports import imports_of
from rlpool.slots.blocks import successor_key

with imports_of("minari"):
    from minari import MinariDataset, create_dataset_from_buffers
    from minari.data_collector import EpisodeBuffer
    from minari.storage.datasets_root_dir import get_dataset_path

__all__ = ["from_minari", "to_minari"]

_LOG = logging.getLogger("rlpool")

_ACTION, _OPTIONS = "action", "env_info"
_OWN = ["reward", *FLAGS]
_NO_INFOS = {"last_action", *_OWN}
"""Keys with a value after the step that Minari stores elsewhere, or that are redundant."""

_N_SEEDS = 2**64
"""Minari draws seeds of 64 bits; ``info["seed"]`` has the same bits as an int64."""

_IS_LOSSLESS = "jpeg_encoding" in inspect.signature(create_dataset_from_buffers).parameters
"""Minari before 0.5.4 converts all images to JPEG."""


class _SpacePart:
    """An observation or action space, and the keys of its parts.

    Args:
        space: The space.
        name: Its name in errors.
        prefix: Prefix of the keys; without parts, the key itself.

    Attributes:
        specs: Declared shapes and dtypes by key.
    """

    def __init__(self, space: Any, name: str, prefix: str = "") -> None:
        structure = structure_of_space(space, name=name)
        leaves = leaves_of({prefix: structure} if prefix else structure, DEFAULT_OBSERVATION_KEY)
        self.specs = {key: leaf.spec for key, leaf in leaves.items()}
        self._nest, self._flatten = nester(structure), flattener(structure, name)

    def nested(self, values: Callable[[str], NDArray]) -> Any:
        """Nest the values of the parts."""
        specs = self.specs.items()
        return self._nest([fitted(repr(key), values(key), spec.dtype) for key, spec in specs])

    def named(self, value: Any) -> dict[str, NDArray]:
        """Split a nested value into its parts."""
        return dict(zip(self.specs, map(np.asarray, self._flatten(value)), strict=True))


# Writing ------------------------------------------------------------------------------------------


def to_minari(
    trajectories: TemporalDictTensor,
    dataset_id: str,
    env: Any,
    *,
    data_format: str | None = None,
    **metadata: Any,
) -> Any:
    """Write complete episodes to a Minari dataset, without loss.

    Observations have one more entry than steps. An episode's seed and row of ``env_info`` become
    the seed and options of its metadata: with them and the actions, it can be repeated bit by bit.
    Other keys with a value after the step become infos: the ``info_keys`` of the environments, and
    an agent's state. Other outputs of an agent are not written.

    Images are not compressed. Observations that are float64 in the environment are stored in
    float64, with the precision of ``GymEnv``: float32 unless ``keep_float64``.

    Args:
        trajectories: Episodes of an ``EpisodeBatcher``, on any device.
        dataset_id: Id such as ``"pendulum/random-v0"``. The environment variable
            ``MINARI_DATASETS_PATH`` sets the directory.
        env: An environment like those of the episodes, its id or its spec: for the spaces, and for
            ``recover_environment`` of the dataset. If its spec cannot be written as JSON, as with a
            class as entry point, the latter is missing, with a warning.
        data_format: ``"hdf5"``, ``"arrow"`` or ``"parquet"``; by default Minari's.
        **metadata: Other arguments of ``minari.create_dataset_from_buffers``, such as
            ``algorithm_name``, ``description`` or ``eval_env``.

    Returns:
        The ``minari.MinariDataset``.

    Raises:
        SpecError: If a row is not a complete episode, keys, shapes or dtypes do not match the
            spaces, Minari or rlpool cannot store a space, the id exists, ``env`` is something else,
            or there are images with Minari before 0.5.4.
        ValueError: If the id is invalid.
        gymnasium.error.Error: If Gymnasium cannot make ``env`` from its id or spec.
    """
    trajectories = instance(trajectories, TemporalDictTensor, "the argument of to_minari()")
    _check_complete(trajectories)
    if not isinstance(env, str | EnvSpec | gymnasium.Env):
        raise SpecError(f"env is {kind(env)}", fix="pass an environment, its id or its spec")
    path = get_dataset_path(dataset_id)
    if path.exists():
        raise SpecError(
            f"the Minari dataset {dataset_id!r} already exists at {path}",
            fix="choose another id or version, or delete it with minari.delete_dataset",
        )
    made = env if isinstance(env, gymnasium.Env) else gymnasium.make(env)
    try:
        buffers = _buffers(trajectories, made)
        options = _described(made) | ({"jpeg_encoding": False} if _IS_LOSSLESS else {})
        with warnings.catch_warnings():
            # Metadata is optional.
            warnings.filterwarnings("ignore", r"`\w+` is set to None", UserWarning)
            return create_dataset_from_buffers(
                dataset_id, buffers, data_format=data_format, **options, **metadata
            )
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # else it would block the next attempt
        raise
    finally:
        if made is not env:
            made.close()


def _described(env: Any) -> dict[str, Any]:
    """Describe a dataset's environment: completely if its spec fits JSON, else by its spaces."""
    try:
        if env.spec is not None:
            env.spec.to_json()
            return {"env": env}
    except (TypeError, ValueError) as error:  # from Gymnasium or JSON
        message = "the dataset cannot recover its environment %r: %s"
        _LOG.warning(message, env.spec.id, error)
    return {"observation_space": env.observation_space, "action_space": env.action_space}


def _check_complete(trajectories: TemporalDictTensor) -> None:
    """Refuse rows that are not complete episodes."""
    fix = "collect episodes with an EpisodeBatcher: the windows of a Batcher are parts of episodes"
    refuse_missing("the trajectories", trajectories.keys(), ["_done", "initial_state"], fix)
    lengths = trajectories.lengths
    if not len(lengths) or not bool((lengths > 0).all()):
        raise SpecError("the trajectories are empty, or have rows without steps", fix=fix)
    first = trajectories["initial_state"][:, 0].bool()
    done = trajectories["_done"].bool() & trajectories.mask().bool()
    last = trajectories.temporal_multi_index(lengths - 1)["_done"].bool()
    is_complete = first & last & (done.sum(1) == 1)
    if not bool(is_complete.all()):
        row = int((~is_complete).nonzero()[0])
        raise SpecError(f"row {row} is not a complete episode", fix=fix)


def _buffers(trajectories: TemporalDictTensor, env: Any) -> list[Any]:
    """Convert complete episodes to Minari's episodes."""
    arrays = {key: tensor.numpy(force=True) for key, tensor in trajectories.items()}
    info = {key: tensor.numpy(force=True) for key, tensor in trajectories.info.items()}
    observation = _SpacePart(env.observation_space, "observation_space")
    action = _SpacePart(env.action_space, "action_space", _ACTION)
    taken = [*observation.specs, *action.specs]
    pairs = [key for key in arrays if successor_key(key) in arrays and not key.startswith("_")]
    info_keys = [key for key in pairs if key not in {*taken, *_NO_INFOS}]
    _check_spaces(arrays, observation, action, info_keys)
    prefix = join_key(_OPTIONS, "")
    env_info = {k.removeprefix(prefix): v for k, v in info.items() if k.startswith(prefix)}

    def buffer(row: int, length: int) -> Any:
        def steps(key: str) -> NDArray:
            return arrays[key][row, :length]

        def with_last(key: str) -> NDArray:  # with the value after the last step
            last = arrays[successor_key(key)][row, length - 1 : length]
            return np.concatenate([steps(key), last])

        # Names such as "episode/r" become groups. Minari accepts single numbers only in lists.
        infos = {key: with_last(key) for key in info_keys}
        listed = {key: list(each) if each.ndim == 1 else each for key, each in infos.items()}
        ends = (fitted(key, steps(key), np.dtype(bool)) for key in ("_terminated", "_truncated"))
        return EpisodeBuffer(
            id=None,
            seed=int(info["seed"][row]) % _N_SEEDS if "seed" in info else None,
            options=options_of(env_info, row),
            observations=observation.nested(with_last),
            actions=action.nested(steps),
            rewards=steps("_reward"),
            terminations=next(ends),
            truncations=next(ends),
            infos=listed or None,
        )

    return [buffer(row, length) for row, length in enumerate(trajectories.lengths.tolist())]


def _check_spaces(
    arrays: Mapping[str, NDArray], observation: _SpacePart, action: _SpacePart, infos: list[str]
) -> None:
    """Refuse values that the spaces do not declare, since they would be lost."""
    fix = "pass an environment wrapped like those of create_env"
    specs = {**observation.specs, **action.specs}
    wanted = [*specs, *map(successor_key, observation.specs)]
    refuse_missing(
        "the trajectories", arrays, [*wanted, "_reward", "_terminated", "_truncated"], fix
    )
    for key, spec in specs.items():
        found = TensorSpec(arrays[key].shape[2:], arrays[key].dtype)
        is_cut = found.dtype.kind == "f" and spec.dtype.kind != "f"
        if found.shape != spec.shape or is_cut:
            raise SpecError(
                f"{key!r} of the trajectories is {found}, but the environment's space has {spec}",
                fix=fix,
            )
    images = [key for key in [*specs, *infos] if arrays[key].dtype == np.uint8]
    if images and not _IS_LOSSLESS:
        raise SpecError(
            f"{images} are uint8, which this version of Minari would convert to JPEG",
            fix="install minari>=0.5.4, for Python 3.11 or later",
        )


# Reading ------------------------------------------------------------------------------------------


def from_minari(dataset: Any, *, keep_float64: bool = False) -> TemporalDictTensor:
    """Read the episodes of a Minari dataset as trajectories, like those of an ``EpisodeBatcher``.

    Add them to a replay pool with ``pool.extend``. All episodes are read into memory: select some
    with ``dataset.filter_episodes``.

    Args:
        dataset: The result of ``minari.load_dataset``.
        keep_float64: Keep float64 values. By default they become float32, as in ``GymEnv``. Rewards
            are always float32, and options keep the dtypes of the dataset.

    Returns:
        ``[B, T, ...]``, zero-padded past ``lengths``: observations (``frame``, or the keys of a
        dict), ``action``, ``reward``, ``terminated``, ``truncated``, ``done``, ``initial_state``
        and the infos that are numbers of the same shape in every step of every episode, with nested
        names joined by ``/``. All but actions have a value after the step, such as ``_frame``.
        ``info`` has ``episode``, the number in the dataset. If all episodes have them, it also has
        ``seed`` (int64 with the bits of Minari's uint64: ``seed % 2**64``) and options as
        ``env_info/...``, exactly and in the dataset's dtype: float64, int64 or bool if
        ``to_minari`` wrote it.

    Raises:
        SpecError: If it is not a dataset, is empty, an episode does not have one more observation
            than steps, a space does not have a fixed shape, or the name of a part of the
            observation is taken, such as ``reward``.
    """
    dataset = instance(dataset, MinariDataset, "the argument of from_minari()")
    numbers = dataset.episode_indices
    if not len(numbers):
        raise SpecError(f"the dataset {dataset.id!r} has no episodes", fix="add or download some")
    observation = _SpacePart(dataset.observation_space, "observation_space")
    action = _SpacePart(dataset.action_space, "action_space", _ACTION)
    groups = {"rlpool": _OWN, "the action": list(action.specs)}
    refuse_collisions({**groups, "the observation": list(observation.specs)})
    data = list(dataset.iterate_episodes())
    pairs = [_pairs(episode, observation) for episode in data]
    actions = [action.named(episode.actions) for episode in data]
    lengths = [len(each["reward"]) - 1 for each in pairs]
    for episode, before, taken, length in zip(data, pairs, actions, lengths, strict=True):
        for key, array in {**before, **taken}.items():
            if len(array) != length + (key in before):
                raise SpecError(
                    f"episode {episode.id} of {dataset.id!r} has {len(array)} values of {key!r} "
                    f"for {length} steps",
                    fix="exclude it with dataset.filter_episodes",
                )
    infos = [{key: np.asarray(v) for key, v in _flat(e.infos or {})} for e in data]
    common = _common_infos(dataset.id, infos, lengths, {*pairs[0], *actions[0]})
    packed: dict[str, NDArray] = {}

    def add(key: str, each: Iterable[NDArray], declared: TensorSpec | None = None) -> None:
        values = np.concatenate(list(each))
        dtype = stored_dtype(values.dtype if declared is None else declared.dtype, keep_float64)
        fix = "keep_float64=True keeps float64 values"
        packed[key] = fitted(repr(key), values, dtype, fix)

    for key in [*common, *pairs[0]]:
        each = [episode[key] for episode in (infos if key in common else pairs)]
        add(key, (array[:-1] for array in each), observation.specs.get(key))
        add(successor_key(key), (array[1:] for array in each), observation.specs.get(key))
    for key, spec in action.specs.items():
        add(key, (taken[key] for taken in actions), spec)
    described = list(dataset.storage.get_episode_metadata(numbers))
    info = _info_of(described) | {"episode": np.asarray(numbers, np.int64)}
    steps = {key: torch.from_numpy(values) for key, values in packed.items()}
    return TemporalDictTensor.from_packed(
        steps,
        torch.tensor(lengths, device="cpu"),
        DictTensor({key: torch.from_numpy(array) for key, array in info.items()}),
    )


def _pairs(data: Any, observation: _SpacePart) -> dict[str, NDArray]:
    """Return values before the steps of an episode and after the last one, by key."""
    pairs = observation.named(data.observations)
    terminated, truncated = (
        fitted(f"flags of episode {data.id}", flags, np.dtype(bool))
        for flags in (data.terminations, data.truncations)
    )
    rewards = fitted_rewards(f"rewards of episode {data.id}", data.rewards)
    done = terminated | truncated
    known = {"reward": rewards, "terminated": terminated, "truncated": truncated, "done": done}
    for key, array in known.items():
        # Before the first step, the reward is 0 and the flags are False.
        pairs[key] = np.concatenate([np.zeros(1, array.dtype), array])
    pairs["initial_state"] = np.arange(len(done) + 1) == 0
    return pairs


def _info_of(described: Sequence[Mapping[str, Any]]) -> dict[str, NDArray]:
    """Return the seeds and options that all episodes have in the same form."""
    info = {}
    seeds = [each.get("seed") for each in described]
    if None not in seeds:
        bits = np.array([int(seed) % _N_SEEDS for seed in seeds if seed is not None], np.uint64)
        info["seed"] = bits.view(np.int64)
    options = [dict(_flat(each.get("options") or {})) for each in described]
    for key in options[0]:
        values = [np.asarray(each.get(key)) for each in options]
        if _are_alike(values):
            # Unrounded: other options would begin another episode.
            info[join_key(_OPTIONS, key)] = np.stack(values)
    return info


def _common_infos(
    name: str, infos: Sequence[Mapping[str, NDArray]], lengths: Sequence[int], taken: set[str]
) -> list[str]:
    """Return the names of infos that all steps of all episodes have in the same shape."""
    every, fits = list(dict.fromkeys(key for episode in infos for key in episode)), []
    for key in every:
        each = [episode.get(key, np.zeros(())) for episode in infos]
        sizes = [len(array) - 1 if array.ndim else -1 for array in each]
        if key not in taken and sizes == list(lengths) and _are_alike([a[0] for a in each]):
            fits.append(key)
    if left_out := [key for key in every if key not in fits]:
        _LOG.warning(
            "infos %s of %r are omitted: some steps do not have numbers of the same shape, or the "
            "name is taken",
            left_out,
            name,
        )
    return fits


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the parts of nested dicts, by joined name."""
    for key, value in values.items():
        name = join_key(prefix, str(key))
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        else:
            yield name, value


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether all values are numbers of one shape."""
    arrays = [np.asarray(value) for value in values]
    is_number = all(array.dtype.kind in "fiub" for array in arrays)
    return is_number and len({array.shape for array in arrays}) == 1
