"""Stable-Baselines3 itself: its policies as agents, its buffers filled, a pool as one of them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch

from rlpool import (
    Agent,
    AgentError,
    Batcher,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    NotEnoughDataError,
    SpecError,
    TemporalDictTensor,
    evaluate,
    gae,
)

from support.drifting import Drift
from support.programs import run_block

pytest.importorskip("stable_baselines3", reason='needs the extra: pip install "rlpool[sb3]"')

from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3, HerReplayBuffer
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    DictRolloutBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlpool.integrations.sb3 import PoolReplayBuffer, from_sb3, to_sb3

N_LANES = 3


class Playback(Agent):
    """Plays recorded actions: row b of step t is ``table[t, b]``, clipped to the bounds."""

    def __init__(self, table: torch.Tensor, low: Any = None, high: Any = None) -> None:
        self.table, self.low, self.high = table, low, high
        self.t = -1  # the call of the trial step

    def __call__(
        self, state: Any, observation: DictTensor, agent_info: Any = None, history: Any = None
    ) -> Any:
        drawn = self.table[max(self.t, 0)]
        self.t += 1
        taken = drawn if self.low is None else torch.clip(drawn, self.low, self.high)
        return DictTensor(), DictTensor({"action": taken, "policy_action": drawn}), DictTensor()


def create_env(seed: int, kind: type[GymEnv] = GymEnv, n: int = N_LANES, **options: Any) -> GymEnv:
    return kind([Drift(**options) for _ in range(n)], seed)


def drifts(n: int = N_LANES, **options: Any) -> DummyVecEnv:
    return DummyVecEnv([lambda: Monitor(Drift(**options)) for _ in range(n)])


def policy_for(observation: str) -> str:
    return {"dict": "MultiInputPolicy", "image": "CnnPolicy"}.get(observation, "MlpPolicy")


def window_of(table: np.ndarray[Any, Any], space: Any, **options: Any) -> TemporalDictTensor:
    """What a batcher collects with recorded actions ``[T, B, ...]``."""
    bounds = (torch.from_numpy(b) for b in (space.low, space.high)) if hasattr(space, "low") else ()
    agent = Playback(torch.from_numpy(table), *bounds)
    env_args = {"kind": GymEnvInf, "n": table.shape[1], **options}
    with Batcher(
        len(table), None, lambda: agent, {}, create_env, env_args, n_threads=0, seeds=0
    ) as batcher:
        batcher.reset()
        agent.t = 0
        batcher.execute()
        window = batcher.get()
    assert agent.t == len(table)
    return window


def assert_equal(got: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key, part in wanted.items():
            np.testing.assert_array_equal(got[key], part)
    else:
        np.testing.assert_array_equal(got, wanted)


def steps_of(model: Any, n_steps: int) -> Any:
    """What the algorithm itself collects, in its own buffer."""
    model.set_logger(Logger(None, []))
    _, callback = model._setup_learn(10_000)
    if hasattr(model, "rollout_buffer"):
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_steps)
        return model.rollout_buffer
    freq = TrainFreq(n_steps, TrainFrequencyUnit.STEP)
    model.collect_rollouts(model.env, callback, freq, model.replay_buffer, model.action_noise)
    return model.replay_buffer


# Rollout buffers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("has_values", [True, False])
@pytest.mark.parametrize(
    ("observation", "action"),
    [
        *(("vector", "box"), ("number", "discrete"), ("dict", "many"), ("image", "bits")),
        ("vector", "square"),
    ],
)
def test_a_rollout_buffer_becomes_what_the_algorithm_would_have_collected(
    observation: str, action: str, has_values: bool
) -> None:
    kinds: dict[str, Any] = {"observation": observation, "action": action, "limit": 3}
    sizes: dict[str, Any] = {"n_steps": 20, "batch_size": 60}
    model = PPO(policy_for(observation), drifts(**kinds), **sizes, seed=0, device="cpu")
    wanted = steps_of(model, 20)
    space = model.action_space
    assert wanted.episode_starts[1:].any()
    table = wanted.actions.reshape(20, N_LANES, *space.shape)
    if action == "bits":
        table = table.astype(np.int8)
    window = window_of(table, space, **kinds)
    assert (window["_truncated"] & ~window["_terminated"]).any()
    if has_values:
        window.set("value", torch.from_numpy(wanted.values.T.copy()))
        window.set("log_probability", torch.from_numpy(wanted.log_probs.T.copy()))
    kind = DictRolloutBuffer if observation == "dict" else RolloutBuffer
    options = "cpu", model.gae_lambda, model.gamma, N_LANES
    buffer = kind(20, model.observation_space, space, *options)
    before = window.clone()
    to_sb3(window, buffer, model.policy)
    assert all(torch.equal(window[key], tensor) for key, tensor in before.items())
    for key in ("observations", "actions", "episode_starts"):
        assert_equal(getattr(buffer, key), getattr(wanted, key))
    for key in ("rewards", "values", "log_probs", "advantages", "returns"):
        np.testing.assert_allclose(getattr(buffer, key), getattr(wanted, key), atol=2e-5)
    assert buffer.full


@pytest.mark.parametrize("has_values", [True, False])
def test_actions_of_an_environment_become_those_of_a_policy_that_squashes_them(
    has_values: bool,
) -> None:
    sizes: dict[str, Any] = {"n_steps": 20, "batch_size": 60, "use_sde": True}
    options = {"policy_kwargs": {"squash_output": True}, "seed": 0, "device": "cpu"}
    model = PPO("MlpPolicy", drifts(), **sizes, **options)
    wanted = copy.deepcopy(steps_of(model, 20))
    taken = model.policy.unscale_action(wanted.actions)
    assert np.abs(taken).max() > 1.2
    window = window_of(taken, model.action_space)
    window = window.get([key for key in window if key != "policy_action"])
    if has_values:
        window.set("value", torch.from_numpy(wanted.values.T.copy()))
        window.set("log_probability", torch.from_numpy(wanted.log_probs.T.copy()))
    to_sb3(window, model)
    for key in ("observations", "actions", "values", "log_probs", "advantages"):
        got = getattr(model.rollout_buffer, key)
        np.testing.assert_allclose(got, getattr(wanted, key), atol=1e-3)


def test_a_model_trains_on_windows_of_its_own_policy() -> None:
    model = PPO("MlpPolicy", drifts(), n_steps=16, batch_size=24, n_epochs=1, seed=0, device="cpu")
    model.set_logger(Logger(None, []))
    before = copy.deepcopy(model.policy.state_dict())
    env_args = {"kind": GymEnvInf}
    with Batcher(
        16, None, from_sb3, {"model": model}, create_env, env_args, n_threads=0, seeds=0
    ) as batcher:
        batcher.reset()
        for _ in range(2):
            batcher.update(model.policy.state_dict())
            batcher.execute()
            window = batcher.get()
            to_sb3(window, model)
            # The action that was drawn, not the one that was clipped.
            drawn = window["policy_action"].transpose(0, 1)
            assert_equal(model.rollout_buffer.actions, drawn.numpy())
            observations = torch.from_numpy(model.rollout_buffer.observations).flatten(0, 1)
            value, log_probability, _ = model.policy.evaluate_actions(
                observations, drawn.flatten(0, 1)
            )
            torch.testing.assert_close(window["value"].T.flatten(), value.detach().flatten())
            torch.testing.assert_close(
                window["log_probability"].T.flatten(), log_probability.detach()
            )
            model.train()
    assert any(not torch.equal(before[k], v) for k, v in model.policy.state_dict().items())


def test_episodes_of_any_length_fill_a_buffer_of_one_environment() -> None:
    model = A2C("MlpPolicy", drifts(), seed=0, device="cpu", gae_lambda=0.9)
    with EpisodeBatcher(
        8, 10, from_sb3, {"model": model}, create_env, {}, n_threads=0, seeds=0
    ) as batcher:
        batcher.execute(10)
        episodes = batcher.get()
    assert len(set(episodes.lengths.tolist())) > 1
    n_steps = int(episodes.lengths.sum())
    buffer = RolloutBuffer(
        n_steps, model.observation_space, model.action_space, "cpu", 0.9, model.gamma, 1
    )
    to_sb3(episodes, buffer, model.policy)
    with torch.no_grad():
        next_value = model.policy.predict_values(episodes["_frame"].flatten(0, 1))
    advantage = gae(
        episodes["_reward"],
        episodes["value"],
        next_value.view(10, -1),
        episodes["_terminated"],
        episodes["_done"],
        model.gamma,
        0.9,
        lengths=episodes.lengths,
    )
    wanted = episodes.clone()
    wanted.set("advantage", advantage)
    got = torch.from_numpy(buffer.advantages[:, 0])
    torch.testing.assert_close(got, wanted.flatten()["advantage"], atol=1e-5, rtol=1e-5)


def test_rows_that_end_in_the_middle_of_episodes_are_bootstrapped_there() -> None:
    model = A2C("MlpPolicy", drifts(), seed=0, device="cpu")
    window = window_of(np.full((6, 2, 2), 0.1, np.float32), model.action_space)
    window = window.temporal_slice(1, 6)
    assert not (window["_done"] | window["initial_state"]).any()
    buffer = RolloutBuffer(10, model.observation_space, model.action_space, "cpu", 1, 0.9, 1)
    to_sb3(window, buffer, model.policy)
    apart = RolloutBuffer(5, model.observation_space, model.action_space, "cpu", 1, 0.9, 2)
    to_sb3(window, apart, model.policy)
    np.testing.assert_allclose(buffer.returns[:, 0], apart.returns.T.flatten(), atol=1e-5)


# Replay buffers ----------------------------------------------------------------------------------


def off_policy_model(observation: str, action: str, **options: Any) -> Any:
    kinds = {"observation": observation, "action": action}
    options = {"seed": 0, "device": "cpu", "buffer_size": 90, "learning_starts": 0, **options}
    algorithm: Any = SAC if action in ("box", "square") else DQN
    return algorithm(policy_for(observation), drifts(**kinds), **options)


@pytest.mark.parametrize("into", ["sb3", "pool"])
@pytest.mark.parametrize(
    ("observation", "action"),
    [
        *(("vector", "box"), ("dict", "box"), ("image", "discrete"), ("number", "discrete")),
        ("vector", "square"),
    ],
)
def test_a_replay_buffer_becomes_what_the_algorithm_would_have_collected(
    observation: str, action: str, into: str
) -> None:
    model = off_policy_model(observation, action)
    wanted = steps_of(model, 20)
    space = model.action_space
    table = wanted.actions[:20].reshape(20, N_LANES, *space.shape)
    if action in ("box", "square"):
        table = model.policy.unscale_action(table)
    window = window_of(table, space, observation=observation, action=action)
    sizes = 90, model.observation_space, space, "cpu", N_LANES
    if into == "pool":
        model.replay_buffer = buffer = PoolReplayBuffer(*sizes)
        to_sb3(window, model)
        assert_holds(buffer, wanted)
        return
    buffer = (DictReplayBuffer if observation == "dict" else ReplayBuffer)(*sizes)
    to_sb3(window, buffer)
    assert buffer.pos == 20
    assert wanted.timeouts.any()
    assert (wanted.dones * (1 - wanted.timeouts)).any()
    for key in ("observations", "next_observations", "rewards", "dones", "timeouts"):
        assert_equal(getattr(buffer, key), getattr(wanted, key))
    np.testing.assert_allclose(buffer.actions, wanted.actions, atol=1e-6)


def assert_holds(buffer: PoolReplayBuffer, wanted: Any) -> None:
    """Each sub-pool holds the transitions of its environment, in order."""
    n = wanted.size()
    assert buffer.size() == n
    assert buffer.pool.lengths == [n] * wanted.n_envs
    every = buffer.pool.transitions()

    def of_all(array: Any) -> Any:
        return array[:n].swapaxes(0, 1).reshape(-1, *array.shape[2:])

    for prefix, array in ("", wanted.observations), ("_", wanted.next_observations):
        parts = array if isinstance(array, dict) else {"frame": array}
        for key, part in parts.items():
            np.testing.assert_array_equal(every[prefix + key].numpy(), of_all(part))
    np.testing.assert_allclose(every["action"].numpy(), of_all(wanted.actions), atol=1e-6)
    np.testing.assert_array_equal(every["_reward"].numpy(), of_all(wanted.rewards))
    np.testing.assert_array_equal(every["_done"].numpy(), of_all(wanted.dones) > 0)
    ended = of_all(wanted.dones * (1 - wanted.timeouts)) > 0
    np.testing.assert_array_equal(every["_terminated"].numpy(), ended)


def test_episodes_go_into_a_replay_buffer_row_after_row() -> None:
    with EpisodeBatcher(
        8, 5, lambda: Playback(torch.full((99, N_LANES, 2), 0.3)), {}, create_env, {}, n_threads=0
    ) as batcher:
        batcher.execute(5, env_info={"start": [0.0, 1.5, -1.0, 0.5, 1.9]})
        episodes = batcher.get()
    env = Drift()
    buffer = ReplayBuffer(100, env.observation_space, env.action_space, "cpu")
    to_sb3(episodes, buffer)
    steps = episodes.flatten()
    assert buffer.pos == len(steps["_reward"]) < 35
    assert_equal(buffer.observations[: buffer.pos, 0], steps["frame"].numpy())
    assert_equal(buffer.next_observations[: buffer.pos, 0], steps["_frame"].numpy())


# What does not fit -------------------------------------------------------------------------------


def a_window(n: int = N_LANES, **options: Any) -> TemporalDictTensor:
    return window_of(np.full((5, n, 2), 0.1, np.float32), Drift().action_space, **options)


def rollout_buffer(n_steps: int = 5, n_envs: int = N_LANES) -> Any:
    env = Drift()
    return RolloutBuffer(n_steps, env.observation_space, env.action_space, "cpu", n_envs=n_envs)


def replay_buffer(kind: Any = ReplayBuffer, n_envs: int = 1, **options: Any) -> Any:
    env = Drift()
    return kind(60, env.observation_space, env.action_space, "cpu", n_envs, **options)


def test_windows_of_another_size_are_refused() -> None:
    with pytest.raises(SpecError, match="buffer_size=6"):
        to_sb3(a_window(), rollout_buffer(6))
    with pytest.raises(SpecError, match="n_envs=2"):
        to_sb3(a_window(), replay_buffer(n_envs=2))


def test_values_that_are_needed_and_missing_are_asked_for() -> None:
    with pytest.raises(SpecError, match="policy is missing"):
        to_sb3(a_window(), rollout_buffer())


@pytest.mark.parametrize("kind", [NStepReplayBuffer, "memory"])
def test_buffers_that_look_ahead_refuse_rows_without_an_end(kind: Any) -> None:
    if kind == "memory":
        options = {"optimize_memory_usage": True, "handle_timeout_termination": False}
        buffer = replay_buffer(**options)
    else:
        buffer = replay_buffer(kind)
    with pytest.raises(SpecError, match="middle of episodes"):
        to_sb3(a_window(), buffer)


def counted(first: int, n_steps: int, n_rows: int = N_LANES) -> TemporalDictTensor:
    """Pieces of episodes without an end, in which every state is the same and rewards tell them."""
    reward = first + torch.arange(n_rows)[:, None] * 100.0 + torch.arange(n_steps)
    frame, flag = torch.zeros(n_rows, n_steps, 3), torch.zeros(n_rows, n_steps, dtype=torch.bool)
    flags = ("_done", "_terminated", "_truncated", "initial_state")
    action = torch.zeros(n_rows, n_steps, 2)
    return TemporalDictTensor(
        {
            "frame": frame,
            "_frame": frame,
            "action": action,
            "_reward": reward,
            **dict.fromkeys(flags, flag),
        }
    )


@pytest.mark.parametrize("n_envs", [1, N_LANES])
def test_returns_of_several_steps_stay_within_the_rows_that_filled_a_pool(n_envs: int) -> None:
    buffer = replay_buffer(PoolReplayBuffer, n_envs, n_steps=3, gamma=1.0)
    for first in (0, 1000):
        to_sb3(counted(first, 5), buffer)
    one = np.zeros((n_envs, 3), np.float32)
    for _ in range(2):  # and then steps of its own, from the same state
        nothing = np.zeros(n_envs)
        buffer.add(one, one, one[:, :2], nothing - 5000, nothing, [{}] * n_envs)
    assert buffer.pos == 10 * N_LANES // n_envs + 2
    expected = {-10_000.0, -5000.0}
    for start in (first + 100 * row for first in (0, 1000) for row in range(N_LANES)):
        rewards = start + np.arange(5)
        expected |= {float(rewards[t : t + 3].sum()) for t in range(5)}
    drawn = {value for _ in range(40) for value in buffer.sample(60).rewards.flatten().tolist()}
    assert drawn == expected


def beginning(at: list[tuple[int, int]]) -> TemporalDictTensor:
    """Pieces in which episodes begin in some rows and steps, though none ended there."""
    window = counted(0, 6)
    begins = torch.zeros(N_LANES, 6, dtype=torch.bool)
    for row, step in at:
        begins[row, step] = True
    window.set("initial_state", begins)
    return window


def test_a_pool_does_not_join_an_episode_to_one_without_an_end() -> None:
    buffer = replay_buffer(PoolReplayBuffer, N_LANES, n_steps=3, gamma=1.0)
    to_sb3(beginning([(1, 3)]), buffer)
    drawn = {value for _ in range(40) for value in buffer.sample(18).rewards.flatten().tolist()}
    assert {100 + 101 + 102, 101 + 102, 102, 103 + 104 + 105} <= drawn
    assert not drawn & {101 + 102 + 103, 102 + 103 + 104}


def test_a_buffer_that_looks_ahead_refuses_episodes_after_those_without_an_end() -> None:
    buffer = replay_buffer(NStepReplayBuffer, N_LANES, n_steps=3, gamma=1.0)
    with pytest.raises(SpecError, match="rows end in the middle of episodes"):
        to_sb3(beginning([(1, 3)]), buffer)
    to_sb3(beginning([(0, 0), (1, 0), (2, 0)]), buffer)
    to_sb3(beginning([]), buffer)  # the next window
    with pytest.raises(SpecError, match="the steps in the buffer end in the middle"):
        to_sb3(beginning([(2, 0)]), buffer)


def test_other_targets_are_refused() -> None:
    with pytest.raises(SpecError, match="cannot fill a dict"):
        to_sb3(a_window(), {})
    with pytest.raises(SpecError, match="HerReplayBuffer"):
        to_sb3(a_window(), HerReplayBuffer.__new__(HerReplayBuffer))
    with pytest.raises(SpecError, match="pass a TemporalDictTensor"):
        to_sb3({}, rollout_buffer())  # type: ignore[arg-type]
    model = PPO("MlpPolicy", VecNormalize(drifts()), device="cpu")
    with pytest.raises(SpecError, match="VecNormalize"):
        to_sb3(a_window(), model)


@pytest.mark.parametrize("action", ["discrete", "bits", "many"])
def test_other_actions_are_refused(action: str) -> None:
    env = Drift(action=action)
    buffer = ReplayBuffer(60, env.observation_space, env.action_space, "cpu", N_LANES)
    window = window_of(np.zeros((4, N_LANES, 2), np.float32), Drift().action_space)
    with pytest.raises(SpecError, match=r"'action' .* is float32\[2\], the buffer has"):
        to_sb3(window, buffer)


def test_numbers_are_no_actions_of_a_box() -> None:
    options = {"action": "discrete"}
    space = Drift(**options).action_space
    window = window_of(np.zeros((4, N_LANES), np.int64), space, **options)
    model = PPO("MlpPolicy", drifts(), n_steps=4, batch_size=12, device="cpu")
    for target in (replay_buffer(n_envs=N_LANES), model):
        with pytest.raises(SpecError, match=r"action' .* is int64\[\], the buffer has Box"):
            to_sb3(window, target)


def test_numbers_that_a_buffer_does_not_hold_are_refused() -> None:
    window = a_window()
    policy = PPO("MlpPolicy", drifts(), device="cpu").policy
    others = {
        "policy_action": torch.full((*window["action"].shape,), 1e300, dtype=torch.float64),
        "frame": torch.full((*window["frame"].shape,), 1e300, dtype=torch.float64),
        "_reward": torch.full((*window["_reward"].shape,), 1e300, dtype=torch.float64),
    }
    for key, other in others.items():
        steps = TemporalDictTensor({**dict(window.items()), key: other}, window.lengths)
        with pytest.raises(SpecError, match=f"'{key}' should fit float32, got 1e.300"):
            to_sb3(steps, rollout_buffer(), policy)


def test_other_observations_are_refused_by_name_and_shape() -> None:
    env = Drift("dict")
    buffer = DictReplayBuffer(60, env.observation_space, env.action_space, "cpu", N_LANES)
    with pytest.raises(SpecError, match=r"keys \['number', 'place'\]|keys \['place', 'number'\]"):
        to_sb3(a_window(), buffer)
    env = Drift("image")
    buffer = ReplayBuffer(60, env.observation_space, env.action_space, "cpu", N_LANES)
    with pytest.raises(SpecError, match="the model has"):
        to_sb3(a_window(), buffer)
    window = a_window().get(["frame", "_frame", "action", "_reward", "initial_state"])
    with pytest.raises(SpecError, match=r"keys \['_done'\], got"):
        to_sb3(window, replay_buffer(n_envs=N_LANES))


# A pool as replay buffer -------------------------------------------------------------------------


def filled(kind: Any, n: int = 40, **options: Any) -> Any:
    """A buffer with steps of random actions."""
    buffer = replay_buffer(kind, N_LANES, **options)
    rng = np.random.default_rng(0)
    env = drifts()
    observations = env.reset()
    for _ in range(n):
        action = rng.uniform(-1, 1, (N_LANES, 2)).astype(np.float32)
        after, reward, done, infos = env.step(action)
        last = after.copy()
        for i in np.flatnonzero(done):
            last[i] = infos[i]["terminal_observation"]
        buffer.add(observations, last, action, reward, done, infos)
        observations = after
    return buffer


def test_a_pool_keeps_the_newest_transitions_of_each_environment() -> None:
    pool, wanted = filled(PoolReplayBuffer), filled(ReplayBuffer)
    assert pool.full
    assert wanted.full
    for key in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        array = getattr(wanted, key)  # the oldest first
        setattr(wanted, key, np.roll(array, -wanted.pos, axis=0))
    assert_holds(pool, wanted)


def known(samples: list[Any]) -> dict[bytes, tuple[bytes, ...]]:
    """Which observation and action came with what else."""
    found = {}
    for batch in samples:
        assert {batch.dones.shape, batch.rewards.shape} == {(len(batch.actions), 1)}
        rest = [batch.next_observations, batch.dones, batch.rewards.round(decimals=4)]
        rest += [] if batch.discounts is None else [batch.discounts.round(decimals=4)]
        for i in range(len(batch.actions)):
            name = batch.observations[i].numpy().tobytes() + batch.actions[i].numpy().tobytes()
            found[name] = tuple(each[i].numpy().tobytes() for each in rest)
    return found


def test_samples_are_those_of_a_replay_buffer() -> None:
    np.random.seed(0)  # noqa: NPY002  (what a replay buffer draws with)
    pool, wanted = filled(PoolReplayBuffer, 15), filled(ReplayBuffer, 15)
    got = known([pool.sample(512) for _ in range(4)])
    assert len(got) == 15 * N_LANES
    assert got == known([wanted.sample(512) for _ in range(4)])


def test_samples_of_several_steps_are_those_of_an_n_step_buffer() -> None:
    np.random.seed(0)  # noqa: NPY002
    options: dict[str, Any] = {"n_steps": 3, "gamma": 0.9}
    pool = filled(PoolReplayBuffer, 15, **options)
    wanted = known([filled(NStepReplayBuffer, 15, **options).sample(512) for _ in range(4)])
    got = known([pool.sample(512) for _ in range(4)])
    assert len(wanted) == 15 * N_LANES
    assert got.keys() == wanted.keys()
    for name, (after, dones, returns, discounts) in wanted.items():
        assert got[name][:3] == (after, dones, returns)
        # After a termination the discount is of no account, and a pool says 0.
        assert got[name][3] == discounts or np.frombuffer(dones, np.float32) == 1


def test_timeouts_are_ends_where_they_are_not_handled() -> None:
    np.random.seed(0)  # noqa: NPY002
    kinds = PoolReplayBuffer, ReplayBuffer
    pool, wanted = (filled(kind, 15, handle_timeout_termination=False) for kind in kinds)
    assert known([pool.sample(2000)]) == known([wanted.sample(2000)])


def test_samples_are_normalised_by_the_environment() -> None:
    np.random.seed(0)  # noqa: NPY002
    env = VecNormalize(drifts())
    env.reset()
    for _ in range(20):
        env.step(np.zeros((N_LANES, 2), np.float32))
    pool, wanted = filled(PoolReplayBuffer, 15), filled(ReplayBuffer, 15)
    got, expected = (known([each.sample(512, env)]) for each in (pool, wanted))
    assert got == expected
    assert got != known([pool.sample(512)])
    pool.n_steps = 3
    with pytest.raises(SpecError, match="norm_reward=False"):
        pool.sample(4, env)


def test_parts_of_an_observation_are_normalised_by_the_environment() -> None:
    env = VecNormalize(drifts(observation="dict"), norm_obs_keys=["place"])
    options: dict[str, Any] = {"learning_starts": 0, "train_freq": 1000, "device": "cpu"}
    model = SAC("MultiInputPolicy", env, replay_buffer_class=PoolReplayBuffer, **options)
    model.learn(45)
    every = model.replay_buffer.pool.transitions()
    wanted = env.normalize_obs({"place": every["_place"].numpy(), "number": None})["place"]
    batch = model.replay_buffer.sample(64, env)
    rows = {row.tobytes() for row in wanted}
    assert all(row.numpy().tobytes() in rows for row in batch.next_observations["place"])
    assert set(batch.observations["number"].flatten().tolist()) <= set(range(9))


@pytest.mark.parametrize("is_filled_by", ["add", "to_sb3"])
def test_a_pool_has_the_dtypes_of_the_spaces_whatever_comes_first(is_filled_by: str) -> None:
    buffer = replay_buffer(PoolReplayBuffer, N_LANES)
    window = counted(0, 2)
    whole = window.clone()
    for key in ("frame", "_frame"):
        whole.set(key, whole[key].long())
    for part, frame in ((whole, 0), (window, 0.5)):
        if is_filled_by == "add":
            row = part["frame"][:, 0].numpy() + frame
            action = np.zeros((N_LANES, 2))
            buffer.add(row, row, action, np.zeros(N_LANES), np.zeros(N_LANES), [{}] * N_LANES)
        else:
            part.set("_frame", part["_frame"] + frame)
            to_sb3(part, buffer)
    specs = buffer.pool.specs
    assert {str(spec.dtype) for key, spec in specs.items() if "frame" in key} == {"float32"}
    assert specs["action"].dtype == np.float32
    assert buffer.pool.transitions()["_frame"].max() == 0.5
    assert buffer.sample(4).observations.dtype == torch.float32
    tall = np.full((N_LANES, 3), 1e300)
    with pytest.raises(SpecError, match="'frame' should fit float32"):
        buffer.add(tall, tall, np.zeros((N_LANES, 2)), np.zeros(3), np.zeros(3), [{}] * N_LANES)


def test_an_empty_pool_says_so_and_a_reset_empties_it() -> None:
    pool = filled(PoolReplayBuffer)
    pool.reset()
    assert (pool.size(), len(pool.pool)) == (0, 0)
    with pytest.raises(NotEnoughDataError):
        pool.sample(4)


def test_optimize_memory_usage_is_refused() -> None:
    with pytest.raises(SpecError, match="stores every observation once"):
        replay_buffer(PoolReplayBuffer, optimize_memory_usage=True)


@pytest.mark.parametrize(
    ("observation", "action", "options"),
    [
        ("vector", "box", {}),
        ("dict", "box", {"storage": "memmap"}),
        ("image", "discrete", {"storage": "shared"}),
        ("vector", "box", {"n_steps": 3, "gamma": 0.9}),
    ],
)
def test_algorithms_learn_from_a_pool_and_save_it(
    observation: str, action: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if options.get("storage") == "memmap":
        options = {**options, "directory": tmp_path}
    model = off_policy_model(
        observation,
        action,
        learning_starts=6,
        batch_size=32,
        replay_buffer_class=PoolReplayBuffer,
        replay_buffer_kwargs=options,
    )
    model.learn(60)
    assert model._n_updates > 0
    assert len(model.replay_buffer.pool) == 60
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    again = off_policy_model(observation, action)
    again.load_replay_buffer(tmp_path / "buffer.pkl")
    assert isinstance(again.replay_buffer, PoolReplayBuffer)
    assert (again.replay_buffer.pos, again.replay_buffer.full) == (20, False)
    one, two = model.replay_buffer.sample(8), again.replay_buffer.sample(8)
    for got, wanted in zip(two, one, strict=True):
        assert_equal(got, wanted)
    again.learn(30)
    assert len(again.replay_buffer.pool) == 90


def test_a_seeded_algorithm_learns_the_same_from_a_pool_again() -> None:
    def learned() -> torch.Tensor:
        model = off_policy_model("vector", "box", replay_buffer_class=PoolReplayBuffer)
        model.learn(60)
        return model.policy.actor.mu.weight.detach().clone()

    assert torch.equal(learned(), learned())


class Aim(gym.Env[Any, Any]):
    """One step: the reward is the closer to 0, the closer the action is to the observation."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.target = self.np_random.uniform(-0.8, 0.8, 1).astype(np.float32)
        return self.target, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.target, -float(abs(action - self.target)[0]), True, False, {}


