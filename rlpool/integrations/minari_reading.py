"""Data sets of Minari as trajectories."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from minari import MinariDataset

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.rows import instance
from rlpool.data.specs import (
    fitted,
    fitted_rewards,
    join_key,
    refuse_collisions,
    stored_dtype,
)
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.integrations.minari_parts import ACTION, BOOL, N_SEEDS, OPTIONS, OWN, SpacePart
from rlpool.slots.blocks import successor_key
from rlpool.slots.trajectories import DerivedTensors, Successor

_LOG = logging.getLogger("rlpool")

_KEEP = "keep_float64=True keeps float64 values"


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
        self, pairs: dict[str, NDArray], actions: dict[str, NDArray], infos: dict[str, NDArray]
    ) -> None:
        self.pairs, self.actions, self.infos = pairs, actions, infos

    def __len__(self) -> int:
        return len(self.pairs["reward"]) - 1


class _Reader:
    """Makes trajectories of Minari's episodes."""

    def __init__(self, dataset: Any, keep_float64: bool) -> None:
        self._observation = SpacePart(dataset.observation_space, "observation_space")
        self._action = SpacePart(dataset.action_space, "action_space", ACTION)
        groups = {"rlpool": OWN, "the action": list(self._action.dtypes)}
        refuse_collisions({**groups, "the observation": list(self._observation.dtypes)})
        self._keep_float64 = keep_float64
        self._name = dataset.id

    def read(self, data: Any) -> _Episode:
        """Check an episode, and name its parts."""
        pairs = self._observation.named(data.observations)
        actions = self._action.named(data.actions)
        terminated, truncated = (
            fitted(f"flags of episode {data.id}", flags, BOOL)
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

    def tensors(self, episodes: Sequence[_Episode], lengths: NDArray) -> DerivedTensors:
        """The steps of all episodes; values after a step are derived from those before it."""
        infos = self._common_infos(episodes)
        last = np.cumsum(lengths + 1) - 1
        packed, finals = {}, {}
        for key in [*infos, *episodes[0].pairs]:
            each = [(e.infos if key in infos else e.pairs)[key] for e in episodes]
            values = self._joined(key, self._observation.dtypes.get(key), each)
            packed[key], finals[key] = np.delete(values, last, 0), values[last]
        for key, declared in self._action.dtypes.items():
            packed[key] = self._joined(key, declared, [e.actions[key] for e in episodes])
        rows = TemporalDictTensor.from_packed(
            {key: torch.from_numpy(values) for key, values in packed.items()},
            torch.from_numpy(lengths),
        )
        derived = {
            successor_key(key): Successor(key, rows[key], values, lengths)
            for key, values in finals.items()
        }
        return DerivedTensors(dict(rows.items()), derived)

    def _joined(self, key: str, declared: np.dtype[Any] | None, each: Sequence[NDArray]) -> NDArray:
        """The values of all episodes, one after the other, in the dtype in which they are kept."""
        values = np.concatenate(each)
        dtype = stored_dtype(values.dtype if declared is None else declared, self._keep_float64)
        return fitted(repr(key), values, dtype, _KEEP)

    def info(self, described: Sequence[Mapping[str, Any]]) -> dict[str, NDArray]:
        """Seeds and options, of which every episode has the same kind."""
        info = {}
        seeds = [each.get("seed") for each in described]
        if None not in seeds:
            bits = np.array([int(seed) % N_SEEDS for seed in seeds if seed is not None], np.uint64)
            info["seed"] = bits.view(np.int64)
        options = [dict(_flat(each.get("options") or {})) for each in described]
        for key in options[0]:
            values = [np.asarray(each.get(key)) for each in options]
            if _is_common(values):
                # As they are: rounded, the environment would begin another episode.
                info[join_key(OPTIONS, key)] = np.stack(values)
        return info

    def _common_infos(self, episodes: Sequence[_Episode]) -> list[str]:
        """Names of the infos that every step of every episode has in the same shape."""
        every = dict.fromkeys(key for episode in episodes for key in episode.infos)
        taken = {*episodes[0].pairs, *episodes[0].actions}
        sizes, fits = [len(episode) + 1 for episode in episodes], []
        for key in every:
            each = [e.infos.get(key, np.zeros(0)) for e in episodes]
            has_all = key not in taken and [len(a) if a.ndim else 0 for a in each] == sizes
            if has_all and _is_common([array[0] for array in each]):
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
