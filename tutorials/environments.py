"""Environments: mapping of Gymnasium spaces to named tensors.

You will learn

- how to step a ``GymEnv`` yourself, without a batcher,
- the keys, shapes and dtypes of observations and actions for every space,
- how environments of the old ``gym`` interface work,
- how ``env_info`` reaches an environment, and how to limit the length of episodes,
- how values of an environment's ``info`` become part of the observation,
- how ``GymEnvInf`` restarts environments when an episode ends.
"""

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

from rlpool import DictTensor, GymEnv, GymEnvInf, SpecError

import running

N_ENVS = 3


def random_actions(env, n_rows):
    """Sample one action per row. A dict space has several keys with the prefix "action/"."""
    if isinstance(env.action_space, Dict):
        spaces = {f"action/{key}": space for key, space in env.action_space.items()}
    else:
        spaces = {"action": env.action_space}
    samples = {key: [space.sample() for _ in range(n_rows)] for key, space in spaces.items()}
    return DictTensor({key: torch.from_numpy(np.stack(rows)) for key, rows in samples.items()})


def run_episodes(env, n_steps):
    """Step until all environments have ended, or ``n_steps`` times; return the sums of rewards."""
    # "running" are the indices of the running environments: all of them after a reset.
    observation, running = env.reset()
    assert torch.equal(running, torch.arange(env.n_envs()))
    assert observation["initial_state"].all()
    returns = torch.zeros(env.n_envs())
    for _ in range(n_steps):
        if not len(running):
            break
        # One action per running environment. The result has the observations of those that were
        # stepped, and of those that continue, from which the next step starts.
        actions = random_actions(env, len(running))
        (stepped, were_running), (_, running) = env.step(actions)
        returns[were_running] += stepped["reward"]
        assert torch.equal(running, were_running[~stepped["done"]])
        assert torch.equal(stepped["done"], stepped["terminated"] | stepped["truncated"])
    return returns


# A dict keeps its keys, parts of a tuple are numbered, and other observations are named "frame".
# Further keys are reward, terminated, truncated, done, initial_state and last_action.
OBSERVATIONS = {
    "CartPole-v1": {"frame": ((4,), torch.float32)},
    "FrozenLake-v1": {"frame": ((), torch.int64)},  # Discrete: a number per environment
    "Pendulum-v1": {"frame": ((3,), torch.float32)},
    "Blackjack-v1": {f"frame/{i}": ((), torch.int64) for i in range(3)},  # a tuple
    "HalfCheetah-v5": {"frame": ((17,), torch.float32)},  # float64 becomes float32
    "ALE/Pong-v5": {"frame": ((210, 160, 3), torch.uint8)},  # images stay bytes
}


def real_environments(n_steps):
    from tqdm import tqdm  # here, to keep --help fast

    for name, expected in tqdm(OBSERVATIONS.items(), desc="real environments", unit="kind"):
        env = GymEnv([gym.make(name) for _ in range(N_ENVS)], seed=0)
        env.action_space.seed(0)
        observation = env.reset()[0]
        for key, (shape, dtype) in expected.items():
            assert observation[key].shape == (N_ENVS, *shape)
            assert observation[key].dtype == dtype
        returns = run_episodes(env, n_steps)
        tqdm.write(f"{name:15} average return {returns.mean():.1f}")
        env.close()

    exact = GymEnv([gym.make("HalfCheetah-v5")], seed=0, keep_float64=True)
    assert exact.reset()[0]["frame"].dtype == torch.float64
    exact.close()