def test_soft_actor_critic_learns_to_aim_on_a_pool() -> None:
    options: dict[str, Any] = {"learning_rate": 3e-3, "learning_starts": 50, "batch_size": 64}
    model = SAC(
        "MlpPolicy",
        Aim(),
        replay_buffer_class=PoolReplayBuffer,
        policy_kwargs={"net_arch": [32]},
        ent_coef=0.01,
        seed=0,
        device="cpu",
        **options,
    )

    def mean_return() -> float:
        agent = from_sb3(model, deterministic=True)
        return evaluate(agent, create_aims, 40, seeds=1).returns.mean().item()

    before = mean_return()
    model.learn(500)
    assert before < -0.3
    assert mean_return() > -0.15


def create_aims(seed: int) -> GymEnv:
    return GymEnv([Aim() for _ in range(4)], seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_soft_actor_critic_learns_pendulum_on_a_pool() -> None:
    model = SAC(
        "MlpPolicy",
        "Pendulum-v1",
        learning_rate=1e-3,
        replay_buffer_class=PoolReplayBuffer,
        policy_kwargs={"net_arch": [128, 128]},
        seed=0,
        device="cpu",
    )
    model.learn(6000)
    agent = from_sb3(model, deterministic=True)
    returns = evaluate(agent, create_pendulums, 20, seeds=1).returns
    assert returns.mean() > -250  # without learning about -1200


def create_pendulums(seed: int) -> GymEnv:
    return GymEnv([gym.make("Pendulum-v1") for _ in range(4)], seed)


# Policies as agents ------------------------------------------------------------------------------

MODELS: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "ppo box": (PPO, "vector", "box", {"n_steps": 32, "batch_size": 48}),
    "ppo discrete": (PPO, "number", "discrete", {}),
    "a2c many": (A2C, "dict", "many", {}),
    "ppo bits": (PPO, "vector", "bits", {}),
    "ppo sde": (PPO, "vector", "box", {"use_sde": True}),
    "ppo squashed": (
        *(PPO, "vector", "box"),
        {"use_sde": True, "policy_kwargs": {"squash_output": True}},
    ),
    "sac": (SAC, "dict", "box", {}),
    "sac sde": (SAC, "vector", "box", {"use_sde": True}),
    "td3": (TD3, "vector", "box", {}),
    "ddpg": (DDPG, "vector", "box", {}),
    "dqn": (DQN, "vector", "discrete", {}),
    "dqn images": (DQN, "image", "discrete", {"buffer_size": 50}),
}


