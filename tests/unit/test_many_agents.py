"""Joint episodes of many agents: births, deaths, groups, masks; conversion to agents and back."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import (
    Batcher,
    EnvError,
    EpisodeBatcher,
    EpisodeStatistics,
    GymEnv,
    ParallelEnvManager,
    Pool,
    SpecError,
    WorkerStartupError,
    gae,
)
from rlpool.envs.vec_env import LaneError
from rlpool.integrations.pettingzoo import JointEnv, PettingZooEnv, PettingZooEnvInf

from support.many_agents import Lives, RandomAgents, check_agents, check_joint_episode

LIVES = {
    "small_0": (0, 6, "terminated"),
    "small_1": (0, 3, "terminated"),
    "small_2": (2, 4, "truncated"),
    "small_3": (4, 9, "terminated"),
}
GROUPS = {
    "small_0": (0, 6, "terminated"),
    "big_0": (0, 4, "truncated"),
    "small_1": (1, 7, "truncated"),
    "big_1": (3, 5, "terminated"),
}
SIZES = {"action": 4}
GROUP_SIZES = {"action/small": 4, "action/big": 0}


def run(
    create_env: Any, n: int = 1, env_info: Any = None, sizes: Any = None, **options: Any
) -> Any:
    """Collect episodes of random agents."""
    agent = RandomAgents, {"sizes": sizes or SIZES, "start": 1}
    given = {"n_workers": 0, "seed": 3, **options}
    with EpisodeBatcher(8, 16, *agent, create_env, **given) as batcher:
        batcher.execute(n, env_info=env_info)
        return batcher.get()


def collected(lives: Any = None, masks: str = "", **options: Any) -> Any:
    """Collect five episodes of two environments."""
    sizes = GROUP_SIZES if lives is GROUPS else SIZES

    def create_env(seed: int) -> PettingZooEnv:
        return PettingZooEnv([Lives(lives or LIVES, masks) for _ in range(2)], seed, **options)

    return run(create_env, 5, sizes=sizes)


@pytest.mark.parametrize("case", range(8))
def test_joint_episodes_match_a_hand_written_loop(case: int) -> None:
    """Births, deaths, groups, masks, limits and infos are drawn."""
    rng = random.Random(case)
    members = rng.choice([{"": ["small"] * 4}, {"small": ["small"] * 2, "big": ["big"] * 2}])
    groups = {
        group: [f"{kind}_{n}" for n, kind in enumerate(kinds)] for group, kinds in members.items()
    }
    lives = {
        agent: (rng.randint(0, 5), rng.randint(1, 6), rng.choice(["terminated", "truncated"]))
        for agents in groups.values()
        for agent in agents
    }
    lives["small_0"] = 0, rng.randint(6, 9), "terminated"
    limit, masks = rng.choice([None, 5]), rng.choice(["", "observation"])
    options = {"reward": rng.choice(["sum", "mean"]), "max_episode_steps": limit}
    biases = [100.0 * rng.randint(-1, 1) for _ in range(5)]

    def create_env(seed: int) -> PettingZooEnv:
        return PettingZooEnv([Lives(lives, masks) for _ in range(2)], seed, **options)

    sizes = SIZES if "" in groups else GROUP_SIZES
    episodes = run(create_env, 5, {"bias": biases}, sizes)
    for row, bias in enumerate(biases):
        env = Lives(lives, masks)
        check_joint_episode(episodes, row, env, groups, {"bias": bias}, **options)
    check_agents(episodes, groups)


@pytest.mark.parametrize("is_in_list", [True, False])
def test_a_truncated_failed_step_has_no_rewards(is_in_list: bool) -> None:
    class Lost(Lives):
        def step(self, actions: Any) -> Any:
            if self.t == 3:
                raise RuntimeError("the simulator is lost")
            return super().step(actions)

    def create_env(seed: int) -> GymEnv:
        return PettingZooEnv([Lost(LIVES)], seed) if is_in_list else GymEnv([JointEnv(Lost(LIVES))])

    episodes = run(create_env, on_env_error="truncate")
    assert episodes["alive"][0, 3].tolist() == [True, False, True, False]
    for key in ("_reward", "_rewards", "_terminations", "_truncations", "_born"):
        assert not episodes[key][0, 3].any(), key
    assert episodes["_terminations"][0].sum() == 1
    own = episodes.per_agent()
    assert own.lengths.tolist() == [4, 3, 2, 0]
    assert own["_truncated"].sum(1).tolist() == [1, 0, 1, 0]


def test_infos_get_an_agent_axis_and_bare_names_mean_one_number_per_agent() -> None:
    episodes = collected(masks="info", info_keys={"action_mask": (np.int8, 4)})
    assert episodes["action_mask"].shape[2:] == (4, 4)
    sums = episodes["action_mask"].sum(-1)
    assert torch.equal(sums == 1, sums > 0)
    alive = episodes["alive"]
    assert (sums[alive] == 1).all()
    allowed = 1 + episodes["action_mask"].argmax(-1)
    assert torch.equal(episodes["action"][alive], allowed[alive])

    ages = collected(masks="info", info_keys=["age"])["age"]
    assert (ages.dtype, ages.shape[2:]) == (torch.float32, (4,))
    episodes = collected(GROUPS, "info", info_keys={"small/action_mask": (np.int8, 4)})
    assert episodes["small/action_mask"].shape[2:] == (2, 4)
    assert "big/action_mask" not in episodes


def test_the_state_is_a_key_if_requested() -> None:
    episodes = collected(state=True)
    assert episodes["state"][0, :3].tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    own = episodes.per_agent()  # its size is the number of agents
    assert own["state"][2, 0].tolist() == [2.0] * 4  # born in step 2
    assert "state" not in collected()


def test_sums_of_rewards_in_narrow_dtypes_do_not_overflow() -> None:
    lives = dict.fromkeys(["small_0", "small_1"], (0, 2, "terminated"))
    for reward in (np.uint8(200), np.float16(60000), 2**62):
        env = JointEnv(Lives(lives, reward=reward))
        env.reset(seed=0)
        assert env.step(np.ones(2, np.int8))[1] == 2 * float(reward)


def test_values_reported_for_absent_agents_are_zero() -> None:
    class Talkative(Lives):
        def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            _, infos = super().reset(seed, options)
            return self._observed(self.possible_agents), infos

        def step(self, actions: Any) -> Any:
            _, rewards, _, truncations, infos = super().step(actions)
            over = {agent: sum(life[:2]) <= self.t for agent, life in self.lives.items()}
            return self._observed(self.possible_agents), rewards, over, truncations, infos

    env = JointEnv(Talkative(LIVES))
    observation, _ = env.reset(seed=0)
    assert not observation["frame"][2:].any()
    for step in range(1, 8):
        was_alive = observation["alive"]
        observation, *_ = env.step(np.ones(4, np.int8))
        is_shown = observation["frame"].any(-1)
        assert np.array_equal(is_shown, was_alive | observation["alive"])
        ended = [sum(LIVES[agent][:2]) == step for agent in LIVES]
        assert observation["terminations"].tolist() == ended


def windows(n_timesteps: int, n_lanes: int, n: int) -> list[Any]:
    """Yield windows of environments that restart automatically."""

    def create_env(seed: int) -> PettingZooEnvInf:
        return PettingZooEnvInf([Lives(LIVES) for _ in range(n_lanes)], seed)

    agent = RandomAgents, {"sizes": SIZES, "start": 1}
    with Batcher(n_timesteps, None, *agent, create_env, n_workers=0, seed=0) as batcher:
        batcher.reset()
        for _ in range(n):
            batcher.execute()
        return [batcher.get() for _ in range(n)]


def test_windows_continue_with_revived_agents() -> None:
    (window,) = windows(20, 2, 1)
    assert window["_done"].sum(1).tolist() == [1, 1]
    own = window.per_agent()
    assert own.lengths.tolist() == [6 + 6, 3 + 3, 4 + 4, 9 + 3] * 2
    assert own["initial_state"][0].nonzero().flatten().tolist() == [0, 6]
    assert own["_done"][1].nonzero().flatten().tolist() == [2, 5]
    ended = EpisodeStatistics().update(own)
    assert sorted(ended.lengths.tolist()) == sorted([6, 6, 3, 3, 4, 4, 9] * 2)


def test_an_agent_may_be_born_at_the_start_of_a_window() -> None:
    starts = []
    for window in windows(2, 1, 4):
        own = window.per_agent()
        starts.append([own["initial_state"][k, : own.lengths[k]].tolist() for k in (2, 3)])
    assert [each[0] for each in starts] == [[], [True, False], [False, False], []]
    assert [each[1] for each in starts] == [[], [], [True, False], [False, False]]


def test_managers_and_pools_accept_joint_environments() -> None:
    with ParallelEnvManager([lambda: JointEnv(Lives(LIVES))] * 2) as manager:
        observation, _ = manager.reset()
        assert observation["alive"].tolist() == [[True, True, False, False]] * 2
    with Pool([JointEnv(Lives(LIVES))], pool_size=20, policy=lambda _: [1] * 4, seed=0) as pool:
        pool.store()
        assert pool.transitions()["alive"].sum(0).tolist() == [6, 3, 4, 9]


def test_gae_accepts_rewards_of_all_agents() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 5, 7, 4, generator=generator)
    terminated, done = torch.rand(2, 5, 7, generator=generator) < 0.2
    lengths = torch.tensor([7, 3, 5, 1, 6])

    def advantage(values: torch.Tensor, lengths: Any) -> torch.Tensor:
        return gae(*values, terminated, done | terminated, 0.9, 0.8, lengths=lengths)

    each = torch.stack([advantage(values[..., k], lengths) for k in range(4)], -1)
    for given in (lengths, lengths.unsqueeze(-1).expand(5, 4)):
        assert torch.equal(advantage(values, given), each)
    with pytest.raises(SpecError, match="lengths"):
        advantage(values, lengths.int())


# Refusals -------------------------------------------------------------------------------------


def lives(kind: Any = Lives, **changes: Any) -> Any:
    """Return an environment without some attributes, or with different ones."""
    env = kind(LIVES)
    for name, value in changes.items():
        delattr(env, name) if value is None else setattr(env, name, value)
    return env


TWICE = Lives(LIVES)
REFUSED: list[tuple[Any, Any, str]] = [
    *((GymEnv, given, "PettingZooEnv") for given in ([lives()], lives())),
    (GymEnv, [JointEnv(lives())] * 2, "0 and 1"),
    *((PettingZooEnv, given, "environment") for given in (lives(), 3, [])),
    (PettingZooEnv, [TWICE, lives(), TWICE], "0 and 2"),
    (PettingZooEnv, [lives(), Lives(GROUPS)], "environment 1"),
    (PettingZooEnv, [lives(possible_agents=None)], "possible_agents"),
    (partial(PettingZooEnv, state="yes"), [lives()], "state"),
    (partial(PettingZooEnv, state=True), [lives(state_space=None)], "state_space"),
    (partial(PettingZooEnv, reward="max"), [lives()], "max"),
]


def test_invalid_environments_and_arguments_are_refused_by_name() -> None:
    for kind, given, named in REFUSED:
        with pytest.raises(SpecError, match=named):
            kind(given, 0)
    with pytest.raises(WorkerStartupError, match="JointEnv"):
        ParallelEnvManager([lives])


class Wrong(Lives):
    """Environment whose step results are changed by a function."""

    def __init__(self, change: Any) -> None:
        super().__init__(LIVES)
        self.change = change

    def step(self, actions: Any) -> Any:
        results = list(super().step(actions))
        self.change(self, *results)
        return tuple(results)


WRONG: list[tuple[Any, str]] = [
    (lambda env, *results: env.agents.remove("small_0"), "small_0"),
    (lambda env, *results: env.agents.append("nobody"), "nobody"),
    (lambda env, *results: results[0].pop("small_0"), "small_0.*observation"),
    (lambda env, *results: results[1].pop("small_0"), "small_0.*reward"),
    (lambda env, *results: results[1].update(small_0=1e300), "small_0"),
    (lambda env, *results: results[2].update(small_0=2), "small_0.*terminated"),
    (lambda env, *results: results[0].update(small_0=np.array([1e300, 0.0])), "small_0"),
]


@pytest.mark.parametrize(("change", "named"), WRONG)
def test_invalid_step_results_name_the_agent(change: Any, named: str) -> None:
    with pytest.raises(EnvError, match=named):
        run(lambda seed: PettingZooEnv([Wrong(change)], seed))


def test_actions_of_living_agents_must_be_in_their_space() -> None:
    env = PettingZooEnv([Lives(GROUPS)])
    env.reset_lanes([0], [0], [None])
    small = np.array([[4, 9]])  # small_1 is not born
    actions = {"action/small": small, "action/big": np.ones((1, 2, 2))}
    env.step_lanes([0], actions)
    small[0, 1] = 0
    with pytest.raises(LaneError) as caught:
        env.step_lanes([0], actions)
    assert "'small_1'" in str(caught.value.__cause__)


def test_per_agent_and_its_inverse_name_missing_parts() -> None:
    episodes, groups = collected(), collected(GROUPS)
    own = groups.per_agent("big")
    refused: list[tuple[Any, str]] = [
        (episodes.per_agent().per_agent, "alive"),
        *(
            (episodes.get([name for name in episodes if name != key]).per_agent, key)
            for key in ("born", "_terminated", "_truncations")
        ),
        (groups.per_agent, "'big', 'small'"),
        (groups.get(["action/big"]).per_agent, "PettingZooEnv"),
        (lambda: groups.from_agents(own["_reward"][:3], "big"), r"\[10, T\]"),
        (lambda: groups.from_agents(own["_reward"][:, :3], "big"), "up to 5"),
    ]
    for call, named in refused:
        with pytest.raises(SpecError, match=named):
            call()
