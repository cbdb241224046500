"""Policies of Stable-Baselines3 as agents, compared with the real library."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import AgentError, DictTensor, EpisodeBatcher, GymEnv, SpecError, evaluate

from support.drifting import Drift
from support.programs import run_block

pytest.importorskip("stable_baselines3", reason='needs the extra: pip install "rlpool[sb3]"')

from stable_baselines3 import A2C, DQN, PPO, SAC, TD3
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlpool.integrations.sb3 import from_sb3

MODELS: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "ppo box": (PPO, "vector", "box", {"n_steps": 32, "batch_size": 48}),
    "ppo discrete": (PPO, "number", "discrete", {}),
    "a2c many": (A2C, "dict", "many", {}),
    "sac": (SAC, "dict", "box", {}),
    "td3": (TD3, "vector", "box", {}),
    "dqn": (DQN, "vector", "discrete", {}),
    "dqn images": (DQN, "image", "discrete", {"buffer_size": 50}),
}
POLICIES = {"dict": "MultiInputPolicy", "image": "CnnPolicy"}


def create_env(seed: int, **kinds: Any) -> GymEnv:
    return GymEnv([Drift(**kinds) for _ in range(3)], seed)


def drifts(n: int = 3, **kinds: Any) -> DummyVecEnv:
    return DummyVecEnv([lambda: Monitor(Drift(**kinds)) for _ in range(n)])


def model_of(name: str) -> tuple[Any, dict[str, str]]:
    algorithm, observation, action, options = MODELS[name]
    kinds = {"observation": observation, "action": action}
    policy = POLICIES.get(observation, "MlpPolicy")
    return algorithm(policy, drifts(**kinds), seed=0, device="cpu", **options), kinds


def seen_by(model: Any, observation: Any) -> Any:
    """Return observations in the form that ``model.predict`` takes."""
    keys = model.observation_space.spaces if "place" in observation else ("frame",)
    arrays = {key: observation[key].numpy() for key in keys}
    return arrays.get("frame", arrays)


def episodes_of(agent: Any, kinds: Any, n: int = 3, n_workers: int = 0) -> Any:
    with EpisodeBatcher(
        8, n, agent.copy, {}, create_env, kinds, n_workers=n_workers, seeds=0
    ) as batcher:
        batcher.execute(n)
        return batcher.get().clone()


@pytest.mark.parametrize("name", MODELS)
def test_deterministic_actions_match_the_models_predictions(name: str) -> None:
    model, kinds = model_of(name)
    episodes = episodes_of(from_sb3(model, deterministic=True), kinds)
    steps = episodes.flatten()
    wanted, _ = model.predict(seen_by(model, steps), deterministic=True)
    np.testing.assert_allclose(steps["action"].numpy(), wanted, atol=1e-5)
    assert "value" not in episodes


@pytest.mark.parametrize("name", ["ppo box", "ppo discrete", "a2c many", "sac", "td3"])
def test_sampled_actions_have_the_models_distribution(name: str) -> None:
    torch.manual_seed(0)
    model, kinds = model_of(name)
    one = Drift(**kinds).reset()[0]
    parts = one if isinstance(one, dict) else {"frame": one}
    seen = {k: torch.stack([torch.as_tensor(np.asarray(p))] * 4000) for k, p in parts.items()}
    agent = from_sb3(model)
    noise = torch.rand(4000, agent.n_noise) if agent.n_noise else torch.zeros(4000, 0)
    _, output, _ = agent(None, DictTensor({**seen, "noise": noise}))
    wanted, _ = model.predict(seen_by(model, seen))
    both = output["action"].numpy().astype(np.float64), wanted.astype(np.float64)
    assert both[0].shape == both[1].shape
    np.testing.assert_allclose(*(each.mean(0) for each in both), atol=0.08)
    np.testing.assert_allclose(*(each.std(0) for each in both), atol=0.08)


@pytest.mark.parametrize("name", ["ppo box", "dqn images"])
def test_episodes_of_a_trained_policy_are_the_same_in_workers(name: str) -> None:
    model, kinds = model_of(name)
    # A distribution now has tensors that cannot be copied, and Stable-Baselines3's image wrappers
    # cannot be pickled.
    model.learn(96 if name == "ppo box" else 5)
    agent = from_sb3(model, deterministic=name != "ppo box")
    here, there = (episodes_of(agent, kinds, 12, n_workers) for n_workers in (0, 2))
    for key in here:
        assert torch.equal(here[key], there[key]), key


def test_an_actor_critic_policy_also_returns_values_and_log_probabilities() -> None:
    model, _ = model_of("ppo box")
    frame, noise = torch.randn(50, 3), torch.rand(50, 2)
    _, output, _ = from_sb3(model)(None, DictTensor({"frame": frame, "noise": noise}))
    drawn = output["policy_action"]
    assert (drawn != output["action"]).any()  # clipped to the bounds
    value, log_probability, _ = model.policy.evaluate_actions(frame, drawn)
    torch.testing.assert_close(output["value"], value.flatten())
    torch.testing.assert_close(output["log_probability"], log_probability)


def test_normalization_statistics_of_the_environment_are_applied() -> None:
    env = VecNormalize(drifts())
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=32, seed=0, device="cpu")
    model.learn(96)
    agent = pickle.loads(pickle.dumps(from_sb3(model, deterministic=True)))
    frame = torch.randn(5, 3)
    wanted, _ = model.predict(env.normalize_obs(frame.numpy()), deterministic=True)
    env.obs_rms.mean += 5  # of the model, not of the copy
    _, output, _ = agent(None, DictTensor({"frame": frame}))
    np.testing.assert_allclose(output["action"].numpy(), wanted, atol=1e-6)
    plain, _ = model.predict(frame.numpy(), deterministic=True)
    assert np.abs(plain - wanted).max() > 1e-4


def test_an_agent_is_updated_with_parameters() -> None:
    model, _ = model_of("ppo box")
    agent = from_sb3(model, deterministic=True)
    frame = DictTensor({"frame": torch.randn(4, 3)})
    with torch.no_grad():
        model.policy.action_net.bias += 0.25
    old = agent(None, frame)[1]["action"]
    agent.update(model.policy.state_dict())
    torch.testing.assert_close(agent(None, frame)[1]["action"], old + 0.25)


def test_unsupported_models_are_refused_by_name() -> None:
    recurrent, _ = model_of("ppo box")
    recurrent.policy.lstm_actor = torch.nn.LSTM(1, 1)
    for model, named in (
        (PPO, "model"),
        (recurrent, "ActorCriticPolicy"),
        # these support only deterministic actions
        (PPO("MlpPolicy", drifts(), device="cpu", use_sde=True), "deterministic=True"),
        (PPO("MlpPolicy", drifts(action="bits"), device="cpu"), "deterministic=True"),
    ):
        with pytest.raises(SpecError, match=named):
            from_sb3(model)
    with pytest.raises(AgentError, match="'number'"):
        evaluate(from_sb3(model_of("sac")[0]), create_env, 3)


def test_the_example_in_the_docs_runs(program_folder: Any, capfd: Any) -> None:
    run_block("docs/integrations.md", 0, program_folder)
    output, errors = capfd.readouterr()
    assert errors == ""
    assert float(output.removeprefix("average return:")) < 0