def model_of(name: str) -> tuple[Any, dict[str, Any]]:
    algorithm, observation, action, options = MODELS[name]
    kinds = {"observation": observation, "action": action}
    return algorithm(
        policy_for(observation), drifts(**kinds), seed=0, device="cpu", **options
    ), kinds


def named(observation: dict[str, Any]) -> Any:
    """Observations as ``model.predict`` takes them."""
    return observation.get("frame", observation)


@pytest.mark.parametrize("name", MODELS)
def test_the_best_actions_are_those_that_the_model_predicts(name: str) -> None:
    model, kinds = model_of(name)
    agent_args = {"model": model, "deterministic": True}
    with EpisodeBatcher(
        8, 3, from_sb3, agent_args, create_env, kinds, n_threads=0, seeds=0
    ) as batcher:
        batcher.execute(3)
        episodes = batcher.get()
    steps = episodes.flatten()
    keys = ("place", "number") if kinds["observation"] == "dict" else ("frame",)
    seen = named({key: steps[key].numpy() for key in keys})
    wanted, _ = model.predict(seen, deterministic=True)
    np.testing.assert_allclose(steps["action"].numpy(), wanted, atol=1e-5)
    assert "value" not in episodes


class NarrowAim(Aim):
    """Has bounds that float32 would round to numbers beyond them."""

    action_space = gym.spaces.Box(-0.1, 0.1, (1,), np.float64)


