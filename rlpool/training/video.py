"""Videos of episodes: an environment that films itself, and the files that it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np

from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import VecEnv
from rlpool.envs.vector_gym_env import as_vec_env
from rlpool.errors import SpecError
from rlpool.machine.arguments import called_with_seed
from rlpool.memory.storage import Array

_EPISODE = "episode-"
_DEFAULT_FPS = 30.0
_DECIMALS = 6  # of the returns in names of files
_SHORTEST_GIF_S = 0.02  # viewers show frames that are shorter much longer


class Filming:
    """A ``create_env`` whose environments film some episodes. It can be pickled.

    Args:
        create_env: Makes the environments.
        directory: Where files are written; those that are not complete begin with a dot.
        suffix: ``.mp4`` or ``.gif``.
        episodes: Seed of an episode to its number. Seeds tell episodes from each other, and from
            the reset that shows the keys of an observation.
    """

    def __init__(
        self,
        create_env: Callable[..., Any],
        directory: Path,
        suffix: str,
        episodes: Mapping[int, int],
    ) -> None:
        self._create_env = create_env
        self._directory, self._suffix, self._episodes = directory, suffix, episodes

    def __call__(self, seed: int, **env_args: Any) -> VecEnv:
        """Make the environments."""
        env = as_vec_env(called_with_seed(self._create_env, seed, env_args), seed)
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
        env.wrap(self._filmed)
        return env

    def _filmed(self, env: Any) -> FilmedEnv:
        return FilmedEnv(env, self._directory, self._suffix, self._episodes)


class FilmedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that films the episodes that begin with some seeds.

    As one of Gymnasium's wrappers, it does not hide what is inside from what adapts environments
    of the old gym.

    Args:
        env: The environment.
        directory: See ``Filming``, and so on.
    """

    def __init__(self, env: Any, directory: Path, suffix: str, episodes: Mapping[int, int]) -> None:
        super().__init__(env)
        self._episodes = episodes
        self._directory, self._suffix = directory, suffix
        self._writer: _Writer | None = None
        self._name = ""
        self._sum = 0.0
        self._shape: tuple[int, ...] = ()  # of this film's frames

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environment; begin a film if the seed is that of an episode."""
        self._drop()
        result = self.env.reset(seed=seed, options=options)
        if seed is not None and seed in self._episodes:
            self._name = f"{_EPISODE}{self._episodes[seed]:03d}-seed-{seed}"
            self._sum, self._shape = 0.0, ()
            fps = (getattr(self.env, "metadata", None) or {}).get("render_fps") or _DEFAULT_FPS
            kind = _Mp4 if self._suffix == ".mp4" else _Gif
            self._writer = kind(self._directory / f".{self._name}{self._suffix}", float(fps))
            self._writer.add(self._frame())
        return result

    def step(self, action: Any) -> Any:
        """Step the environment and film it; the end of the episode completes the file."""
        result: Any = self.env.step(action)
        if self._writer is not None:
            _, reward, *flags, _ = result  # the old gym has a single flag
            self._sum += float(reward)
            self._writer.add(self._frame())
            if any(flags):
                path = self._writer.finish()
                self._writer = None
                # In full, but without the digits that come from rounding.
                shown = np.format_float_positional(round(self._sum, _DECIMALS) + 0.0, trim="-")
                path.replace(self._directory / f"{self._name}-return-{shown}{self._suffix}")
        return result

    def close(self) -> None:
        """Drop an unfinished film and close the environment."""
        self._drop()
        self.env.close()

    def _drop(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.finish().unlink(missing_ok=True)

    def _frame(self) -> Array:
        """What the environment shows: uint8 ``[height, width, 3]``."""
        frame = self.env.render()
        array: Array = np.ascontiguousarray(frame)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3:
            got = type(frame).__name__ if array.dtype == object else f"{array.dtype} {array.shape}"
            what = f"render() returned {got}, not uint8 (height, width, 3)"
            raise SpecError(what, fix="render RGB arrays with render_mode='rgb_array'")
        self._shape = self._shape or array.shape
        if array.shape != self._shape:
            what = f"render() returned a frame {array.shape}, those before it were {self._shape}"
            raise SpecError(what, fix="render frames of one size in each episode")
        return array


def number_of(path: Path) -> int:
    """The number of the episode in a film that is complete."""
    return int(path.name.removeprefix(_EPISODE).partition("-")[0])


# Files -----------------------------------------------------------------------------------------


class _Writer(Protocol):
    """Writes one film."""

    def add(self, frame: Array) -> None:
        """Add a frame, uint8 ``[height, width, 3]``."""

    def finish(self) -> Path:
        """Complete the file; returns its path."""


def best_suffix() -> str:
    """``.mp4`` if imageio-ffmpeg is installed, otherwise ``.gif``, for which Pillow is enough.

    Raises:
        SpecError: If neither is installed.
    """
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        get_ffmpeg_exe()
    except (ImportError, RuntimeError):  # not installed, or no ffmpeg for this machine
        if find_spec("PIL") is None:
            what = "video needs imageio-ffmpeg, or Pillow for GIFs, and neither is installed"
            raise SpecError(what, fix="pip install rlpool[video]") from None
        return ".gif"
    return ".mp4"


class _Mp4:
    """Sends frames to ffmpeg as they come."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._fps = path, fps
        self._frames: Any = None

    def add(self, frame: Array) -> None:
        """See ``_Writer``; odd sizes grow by one pixel, since most players want even ones."""
        height, width = (size + size % 2 for size in frame.shape[:2])
        if frame.shape[:2] != (height, width):
            missing = (0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)
            frame = np.pad(frame, missing, mode="edge")
        if self._frames is None:
            from imageio_ffmpeg import write_frames

            options = {"fps": self._fps, "macro_block_size": 1, "ffmpeg_log_level": "error"}
            self._frames = write_frames(str(self._path), (width, height), **options)
            self._frames.send(None)
        self._frames.send(frame)

    def finish(self) -> Path:
        """See ``_Writer``."""
        if self._frames is not None:
            self._frames.close()
        return self._path


class _Gif:
    """Keeps frames of 256 colours, and writes them at the end."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._duration_s = path, max(_SHORTEST_GIF_S, 1 / fps)
        self._frames: list[Any] = []

    def add(self, frame: Array) -> None:
        """See ``_Writer``."""
        from PIL import Image

        self._frames.append(Image.fromarray(frame).quantize())

    def finish(self) -> Path:
        """See ``_Writer``."""
        if self._frames:
            first, *others = self._frames
            first.save(
                self._path,
                save_all=True,
                append_images=others,
                duration=round(1000 * self._duration_s),
                loop=0,
            )
        return self._path
