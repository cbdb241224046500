"""The same seeds give the same bits, and row i is episode i, whoever ran it."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpool import (
    Agent,
    Batcher,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    TemporalDictTensor,
    sample_categorical,
    sample_normal,
)

from support.faults import FaultyEnv, create_agent, create_env

pytestmark = pytest.mark.timeout(200)


class MlpAgent(Agent):
    """Samples CartPole's actions."""

    n_noise = 1

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._model = torch.nn.Sequential(
                torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)
            )

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: Any = None,
    ) -> tuple[DictTensor, DictTensor, DictTensor]:
        logits = self._model(observation["frame"])
        action, log_probability = sample_categorical(logits, observation["noise"])
        output = {"action": action, "log_probability": log_probability, "logits": logits}
        return DictTensor({}), DictTensor(output), DictTensor({})

    def update(self, info: Any) -> None:
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(info)


def create_cartpoles(seed: int, n_lanes: int, cls: type[GymEnv] = GymEnv) -> GymEnv:
    return cls([gymnasium.make("CartPole-v1") for _ in range(n_lanes)], seed)


_SIZE, _HIDDEN, _N_ACTIONS = 17, 33, 5


class DriftEnv(gymnasium.Env):
    """Drifts at random, for a number of steps that depends on its seed and on ``env_info``."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (_SIZE,), np.float32)
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (_N_ACTIONS,), np.float32)

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._rng = np.random.default_rng()
        self._n_calls = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._rng = np.random.default_rng(seed)
        self._scale = (options or {}).get("scale", 1.0)
        self._steps_left = int(self._rng.integers(1, 30)) + (options or {}).get("extra", 0)
        self._frame = self._rng.normal(size=_SIZE).astype(np.float32)
        self._dawdle()
        return self._frame, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._dawdle()
        self._steps_left -= 1
        push = np.resize(action, _SIZE) * np.float32(self._scale)
        noise = self._rng.normal(size=_SIZE).astype(np.float32)
        self._frame = np.tanh(self._frame + push) + np.float32(0.1) * noise
        return self._frame, float(self._frame.sum()), self._steps_left <= 0, False, {}

    def _dawdle(self) -> None:
        """Take a time that no two processes agree about."""
        self._n_calls += 1
        if self._delay_s:
            word = hashlib.blake2b(f"{os.getpid()} {self._n_calls}".encode()).digest()[0]
            time.sleep(self._delay_s * word / 255)


def create_drifts(
    seed: int, n_lanes: int, delay_s: float = 0.0, cls: type[GymEnv] = GymEnv
) -> GymEnv:
    return cls([DriftEnv(delay_s) for _ in range(n_lanes)], seed)


class GruAgent(Agent):
    """A recurrent agent that samples, with sizes that no vector unit likes."""

    n_noise = _N_ACTIONS

    def __init__(self, own_initial_state: bool = False) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self._cell = torch.nn.GRUCell(_SIZE, _HIDDEN)
            self._head = torch.nn.Linear(_HIDDEN, _N_ACTIONS)

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: Any = None,
    ) -> tuple[DictTensor, DictTensor, DictTensor]:
        n = observation.n_elems()
        if state is None:
            state = DictTensor({"hidden": torch.zeros(n, _HIDDEN)})
        hidden = self._cell(observation["frame"], state["hidden"])
        mean = self._head(hidden)
        if agent_info is not None:
            mean = mean * agent_info["gain"].unsqueeze(-1)
        action, log_probability = sample_normal(mean, torch.tensor(-1.0), observation["noise"])
        output = DictTensor({"action": action, "log_probability": log_probability})
        return state, output, DictTensor({"hidden": hidden})


class PatientGruAgent(GruAgent):
    """The same, making its initial states itself."""

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
        return DictTensor({"hidden": torch.zeros(n, _HIDDEN)})


def result_of(batcher: EpisodeBatcher | Batcher) -> TemporalDictTensor:
    result = batcher.get()
    assert result is not None
    return result


def assert_equal(one: TemporalDictTensor, other: TemporalDictTensor) -> None:
    """Compare bit by bit."""
    assert list(one.keys()) == list(other.keys())
    assert one.lengths.tolist() == other.lengths.tolist()
    for key, values in one.items():
        assert values.dtype == other[key].dtype
        assert torch.equal(values, other[key]), key
    assert one.info is not None
    assert other.info is not None
    for key, values in one.info.items():
        assert torch.equal(values, other.info[key]), f"info/{key}"


def collect_cartpole(n_threads: int, start_method: str = "auto") -> list[TemporalDictTensor]:
    results = []
    with EpisodeBatcher(
        64,
        40,
        MlpAgent,
        {},
        create_cartpoles,
        {"n_lanes": 4},
        n_threads=n_threads,
        seeds=3,
        start_method=start_method,
    ) as batcher:
        batcher.execute(32)
        results.append(result_of(batcher))
        batcher.reexecute()
        batcher.update(0.5)
        batcher.execute(70)  # more than there are slots
        results.extend(result_of(batcher) for _ in range(2))
        batcher.execute(1)
        results.append(result_of(batcher))
    return results


def collect_drifts(
    n_threads: int,
    agent: type[Agent] = GruAgent,
    n_timesteps: int = 20,
    n_slots: int = 30,
    delay_s: float = 0.0,
    start_method: str = "auto",
) -> list[TemporalDictTensor]:
    n = 23
    agent_info = DictTensor({"gain": torch.linspace(0.5, 2.0, n)})
    env_info = DictTensor({"scale": torch.linspace(0.1, 1.0, n), "extra": torch.arange(n) % 7})
    env_args = {"n_lanes": 3, "delay_s": delay_s}
    results = []
    with EpisodeBatcher(
        n_timesteps,
        n_slots,
        agent,
        {},
        create_drifts,
        env_args,
        n_threads=n_threads,
        seeds=5,
        start_method=start_method,
    ) as batcher:
        batcher.execute(n, agent_info, env_info)
        batcher.reexecute()
        results.extend(result_of(batcher) for _ in range(2))
        batcher.execute(40)
        results.append(result_of(batcher))
        batcher.execute(n, agent_info, env_info)
        results.append(result_of(batcher))
    return results


@cache
def serial_cartpole() -> list[TemporalDictTensor]:
    return collect_cartpole(0)


@cache
def serial_drifts() -> list[TemporalDictTensor]:
    return collect_drifts(0)


# The same for any number of workers -----------------------------------------------------------


ANY_NUMBER = pytest.mark.parametrize(
    ("n_threads", "start_method"),
    [(4, "auto"), (2, "auto"), (1, "auto"), (2, "spawn"), (4, "spawn"), (1, "spawn")],
)


@ANY_NUMBER
def test_cartpole_gives_the_same_bits_for_any_number_of_workers(
    n_threads: int, start_method: str
) -> None:
    results = collect_cartpole(n_threads, start_method)
    for one, other in zip(results, serial_cartpole(), strict=True):
        assert_equal(one, other)


@ANY_NUMBER
def test_a_noisy_recurrent_agent_gives_the_same_bits_for_any_number_of_workers(
    n_threads: int, start_method: str
) -> None:
    results = collect_drifts(n_threads, start_method=start_method)
    for one, other in zip(results, serial_drifts(), strict=True):
        assert_equal(one, other)


def test_delays_that_differ_between_processes_change_nothing() -> None:
    for one, other in zip(collect_drifts(3, delay_s=0.004), serial_drifts(), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize(("n_timesteps", "n_slots"), [(1, 3), (7, 4), (200, 100)])
def test_slots_change_nothing(n_timesteps: int, n_slots: int) -> None:
    results = collect_drifts(0, n_timesteps=n_timesteps, n_slots=n_slots)
    for one, other in zip(results, serial_drifts(), strict=True):
        assert_equal(one, other)


def test_requests_do_not_depend_on_whether_they_were_queued() -> None:
    results = []
    for queued in (True, False):
        with EpisodeBatcher(
            9, 20, GruAgent, {}, create_drifts, {"n_lanes": 3}, n_threads=0, seeds=5
        ) as batcher:
            if queued:
                for _ in range(4):
                    batcher.execute(11)
                results.append([result_of(batcher) for _ in range(4)])
            else:
                results.append([run(batcher, 11) for _ in range(4)])
    for one, other in zip(*results, strict=True):
        assert_equal(one, other)


def run(batcher: EpisodeBatcher, n_episodes: int) -> TemporalDictTensor:
    batcher.execute(n_episodes)
    return result_of(batcher)


def test_later_requests_draw_new_episodes() -> None:
    first, second, *_ = serial_drifts()
    assert first.info is not None
    assert second.info is not None
    assert not set(first.info["seed"].tolist()) & set(second.info["seed"].tolist())
    assert not torch.equal(first["noise"][:, 0], second["noise"][:, 0])


def collect_windows(n_threads: int, kind: str, start_method: str) -> list[TemporalDictTensor]:
    create_env: Any = create_cartpoles if kind == "cartpole" else create_drifts
    agent: Any = MlpAgent if kind == "cartpole" else PatientGruAgent
    env_args = {"n_lanes": 4, "cls": GymEnvInf}
    results = []
    with Batcher(
        16,
        None,
        agent,
        {},
        create_env,
        env_args,
        n_threads=n_threads,
        seeds=5,
        start_method=start_method,
    ) as batcher:
        for _ in range(2):
            batcher.reset()
            for _ in range(4):
                batcher.execute()
                results.append(result_of(batcher))
    return results


@pytest.mark.parametrize(
    ("kind", "start_method"), [("cartpole", "auto"), ("gru", "auto"), ("gru", "spawn")]
)
def test_lanes_of_windows_give_the_same_bits_for_any_number_of_workers(
    kind: str, start_method: str
) -> None:
    serial, one, two = (collect_windows(n, kind, start_method) for n in (0, 1, 2))
    for window, other, wider in zip(serial, one, two, strict=True):
        assert_equal(window, other)
        assert wider.lengths.tolist() == [16] * 8
        for key, values in window.items():
            assert torch.equal(values, wider[key][:4]), key
    # The lanes of the second worker are others.
    assert not torch.equal(two[0]["frame"][:4, 0], two[0]["frame"][4:, 0])


# Seeds ----------------------------------------------------------------------------------------


def first_seeds(seeds: Any, n_threads: int = 0) -> list[int]:
    with EpisodeBatcher(4, 8, create_agent, {}, create_env, {}, n_threads, seeds) as batcher:
        result = run(batcher, 4)
    assert result.info is not None
    return result.info["seed"].tolist()


def test_seeds_may_be_a_list_and_every_entry_counts() -> None:
    given: list[Any] = [[1, 2], [2, 1], [1, 3], [1], 1, 2, [1, 2, 0], 0]
    seeds = [first_seeds(entry) for entry in given]
    assert len({seed for row in seeds for seed in row}) == 4 * len(given)
    assert first_seeds([1, 2]) == seeds[0]
    assert first_seeds([1, 2], n_threads=2) == seeds[0]


def test_without_seeds_every_batcher_draws_its_own() -> None:
    assert not set(first_seeds(None)) & set(first_seeds(None))


class NoisyAgent(MlpAgent):
    """Wants two random numbers per step and does nothing with them."""

    n_noise = 2

    def __call__(self, state: Any, observation: DictTensor, *rest: Any) -> Any:
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor({}), DictTensor({"action": action}), DictTensor({})


def test_no_two_base_seeds_share_an_episode_or_its_noise() -> None:
    # Fewer seeds than would have one twice by chance: 3,520 * 3,520 / 2 / 2**31 is 0.003.
    seeds, noise = [], []
    length = 10
    env_info = DictTensor({"length": torch.full((24,), length)})
    for base in range(40):
        with EpisodeBatcher(
            length, 24, NoisyAgent, {}, create_env, {"n_lanes": 8}, n_threads=0, seeds=base
        ) as batcher:
            for _ in range(3):
                batcher.execute(24, env_info=env_info)
                result = result_of(batcher)
                assert result.info is not None
                seeds += result.info["seed"].tolist()
                noise.append(result["noise"].reshape(24, 2 * length).clone())
        with Batcher(
            length, None, NoisyAgent, {}, create_env, {"n_lanes": 8}, n_threads=0, seeds=base
        ) as windows:
            for _ in range(2):
                windows.reset(env_info=DictTensor({"length": torch.full((8,), length)}))
                windows.execute()
                result = result_of(windows)
                assert result.info is not None
                seeds += result.info["seed"].tolist()
                noise.append(result["noise"].reshape(8, 2 * length).clone())
    assert len(set(seeds)) == len(seeds) == 40 * (3 * 24 + 2 * 8)
    assert all(0 <= seed < 2**31 for seed in seeds)
    numbers = torch.cat(noise)
    assert 0.0 <= numbers.min() <= numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.005
    # Two numbers of 24 bits may be equal by chance; two in a row, of 66,880 pairs, hardly are.
    words = (numbers.double() * 2**24).long()
    pairs = Counter((words[:, :-1] * 2**24 + words[:, 1:]).flatten().tolist())
    assert max(pairs.values()) == 1


# Row i is episode i, exactly once -------------------------------------------------------------


class OnceEnv(FaultyEnv):
    """Counts how often each episode was begun in this process."""

    begun: ClassVar[Counter[int]] = Counter()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options and "id" in options:
            OnceEnv.begun[options["id"]] += 1
        return super().reset(seed=seed, options=options)


def create_counted(seed: int, n_lanes: int) -> GymEnv:
    return GymEnv([OnceEnv() for _ in range(n_lanes)], seed)


IDS = itertools.count(1)


def request(batcher: EpisodeBatcher, lengths: list[int], **columns: int) -> DictTensor:
    """Ask for episodes with ids of their own; returns what they were asked for with."""
    env_info = DictTensor(
        {
            "id": torch.tensor([next(IDS) for _ in lengths]),
            "length": torch.tensor(lengths),
            **{key: torch.full((len(lengths),), value) for key, value in columns.items()},
        }
    )
    batcher.execute(len(lengths), env_info=env_info)
    return env_info


def check_rows(result: TemporalDictTensor, env_info: DictTensor) -> None:
    """Compare every value with what it must be."""
    lengths = env_info["length"]
    n, longest = len(lengths), int(lengths.max())
    assert result.info is not None
    assert result.info["episode"].tolist() == list(range(n))
    assert torch.equal(result.info["env_info/id"], env_info["id"])
    assert torch.equal(result.lengths, lengths)
    step = torch.arange(longest).expand(n, longest)
    inside = step < lengths[:, None]
    last = step == lengths[:, None] - 1
    identity = env_info["id"][:, None].expand(n, longest)
    expected = {
        "frame": torch.stack([identity, step], -1) * inside[..., None],
        "_frame": torch.stack([identity, step + 1], -1) * inside[..., None],
        "reward": step * inside,
        "_reward": (step + 1) * inside,
        "done": torch.zeros(n, longest),
        "_done": last,
        "_terminated": last,
        "_truncated": torch.zeros(n, longest),
        "initial_state": (step == 0) & inside,
        "_initial_state": torch.zeros(n, longest),
        "action": inside,
        "last_action": (step > 0) & inside,
        "_last_action": inside,
    }
    for key, values in expected.items():
        assert torch.equal(result[key].double(), values.double()), key


@settings(max_examples=150)
@given(
    n_lanes=st.integers(1, 5),
    n_slots=st.integers(1, 12),
    n_timesteps=st.integers(1, 7),
    requests=st.lists(
        st.lists(st.integers(1, 20), min_size=1, max_size=25), min_size=1, max_size=4
    ),
    queued=st.booleans(),
)
def test_row_i_is_episode_i_exactly_once(
    n_lanes: int, n_slots: int, n_timesteps: int, requests: list[list[int]], queued: bool
) -> None:
    OnceEnv.begun.clear()
    asked = []
    with EpisodeBatcher(
        n_timesteps, n_slots, create_agent, {}, create_counted, {"n_lanes": n_lanes}, 0, 1
    ) as batcher:
        for lengths in requests:
            asked.append(request(batcher, lengths))
            if not queued:
                check_rows(result_of(batcher), asked[-1])
        if queued:
            results = [result_of(batcher) for _ in asked]
            for result, env_info in zip(results, asked, strict=True):
                check_rows(result, env_info)
    ids = [identity for env_info in asked for identity in env_info["id"].tolist()]
    # The first request may be probed with before it runs.
    assert Counter(ids).keys() <= OnceEnv.begun.keys()
    assert all(OnceEnv.begun[identity] == 1 for identity in ids)


@pytest.fixture(
    scope="module",
    params=[(1, 1, 2), (2, 3, 7), (3, 2, 6)],
    ids=lambda p: "{}_workers_{}_lanes_{}_slots".format(*p),
)
def shared_batcher(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EpisodeBatcher, Path]]:
    n_threads, n_lanes, n_slots = request.param
    ran_in = tmp_path_factory.mktemp("ran")
    env_args = {"n_lanes": n_lanes, "ran_in": str(ran_in)}
    with EpisodeBatcher(
        4, n_slots, create_agent, {}, create_env, env_args, n_threads=n_threads, seeds=1
    ) as batcher:
        yield batcher, ran_in


@pytest.mark.parametrize("sleep_ms", [0, 1])
def test_row_i_is_episode_i_exactly_once_with_workers(
    shared_batcher: tuple[EpisodeBatcher, Path], sleep_ms: int
) -> None:
    batcher, ran_in = shared_batcher
    rng = random.Random(sleep_ms)
    asked: list[DictTensor] = []
    for _ in range(12 if sleep_ms else 60):
        for _ in range(rng.randint(1, 3)):
            lengths = [rng.choice([1, 2, 3, 4, 5, 9, 30]) for _ in range(rng.randint(1, 20))]
            asked.append(request(batcher, lengths, sleep_ms=sleep_ms))
            if rng.random() < 0.7:
                check_rows(result_of(batcher), asked.pop(0))
    while asked:
        check_rows(result_of(batcher), asked.pop(0))
    begun = Counter(
        int(line) for path in ran_in.iterdir() for line in path.read_text().splitlines()
    )
    assert set(begun.values()) == {1}


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 17), min_size=1, max_size=5), n_timesteps=st.integers(1, 9))
def test_windows_in_a_row_are_whole_episodes(lengths: list[int], n_timesteps: int) -> None:
    n = len(lengths)
    env_info = DictTensor({"id": torch.arange(n) + 1, "length": torch.tensor(lengths)})
    with Batcher(n_timesteps, None, create_agent, {}, create_env, {"n_lanes": n}, 0, 1) as batcher:
        for _ in range(2):
            batcher.reset(env_info=env_info)
            steps: dict[int, list[float]] = {row: [] for row in range(n)}
            while True:
                batcher.execute()
                window = batcher.get()
                if window is None:
                    break
                assert window.lengths.min() >= 1
                for row, length in enumerate(window.lengths.tolist()):
                    (identity,) = set(window["frame"][row, :length, 0].tolist())
                    steps[int(identity) - 1] += window["frame"][row, :length, 1].tolist()
            assert batcher.all_stopped
            assert steps == {row: list(range(length)) for row, length in enumerate(lengths)}