def test_clipped_actions_are_within_the_bounds_of_a_space_of_float64() -> None:
    model = PPO("MlpPolicy", NarrowAim(), seed=0, device="cpu")
    observation = {"frame": torch.zeros(50, 1), "noise": torch.linspace(0.01, 0.99, 50)[:, None]}
    _, output, _ = from_sb3(model)(None, DictTensor(observation))
    actions = output["action"].numpy()
    assert all(NarrowAim.action_space.contains(action) for action in actions)
    assert (actions.min(), actions.max()) == (-0.1, 0.1)  # as model.predict clips them


@pytest.mark.parametrize("name", set(MODELS) - {"dqn images"})
def test_samples_are_distributed_as_those_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    model, kinds = model_of(name)
    if name == "dqn":
        model.exploration_rate = 0.6
    n = 4000
    env = Drift(**kinds)
    one = env.reset()[0]
    parts = one if isinstance(one, dict) else {"frame": one}
    row = {key: torch.as_tensor(np.asarray(part)) for key, part in parts.items()}
    agent = from_sb3(model)
    seen = {key: torch.stack([part] * n) for key, part in row.items()}
    noise = torch.rand(n, agent.n_noise) if agent.n_noise else torch.zeros(n, 0)
    _, output, _ = agent(None, DictTensor({**seen, "noise": noise}))
    arrays = {key: part.numpy() for key, part in seen.items()}
    # gSDE has one matrix of noise for a while, and DQN explores with the whole batch or not at all.
    few = 10 if "sde" in name or "squashed" in name or name == "dqn" else n
    wanted = []
    for _ in range(n // few):
        if model.use_sde:
            getattr(model, "actor", model.policy).reset_noise(few)
        wanted.append(model.predict(named({key: a[:few] for key, a in arrays.items()}))[0])
    both = output["action"].numpy().astype(np.float64), np.concatenate(wanted).astype(np.float64)
    assert both[0].shape == both[1].shape
    np.testing.assert_allclose(*(each.mean(0) for each in both), atol=0.08)
    np.testing.assert_allclose(*(each.std(0) for each in both), atol=0.08)
    if isinstance(env.action_space, gym.spaces.Box):
        shares = [0.1, 0.5, 0.9]
        np.testing.assert_allclose(*(np.quantile(each, shares, 0) for each in both), atol=0.15)


def test_episodes_of_a_policy_are_the_same_for_any_number_of_workers() -> None:
    model, kinds = model_of("ppo box")
    model.learn(96)  # afterwards its distribution has tensors that cannot be copied
    agent = from_sb3(model)
    found = []
    for n_threads in (0, 2):
        with EpisodeBatcher(
            8, 12, agent.copy, {}, create_env, kinds, n_threads=n_threads, seeds=0
        ) as batcher:
            batcher.execute(12)
            found.append(batcher.get())
    for key in ("action", "policy_action", "value", "log_probability", "frame"):
        assert torch.equal(found[0][key], found[1][key])


def test_workers_get_the_policy_without_environments_and_buffers() -> None:
    # What Stable-Baselines3 wraps images in cannot be pickled.
    model, kinds = model_of("dqn images")
    model.learn(5)
    with pytest.raises(TypeError, match="pickle"):
        cloudpickle.dumps(model.env)
    agent = from_sb3(model, deterministic=True)
    with EpisodeBatcher(8, 3, agent.copy, {}, create_env, kinds, n_threads=1, seeds=0) as batcher:
        batcher.execute(3)
        episodes = batcher.get()
    actions, _ = model.predict(episodes["frame"][:, 0].numpy(), deterministic=True)
    np.testing.assert_array_equal(episodes["action"][:, 0].numpy(), actions)


def test_evaluation_gives_the_returns_of_evaluate_policy() -> None:
    model, kinds = model_of("sac sde")
    model.learning_starts = 20
    model.learn(60)
    agent = from_sb3(model, deterministic=True)
    returns = evaluate(agent, create_env, 4, env_args=kinds, n_threads=1).returns
    wanted, _ = evaluate_policy(
        model, drifts(1, **kinds), 4, deterministic=True, return_episode_rewards=True
    )
    np.testing.assert_allclose(returns.numpy(), wanted, atol=1e-4)


def test_some_episodes_may_take_the_best_actions() -> None:
    for name in ("ppo box", "sac", "dqn"):
        model, kinds = model_of(name)
        model.exploration_rate = 1.0
        with EpisodeBatcher(
            8, 6, from_sb3, {"model": model}, create_env, kinds, n_threads=0, seeds=0
        ) as batcher:
            is_best = [True, False] * 3
            batcher.execute(6, agent_info={"deterministic": is_best})
            first = batcher.get().temporal_index(0)
        keys = ("place", "number") if kinds["observation"] == "dict" else ("frame",)
        seen = named({key: first[key].numpy() for key in keys})
        best, _ = model.predict(seen, deterministic=True)
        differs = np.abs(first["action"].numpy() - best).reshape(6, -1).max(1) > 1e-5
        assert not differs[::2].any()
        assert differs[1::2].any()


def test_the_statistics_of_the_environment_are_applied() -> None:
    env = VecNormalize(drifts())
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=32, seed=0, device="cpu")
    model.learn(96)
    agent = pickle.loads(pickle.dumps(from_sb3(model, deterministic=True)))
    frame = torch.randn(5, 3)
    wanted, _ = model.predict(env.normalize_obs(frame.numpy()), deterministic=True)
    _, output, _ = agent(None, DictTensor({"frame": frame}))
    np.testing.assert_allclose(output["action"].numpy(), wanted, atol=1e-6)
    plain, _ = model.predict(frame.numpy(), deterministic=True)
    assert np.abs(plain - wanted).max() > 1e-4
    env.obs_rms.mean += 5  # a copy: it stays what it was
    _, again, _ = agent(None, DictTensor({"frame": frame}))
    assert torch.equal(again["action"], output["action"])


