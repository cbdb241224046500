"""Films of episodes, by Gymnasium's ``RecordVideo``."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.wrappers import RecordVideo

from rlpool.data.storage import NDArray
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import VecEnv
from rlpool.errors import SpecError
from rlpool.machine.arguments import whole_number

_LOG = logging.getLogger("rlpool")

_DEFAULT_FPS = 30  # as RecordVideo has it
_DECIMALS = 6  # of the returns in names of files


def filmed_seeds(video_episodes: Any, seeds: Sequence[int]) -> dict[int, int]:
    """The seeds of the episodes to film, each with the number of its episode, in their order."""
    n_episodes = len(seeds)
    if isinstance(video_episodes, Iterable):
        name = "each of video_episodes"
        numbers = sorted({whole_number(name, number, 0) for number in video_episodes})
    else:
        first = whole_number("video_episodes", video_episodes, 0)
        numbers = list(range(min(first, n_episodes)))
    last = max(numbers, default=-1)
    if last >= n_episodes:
        what = f"video_episodes has episode {last}, there are {n_episodes}"
        raise SpecError(what, fix="number them from 0")
    return {seeds[number]: number for number in numbers}


@contextmanager
def filming(
    video: str | Path | None, filmed: Mapping[int, int]
) -> Iterator[tuple[Callable[[VecEnv], None] | None, Path]]:
    """Film into a folder inside the directory, which is removed at the end.

    Yields:
        What lets environments film, ``None`` if nothing is to be filmed, and the folder.
    """
    if video is None:
        yield None, Path()
        return
    fix = "pass a directory that can be made and written, which may be missing"
    if not isinstance(video, str | os.PathLike):
        raise SpecError(f"video is {video!r:.60}, not a path", fix=fix)
    if find_spec("moviepy") is None:
        raise SpecError("video needs moviepy", fix="pip install rlpool[video]")
    directory = Path(video)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"video is {video!s:.200}: {error.strerror}", fix=fix) from error
    with tempfile.TemporaryDirectory(prefix=".filming-", dir=directory) as folder:
        # The name of a temporary directory is absolute since Python 3.12.
        yield partial(film, Path(folder).absolute(), filmed), directory / Path(folder).name


def kept_films(folder: Path, filmed: Mapping[int, int]) -> tuple[Path, ...]:
    """Move films out of the folder; the log names the episodes without one."""
    films, missing = list[Path](), list[int]()
    for number in filmed.values():
        found = [*folder.glob(f"episode-{number:03d}-*")]
        films += [film.replace(folder.parent / film.name) for film in found]
        missing += [] if found else [number]
    if missing:
        _LOG.warning("no film of episodes %s: they failed, or the record had them already", missing)
    return tuple(films)


def film(directory: Path, episodes: Mapping[int, int], env: VecEnv) -> None:
    """Let environments film some episodes.

    Args:
        directory: Where ``episode-002-seed-1703251-return-200.mp4`` is written. Films that are
            not complete have other names.
        episodes: Seed of an episode to its number. Seeds tell episodes from each other, and from
            the reset that shows the keys of an observation.
        env: The environments.
    """
    if not isinstance(env, GymEnv):
        what = f"video needs the environments of a GymEnv, create_env returned {type(env)!r}"
        raise SpecError(what, fix="return GymEnv([...], seed), or leave video out")
    for lane in range(env.n_lanes):
        mode = env.attribute(lane, "render_mode")
        if mode != "rgb_array":
            raise SpecError(
                f"video needs environments that render arrays, their render_mode is {mode!r}",
                fix="gymnasium.make(..., render_mode='rgb_array') in create_env",
            )
    env.wrap(lambda each: _Film(each, directory, episodes))


class _Film(RecordVideo):
    """Films the episodes that begin with some seeds; environments of the old gym as well.

    ``RecordVideo`` itself counts episodes, which lanes share out as they like.
    """

    def __init__(self, env: Any, directory: Path, episodes: Mapping[int, int]) -> None:
        fps = (env.metadata or {}).get("render_fps") or _DEFAULT_FPS
        with warnings.catch_warnings():
            # The directory is there: all lanes write into it.
            warnings.simplefilter("ignore")
            super().__init__(env, str(directory), fps=fps)
        self._directory, self._episodes = directory, episodes
        self._name, self._sum = "", 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._drop()
        result = self.env.reset(seed=seed, options=options)
        if seed is not None and seed in self._episodes:
            self._name, self._sum = f"episode-{self._episodes[seed]:03d}-seed-{seed}", 0.0
            self.start_recording(f".{self._name}")
            self.recorded_frames.append(self._frame())
        return result

    def step(self, action: Any) -> Any:
        result: Any = self.env.step(action)
        if self.recording:
            _, reward, *flags, _ = result  # the old gym has a single flag
            self._sum += float(reward)
            self.recorded_frames.append(self._frame())
            if any(flags):
                self._complete()
        return result

    def close(self) -> None:
        self._drop()
        super().close()  # type: ignore[no-untyped-call]

    def _drop(self) -> None:
        self.recording, self.recorded_frames = False, []

    def _complete(self) -> None:
        # moviepy adds up durations, and drops the last frame if their sum is rounded down.
        frames, fps = self.recorded_frames, self.frames_per_sec
        if int(sum([1 / fps] * len(frames)) * fps) < len(frames):
            frames.append(frames[-1])
        self.stop_recording()  # type: ignore[no-untyped-call]
        # In full, but without the digits that come from rounding.
        shown = np.format_float_positional(round(self._sum, _DECIMALS) + 0.0, trim="-")
        path = self._directory / f".{self._name}.mp4"
        path.replace(self._directory / f"{self._name}-return-{shown}.mp4")

    def _frame(self) -> NDArray:
        """A copy of what the environment shows, uint8 ``[height, width, 3]``, of even size."""
        frame = self.env.render()
        array: NDArray = np.asarray(frame)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3:
            got = type(frame).__name__ if array.dtype == object else f"{array.dtype} {array.shape}"
            what = f"render() returned {got}, not uint8 (height, width, 3)"
            raise SpecError(what, fix="render RGB arrays with render_mode='rgb_array'")
        height, width, _ = array.shape
        return np.pad(array, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")  # for players