class Robot(gym.Env):
    """Nested spaces, for observations and for actions."""

    observation_space = Dict(
        {
            "camera": Box(0, 255, (8, 8), np.uint8),
            "arm": Dict({"angle": Box(-1.0, 1.0, (2,)), "holds": Discrete(2)}),
        }
    )
    action_space = Dict({"turn": Box(-1.0, 1.0, (2,)), "lights": MultiBinary(4)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        # The row of env_info arrives here at every reset.
        self.holds = 0 if options is None else options["holds"]
        self.angle = np.zeros(2, np.float32)
        return self.observation(), {}

    def step(self, action):
        self.angle = np.clip(self.angle + 0.1 * action["turn"], -1.0, 1.0).astype(np.float32)
        return self.observation(), float(action["lights"].sum()), False, False, {}

    def observation(self):
        camera = np.full((8, 8), self.holds, np.uint8)
        return {"camera": camera, "arm": {"angle": self.angle, "holds": self.holds}}


def nested_spaces_and_env_info():
    # Environment n gets row n of env_info.
    env = GymEnv([Robot() for _ in range(N_ENVS)], seed=0, max_episode_steps=10)
    observation, _ = env.reset(DictTensor({"holds": torch.tensor([0, 1, 1])}))
    assert {"camera", "arm/angle", "arm/holds"} <= set(observation.keys())
    assert observation["arm/holds"].tolist() == [0, 1, 1]

    actions = random_actions(env, N_ENVS)
    assert set(actions.keys()) == {"action/turn", "action/lights"}
    (stepped, _), _ = env.step(actions)
    assert torch.equal(stepped["last_action/turn"], actions["action/turn"])

    # The robot never ends an episode, but its time limit does: truncated, not terminated.
    for _ in range(9):
        (stepped, _), (_, running) = env.step(random_actions(env, N_ENVS))
    assert stepped["truncated"].all()
    assert not stepped["terminated"].any()
    assert len(running) == 0

    # Spaces without a fixed shape cannot become tensors.
    talker = Robot()
    talker.observation_space = gym.spaces.Text(10)
    try:
        GymEnv([talker])
    except SpecError as error:
        print(f"refused: {error}")


def keys_of_infos():
    # HalfCheetah reports its speed in every info; names without dtypes mean float32 numbers.
    env = GymEnv([gym.make("HalfCheetah-v5")], seed=0, info_keys=["x_velocity", "reward_ctrl"])
    observation, _ = env.reset()
    assert observation["x_velocity"].item() == 0  # not in the info of a reset
    env.action_space.seed(0)
    (stepped, _), _ = env.step(random_actions(env, 1))
    assert stepped["x_velocity"].dtype == torch.float32
    assert stepped["reward_ctrl"].item() < 0
    env.close()

    # Other dtypes are declared. Missing values are zero. A slash separates keys of nested infos.
    recorded = [
        gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1")) for _ in range(N_ENVS)
    ]
    env = GymEnv(recorded, seed=0, info_keys={"episode/r": np.float32, "episode/l": int})
    _, running = env.reset()
    lengths = torch.zeros(N_ENVS).long()
    while len(running):
        (stepped, were_running), (_, running) = env.step(random_actions(env, len(running)))
        lengths[were_running] += 1
        ended = stepped["done"]
        assert torch.equal(stepped["episode/l"][ended], lengths[were_running][ended])
        assert not stepped["episode/r"][~ended].any()
    env.close()


class OldCountdown:
    """The interface before Gymnasium: ``seed()``, ``reset(env_info)``, four values, no spaces."""

    def seed(self, seed=None):
        self.generator = np.random.default_rng(seed)

    def reset(self, env_info=None):  # called without arguments if there is no env_info
        self.left = (env_info or {}).get("left", int(self.generator.integers(2, 6)))
        return {"left": self.left}

    def step(self, action):
        self.left -= 1
        return {"left": self.left}, 1.0, self.left == 0, {}


def old_environments():
    env = GymEnv([OldCountdown() for _ in range(N_ENVS)], seed=0)
    observation, running = env.reset(DictTensor({"left": torch.tensor([2, 4, 3])}))
    # Without a declared space, a Python int becomes int64, a float becomes float32.
    assert observation["left"].dtype == torch.int64
    lengths = torch.zeros(N_ENVS).long()
    while len(running):
        lengths[running] += 1
        _, (_, running) = env.step(DictTensor({"action": torch.zeros(len(running))}))
    assert lengths.tolist() == [2, 4, 3]


def environments_that_restart():
    env = GymEnvInf([OldCountdown() for _ in range(N_ENVS)], seed=0)
    env.reset()
    wait = DictTensor({"action": torch.zeros(N_ENVS)})
    n_ended = 0
    for _ in range(20):
        (stepped, _), (observation, running) = env.step(wait)
        # All environments keep running: the first result has the end of an episode ...
        assert len(running) == N_ENVS
        ended = stepped["done"]
        assert (stepped["left"][ended] == 0).all()
        # ... and the second the start of the next one.
        assert (observation["left"][ended] >= 2).all()
        assert torch.equal(observation["initial_state"], ended)
        assert not observation["done"].any()
        n_ended += int(ended.sum())
    print(f"restarting: {n_ended} episodes ended and were followed by the next")


def main():
    parser = running.Parser(__doc__)
    parser.add_number("--n-steps", least=1, default=300, help="maximum per environment")
    arguments = parser.parse_args()
    import ale_py  # here, to keep --help fast

    gym.register_envs(ale_py)
    real_environments(arguments.n_steps)
    nested_spaces_and_env_info()
    keys_of_infos()
    old_environments()
    environments_that_restart()


if __name__ == "__main__":
    main()
