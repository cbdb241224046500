"""Joint steps per second of many agents: rlpool, the bare loop, TorchRL and AgileRL.

    python benchmarks/many_agents.py [--windows 9] [--seconds 2]

``simple_spread`` of mpe2: three agents, episodes of 25 steps, one shared network of 64 and 64
units. Windows alternate between the bare loop in this process (the base) and

- ``rlpool``: an ``EpisodeBatcher`` with two workers of 8 environments, requests of 64 episodes, the
  next one pending
- ``torchrl``: ``MultiSyncCollector`` with two workers of 8 ``PettingZooEnv`` in a ``SerialEnv``
- ``agilerl``: its ``AsyncPettingZooVecEnv`` with two processes of one environment each, the policy
  in the caller

Libraries that are not installed are skipped. Prints a JSON line for each.
"""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from mpe2 import simple_spread_v3
from torch import nn
from workloads import SEED, Window, in_turns, noise_of, parser_of, quartiles, show, timed

from rlpool import Agent, DictTensor, EpisodeBatcher, sample_categorical
from rlpool.integrations.pettingzoo import PettingZooEnv

N_WORKERS, N_LANES, N_AGENTS, N_STEPS = 2, 8, 3, 25
N_EPISODES = 64


class Team(nn.Module, Agent):
    """The policy of all contenders."""

    n_noise = N_AGENTS

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.network = nn.Sequential(
            nn.Linear(18, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)
        )

    def forward(self, frame: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return actions ``[..., A]`` for observations ``[..., A, 18]``."""
        logits = self.network(frame).flatten(0, -2)
        noise = torch.rand(len(logits)) if noise is None else noise.flatten()
        return sample_categorical(logits, noise)[0].view(frame.shape[:-1])

    def __call__(self, state: Any, observation: Any = None, *_: Any, **__: Any) -> Any:
        if isinstance(observation, DictTensor):
            action = self.forward(observation["frame"], observation["noise"])
            return DictTensor(), DictTensor({"action": action}), DictTensor()
        return self.forward(state)


def make_env() -> Any:
    return simple_spread_v3.parallel_env(max_cycles=N_STEPS)


def create_env(seed: int) -> PettingZooEnv:
    return PettingZooEnv([make_env() for _ in range(N_LANES)], seed)


def bare_loop() -> Window:
    """Return a bare loop of one process, with the number of environments of a worker."""
    envs, team = [make_env() for _ in range(N_LANES)], Team()
    names = envs[0].possible_agents
    frames = np.zeros((N_LANES, N_AGENTS, 18), np.float32)

    def collect() -> int:
        for lane, env in enumerate(envs):
            observations = env.reset()[0]
            frames[lane] = [observations[name] for name in names]
        for _ in range(N_STEPS):
            with torch.no_grad():
                actions = team(torch.from_numpy(frames)).numpy()
            for lane, env in enumerate(envs):
                observations = env.step(dict(zip(names, actions[lane], strict=True)))[0]
                frames[lane] = [observations[name] for name in names]
        return N_LANES * N_STEPS

    return timed(collect)


def ours(stack: ExitStack) -> Window:
    batcher = stack.enter_context(
        EpisodeBatcher(
            N_STEPS, 2 * N_EPISODES, Team, create_env=create_env, n_workers=N_WORKERS, seed=SEED
        )
    )
    batcher.execute(N_EPISODES)

    def collect() -> int:
        batcher.execute(N_EPISODES)
        return int(batcher.get().lengths.sum())

    return timed(collect)


def make_torchrl_env() -> Any:
    from torchrl.envs import SerialEnv
    from torchrl.envs.libs.pettingzoo import PettingZooWrapper

    def one() -> Any:
        groups = {"agents": [f"agent_{number}" for number in range(N_AGENTS)]}
        return PettingZooWrapper(make_env(), group_map=groups, categorical_actions=True)

    return SerialEnv(N_LANES, one)


def torchrl(stack: ExitStack) -> Window:
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import MultiSyncCollector

    collector = MultiSyncCollector(
        [make_torchrl_env] * N_WORKERS,
        TensorDictModule(
            Team(), in_keys=[("agents", "observation")], out_keys=[("agents", "action")]
        ),
        frames_per_batch=N_EPISODES * N_STEPS,
        total_frames=-1,
        num_threads=1,
        num_sub_threads=1,
    )
    stack.callback(collector.shutdown)
    batches = iter(collector)
    return timed(lambda: int(next(batches).numel()))


def agilerl(stack: ExitStack) -> Window:
    from agilerl.vector.pz_async_vec_env import AsyncPettingZooVecEnv

    env = AsyncPettingZooVecEnv([make_env] * N_WORKERS)
    stack.callback(env.close)
    team, names = Team(), list(env.agents)
    shown = [env.reset()[0]]

    def collect() -> int:
        for _ in range(N_STEPS):
            frames = torch.as_tensor(np.stack([shown[0][name] for name in names], 1))
            with torch.no_grad():
                actions = team(frames).numpy()
            taken = {name: actions[:, place] for place, name in enumerate(names)}
            shown[0] = env.step(taken)[0]
        return N_WORKERS * N_STEPS

    return timed(collect)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    peers = {"rlpool": ours, "torchrl": torchrl, "agilerl": agilerl}
    with ExitStack() as stack:
        others = {n: make(stack) for n, make in peers.items() if importlib.util.find_spec(n)}
        base, found = in_turns(bare_loop(), others, args.windows, args.seconds)
    show({"many_agents": "bare loop", "steps_per_s": quartiles(base, 0), "noise": noise_of(base)})
    for name, (rates, ratios) in found.items():
        row = {"many_agents": name, "ratio": quartiles(ratios), "steps_per_s": quartiles(rates, 0)}
        show(row, "pettingzoo", "mpe2", name)


if __name__ == "__main__":
    main()
