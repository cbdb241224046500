"""Episodes as data sets of Minari."""

from __future__ import annotations

import inspect
import logging
import shutil
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from minari import create_dataset_from_buffers
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_dataset import parse_dataset_id
from minari.storage.datasets_root_dir import get_dataset_path

from rlpool.data.infos import options_of
from rlpool.data.rows import instance, kind
from rlpool.data.specs import (
    TensorSpec,
    fitted,
    join_key,
    refuse_missing,
)
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.integrations.minari_parts import ACTION, BOOL, N_SEEDS, OPTIONS, OWN, SpacePart
from rlpool.slots.blocks import successor_key

_LOG = logging.getLogger("rlpool")

_NO_INFOS = {"last_action", *OWN}
"""Keys with a value after the step that Minari stores elsewhere, or that follow from others."""

_SAME = "pass an environment that is wrapped like those of create_env"

_RECOVERABLE = 'register it with entry_point="module:Class", and with arguments that JSON has'

_IS_LOSSLESS = "jpeg_encoding" in inspect.signature(create_dataset_from_buffers).parameters
"""Before Minari 0.5.4 all images became JPEG."""


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
        self._observation = SpacePart(env.observation_space, "observation_space")
        self._action = SpacePart(env.action_space, "action_space", ACTION)
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
        def steps(key: str) -> NDArray:
            return self._arrays[key][row, :length]

        def whole(key: str) -> NDArray:  # with the value after the last step
            last = self._arrays[successor_key(key)][row, length - 1 : length]
            return np.concatenate([steps(key), last])

        # Names such as "episode/r" become groups. Minari takes single numbers in lists only.
        infos = {key: whole(key) for key in self._infos}
        listed = {key: list(each) if each.ndim == 1 else each for key, each in infos.items()}
        return EpisodeBuffer(
            id=None,
            seed=int(self._info["seed"][row]) % N_SEEDS if "seed" in self._info else None,
            options=self._options(row),
            observations=self._observation.nested(whole),
            actions=self._action.nested(steps),
            rewards=steps("_reward"),
            terminations=fitted("'_terminated'", steps("_terminated"), BOOL),
            truncations=fitted("'_truncated'", steps("_truncated"), BOOL),
            infos=listed or None,
        )

    def _options(self, row: int) -> dict[str, Any] | None:
        """The row of ``env_info`` as Python values, which is what the environment was given."""
        prefix = join_key(OPTIONS, "")
        rows = {k.removeprefix(prefix): v for k, v in self._info.items() if k.startswith(prefix)}
        return options_of(rows, row)

    def _refuse_others(self, part: SpacePart) -> None:
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
