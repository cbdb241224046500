"""A short run in this process, which shows what environments and agent cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Discrete

from rlpool.agents.agent import Agent, AgentStep
from rlpool.batch.window_batcher import Batcher
from rlpool.data.dict_tensor import DictTensor
from rlpool.envs.columns import Columns
from rlpool.envs.gym_env import GymEnv, GymEnvInf, is_environment
from rlpool.envs.info_keys import value_of
from rlpool.envs.vec_env import LaneError, VecEnv
from rlpool.envs.vector_gym_env import as_vec_env
from rlpool.errors import SpecError, Where
from rlpool.machine.arguments import called_with_seed
from rlpool.specs import structure_of_space
from rlpool.workers.worker_process import called

_N_LANES = 4
"""Lanes of the second run; the first has one."""

_WINDOW_S, _MOST_TIMESTEPS = 0.02, 128
"""Windows last about this long, so that a median of several is not disturbed by one."""

_N_ACTIONS = 64  # that are sampled where there is no agent
_MASK = "action_mask"


class Lanes:
    """Environments of which any number can be run as lanes.

    Args:
        create_env: Makes one, or several as a ``VecEnv``.
        arguments: Its arguments.
        stack: Closes them.

    Attributes:
        fixed: A ``VecEnv`` whose lanes belong together, ``None`` if there are single environments.
    """

    def __init__(
        self, create_env: Callable[..., Any], arguments: dict[str, Any], stack: ExitStack
    ) -> None:
        self.fixed: VecEnv | None = None
        self._create, self._arguments, self._stack = create_env, arguments, stack
        self._envs: list[Any] = []
        self._options: dict[str, Any] = {}
        children = set(active_children())
        self._make_more()
        if started := len(set(active_children()) - children):
            raise SpecError(
                f"create_env started processes ({started}) for its environments, whose "
                "work cannot be seen from here",
                fix="let it make environments of this process",
            )

    def _make_more(self) -> None:
        made = called(
            Where(),
            "create_env",
            lambda: as_vec_env(called_with_seed(self._create, 0, self._arguments), 0),
        )
        if type(made) in (GymEnv, GymEnvInf):
            self._stack.callback(made.close)
            self._envs += made._envs
            wide, infos = made._keep_float64, made._wanted_infos
            self._options = {"keep_float64": wide, "info_keys": infos}
        elif isinstance(made, VecEnv):
            self._stack.callback(made.close)
            self.fixed = made
        elif is_environment(made):
            self._stack.callback(made.close)
            self._envs.append(made)
        else:
            raise SpecError(
                f"create_env returned {made!r:.60}, not an environment",
                fix="return an environment, or GymEnv([...environments...], seed)",
            )

    def first(self, n_lanes: int) -> VecEnv:
        """The first environments as lanes that restart; ``fixed`` as it is."""
        if self.fixed is not None:
            self.fixed.auto_reset = True
            return self.fixed
        while len(self._envs) < n_lanes:
            self._make_more()
        return GymEnvInf(self._envs[:n_lanes], 0, **self._options)

    def show_masks(self, env_info: DictTensor) -> None:
        """Let random agents see the ``action_mask`` that the info of a reset has, if any."""
        env = self.first(1)
        if not isinstance(env, GymEnv) or type(env.action_space) is not Discrete:
            return
        env.keeps_results = True
        options = {key: row[0].tolist() for key, row in env_info.items()} or None
        try:
            env.reset_lanes([0], [0], [options])
        except LaneError:  # the run will fail as well, and say where
            return
        mask = value_of(env.results[0][1], _MASK)
        if _MASK not in env.current and np.shape(mask) == (env.action_space.n,):
            infos = {**env._wanted_infos, _MASK: (np.int8, env.action_space.n)}
            self._options = {**self._options, "info_keys": infos}


class Run(NamedTuple):
    """What a run showed: medians of windows, in seconds per step of all lanes.

    Attributes:
        n_lanes: How many lanes it had.
        wall: On the clock, without waiting for a core that somebody else used.
        cpu: Of cores used.
        mean_length: Average steps per episode that ended; ``None`` if none did.
        bytes_per_lane: What the environments put into a step.
    """

    n_lanes: int
    wall: float
    cpu: float
    mean_length: float | None
    bytes_per_lane: int


class Parts(NamedTuple):
    """Seconds of one call: a step and a reset of one environment, the agent for few lanes."""

    env_step: float
    env_reset: float
    agent_call: float


def measure(
    lanes: Lanes,
    create_agent: Callable[..., Any],
    agent_args: Mapping[str, Any] | None,
    infos: tuple[DictTensor, DictTensor],
    seconds: float,
) -> tuple[list[Run], Parts]:
    """Run one lane, and then several; where lanes belong together, all of them.

    Args:
        lanes: The environments.
        create_agent: Makes the agent.
        agent_args: Its arguments.
        infos: ``agent_info`` and ``env_info``: one row, which every lane gets.
        seconds: How long, about; slow environments make at least a few steps.
    """
    watch = _Stopwatch()

    def make_timed(**arguments: Any) -> Any:
        agent = create_agent(**arguments)
        return _TimedAgent(agent, watch) if isinstance(agent, Agent) else agent

    sizes = [1, _N_LANES] if lanes.fixed is None else [lanes.fixed.n_lanes]
    env = lanes.first(sizes[-1])
    trial = _run(env, create_agent, agent_args, infos, 2, 0.0)  # how long are windows to be?
    with watch.on_methods(env, "_step_lanes", "_reset_lanes"):
        timed = _run(env, make_timed, agent_args, infos, _length(trial), seconds / 5)
    runs = [
        _run(lanes.first(n), create_agent, agent_args, infos, _length(timed), seconds / len(sizes))
        for n in sizes
    ]
    return runs, Parts(*(watch.mean(part) for part in ("_step_lanes", "_reset_lanes", "agent")))


def _length(run: Run) -> int:
    """Steps of a window that is long enough."""
    return int(min(_MOST_TIMESTEPS, max(1, _WINDOW_S / run.wall)))


def _run(
    env: VecEnv,
    create_agent: Callable[..., Any],
    agent_args: Mapping[str, Any] | None,
    infos: tuple[DictTensor, DictTensor],
    n_timesteps: int,
    seconds: float,
) -> Run:
    """Collect windows for a while, at least three after the first."""
    windows: list[tuple[float, float]] = []
    n_ended = n_steps = 0
    with (
        _kept_open(env),
        Batcher(
            n_timesteps=n_timesteps,
            create_agent=create_agent,
            agent_args=agent_args,
            create_env=lambda: env,
            n_threads=0,
            seeds=0,
        ) as batcher,
    ):
        agent_info, env_info = (
            {key: row.expand(env.n_lanes, *row.shape[1:]) for key, row in info.items()}
            for info in infos
        )
        batcher.reset(agent_info, env_info)
        start = time.perf_counter()
        while len(windows) < 4 or time.perf_counter() - start < seconds:
            before = _clocks()
            batcher.execute()
            window: Any = batcher.get()
            wall, cpu, queued = (now - then for now, then in zip(_clocks(), before, strict=True))
            windows.append(((wall - queued) / n_timesteps, cpu / n_timesteps))
            n_ended += int(window["_done"].sum())
            n_steps += int(window.lengths.sum())
    wall, cpu = (statistics.median(times) for times in zip(*windows[1:], strict=True))
    n_bytes = sum(array.nbytes for array in env.current.values())
    mean_length = n_steps / n_ended if n_ended else None
    return Run(env.n_lanes, wall, cpu, mean_length, n_bytes // env.n_lanes)


@contextmanager
def _kept_open(env: VecEnv) -> Iterator[None]:
    """Let a batcher close environments in vain: another run needs them."""
    vars(env)["close"] = lambda: None
    try:
        yield
    finally:
        del vars(env)["close"]


def _clocks() -> tuple[float, float, float]:
    """Seconds: on the clock, of cores used, and that this thread was ready but had no core."""
    queued = 0.0
    with suppress(OSError, IndexError, ValueError):  # a kernel without these statistics
        queued = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return time.perf_counter(), time.process_time(), queued


class _Stopwatch:
    """Adds up the time inside functions."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._n: dict[str, int] = {}

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed; if it gets lanes first, for each of them."""
        self._seconds[part], self._n[part] = 0.0, 0

        def timed(first: Any, *others: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(first, *others)
            finally:
                self._seconds[part] += time.perf_counter() - start
                self._n[part] += len(first) if part != "agent" else 1

        return timed

    @contextmanager
    def on_methods(self, env: VecEnv, *names: str) -> Iterator[None]:
        """Time methods that get lanes."""
        vars(env).update({name: self.around(name, getattr(env, name)) for name in names})
        try:
            yield
        finally:
            for name in names:
                del vars(env)[name]

    def mean(self, part: str) -> float:
        """Seconds per call, or per lane."""
        return self._seconds[part] / max(1, self._n[part])


class _TimedAgent(Agent):
    """Passes calls on to an agent, timed."""

    def __init__(self, inner: Agent, watch: _Stopwatch) -> None:
        for name in ("n_noise", "initial_state", "makes_initial_states", "require_history"):
            setattr(self, name, getattr(inner, name))
        self._call = watch.around("agent", inner)

    def __call__(self, *inputs: Any) -> AgentStep:
        """Call the agent."""
        result: AgentStep = self._call(*inputs)
        return result


def random_agent(lanes: Lanes, env_info: DictTensor) -> Callable[[], Agent]:
    """Makes agents whose random actions cost nothing; none is masked by an ``action_mask``."""
    space = getattr(lanes.first(1), "action_space", None)
    if space is None:
        raise SpecError("the environments declare no action space", fix="pass create_agent")
    lanes.show_masks(env_info)
    structure = structure_of_space(space, keep_float64=True, name="action_space")
    columns = Columns({"action": structure}, "action", _N_ACTIONS)
    columns.write(range(_N_ACTIONS), [{"action": space.sample()} for _ in range(_N_ACTIONS)])
    actions = {key: torch.from_numpy(np.array(array)) for key, array in columns.arrays.items()}
    return lambda: _RandomAgent(actions, space)


class _RandomAgent(Agent):
    """Gives actions that were sampled before, in turn; where there are masks, one that is allowed.

    Args:
        actions: The actions, ``[_N_ACTIONS, ...]`` per key.
        space: Their space.
    """

    def __init__(self, actions: Mapping[str, torch.Tensor], space: Any) -> None:
        self._actions, self._n_calls, self._empty = actions, 0, DictTensor()
        self._masked = (int(space.start), int(space.n)) if type(space) is Discrete else None

    def __call__(
        self, state: Any, observation: Any, agent_info: Any = None, history: Any = None
    ) -> AgentStep:
        self._n_calls += 1
        rows = (torch.arange(observation.n_elems()) + self._n_calls) % _N_ACTIONS
        action = {key: tensor[rows] for key, tensor in self._actions.items()}
        if self._masked is not None and _MASK in observation:
            start, n = self._masked
            mask = observation[_MASK]
            if mask.shape[1:] == (n,):
                # The first that is allowed, from the sampled one on.
                places = (action["action"][:, None] - start + torch.arange(n)) % n
                first = mask.gather(1, places).ne(0).to(torch.int8).argmax(1)
                action["action"] = places.gather(1, first[:, None])[:, 0] + start
        return self._empty, DictTensor(action), self._empty
