"""Joint episodes of many agents: births, deaths, groups, masks; an agent's own steps, and back."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete

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


def collected(lives: Any, sizes: Any, n: int = 5, n_workers: int = 0, **options: Any) -> Any:
    masks = options.pop("masks", "")

    def create_env(seed: int) -> PettingZooEnv:
        return PettingZooEnv([Lives(lives, masks) for _ in range(2)], seed, **options)

    with EpisodeBatcher(
        n, 16, RandomAgents, {"sizes": sizes}, create_env, n_workers=n_workers, seed=3
    ) as batcher:
        batcher.execute(n)
        return batcher.get()


@pytest.mark.parametrize("masks", ["", "observation"])
@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_joint_episode_is_that_of_a_loop_by_hand(n_workers: int, masks: str) -> None:
    episodes = collected(LIVES, SIZES, n_workers=n_workers, masks=masks)
    for row in range(5):
        check_joint_episode(episodes, row, Lives(LIVES, masks), {"": list(LIVES)})
    assert episodes["frame"].shape[2:] == (4, 2)
    check_agents(episodes, {"": list(LIVES)})


@pytest.mark.parametrize("n_workers", [0, 2])
def test_agents_with_other_spaces_are_a_group_of_their_own(n_workers: int) -> None:
    episodes = collected(GROUPS, GROUP_SIZES, n_workers=n_workers)
    groups = {"small": ["small_0", "small_1"], "big": ["big_0", "big_1"]}
    for row in range(5):
        check_joint_episode(episodes, row, Lives(GROUPS), groups)
    check_agents(episodes, groups)


@pytest.mark.parametrize("is_in_list", [True, False])
def test_a_step_that_is_given_up_earned_nobody_anything(is_in_list: bool) -> None:
    class Lost(Lives):
        def step(self, actions: Any) -> Any:
            if self.t == 3:
                raise RuntimeError("the simulator is lost")
            return super().step(actions)

    def create_env(seed: int) -> GymEnv:
        return PettingZooEnv([Lost(LIVES)], seed) if is_in_list else GymEnv([JointEnv(Lost(LIVES))])

    with EpisodeBatcher(
        *(8, 4, RandomAgents, {"sizes": SIZES}, create_env), n_workers=0, on_env_error="truncate"
    ) as batcher:
        batcher.execute(1)
        episodes = batcher.get()
    assert episodes["alive"][0, 3].tolist() == [True, False, True, False]
    for key in ("_reward", "_rewards", "_terminations", "_truncations", "_born"):
        assert not episodes[key][0, 3].any(), key
    assert episodes["_terminations"][0].sum() == 1
    own = episodes.per_agent()
    assert own.lengths.tolist() == [4, 3, 2, 0]
    assert own["_truncated"].sum(1).tolist() == [1, 0, 1, 0]


def test_a_limit_of_the_joint_episode_truncates_the_agents_that_are_alive() -> None:
    episodes = collected(LIVES, SIZES, max_episode_steps=5)
    assert episodes.lengths.tolist() == [5] * 5
    assert episodes["_truncated"][:, 4].all()
    own = episodes.per_agent()
    assert own.lengths.tolist() == [5, 3, 3, 1] * 5
    ends = own.temporal_multi_index(own.lengths - 1)
    assert ends["_terminated"].tolist() == [False, True, False, False] * 5
    assert ends["_truncated"].tolist() == [True, False, True, True] * 5
    check_agents(episodes, {"": list(LIVES)})


def test_masks_and_other_infos_get_an_axis_of_agents() -> None:
    episodes = collected(LIVES, SIZES, masks="info", info_keys={"action_mask": (np.int8, 4)})
    assert episodes["action_mask"].shape[2:] == (4, 4)
    sums = episodes["action_mask"].sum(-1)
    assert torch.equal(sums == 1, sums > 0)
    alive = episodes["alive"]
    assert (sums[alive] == 1).all()
    allowed = episodes["action_mask"].argmax(-1)
    assert torch.equal(episodes["action"][alive], allowed[alive])


def test_names_alone_mean_a_number_of_each_agent() -> None:
    episodes = collected(LIVES, SIZES, masks="info", info_keys=["age"])
    assert episodes["age"].shape[2:] == (4,)
    assert episodes["age"].dtype == torch.float32


def test_infos_of_one_group() -> None:
    episodes = collected(
        GROUPS, GROUP_SIZES, masks="info", info_keys={"small/action_mask": (np.int8, 4)}
    )
    assert episodes["small/action_mask"].shape[2:] == (2, 4)
    assert "big/action_mask" not in episodes


def test_the_state_is_a_key_if_it_is_asked_for() -> None:
    episodes = collected(LIVES, SIZES, state=True)
    assert episodes["state"][0, :3].tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    own = episodes.per_agent()  # its size is the number of agents
    assert own["state"][2, 0].tolist() == [2.0] * 4  # born in step 2
    assert "state" not in collected(LIVES, SIZES)


@pytest.mark.parametrize("reward", ["sum", "mean"])
def test_the_joint_reward_combines_those_of_the_agents(reward: str) -> None:
    episodes = collected(LIVES, SIZES, reward=reward)
    n_agents = episodes["alive"].sum(-1).clamp(min=1) if reward == "mean" else 1
    expected = episodes["_rewards"].sum(-1) / n_agents
    torch.testing.assert_close(episodes["_reward"], expected)


@pytest.mark.parametrize("small", [np.uint8(200), np.int8(100), np.float16(60000), 2**62])
def test_rewards_of_narrow_dtypes_do_not_wrap_around_when_they_are_summed(small: Any) -> None:
    class Narrow(Lives):
        def _reward(self, agent: str, action: Any) -> Any:
            return small

    env = JointEnv(Narrow({"small_0": (0, 2, "terminated"), "small_1": (0, 2, "terminated")}))
    env.reset(seed=0)
    assert env.step(np.zeros(2, np.int64))[1] == 2 * float(small)


def test_what_is_told_of_agents_that_are_not_there_is_zero() -> None:
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
        observation, *_ = env.step(np.zeros(4, np.int64))
        is_shown = observation["frame"].any(-1)
        assert np.array_equal(is_shown, was_alive | observation["alive"])
        ended = [sum(LIVES[agent][:2]) == step for agent in LIVES]
        assert observation["terminations"].tolist() == ended


def test_windows_go_on_with_agents_that_live_again() -> None:
    def create_env(seed: int) -> PettingZooEnvInf:
        return PettingZooEnvInf([Lives(LIVES) for _ in range(2)], seed)

    with Batcher(
        20, None, RandomAgents, {"sizes": SIZES}, create_env, n_workers=0, seed=0
    ) as batcher:
        batcher.reset()
        batcher.execute()
        window = batcher.get()
    assert window["_done"].sum(1).tolist() == [1, 1]
    own = window.per_agent()
    assert own.lengths.tolist() == [6 + 6, 3 + 3, 4 + 4, 9 + 3] * 2
    assert own["initial_state"][0].nonzero().flatten().tolist() == [0, 6]
    assert own["_done"][1].nonzero().flatten().tolist() == [2, 5]
    ended = EpisodeStatistics().update(own)
    assert sorted(ended.lengths.tolist()) == sorted([6, 6, 3, 3, 4, 4, 9] * 2)


def test_an_agent_may_be_born_where_a_window_begins() -> None:
    def create_env(seed: int) -> PettingZooEnvInf:
        return PettingZooEnvInf([Lives(LIVES)], seed)

    with Batcher(2, None, RandomAgents, {"sizes": SIZES}, create_env, n_workers=0) as batcher:
        batcher.reset()
        starts = []
        for _ in range(4):
            batcher.execute()
            own = batcher.get().per_agent()
            starts.append([own["initial_state"][k, : own.lengths[k]].tolist() for k in range(4)])
    assert [each[2] for each in starts] == [[], [True, False], [False, False], []]
    assert [each[3] for each in starts] == [[], [], [True, False], [False, False]]


def test_a_manager_takes_joint_environments() -> None:
    with ParallelEnvManager([lambda: JointEnv(Lives(LIVES))] * 2) as manager:
        observation, _ = manager.reset()
        assert observation["frame"].shape == (2, 4, 2)
        assert observation["alive"].tolist() == [[True, True, False, False]] * 2


def test_pools_keep_joint_episodes_and_run_joint_environments() -> None:
    episodes = collected(LIVES, SIZES)
    for given, shape in ((episodes, [3, 4, 2]), (episodes.per_agent(), [3, 2])):
        pool = Pool(pool_size=200, seed=0)
        pool.extend(given)
        assert list(pool.sample(3, n_step=2)["_frame"].shape) == shape
    with Pool([JointEnv(Lives(LIVES))], pool_size=20, policy=lambda _: [0] * 4, seed=0) as pool:
        pool.store()
        alive = pool.transitions()["alive"]
    assert alive.sum(0).tolist() == [6, 3, 4, 9]


def test_env_info_reaches_the_reset_as_options() -> None:
    def create_env(seed: int) -> PettingZooEnv:
        return PettingZooEnv([Lives(LIVES)], seed)

    with EpisodeBatcher(
        2, 16, RandomAgents, {"sizes": SIZES}, create_env, n_workers=0, seed=0
    ) as batcher:
        batcher.execute(2, env_info={"bias": torch.tensor([100.0, -100.0])})
        episodes = batcher.get()
    assert (episodes["frame"][0, 0, :2] > 50).all()
    for row, bias in enumerate((100.0, -100.0)):
        check_joint_episode(episodes, row, Lives(LIVES), {"": list(LIVES)}, {"bias": bias})


def test_gae_takes_rewards_of_all_agents() -> None:
    generator = torch.Generator().manual_seed(0)
    reward, value, following = torch.randn(3, 5, 7, 4, generator=generator)
    terminated, done = torch.rand(2, 5, 7, generator=generator) < 0.2
    lengths = torch.tensor([7, 3, 5, 1, 6])

    def advantage(*values: torch.Tensor, lengths: Any = None) -> torch.Tensor:
        return gae(*values, terminated, done | terminated, 0.9, 0.8, lengths=lengths)

    of_each = [(reward[..., k], value[..., k], following[..., k]) for k in range(4)]
    each = torch.stack([advantage(*values, lengths=lengths) for values in of_each], -1)
    for given in (lengths, lengths.unsqueeze(-1).expand(5, 4)):
        assert torch.equal(advantage(reward, value, following, lengths=given), each)
    for wrong in (lengths.tolist(), lengths.int()):
        with pytest.raises(SpecError, match=r"int64 \[5, 4\]"):
            advantage(reward, value, following, lengths=wrong)
    shared = value[..., 0], following[..., 0]
    assert torch.equal(advantage(reward, *shared)[..., 2], advantage(reward[..., 2], *shared))


# What is refused ------------------------------------------------------------------------------


def lives(kind: Any = Lives, **changes: Any) -> Any:
    """An environment without some attributes, or with others."""
    env = kind(LIVES)
    for name, value in changes.items():
        delattr(env, name) if value is None else setattr(env, name, value)
    return env


class Named(Lives):
    def observation_space(self, agent: str) -> Any:
        return gymnasium.spaces.Dict(alive=gymnasium.spaces.Discrete(2))


TWICE = Lives(LIVES)
REFUSED: list[tuple[Any, Any, str]] = [
    *((GymEnv, given, "PettingZooEnv") for given in ([lives()], lives())),
    (GymEnv, [JointEnv(lives())] * 2, "environments 0 and 1 are the same object"),
    *(
        (PettingZooEnv, given, "environment")
        for given in (lives(), gymnasium.make("CartPole-v1"), 3, [])
    ),
    (PettingZooEnv, [gymnasium.make("CartPole-v1")], "PettingZoo"),
    (PettingZooEnv, [TWICE, lives(), TWICE], "environments 0 and 2 are the same object"),
    (PettingZooEnv, [lives(), Lives(GROUPS)], "environment 1"),
    (PettingZooEnv, [lives(Named)], "'alive'"),
    (PettingZooEnv, [lives(possible_agents=None)], "possible_agents"),
    (partial(PettingZooEnv, state="yes"), [lives()], "state"),
    (partial(PettingZooEnv, state=True), [lives(state_space=None)], "state_space"),
    (partial(PettingZooEnv, reward=["sum"]), [lives()], "'sum'"),
    (partial(PettingZooEnv, reward="max"), [lives()], "'max'"),
]


def test_environments_and_arguments_that_do_not_fit_are_refused() -> None:
    for kind, given, named in REFUSED:
        with pytest.raises(SpecError, match=named):
            kind(given, 0)
    with pytest.raises(WorkerStartupError, match="JointEnv"):
        ParallelEnvManager([lives])


class Wrong(Lives):
    """Its first step is changed by a function."""

    def __init__(self, change: Any) -> None:
        super().__init__(LIVES)
        self.change = change

    def step(self, actions: Any) -> Any:
        return self.change(self, list(super().step(actions)))


def left(env: Any, results: list[Any]) -> Any:
    env.agents.remove("small_0")
    return tuple(results)


def unknown(env: Any, results: list[Any]) -> Any:
    env.agents.append("nobody")
    return tuple(results)


def without(position: int, agent: str = "small_0") -> Any:
    def change(env: Any, results: list[Any]) -> Any:
        del results[position][agent]
        return tuple(results)

    return change


def with_value(position: int, value: Any) -> Any:
    def change(env: Any, results: list[Any]) -> Any:
        results[position]["small_0"] = value
        return tuple(results)

    return change


def cut_without_observation(env: Any, results: list[Any]) -> Any:
    results[3]["small_0"] = True
    env.agents.remove("small_0")
    del results[0]["small_0"]
    return tuple(results)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (left, "'small_0' left without being terminated or truncated"),
        (unknown, r"\['nobody'\] are not in possible_agents"),
        (without(0), "'small_0' has no observation"),
        (cut_without_observation, "'small_0' has no observation"),
        (without(1), "'small_0' acted and got no reward"),
        (with_value(1, "much"), "'small_0': 'reward' should be a number, got 'much'"),
        (with_value(1, 1e300), "'small_0'"),
        (with_value(2, 2), "'small_0': 'terminated' should be True or False, got 2"),
        (with_value(0, np.zeros(3, np.float32)), r"'frame of small_0' should have shape \[2\]"),
        (with_value(0, np.array([1e300, 0.0])), "frame of small_0"),
        (lambda env, results: tuple(results[:4]), "five"),
    ],
)
def test_results_that_do_not_fit_name_the_agent(change: Any, words: str) -> None:
    def create_env(seed: int) -> PettingZooEnv:
        return PettingZooEnv([Wrong(change)], seed)

    with EpisodeBatcher(
        1, 16, RandomAgents, {"sizes": SIZES}, create_env, n_workers=0, seed=0
    ) as batcher:
        batcher.execute(1)
        with pytest.raises(EnvError, match=words):
            batcher.get()


class Strict(Lives):
    """Its small agents count their actions from 1, as int8."""

    def action_space(self, agent: str) -> Any:
        is_big = agent.startswith("big")
        return super().action_space(agent) if is_big else Discrete(4, start=1, dtype=np.int8)

    def step(self, actions: Any) -> Any:
        assert all(self.action_space(agent).contains(actions[agent]) for agent in actions)
        return super().step(actions)


@pytest.mark.parametrize(("lives", "key"), [(LIVES, "action"), (GROUPS, "action/small")])
def test_actions_of_agents_that_are_alive_have_to_be_in_their_space(lives: Any, key: str) -> None:
    env = PettingZooEnv([Strict(lives)])
    env.reset_lanes([0], [0], [None])
    actions = {key: np.full((1, len(env.groups[key[7:]])), 4), "action/big": np.ones((1, 2, 2))}
    actions[key][0, -1] = 9  # small_3 is not born, small_1 neither
    env.step_lanes([0], actions)
    actions[key][0, 1] = 0
    with pytest.raises(LaneError) as caught:
        env.step_lanes([0], actions)
    assert "agent 'small_1': the action 'action' is 0, outside of 1 to 4" in str(
        caught.value.__cause__
    )


def test_the_steps_of_agents_have_no_agents() -> None:
    with pytest.raises(SpecError, match="no key 'alive'"):
        collected(LIVES, SIZES).per_agent().per_agent()


@pytest.mark.parametrize("key", ["born", "_terminated", "_truncations"])
def test_per_agent_names_what_episodes_lack(key: str) -> None:
    episodes = collected(LIVES, SIZES)
    with pytest.raises(SpecError, match=rf"\['{key}'\].*\n.*with all their keys"):
        episodes.get([name for name in episodes if name != key]).per_agent()


def test_per_agent_names_the_groups() -> None:
    episodes = collected(GROUPS, GROUP_SIZES)
    with pytest.raises(SpecError, match="name a group: 'big', 'small'"):
        episodes.per_agent()
    with pytest.raises(SpecError, match="PettingZooEnv"):
        episodes.get(["action/big"]).per_agent()
    own = episodes.per_agent("big")
    with pytest.raises(SpecError, match=r"one row per agent: \[10, T\]"):
        episodes.from_agents(own["_reward"][:3], "big")
    with pytest.raises(SpecError, match="agents have up to 5"):
        episodes.from_agents(own["_reward"][:, :3], "big")
