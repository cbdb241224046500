"""Evaluating an agent: returns, lengths and successes of complete episodes, and videos of some."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlpool.agents.agent import Agent, refuse_no_agent
from rlpool.batch.batcher import EpisodeBatcher
from rlpool.batch.batcher_base import CreateEnv
from rlpool.batch.messages import Infos
from rlpool.batch.requests import as_infos, part_of
from rlpool.data.infos import Info
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, WorkerError, described
from rlpool.machine.arguments import also_takes, whole_number
from rlpool.memory.sharing import Parcel, pickled
from rlpool.seeding import episode_seeds, evaluation_root, root_from
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.training.statistics import episode_returns, numbers_of
from rlpool.training.video import Filming
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, PolicyOptions, takes_policy

if TYPE_CHECKING:
    from typing_extensions import Unpack

_N_TIMESTEPS = 128
"""Steps per slot; longer episodes are joined from several."""

_PER_LANE = 4
"""Episodes of a request per lane of one worker. Only two requests are in memory at a time, whatever
the number of episodes; and their size does not depend on the number of workers, nor do the bits."""

_N_VIDEOS = 3


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What ``evaluate`` found, episode by episode.

    Attributes:
        returns: float32 ``[n_episodes]``: sums of rewards, not discounted.
        lengths: int64 ``[n_episodes]``, in steps.
        successes: bool ``[n_episodes]``, ``None`` if the environments do not say.
        seeds: int64 ``[n_episodes]``: what each episode was reset with.
        videos: The files that were written, in order of episodes.
        failed: bool ``[n_episodes]``: those that were given up since their environment failed,
            ``None`` with ``on_env_error="raise"``.
        failures: Why, in order; ``where.episode`` is the number of the episode.

    Example:
        >>> lengths = {"length": [2, 3]}
        >>> evaluation = evaluate(create_agent(), create_env, n_episodes=2, env_info=lengths)
        >>> evaluation.returns, evaluation.lengths
        (tensor([3., 6.]), tensor([2, 3]))
    """

    returns: Tensor
    lengths: Tensor
    successes: Tensor | None
    seeds: Tensor
    videos: tuple[Path, ...] = ()
    failed: Tensor | None = None
    failures: tuple[WorkerError, ...] = ()


@also_takes(n_threads="n_workers", seed="seeds")
@takes_policy
def evaluate(
    agent: Agent,
    create_env: CreateEnv,
    n_episodes: int,
    *,
    env_args: Mapping[str, Any] | None = None,
    n_workers: int = 0,
    seeds: int = 0,
    agent_info: Info = None,
    env_info: Info = None,
    video: str | Path | None = None,
    video_episodes: int | Sequence[int] = _N_VIDEOS,
    timeout: float | None = DEFAULT_TIMEOUT_S,
    **policy: Unpack[PolicyOptions],
) -> Evaluation:
    """Run complete episodes with a copy of an agent, without gradients.

    The agent itself is not touched: its copy is put into evaluation mode (``nn.Module.eval``), and
    may change what it likes. The same seeds give the same results for any ``n_workers``, if
    ``create_env`` makes as many environments each time, whose ``seeding`` is not ``"request"`` or
    ``"stream"`` (see ``VectorGymEnv``).

    Success is what the environments say under the key ``success`` (in any step of the episode, as
    Meta-World counts it) or ``is_success`` (in its last step, as Gymnasium-Robotics does), see
    ``info_keys`` of ``GymEnv``.

    Args:
        agent: The agent. With workers it has to be picklable, otherwise ``copy.deepcopy`` has to
            be able to copy it.
        create_env: As for ``EpisodeBatcher``.
        n_episodes: How many episodes, from 1.
        env_args: As for ``EpisodeBatcher``.
        n_workers: As for ``EpisodeBatcher``.
        seeds: A non-negative int, from which all seeds derive, apart from those of training: a
            batcher made with the same one runs other episodes.
        agent_info: ``[n_episodes, ...]`` or empty, as for ``EpisodeBatcher.execute``: what makes
            the agent greedy, say.
        env_info: Likewise.
        video: A directory, created if it is missing, for one file per filmed episode, such as
            ``episode-002-seed-1703251-return-200.mp4``. Needs the extra ``video``. ``create_env``
            has to make a ``GymEnv`` of environments with ``render_mode="rgb_array"``; Gymnasium's
            ``RecordVideo`` films them, in the workers, and keeps the frames of an episode in
            memory until its end.
        video_episodes: How many of the first episodes to film, or the numbers of those to film.
        timeout: As for ``EpisodeBatcher``.
        **policy: As for ``EpisodeBatcher``. With ``on_env_error="truncate"`` an episode whose
            environment fails ends there, and ``failed`` says so.

    Raises:
        SpecError: For arguments of the wrong kind or size.
        WorkerStartupError: If ``create_env`` raises, or its environments cannot be filmed.
        EnvError, AgentError: If the user's code fails.
        WorkerDiedError, WorkerTimeoutError: If a worker dies or hangs again and again.

    Example:
        >>> lengths = {"length": [2, 3, 4]}  # options of the environment's reset
        >>> evaluation = evaluate(create_agent(), create_env, n_episodes=3, env_info=lengths)
        >>> evaluation.returns, evaluation.returns.mean()
        (tensor([ 3.,  6., 10.]), tensor(6.3333))
    """
    n_episodes = whole_number("n_episodes", n_episodes, 1)
    seeds = whole_number("seeds", seeds, 0)
    infos = as_infos(agent_info, env_info, n_episodes)
    agent_args = {"agent": _checked_agent(agent, n_workers)}
    root = evaluation_root(seeds)
    filmed = _filmed_seeds(video_episodes, n_episodes, root) if video is not None else {}
    with _filming(create_env, video, filmed) as (create, folder):
        factories = _in_evaluation_mode, agent_args, create, env_args
        # As many slots as its own layout says.
        n_slots: Any = None
        with _Evaluator(
            _N_TIMESTEPS, n_slots, *factories, n_workers, root, timeout=timeout, **policy
        ) as batcher:
            outcomes = [_outcome(part) for part in batcher.parts(n_episodes, infos)]
        films = [film for n in filmed.values() for film in folder.glob(f"episode-{n:03d}-*")]
        videos = tuple(film.replace(folder.parent / film.name) for film in films)
    returns, lengths, successes, used, failed = zip(*outcomes, strict=True)
    success, gave_up = (
        torch.cat(parts) if parts else None
        for parts in ([p for p in each if p is not None] for each in (successes, failed))
    )
    measured = torch.cat(returns), torch.cat(lengths), success, torch.cat(used)
    return Evaluation(*measured, videos, gave_up, tuple(batcher.found))


