"""Policies of Stable-Baselines3 as agents, beside the real library."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch

from rlpool import AgentError, DictTensor, EpisodeBatcher, GymEnv, SpecError, evaluate

from support.drifting import Drift
from support.programs import run_block

pytest.importorskip("stable_baselines3", reason='needs the extra: pip install "rlpool[sb3]"')

from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlpool.integrations.sb3 import from_sb3

N_LANES = 3


def create_env(seed: int, **options: Any) -> GymEnv:
    return GymEnv([Drift(**options) for _ in range(N_LANES)], seed)


def drifts(n: int = N_LANES, **options: Any) -> DummyVecEnv:
    return DummyVecEnv([lambda: Monitor(Drift(**options)) for _ in range(n)])


def policy_for(observation: str) -> str:
    return {"dict": "MultiInputPolicy", "image": "CnnPolicy"}.get(observation, "MlpPolicy")


MODELS: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "ppo box": (PPO, "vector", "box", {"n_steps": 32, "batch_size": 48}),
    "ppo discrete": (PPO, "number", "discrete", {}),
    "a2c many": (A2C, "dict", "many", {}),
    "sac": (SAC, "dict", "box", {}),
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


class Narrow(Drift):
    """Has bounds that float32 would round to numbers beyond them."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = gym.spaces.Box(-0.1, 0.1, (1,), np.float64)


def test_clipped_actions_are_within_the_bounds_of_a_space_of_float64() -> None:
    env = Narrow()
    model = PPO("MlpPolicy", env, seed=0, device="cpu")
    observation = {"frame": torch.zeros(50, 3), "noise": torch.linspace(0.01, 0.99, 50)[:, None]}
    _, output, _ = from_sb3(model)(None, DictTensor(observation))
    actions = output["action"].numpy()
    assert all(env.action_space.contains(action) for action in actions)
    assert (actions.min(), actions.max()) == (-0.1, 0.1)  # as model.predict clips them


@pytest.mark.parametrize("name", ["ppo box", "ppo discrete", "a2c many", "sac", "td3"])
def test_samples_are_distributed_as_those_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    model, kinds = model_of(name)
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
    wanted, _ = model.predict(named(arrays))
    both = output["action"].numpy().astype(np.float64), wanted.astype(np.float64)
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
    model, kinds = model_of("sac")
    model.learning_starts = 20
    model.learn(60)
    agent = from_sb3(model, deterministic=True)
    returns = evaluate(agent, create_env, 4, env_args=kinds, n_workers=1).returns
    wanted, _ = evaluate_policy(
        model, drifts(1, **kinds), 4, deterministic=True, return_episode_rewards=True
    )
    np.testing.assert_allclose(returns.numpy(), wanted, atol=1e-4)


def test_a_policy_of_actor_and_critic_also_gives_values_and_log_probabilities() -> None:
    model, _ = model_of("ppo box")
    frame, noise = torch.randn(50, 3), torch.rand(50, 2)
    _, output, _ = from_sb3(model)(None, DictTensor({"frame": frame, "noise": noise}))
    drawn = output["policy_action"]
    assert (drawn != output["action"]).any()  # clipped to the bounds
    value, log_probability, _ = model.policy.evaluate_actions(frame, drawn)
    torch.testing.assert_close(output["value"], value.flatten())
    torch.testing.assert_close(output["log_probability"], log_probability)


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


@pytest.mark.parametrize(
    ("action", "options"),
    [("box", {"use_sde": True}), ("bits", {})],
)
def test_policies_that_cannot_be_sampled_take_their_best_actions(
    action: str, options: dict[str, Any]
) -> None:
    model = PPO("MlpPolicy", drifts(action=action), seed=0, device="cpu", **options)
    with pytest.raises(SpecError, match="deterministic=True"):
        from_sb3(model)
    frame = torch.randn(5, 3)
    wanted, _ = model.predict(frame.numpy(), deterministic=True)
    _, output, _ = from_sb3(model, deterministic=True)(None, DictTensor({"frame": frame}))
    np.testing.assert_allclose(output["action"].numpy(), wanted, atol=1e-6)


def test_other_objects_and_policies_are_refused() -> None:
    with pytest.raises(SpecError, match="model"):
        from_sb3(PPO)
    model, _ = model_of("ppo box")
    model.policy.lstm_actor = torch.nn.LSTM(1, 1)
    with pytest.raises(SpecError, match="ActorCriticPolicy"):
        from_sb3(model)


def test_environments_unlike_those_of_the_model_are_refused_by_name() -> None:
    model, _ = model_of("sac")
    with pytest.raises(AgentError, match=r"keys \['number', 'place'\]|keys \['place', 'number'\]"):
        evaluate(from_sb3(model), create_env, 3)


@pytest.mark.parametrize("number", range(3))
def test_the_programs_of_the_page_run(number: int, program_folder: Path, capfd: Any) -> None:
    run_block("docs/neighbours/sb3.md", number, program_folder)
    output, errors = capfd.readouterr()
    assert errors == ""
    assert output
