"""Minari: episodes as its datasets, and its datasets as trajectories."""

from __future__ import annotations

import inspect
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.dict_tensor_base import instance, kind
from rlpool.data.infos import options_of
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.machine.extras import imports_of
from rlpool.memory.storage import Array
from rlpool.slots.blocks import successor_key
from rlpool.slots.trajectories import DerivedTensors, Successor
from rlpool.specs import (
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

with imports_of("minari"):
    from minari import MinariDataset, create_dataset_from_buffers
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage.datasets_root_dir import get_dataset_path

__all__ = ["from_minari", "to_minari"]

_LOG = logging.getLogger("rlpool")

_ACTION = "action"
_OPTIONS = "env_info"
_OWN = ["reward", *FLAGS]
_NO_INFOS = {"last_action", *_OWN}
"""Keys with a value after the step that Minari stores elsewhere, or that follow from others."""

_BOOL = np.dtype(bool)

_KEEP = "keep_float64=True keeps float64 values"

_SAME = "pass an environment that is wrapped like those of create_env"

_RECOVERABLE = 'register it with entry_point="module:Class", and with arguments that JSON has'

_N_SEEDS = 2**64
"""Seeds that Minari draws have 64 bits; ``info["seed"]`` has the same bits as an int64."""

_IS_LOSSLESS = "jpeg_encoding" in inspect.signature(create_dataset_from_buffers).parameters
"""Before Minari 0.5.4 all images became JPEG."""


# To Minari ---------------------------------------------------------------------------------------


def to_minari(
    trajectories: TemporalDictTensor,
    dataset_id: str,
    env: Any,
    *,
    data_format: str | None = None,
    **metadata: Any,
) -> Any:
    """Write complete episodes as a dataset of Minari, and lose nothing of them.

    Observations have one entry more than steps. An episode's seed and row of ``env_info`` become
    the seed and options of its metadata: with them and the actions, it can be repeated bit by bit.
    What else has a value after the step becomes infos: the ``info_keys`` of the environments, and
    an agent's state. An agent's other outputs are not written.

    Images are not compressed. Observations that the environment gives in float64 are what
    ``GymEnv`` made of them, float32 unless ``keep_float64``, and are stored in float64.

    Args:
        trajectories: What an ``EpisodeBatcher`` returned, on any device.
        dataset_id: Such as ``"pendulum/random-v0"``. Minari's directory is that of its variable
            ``MINARI_DATASETS_PATH``.
        env: An environment like those that the episodes come from, its id or its spec: for the
            spaces, and for ``recover_environment`` of the dataset. Without a spec that can be
            written as JSON, as with a class as entry point, the latter is missing, which a warning
            says.
        data_format: ``"hdf5"``, ``"arrow"`` or ``"parquet"``; by default Minari's.
        **metadata: What ``minari.create_dataset_from_buffers`` takes besides, such as
            ``algorithm_name``, ``author`` or ``description``.

    Returns:
        The ``minari.MinariDataset``.

    Raises:
        SpecError: If a row is no complete episode, keys, shapes or dtypes do not fit the spaces, a
            space is of a kind that Minari or rlpool cannot store, the id exists or is none, ``env``
            is something else, or, with a Minari before 0.5.4, there are images.
        gymnasium.error.Error: If Gymnasium cannot make ``env`` of its id or spec.
    """
    trajectories = instance(trajectories, TemporalDictTensor, "what to_minari() gets")
    path = _free_path(dataset_id)
    _refuse_parts(trajectories)
    if not isinstance(env, str | EnvSpec | gymnasium.Env):
        fix = "pass an environment, its id or its spec: it tells the spaces"
        raise SpecError(f"env is {kind(env)}", fix=fix)
    made = env if isinstance(env, gymnasium.Env) else gymnasium.make(env)
    try:
        buffers = _Writer(trajectories, made).buffers()
        options = _described(made) | ({"jpeg_encoding": False} if _IS_LOSSLESS else {})
        with warnings.catch_warnings():
            # That metadata is missing is the user's choice.
            warnings.filterwarnings("ignore", r"`\w+` is set to None", UserWarning)
            return create_dataset_from_buffers(
                dataset_id, buffers, data_format=data_format, **options, **metadata
            )
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # it would be in the way of the next try
        raise
    finally:
        if made is not env:
            made.close()


def _free_path(dataset_id: Any) -> Any:
    """Where a dataset will be."""
    fix = 'pass an id such as "pendulum/random-v0": namespace (two letters or more), name, version'
    try:
        parse_dataset_id(dataset_id)
    except (TypeError, ValueError):
        raise SpecError(f"{dataset_id!r} is no id of a Minari dataset", fix=fix) from None
    path = get_dataset_path(dataset_id)
    if path.exists():
        raise SpecError(
            f"there is a Minari dataset {dataset_id!r} already, at {path}",
            fix="choose another id or version, or delete it with minari.delete_dataset",
        )
    return path


def _described(env: Any) -> dict[str, Any]:
    """What a dataset is told of its environment: all, or only the spaces if that cannot be made."""
    try:
        if env.spec is not None:
            env.spec.to_json()
            return {"env": env}
    except (TypeError, ValueError) as error:  # of Gymnasium, of JSON
        what = "the dataset cannot make its environment %r again: %s; %s"
        _LOG.warning(what, env.spec.id, str(error).rstrip("."), _RECOVERABLE)
    return {"observation_space": env.observation_space, "action_space": env.action_space}


def _refuse_parts(trajectories: TemporalDictTensor) -> None:
    """Refuse rows that are no complete episodes."""
    fix = "collect episodes with an EpisodeBatcher: the windows of a Batcher are parts of episodes"
    refuse_missing("the trajectories", trajectories.keys(), ["_done", "initial_state"], fix)
    lengths = trajectories.lengths
    if not len(lengths) or not bool((lengths > 0).all()):
        raise SpecError("there are no episodes, or rows without steps", fix=fix)
    first = trajectories["initial_state"][:, 0].bool()
    done = trajectories["_done"].bool() & trajectories.mask().bool()
    last = trajectories.temporal_multi_index(lengths - 1)["_done"].bool()
    is_whole = first & last & (done.sum(1) == 1)
    if not bool(is_whole.all()):
        row = int((~is_whole).nonzero()[0])
        raise SpecError(f"row {row} is no complete episode", fix=fix)


class _Writer:
    """Makes Minari's episodes of trajectories.

    Args:
        trajectories: Complete episodes.
        env: The environment.
    """

    def __init__(self, trajectories: TemporalDictTensor, env: Any) -> None:
        self._arrays = {key: tensor.numpy(force=True) for key, tensor in trajectories.items()}
        self._info = {key: tensor.numpy(force=True) for key, tensor in trajectories.info.items()}
        self._lengths = trajectories.lengths.tolist()
        self._observation = _Part(env.observation_space, "observation_space")
        self._action = _Part(env.action_space, "action_space", _ACTION)
        observed = self._observation.dtypes
        wanted = [*observed, *map(successor_key, observed), *self._action.dtypes]
        wanted += ["_reward", "_terminated", "_truncated"]
        refuse_missing("the trajectories", self._arrays, wanted, _SAME)
        self._refuse_others(self._observation)
        self._refuse_others(self._action)
        taken = {*observed, *self._action.dtypes, *_NO_INFOS}
        pairs = (key for key in self._arrays if successor_key(key) in self._arrays)
        self._infos = [key for key in pairs if key not in taken and not key.startswith("_")]
        self._refuse_images([*observed, *self._action.dtypes, *self._infos])

    def buffers(self) -> list[Any]:
        """One buffer per episode."""
        return [self._buffer(row, length) for row, length in enumerate(self._lengths)]

    def _buffer(self, row: int, length: int) -> Any:
        def steps(key: str) -> Array:
            return self._arrays[key][row, :length]

        def whole(key: str) -> Array:  # with the value after the last step
            last = self._arrays[successor_key(key)][row, length - 1 : length]
            return np.concatenate([steps(key), last])

        # Names such as "episode/r" become groups. Minari takes single numbers in lists only.
        infos = {key: whole(key) for key in self._infos}
        listed = {key: list(each) if each.ndim == 1 else each for key, each in infos.items()}
        return EpisodeBuffer(
            id=None,
            seed=int(self._info["seed"][row]) % _N_SEEDS if "seed" in self._info else None,
            options=self._options(row),
            observations=self._observation.nested(whole),
            actions=self._action.nested(steps),
            rewards=steps("_reward"),
            terminations=fitted("'_terminated'", steps("_terminated"), _BOOL),
            truncations=fitted("'_truncated'", steps("_truncated"), _BOOL),
            infos=listed or None,
        )

    def _options(self, row: int) -> dict[str, Any] | None:
        """The row of ``env_info`` as Python values, which is what the environment was given."""
        prefix = join_key(_OPTIONS, "")
        rows = {k.removeprefix(prefix): v for k, v in self._info.items() if k.startswith(prefix)}
        return options_of(rows, row)

    def _refuse_others(self, part: _Part) -> None:
        """Refuse values that a space does not have: they would be lost."""
        for key, spec in part.specs.items():
            found = TensorSpec(self._arrays[key].shape[2:], self._arrays[key].dtype)
            if not spec.takes(found):
                raise SpecError(
                    f"{key!r} of the trajectories is {found}, in the spaces of the environment it "
                    f"is {spec}",
                    fix=_SAME,
                )

    def _refuse_images(self, keys: list[str]) -> None:
        images = [key for key in keys if self._arrays[key].dtype == np.uint8]
        if images and not _IS_LOSSLESS:
            raise SpecError(
                f"{images} are uint8, which this version of Minari would write as JPEG images",
                fix="install minari>=0.5.4, for Python 3.11 or later",
            )


class _Part:
    """An observation or action space, and the keys of its parts.

    Args:
        space: The space.
        name: What errors call it.
        prefix: Prefix of the keys; without parts, the key itself.

    Attributes:
        specs: Key to the shape and dtype that the space declares.
        dtypes: Key to the dtype alone.
    """

    def __init__(self, space: Any, name: str, prefix: str = "") -> None:
        structure = structure_of_space(space, keep_float64=True, name=name)
        leaves = leaves_of({prefix: structure} if prefix else structure, DEFAULT_OBSERVATION_KEY)
        self.specs = {key: leaf.spec for key, leaf in leaves.items()}
        self.dtypes = {key: spec.dtype for key, spec in self.specs.items()}
        self._nest, self._flatten = nester(structure), flattener(structure, name)

    def nested(self, values: Callable[[str], Array]) -> Any:
        """A nested value from the values of the parts."""
        return self._nest([fitted(repr(key), values(key), d) for key, d in self.dtypes.items()])

    def named(self, value: Any) -> dict[str, Array]:
        """The parts of a nested value."""
        return dict(zip(self.dtypes, map(np.asarray, self._flatten(value)), strict=True))


# From Minari -------------------------------------------------------------------------------------


def from_minari(dataset: Any, *, keep_float64: bool = False) -> TemporalDictTensor:
    """The episodes of a dataset of Minari as trajectories, as an ``EpisodeBatcher`` returns them.

    A replay pool takes them with ``pool.extend``. All episodes are read into memory: leave some out
    with ``dataset.filter_episodes``.

    Args:
        dataset: What ``minari.load_dataset`` returns.
        keep_float64: Keep float64 values. By default they become float32, as in ``GymEnv``. Rewards
            are float32 in any case, and options are kept as the dataset has them.

    Returns:
        ``[B, T, ...]``, zero-padded past ``lengths``: observations (``frame``, or the keys of a
        dict), ``action``, ``reward``, ``terminated``, ``truncated``, ``done``, ``initial_state``
        and those infos that are numbers of the same shape in every step of every episode, nested
        names joined with ``/``; all but actions with a value after the step, such as ``_frame``.
        ``info`` has ``episode``, the number in the dataset, and if all episodes have them ``seed``
        (int64 with the bits of Minari's uint64: ``seed % 2**64``) and options as ``env_info/...``,
        exactly and in the dataset's dtype: float64, int64 or bool where ``to_minari`` wrote it.

    Raises:
        SpecError: If it is no dataset, has no episodes, one of them has not one observation more
            than steps, a space has no fixed shape, or a part of the observation is called like
            something else, such as ``reward``.
    """
    dataset = instance(dataset, MinariDataset, "what from_minari() gets")
    reader = _Reader(dataset, keep_float64)
    numbers = dataset.episode_indices
    if not len(numbers):
        raise SpecError(f"the dataset {dataset.id!r} has no episodes", fix="add or download some")
    episodes = [reader.read(episode) for episode in dataset.iterate_episodes()]
    lengths = np.array([len(episode) for episode in episodes])
    tensors = reader.tensors(episodes, lengths)
    described = list(dataset.storage.get_episode_metadata(numbers))
    info = reader.info(described) | {"episode": np.asarray(numbers, np.int64)}
    return TemporalDictTensor._wrap(
        tensors,
        torch.from_numpy(lengths),
        DictTensor({key: torch.from_numpy(array) for key, array in info.items()}),
    )


class _Episode:
    """The values of an episode.

    Args:
        pairs: Key to values before the steps and after the last one, ``[length + 1, ...]``.
        actions: Key to ``[length, ...]``.
        infos: The infos, which may have any lengths.
    """

    def __init__(
        self, pairs: dict[str, Array], actions: dict[str, Array], infos: dict[str, Array]
    ) -> None:
        self.pairs, self.actions, self.infos = pairs, actions, infos

    def __len__(self) -> int:
        return len(self.pairs["reward"]) - 1


class _Reader:
    """Makes trajectories of Minari's episodes."""

    def __init__(self, dataset: Any, keep_float64: bool) -> None:
        self._observation = _Part(dataset.observation_space, "observation_space")
        self._action = _Part(dataset.action_space, "action_space", _ACTION)
        groups = {"rlpool": _OWN, "the action": list(self._action.dtypes)}
        refuse_collisions({**groups, "the observation": list(self._observation.dtypes)})
        self._keep_float64 = keep_float64
        self._name = dataset.id

    def read(self, data: Any) -> _Episode:
        """Check an episode, and name its parts."""
        pairs = self._observation.named(data.observations)
        actions = self._action.named(data.actions)
        terminated, truncated = (
            fitted(f"flags of episode {data.id}", flags, _BOOL)
            for flags in (data.terminations, data.truncations)
        )
        for key, array in {**pairs, **actions}.items():
            wanted = len(terminated) + (key in pairs)
            if len(array) != wanted:
                raise SpecError(
                    f"episode {data.id} of {self._name!r} has {len(array)} values of {key!r} for "
                    f"{len(terminated)} steps, {wanted} were expected",
                    fix="leave it out with dataset.filter_episodes",
                )
        # Before the first step there was no reward, and nothing had ended.
        rewards = fitted_rewards(f"rewards of episode {data.id}", data.rewards)
        done = terminated | truncated
        known = {"reward": rewards, "terminated": terminated, "truncated": truncated, "done": done}
        for key, array in known.items():
            pairs[key] = np.concatenate([np.zeros(1, array.dtype), array])
        pairs["initial_state"] = np.arange(len(done) + 1) == 0
        infos = {key: np.asarray(value) for key, value in _flat(data.infos or {})}
        return _Episode(pairs, actions, infos)

    def tensors(self, episodes: Sequence[_Episode], lengths: Array) -> DerivedTensors:
        """The steps of all episodes; values after a step are derived from those before it."""
        infos = self._common_infos(episodes)
        rows: dict[str, torch.Tensor] = {}
        derived = {}
        for key in [*infos, *episodes[0].pairs]:
            each = [(e.infos if key in infos else e.pairs)[key] for e in episodes]
            dtype = self._dtype(self._observation.dtypes.get(key), each)
            each = [fitted(repr(key), values, dtype, _KEEP) for values in each]
            finals = np.stack([values[-1] for values in each])
            rows[key] = _padded([values[:-1] for values in each])
            derived[successor_key(key)] = Successor(key, rows[key], finals, lengths)
        for key, declared in self._action.dtypes.items():
            each = [episode.actions[key] for episode in episodes]
            dtype = self._dtype(declared, each)
            rows[key] = _padded([fitted(repr(key), values, dtype, _KEEP) for values in each])
        return DerivedTensors(rows, derived)

    def info(self, described: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
        """Seeds and options, of which every episode has the same kind."""
        info = {}
        seeds = [each.get("seed") for each in described]
        if None not in seeds:
            bits = np.array([int(seed) % _N_SEEDS for seed in seeds if seed is not None], np.uint64)
            info["seed"] = bits.view(np.int64)
        options = [dict(_flat(each.get("options") or {})) for each in described]
        for key in options[0]:
            values = [np.asarray(each.get(key)) for each in options]
            if _is_common(values):
                # As they are: rounded, the environment would begin another episode.
                info[join_key(_OPTIONS, key)] = np.stack(values)
        return info

    def _dtype(self, declared: np.dtype[Any] | None, values: Sequence[Array]) -> np.dtype[Any]:
        """The dtype in which values are kept."""
        found = np.result_type(*(each.dtype for each in values)) if declared is None else declared
        return stored_dtype(found, self._keep_float64)

    def _common_infos(self, episodes: Sequence[_Episode]) -> list[str]:
        """Names of the infos that every step of every episode has in the same shape."""
        every = dict.fromkeys(key for episode in episodes for key in episode.infos)
        taken = {*episodes[0].pairs, *episodes[0].actions}
        fits = []
        for key in every:
            each = [e.infos.get(key, np.zeros(0)) for e in episodes]
            has_all = all(
                len(a) == len(e) + 1 for a, e in zip(each, episodes, strict=True) if a.ndim
            )
            has_all &= key not in taken
            if has_all and _is_common([array[0] if array.ndim else None for array in each]):
                fits.append(key)
        left_out = [key for key in every if key not in fits]
        if left_out:
            _LOG.warning(
                "infos %s of %r are left out: not every step has numbers of one shape, or "
                "there is another key of that name",
                left_out,
                self._name,
            )
        return fits


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Parts of nested dicts, by their joined names."""
    for key, value in values.items():
        name = join_key(prefix, str(key))
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        else:
            yield name, value


def _is_common(values: Sequence[Any]) -> bool:
    """Whether all values are numbers of one shape."""
    arrays = [np.asarray(value) for value in values]
    return len({array.shape for array in arrays}) == 1 and all(
        a.dtype.kind in "fiub" for a in arrays
    )


def _padded(each: Sequence[Array]) -> torch.Tensor:
    """Values of episodes as ``[B, T, ...]``, zeros past their lengths."""
    longest = max(len(values) for values in each)
    padded = np.zeros((len(each), longest, *each[0].shape[1:]), each[0].dtype)
    for row, values in zip(padded, each, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded)