class _Evaluator(EpisodeBatcher):
    """Runs the episodes of an evaluation in requests of a size that memory has room for.

    Attributes:
        found: Why episodes were given up.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.found: list[WorkerError] = []
        super().__init__(*args, **kwargs)

    _NAME = "evaluate"

    @classmethod
    def layout(
        cls, n_timesteps: int, n_slots: int | None, n_workers: int, specs: StepSpecs
    ) -> Layout:
        """See ``BatcherBase.layout``: room for two requests."""
        return Layout(specs, 2 * _PER_LANE * specs.n_lanes, n_timesteps, n_workers).checked(())

    def parts(self, n_episodes: int, infos: Infos) -> Iterator[TemporalDictTensor]:
        """The episodes, one request after the other."""
        size = _PER_LANE * self._open().n_lanes
        starts = range(0, n_episodes, size)
        for start in starts:
            stop = min(start + size, n_episodes)
            self.execute(stop - start, *part_of(infos, range(start, stop)))
        for start in starts:
            if (part := self.get()) is not None:
                for failure in self.failures:
                    episode = start + (failure.where.episode or 0)
                    where = failure.where._replace(episode=episode)
                    self.found.append(failure.reworded(where=where))
                yield part


def _outcome(
    part: TemporalDictTensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Returns, lengths, successes and seeds of some episodes, and which failed, as copies."""
    success = None
    if "_success" in part:
        success = episode_returns(part, "_success") != 0
    elif "_is_success" in part:
        last = part.lengths[:, None] - 1
        success = numbers_of(part, "_is_success").gather(1, last)[:, 0] != 0
    failed = part.info["failed"].clone() if "failed" in part.info else None
    seeds = part.info["seed"].clone()
    return episode_returns(part), part.lengths.clone(), success, seeds, failed


# The agent ---------------------------------------------------------------------------------------


def _checked_agent(agent: Any, n_workers: int) -> Any:
    """A copy of the agent, pickled for workers.

    Raises:
        SpecError: If it is a class, no agent, or cannot be copied.
    """
    refuse_no_agent(agent)
    if n_workers:
        fix = "leave out in its __getstate__ what it does not need for acting"
        return pickled({"agent": agent}, agent, fix=fix, copies=True)
    try:
        return copy.deepcopy(agent)
    except Exception as error:
        raise SpecError(
            f"the agent cannot be copied: {described(error):.200}",
            fix="define its __deepcopy__, or leave out in its __getstate__ what cannot be copied",
        ) from error


def _in_evaluation_mode(agent: Any) -> Any:
    """Make the agent of a worker: all its modules are in evaluation mode."""
    agent = agent.load() if isinstance(agent, Parcel) else agent
    seen: set[int] = set()
    parts = [agent]
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, nn.Module):
            part.eval()
        if isinstance(part, Agent):
            parts += vars(part).values()
        elif isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
    return agent


# Videos ------------------------------------------------------------------------------------------


def _filmed_seeds(video_episodes: Any, n_episodes: int, root: int) -> dict[int, int]:
    """The seeds of the episodes to film, each with the number of its episode, in their order."""
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
    seeds = episode_seeds(root_from(root), 0, last + 1)
    return {seeds[number]: number for number in numbers}


@contextmanager
def _filming(
    create_env: Any, video: str | Path | None, filmed: Mapping[int, int]
) -> Iterator[tuple[Any, Path]]:
    """Let environments film into a folder inside the directory, which is removed at the end.

    Yields:
        What makes the environments, and the folder.
    """
    if video is None or not callable(create_env):
        yield create_env, Path()
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
        yield Filming(create_env, Path(folder).absolute(), filmed), Path(folder)