def test_making_an_agent_draws_no_random_numbers_and_updating_it_takes_parameters() -> None:
    model, _ = model_of("ppo box")
    before = torch.get_rng_state()
    agent = from_sb3(model, deterministic=True)
    assert torch.equal(torch.get_rng_state(), before)
    frame = DictTensor({"frame": torch.randn(4, 3)})
    with torch.no_grad():
        model.policy.action_net.bias += 0.25
    old = agent(None, frame)[1]["action"]
    agent.update(model.policy.state_dict())
    new = agent(None, frame)[1]["action"]
    torch.testing.assert_close(new, old + 0.25)


def test_what_is_no_model_or_needs_more_than_an_observation_is_refused() -> None:
    with pytest.raises(SpecError, match=r"PPO\.load"):
        from_sb3(PPO)
    model, _ = model_of("ppo box")
    model.policy.lstm_actor = torch.nn.LSTM(1, 1)
    with pytest.raises(SpecError, match="needs more than an observation"):
        from_sb3(model)


def test_environments_unlike_those_of_the_model_are_refused_by_name() -> None:
    model, _ = model_of("sac")
    with pytest.raises(AgentError, match=r"keys \['number', 'place'\]|keys \['place', 'number'\]"):
        evaluate(from_sb3(model), create_env, 3)


def test_action_noise_of_a_model_is_left_to_the_model() -> None:
    noise = NormalActionNoise(np.zeros(2), np.ones(2))
    model = TD3("MlpPolicy", drifts(), action_noise=noise, seed=0, device="cpu")
    agent = from_sb3(model)
    assert agent.n_noise == 0


@pytest.mark.parametrize("number", range(3))
def test_the_programs_of_the_page_run(number: int, program_folder: Path, capfd: Any) -> None:
    run_block("docs/neighbours/sb3.md", number, program_folder)
    output, errors = capfd.readouterr()
    assert errors == ""
    assert output
