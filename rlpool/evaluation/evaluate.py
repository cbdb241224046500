"""Evaluating an agent: returns, lengths and successes of complete episodes, and videos of some."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlpool.agents.agent import Agent, refuse_no_agent, refuse_no_factory
from rlpool.batch.batcher import EpisodeBatcher
from rlpool.batch.batcher_base import CreateEnv
from rlpool.data.infos import Info, Infos, as_infos, options_of, part_of
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import VecEnv
from rlpool.errors import SpecError, WorkerError, described
from rlpool.evaluation.protocol import Telling, described_infos, modules_of, plain, protocol_of
from rlpool.evaluation.result import Entry, Evaluation, Record, error_of
from rlpool.evaluation.video import filmed_seeds, filming, kept_films
from rlpool.machine.arguments import also_takes, whole_number
from rlpool.machine.files import checked_target
from rlpool.machine.imports import import_extra
from rlpool.seeding import checked_seeds, evaluation_root, root_from
from rlpool.seeding import episode_seeds as episode_seeds_of
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.training.statistics import episode_returns, numbers_of
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, BatcherOptions
from rlpool.workers.sharing import Parcel, pickled

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LOG = logging.getLogger("rlpool")

AGENT_ROWS = 16
"""Rows that an agent is called with, so that no result depends on the number of environments."""

_N_TIMESTEPS = 128
"""Steps per slot; longer episodes are joined from several."""

_PER_LANE = 4
"""Episodes of a request per lane of one worker. Only two requests are in memory at a time, whatever
the number of episodes; and their size does not depend on the number of workers, nor do the bits."""

_N_VIDEOS = 3


@also_takes(seed="seeds")
def evaluate(
    agent: Agent,
    create_env: CreateEnv,
    n_episodes: int | None = None,
    *,
    env_args: Mapping[str, Any] | None = None,
    n_workers: int = 0,
    seeds: int = 0,
    agent_info: Info = None,
    env_info: Info = None,
    episode_seeds: Sequence[int] | None = None,
    agent_rows: int | None = AGENT_ROWS,
    infos: Sequence[str] = (),
    record: str | os.PathLike[str] | None = None,
    progress: bool = False,
    video: str | Path | None = None,
    video_episodes: int | Sequence[int] = _N_VIDEOS,
    timeout: float | None = DEFAULT_TIMEOUT_S,
    **policy: Unpack[BatcherOptions],
) -> Evaluation:
    """Run complete episodes with a copy of an agent, without gradients.

    The agent itself is not touched: its copy is put into evaluation mode (``nn.Module.eval``, of
    modules that are attributes of agents, also in lists and dicts; not of those inside other
    objects), and may change what it likes. The same seeds give the same bits for any ``n_workers``
    and any number of environments that ``create_env`` makes, if their ``seeding`` is not
    ``"request"`` (see ``VectorGymEnv``) and ``agent_rows`` is a number.

    Success is what the environments say under the key ``success`` (in any step of the episode, as
    Meta-World counts it) or ``is_success`` (in its last step, as Gymnasium-Robotics does), see
    ``info_keys`` of ``GymEnv``: without it there are no successes. NaN is an error.

    Args:
        agent: The agent. With workers it has to be picklable, otherwise ``copy.deepcopy`` has to
            be able to copy it.
        create_env: As for ``EpisodeBatcher``.
        n_episodes: How many episodes, from 1; as many as there are ``episode_seeds`` by default.
        env_args: As for ``EpisodeBatcher``.
        n_workers: As for ``EpisodeBatcher``; at least one with ``on_env_error="restart"``, since
            what is restarted is a worker.
        seeds: A non-negative int, from which all seeds derive, apart from those of training: a
            batcher made with the same one runs other episodes.
        agent_info: ``[n_episodes, ...]`` or empty, as for ``EpisodeBatcher.execute``: what makes
            the agent greedy, say.
        env_info: Likewise.
        episode_seeds: What the environment of each episode is reset with, such as ``range(200)``:
            all different, as for ``EpisodeBatcher.execute``. Noise still derives from ``seeds``.
        agent_rows: As for ``EpisodeBatcher``, but a number by default, so that no result depends on
            the number of environments. ``None`` calls the agent with a row per environment.
        infos: Keys of the environments' infos (see ``info_keys`` of ``GymEnv``) or observations
            whose value after the last step is recorded in ``entries``.
        record: A file, to which episodes are appended when they are complete. If it holds some
            already, since an evaluation like this one was killed, only the others are run. It is
            locked meanwhile.
        progress: Show a bar (tqdm).
        video: A directory, created if it is missing, for one file per filmed episode, such as
            ``episode-002-seed-1703251-return-200.mp4``. Needs the extra ``video``. ``create_env``
            has to make a ``GymEnv`` of environments with ``render_mode="rgb_array"``; Gymnasium's
            ``RecordVideo`` films them, in the workers, and keeps the frames of an episode in
            memory until its end. Episodes that ``record`` holds already, and those that fail, are
            not filmed: the log names them.
        video_episodes: How many of the first episodes to film, or the numbers of those to film.
        timeout: As for ``EpisodeBatcher``.
        **policy: As for ``EpisodeBatcher``. An episode whose environment fails for good ends
            there with ``on_env_error="truncate"`` or ``"restart"``, and ``failed`` says so.

    Raises:
        SpecError: For arguments of the wrong kind or size, and a ``record`` of another evaluation,
            that is damaged, that another one writes to, or in a folder that does not exist.
        WorkerStartupError: If ``create_env`` raises, or its environments cannot be filmed.
        EnvError, AgentError: If the user's code fails.
        WorkerDiedError, WorkerTimeoutError: If a worker dies or hangs again and again.

    Example:
        >>> lengths = {"length": [2, 3, 4]}  # options of the environment's reset
        >>> evaluation = evaluate(create_agent(), create_env, n_episodes=3, env_info=lengths)
        >>> evaluation.returns, evaluation.returns.mean()
        (tensor([ 3.,  6., 10.]), tensor(6.3333))
    """
    refuse_no_agent(agent)
    n_episodes, given = _checked_episodes(n_episodes, episode_seeds)
    if agent_rows is not None:
        agent_rows = whole_number("agent_rows", agent_rows, 1)
    if policy.get("on_env_error") == "restart":
        n_workers = n_workers or 1  # what is started again is a worker
    if record is not None:
        checked_target("record", record)  # now, not after the workers have started
    seeds = whole_number("seeds", seeds, 0)
    rows = as_infos(agent_info, env_info, n_episodes)
    root = evaluation_root(seeds)
    all_seeds = given or episode_seeds_of(root_from(root), 0, n_episodes)
    filmed = filmed_seeds(video_episodes, all_seeds) if video is not None else {}
    settings = {
        "n_episodes": n_episodes,
        "seeds": seeds,
        "episode_seeds": given,
        "agent_rows": agent_rows,
        "on_env_error": policy.get("on_env_error", "raise"),
        "infos": _checked_keys(infos),
        **described_infos(rows),
    }
    with filming(video, filmed) as (film, folder):
        failing: Any = {"timeout": timeout, **policy}
        made_of = agent, create_env, env_args, n_workers, root, agent_rows, failing
        with Evaluator(*made_of, film) as runs:
            protocol = protocol_of(agent, runs.environment, **settings)
            entries = _entries(runs, rows, given, protocol, record, progress)
        return Evaluation.of_entries(entries, protocol, kept_films(folder, filmed), runs.found)


def _checked_episodes(n_episodes: Any, given: Any) -> tuple[int, list[int] | None]:
    """How many episodes, and their seeds if the user has named them."""
    if given is None:
        return whole_number("n_episodes", n_episodes, 1, fix="or name episode_seeds"), None
    if n_episodes is not None:
        n_episodes = whole_number("n_episodes", n_episodes, 1)
    seeds = checked_seeds(given, n_episodes)
    if len(set(seeds)) < len(seeds):
        twice = next(seed for row, seed in enumerate(seeds) if seed in seeds[:row])
        what = f"episode_seeds has the seed {twice} {seeds.count(twice)} times"
        raise SpecError(what, fix="name every seed once: the same episode again is no further one")
    return len(seeds), seeds


def _checked_keys(infos: Any) -> list[str]:
    """The keys of infos to record."""
    keys = [infos] if isinstance(infos, str) or not isinstance(infos, Iterable) else list(infos)
    if keys == [infos] or not all(isinstance(key, str) for key in keys):
        raise SpecError(f"infos is {infos!r:.60}, not a list of keys", fix='pass infos=["key"]')
    return keys


def _entries(
    runs: Evaluator,
    infos: Infos,
    given: list[int] | None,
    protocol: Mapping[str, Any],
    path: Any,
    progress: bool,
) -> list[Entry]:
    """Run the episodes that are not recorded yet; returns all of them."""
    n_episodes, keys = protocol["n_episodes"], protocol["infos"]
    with ExitStack() as stack:
        entries = list[Entry]()
        written = None
        if path is not None:
            written = stack.enter_context(closing(Record(path, protocol)))
            entries += written.entries
        show = None
        if progress:
            tqdm = import_extra("tqdm.auto", "evaluation").tqdm
            bar = stack.enter_context(tqdm(total=n_episodes, unit="episode", initial=len(entries)))

            def show(n_finished: int, _: int) -> None:
                bar.update(len(entries) + n_finished - bar.n)

        for part in runs.parts(range(len(entries), n_episodes), infos, given, keys, show):
            if written is not None:
                written.append(part)
            entries += part
    return entries


class Evaluator(EpisodeBatcher):
    """Runs the episodes of an evaluation in requests of a size that memory has room for.

    Attributes:
        found: Number of an episode to why it was given up.
    """

    def __init__(
        self,
        agent: Any,
        create_env: Any,
        env_args: Mapping[str, Any] | None,
        n_workers: int,
        root: int,
        agent_rows: int | None,
        failing: Mapping[str, Any],
        prepare: Callable[[VecEnv], None] | None = None,
    ) -> None:
        agent_args = {"agent": _copied(agent, n_workers)}
        self.found: dict[int, WorkerError] = {}
        self._agent_rows = agent_rows
        self._args = plain(env_args or {})  # before create_env may change them
        refuse_no_factory("create_env", create_env)
        self._telling = Telling(create_env, prepare)
        # As many slots as its own layout says.
        n_slots: Any = None
        factories = in_evaluation_mode, agent_args, self._telling, env_args
        super().__init__(
            _N_TIMESTEPS, n_slots, *factories, n_workers, root, agent_rows=agent_rows, **failing
        )

    _NAME = "evaluate"

    @classmethod
    def layout(
        cls, n_timesteps: int, n_slots: int | None, n_workers: int, specs: StepSpecs
    ) -> Layout:
        """See ``BatcherBase.layout``: room for two requests."""
        return Layout(specs, 2 * _PER_LANE * specs.n_lanes, n_timesteps, n_workers).checked(())

    @property
    def environment(self) -> dict[str, Any]:
        """What the environments are; their number only if results depend on it."""
        told = self._telling.environment
        if self._agent_rows is not None:
            told.pop("n_lanes", None)
        return {**told, "args": self._args}

    def parts(
        self,
        numbers: range,
        infos: Infos,
        given: list[int] | None,
        keys: Sequence[str],
        show: Callable[[int, int], None] | None = None,
    ) -> Iterator[list[Entry]]:
        """The episodes of these numbers, one request after the other.

        Args:
            numbers: Numbers of the episodes.
            infos: ``agent_info`` and ``env_info`` of all episodes.
            given: The seeds of all episodes, if the user has named them.
            keys: What else to record.
            show: Is told how far the request is.
        """
        self.seek(numbers.start)
        size = _PER_LANE * self._open().n_lanes
        step = self._open().step
        if step is not None:  # else the first episodes show it
            _refuse_unknown(keys, step.succeeded)
        parts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        for part in parts:
            seeds = given and given[part.start : part.stop]
            self.execute(len(part), *part_of(infos, part), episode_seeds=seeds)
        for part in parts:
            request: Any = self._open().pending[0]
            trajectories = self.get(progress=show or False)
            for failure in self.failures:
                self.found[part.start + (failure.where.row or 0)] = failure
            if trajectories is not None:
                yield self._recorded(part, trajectories, request.n_repeats, infos, keys)

    def _recorded(
        self,
        numbers: range,
        part: TemporalDictTensor,
        n_repeats: NDArray,
        infos: Infos,
        keys: Sequence[str],
    ) -> list[Entry]:
        """What is recorded of some episodes."""
        _refuse_unknown(keys, [key for key in part if f"_{key}" in part])
        last = torch.arange(len(numbers)), part.lengths - 1
        returns, successes = episode_returns(part).tolist(), _successes(part, numbers)
        terminated = part["_terminated"][last].tolist()
        seeds, lengths = part.info["seed"].tolist(), part.lengths.tolist()
        told = {key: part[f"_{key}"][last].tolist() for key in keys}
        agent_info, env_info = infos
        return [
            {
                "episode": number,
                "seed": seeds[row],
                "return": returns[row],
                "length": lengths[row],
                "terminated": terminated[row],
                "success": None if successes is None else bool(successes[row]),
                "restarts": int(n_repeats[row]),
                "error": error_of(self.found[number]) if number in self.found else None,
                "infos": {key: values[row] for key, values in told.items()},
                "agent_info": options_of(agent_info, number) or {},
                "env_info": options_of(env_info, number) or {},
            }
            for row, number in enumerate(numbers)
        ]


def _refuse_unknown(keys: Sequence[str], known: Iterable[str]) -> None:
    for key in keys:
        if key not in known:
            what = f"infos names {key!r}, which the environments do not report"
            fix = f"name it in info_keys of GymEnv; there are {list(known)}"
            raise SpecError(what, fix=fix)


def _successes(part: TemporalDictTensor, numbers: range) -> Tensor | None:
    if "_success" in part:
        found = episode_returns(part, "_success")
    elif "_is_success" in part:
        last = part.lengths[:, None] - 1
        found = numbers_of(part, "_is_success").gather(1, last)[:, 0]
    else:
        return None
    for row in found.isnan().nonzero()[:, 0].tolist():
        what = f"the success of episode {numbers[row]} is nan"
        raise SpecError(what, fix="let the environment report a bool, in every step")
    return found != 0


# The agent ---------------------------------------------------------------------------------------


def _copied(agent: Any, n_workers: int) -> Any:
    """A copy of the agent, pickled for workers.

    Raises:
        SpecError: If it cannot be copied.
    """
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


def in_evaluation_mode(agent: Any) -> Any:
    """Make the agent of a worker: all its modules are in evaluation mode."""
    agent = agent.load() if isinstance(agent, Parcel) else agent
    for module in modules_of(agent):
        module.eval()
    return agent
