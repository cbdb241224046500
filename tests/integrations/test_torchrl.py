"""What batchers and pools give, in TorchRL: its losses, its buffers, and the way back."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Categorical

from rlpool import (
    Agent,
    Batcher,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    Pool,
    SpecError,
    TemporalDictTensor,
    gae,
    sample_categorical,
)
from rlpool.integrations.torchrl import from_torchrl, to_torchrl

from support.agents import GruAgent
from support.collected import (
    assert_same_bits,
    counting_episodes,
    counting_window,
    episodes_of,
    episodes_of_parts,
)
from support.envs import create_counting
from support.programs import blocks_of, run_block

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecated classes of its own, defined on import
    pytest.importorskip("torchrl", reason='needs TorchRL: pip install "rlpool[torchrl]"')
    from tensordict import NonTensorData, TensorDict
    from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
    from tensordict.nn import ProbabilisticTensorDictSequential as ProbabilisticSequence
    from torchrl.collectors import Collector
    from torchrl.collectors.utils import split_trajectories
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler
    from torchrl.envs import GymEnv as TorchRLGymEnv
    from torchrl.envs import SerialEnv
    from torchrl.modules import QValueActor
    from torchrl.objectives import ClipPPOLoss, DQNLoss, SoftUpdate
    from torchrl.objectives.value import GAE

pytestmark = pytest.mark.filterwarnings("ignore:::torchrl", "ignore:::tensordict")

DISCOUNT, LAMBDA = 0.9, 0.8


class RightEnv(gymnasium.Env[Any, Any]):
    """Pays for action 1 in state 0, and for action 0 in state 1; states are drawn."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        reward = float(action != self.state)
        return self._observe(), reward, False, self.t == 8, {}

    def _observe(self) -> Any:
        self.state = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.state]


class Policy(nn.Linear, Agent):
    """Logits of two actions; says the log-probability under TorchRL's name."""

    n_noise = 1

    def __init__(self) -> None:
        super().__init__(2, 2)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def __call__(self, state, observation, agent_info=None, history=None):
        action, log_prob = sample_categorical(
            self.forward(observation["frame"]), observation["noise"]
        )
        return None, DictTensor({"action": action, "action_log_prob": log_prob}), None

    update = nn.Module.load_state_dict


def create_right(seed: int, kind: Any = GymEnv) -> GymEnv:
    return kind([RightEnv() for _ in range(8)], seed)


class NestedAgent(Agent):
    def __call__(self, state, observation, agent_info=None, history=None):
        action = observation["pose/0"] % 3
        return None, DictTensor({"action": action}), None


def recurrent_episodes() -> TemporalDictTensor:
    return episodes_of(GruAgent, create_counting)


def pool_of_counting(**arguments: Any) -> Pool:
    pool = Pool(pool_size=100, seed=0, **arguments)
    pool.extend(counting_episodes())
    return pool


BATCHES = {
    "episodes": counting_episodes,
    "a window": counting_window,
    "recurrent episodes": recurrent_episodes,
    "nested episodes": lambda: episodes_of_parts(NestedAgent),
    "a sample": lambda: pool_of_counting().sample(5),
    "a sample by priority": lambda: pool_of_counting(priority_exponent=0.5).sample(5, n_step=2),
    "sequences": lambda: pool_of_counting(priority_exponent=0.5).sample_sequences(5, 4),
}


# The layout ---------------------------------------------------------------------------------------


def test_trajectories_have_the_entries_that_a_collector_of_torchrl_gives() -> None:
    env = TorchRLGymEnv("CartPole-v1", categorical_action_encoding=True)
    collector = Collector(SerialEnv(2, lambda: env), None, frames_per_batch=20, total_frames=20)
    (theirs,) = collector
    collector.shutdown()
    with Batcher(10, None, BinaryAgent, {}, create_cartpole, {}, n_threads=0, seeds=1) as batcher:
        batcher.reset()
        batcher.execute()
        ours = to_torchrl(batcher.get())
    assert ours.batch_size == theirs.batch_size == (2, 10)
    assert ours.names == theirs.names
    paths = theirs.keys(include_nested=True, leaves_only=True)
    described = {path: (ours[path].dtype, ours[path].shape) for path in paths}
    assert described == {path: (theirs[path].dtype, theirs[path].shape) for path in paths}


class BinaryAgent(Agent):
    n_noise = 1

    def __call__(self, state, observation, agent_info=None, history=None):
        action = (observation["noise"][:, 0] * 2).long()
        return None, DictTensor({"action": action}), None


def create_cartpole(seed: int) -> GymEnv:
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(2)], seed)


def test_episodes_are_masked_numbered_and_told_what_they_ran_with() -> None:
    data = to_torchrl(counting_episodes())
    assert data["collector", "mask"].sum(1).tolist() == [3, 5, 1, 4]
    steps = data[data["collector", "mask"]]
    assert steps["collector", "traj_ids"].tolist() == [0] * 3 + [1] * 5 + [2] + [3] * 4
    assert steps["info", "env_info", "length"].tolist() == [3] * 3 + [5] * 5 + [1] + [4] * 4
    assert steps["observation"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 1, 2, 3]
    assert steps["next", "observation"][:, 0].tolist() == [1, 2, 3, 1, 2, 3, 4, 5, 1, 1, 2, 3, 4]
    assert steps["next", "terminated"][:, 0].nonzero()[:, 0].tolist() == [2, 7, 8, 12]
    assert steps["is_init"][:, 0].nonzero()[:, 0].tolist() == [0, 3, 8, 9]


def test_episodes_of_a_window_have_numbers_of_their_own() -> None:
    data = to_torchrl(counting_window())
    assert data["collector", "traj_ids"].tolist() == [
        [0, 0, 0, 1, 1, 1, 2],
        [3, 3, 3, 4, 4, 4, 5],
    ]


def test_data_of_several_agents_keep_a_dimension_for_them() -> None:
    done = torch.tensor([[0, 1, 0], [0, 0, 0]])[:, :, None, None].repeat(1, 1, 4, 1) > 0
    done[1, 0, 2] = True  # one agent's, while the others go on
    data = to_torchrl(TemporalDictTensor({"_done": done, "_reward": torch.ones(2, 3, 4, 1)}))
    assert data["next", "reward"].shape == (2, 3, 4, 1)
    assert data["collector", "traj_ids"].tolist() == [[0, 0, 1], [2, 2, 2]]


def test_nested_observations_have_nested_entries() -> None:
    data = to_torchrl(episodes_of_parts(NestedAgent))
    assert data["image"].shape == data["next", "image"].shape == (3, 3, 4, 3, 2)
    assert data["next", "pose", "1"].shape == (3, 3, 2)


@pytest.mark.parametrize("name", BATCHES)
def test_no_tensor_is_copied(name: str) -> None:
    batch = BATCHES[name]()
    data = to_torchrl(batch)
    again = from_torchrl(data)
    shared = {t.data_ptr() for t in data.values(include_nested=True, leaves_only=True)}
    leaves = [t for t in batch.values() if t.numel()]
    assert {tensor.data_ptr() for tensor in leaves} <= shared
    assert [again[k].data_ptr() for k in batch] == [batch[k].data_ptr() for k in batch]
    if isinstance(batch, TemporalDictTensor):
        assert {tensor.data_ptr() for tensor in batch.info.values()} <= shared


@pytest.mark.parametrize("name", BATCHES)
def test_what_comes_back_has_the_same_bits(name: str) -> None:
    batch = BATCHES[name]()
    assert_same_bits(from_torchrl(to_torchrl(batch)), batch)


parts = st.sampled_from(["", "_", "frame", "observation", "next", "info", "done", "weight", "a"])
keys = st.lists(parts, min_size=1, max_size=3).map("/".join) | parts.map("_{}".format)


shapes = st.sampled_from([(2, 3), (2, 1), (2, 3, 1), (2, 3, 2), (2, 3, 1, 1)])


@given(
    st.dictionaries(keys, shapes, max_size=4),
    st.sets(keys, max_size=3),
    st.booleans(),
    st.sampled_from(["frame", "observation"]),
)
def test_whatever_the_keys_a_batch_comes_back_or_is_refused(
    steps: dict[str, tuple[int, ...]], info: set[str], is_temporal: bool, observation: str
) -> None:
    tensors = {key: torch.full(steps[key], n) for n, key in enumerate(sorted(steps))}
    batch: TemporalDictTensor | DictTensor = DictTensor(tensors)
    if is_temporal and steps:
        tensors = {key: tensor.expand(2, 3, *tensor.shape[2:]) for key, tensor in tensors.items()}
        told = DictTensor({key: torch.arange(2) for key in info})
        batch = TemporalDictTensor(tensors, info=told)
    try:
        data = to_torchrl(batch, observation=observation)
    except SpecError:
        return
    assert_same_bits(from_torchrl(data, observation=observation), batch)


def test_observations_with_a_key_observation_keep_their_names_if_asked() -> None:
    goals = DictTensor({"observation": torch.zeros(2, 3), "achieved_goal": torch.ones(2, 3)})
    with pytest.raises(SpecError, match=r"observation='observation'"):
        to_torchrl(goals)
    data = to_torchrl(goals, observation="observation")
    assert data["observation"].shape == (2, 3)
    assert_same_bits(from_torchrl(data, observation="observation"), goals)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["next/frame"], r"layout needs 'next'"),
        (["collector/mask"], r"layout needs 'collector'"),
        (["info"], r"layout needs 'info'"),
        (["initial_state", "_is_init"], r"'_is_init', which TorchRL has for 'initial_state'"),
        (["pose", "pose/0"], r"'pose' and 'pose/0' cannot both be"),
    ],
)
def test_keys_that_the_layout_needs_are_refused_by_name(keys: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        to_torchrl(TemporalDictTensor({key: torch.zeros(2, 3) for key in keys}))


def test_keys_of_info_that_cannot_both_be_there_are_refused_by_name() -> None:
    info = DictTensor({"task": torch.zeros(2), "task/goal": torch.zeros(2)})
    with pytest.raises(SpecError, match="keys of info 'task' and 'task/goal' cannot both be"):
        to_torchrl(TemporalDictTensor({"frame": torch.zeros(2, 3)}, info=info))


@pytest.mark.parametrize("key", ["reward", "_reward", "_done", "terminated", "initial_state"])
@pytest.mark.parametrize("kind", [TemporalDictTensor, DictTensor])
def test_signals_that_would_lose_a_dimension_are_refused(key: str, kind: Any) -> None:
    leading = (2, 3) if kind is TemporalDictTensor else (2,)
    batch = kind({key: torch.ones(*leading, 1)})
    with pytest.raises(SpecError, match=rf"'{key}' is float32 .* 1\], .* one number") as refused:
        to_torchrl(batch)
    eval(refused.value.fix)
    assert_same_bits(from_torchrl(to_torchrl(batch)), kind({key: torch.ones(*leading)}))


def steps(**entries: Any) -> Any:
    return TensorDict({"observation": torch.zeros(2, 3), **entries}, [2, 3])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"observation": torch.zeros(2)}, "pass a TensorDict"),
        (steps()[0, 0], "no batch dimension"),
        (TensorDict({}, [3, 2], names=["time", None]), "time is not the last"),
        (steps(mask=torch.tensor([[1, 0, 1], [1, 1, 1]]) > 0), "steps that follow padding"),
        (steps(mask=torch.ones(2, 3)), r"mask is float32 \[2, 3\]"),
        (steps(info={"cost": torch.arange(6).view(2, 3)}), "'cost'.* changes within a row"),
        (steps(_frame=torch.zeros(2, 3), next={"observation": torch.zeros(2, 3)}), "'_frame'"),
    ],
)
def test_data_that_cannot_be_trajectories_are_refused(data: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        from_torchrl(data)


def test_entries_that_are_no_tensors_are_left_out() -> None:
    batch = from_torchrl(steps(task=NonTensorData("reach", [2, 3])))
    assert list(batch) == ["frame"]


def test_an_observation_that_is_missing_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"no key 'place' .*observation"):
        to_torchrl(TemporalDictTensor({"frame": torch.zeros(2, 3)}), observation="place")
    assert "pose" in to_torchrl(TemporalDictTensor({"pose": torch.zeros(2, 3)}))


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(SpecError, match="pass a TemporalDictTensor or a DictTensor"):
        to_torchrl({"frame": torch.zeros(2)})  # type: ignore[arg-type]


def test_a_missing_tensordict_is_asked_for_by_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ImportError, match=r"pip install 'rlpool\[torchrl\]'"):
        to_torchrl(DictTensor({"frame": torch.zeros(2)}))


# What TorchRL makes of it -------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
@pytest.mark.parametrize("collect", [counting_episodes, counting_window])
def test_advantages_are_those_that_rlpool_computes(collect: Any, ends: str) -> None:
    batch = counting_window(ends=ends) if collect is counting_window else collect()
    critic = nn.Linear(2, 1)
    data = to_torchrl(batch)
    GAE(gamma=DISCOUNT, lmbda=LAMBDA, value_network=value_module(critic))(data)
    with torch.no_grad():
        value, next_value = (critic(batch[key])[..., 0] for key in ("frame", "_frame"))
    expected = gae(
        batch["_reward"],
        value,
        next_value,
        batch["_terminated"],
        batch["_done"],
        DISCOUNT,
        LAMBDA,
        lengths=batch.lengths,
    )
    is_step = data["collector", "mask"]
    torch.testing.assert_close(data["advantage"][..., 0][is_step], expected[is_step])


def value_module(critic: nn.Module) -> Any:
    return TensorDictModule(critic, in_keys=["observation"], out_keys=["state_value"])


def test_ppo_of_torchrl_learns_from_windows() -> None:
    torch.manual_seed(0)
    policy, critic = Policy(), nn.Linear(2, 1)
    actor = ProbabilisticSequence(
        TensorDictModule(policy.forward, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=Categorical,
            return_log_prob=True,
        ),
    )
    loss = ClipPPOLoss(actor, value_module(critic))
    advantage = GAE(gamma=DISCOUNT, lmbda=LAMBDA, value_network=value_module(critic))
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=0.05)
    returns = []
    with Batcher(
        16, None, Policy, {}, create_right, {"kind": GymEnvInf}, n_threads=0, seeds=3
    ) as batcher:
        batcher.reset()
        for _ in range(12):
            batcher.update(policy.state_dict())
            batcher.execute()
            data = to_torchrl(batcher.get())
            returns.append(data["next", "reward"].mean().item())
            for _ in range(4):
                advantage(data)
                losses = loss(data.reshape(-1))
                optimizer.zero_grad()
                sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
                optimizer.step()
    assert returns[0] < 0.7
    assert returns[-1] > 0.9


def samples(pool: Pool, n: int) -> Iterator[Any]:
    yield from (to_torchrl(batch) for batch in pool.batches(32, n))


def weight_of(parameters: Any) -> Tensor:
    return next(t for k, t in parameters.flatten_keys(".").items() if k.endswith("weight"))


def test_dqn_of_torchrl_learns_from_a_pool_with_a_target_that_follows() -> None:
    torch.manual_seed(0)
    pool = Pool(pool_size=1000, seed=0)
    with EpisodeBatcher(8, 64, Policy, {}, create_right, {}, n_threads=0, seeds=3) as batcher:
        batcher.execute(64)
        pool.extend(batcher.get())
    network = nn.Linear(2, 2)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss = DQNLoss(actor, action_space="categorical", delay_value=True)
    loss.make_value_estimator(gamma=0.0)
    updater = SoftUpdate(loss, eps=0.5)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    for data in samples(pool, 150):
        optimizer.zero_grad()
        loss(data)["loss"].backward()
        optimizer.step()
        before = weight_of(loss.target_value_network_params).clone()
        updater.step()
    # The last update: half of what it was, half of what the network is.
    target = weight_of(loss.target_value_network_params)
    torch.testing.assert_close(target, (before + network.weight) / 2)
    values = network(torch.eye(2)).detach()  # of each state, what each action pays
    torch.testing.assert_close(values, torch.tensor([[0.0, 1], [1, 0]]), atol=0.1, rtol=0)


def test_the_weights_of_priorities_weigh_the_loss_of_dqn() -> None:
    pool = pool_of_counting(priority_exponent=1.0)
    pool.update_priorities(pool.sample(13)["index"], torch.rand(13) + 0.1)
    batch = pool.sample(13, beta=1.0)
    actor = QValueActor(nn.Linear(2, 6), in_keys=["observation"], action_space="categorical")
    loss = DQNLoss(actor, action_space="categorical", reduction="none", delay_value=False)
    weight, weighted = batch["weight"], loss(to_torchrl(batch))["loss"]
    assert weight.min() < 0.5
    batch.set("weight", torch.ones(13))
    torch.testing.assert_close(weighted, weight * loss(to_torchrl(batch))["loss"])


def buffer(data: Any, **sampler: Any) -> Any:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(1000), sampler=SliceSampler(slice_len=3, **sampler), batch_size=30
    )
    buffer.extend(data)
    return buffer


@pytest.mark.parametrize(
    ("data", "sampler"),
    [
        (
            lambda: to_torchrl(counting_window(20, length=6)),
            {"traj_key": ("collector", "traj_ids")},
        ),
        (
            lambda: to_torchrl(counting_episodes()),
            {"end_key": ("next", "done"), "strict_length": False},
        ),
    ],
)
def test_slices_of_a_replay_buffer_are_steps_of_one_episode(data: Any, sampler: Any) -> None:
    data = data()
    drawn = buffer(data[data["collector", "mask"]], **sampler).sample()
    step, number = drawn["observation"][:, 0], drawn["collector", "traj_ids"]
    starts = torch.cat(
        [torch.ones(1) > 0, (number[1:] != number[:-1]) | (step[1:] != step[:-1] + 1)]
    )
    assert 10 <= starts.sum() <= 30
    assert len(set(number.tolist())) > 2
    slices = starts.cumsum(0).bincount()[1:]
    assert slices.max() <= 6


def test_slices_come_back_as_sequences() -> None:
    data = to_torchrl(counting_window(20, length=6))
    drawn = buffer(data.reshape(-1), traj_key=("collector", "traj_ids")).sample()
    batch = from_torchrl(drawn.reshape(10, 3))
    assert batch["frame"].shape == (10, 3, 2)
    assert torch.equal(batch["frame"][:, 1:], batch["_frame"][:, :-1])
    assert batch.info["episode"].shape == (10,)


# What comes from TorchRL --------------------------------------------------------------------------


def collected(n_envs: int, **arguments: Any) -> Any:
    env = (
        SerialEnv(n_envs, lambda: TorchRLGymEnv("CartPole-v1"))
        if n_envs
        else TorchRLGymEnv("CartPole-v1")
    )
    collector = Collector(env, None, frames_per_batch=120, total_frames=120, **arguments)
    (data,) = collector
    collector.shutdown()
    return data


@pytest.mark.parametrize("n_envs", [0, 2])
def test_what_a_collector_of_torchrl_returns_goes_into_a_pool_and_gae(n_envs: int) -> None:
    data = collected(n_envs)
    batch = from_torchrl(data)
    assert isinstance(batch, TemporalDictTensor)
    assert batch["frame"].shape == (max(1, n_envs), 120 // max(1, n_envs), 4)
    assert batch["_reward"].shape == batch["frame"].shape[:2]
    pool = Pool(pool_size=200, seed=0)
    pool.extend(batch)
    assert len(pool) == 120
    flat = data.reshape(-1)
    assert torch.equal(pool.transitions()["_frame"], flat["next", "observation"])
    assert torch.equal(pool.transitions()["_done"], flat["next", "done"][:, 0])
    value = batch["frame"].sum(-1)
    ends = batch["_terminated"], batch["_done"]
    advantage = gae(batch["_reward"], value, batch["_frame"].sum(-1), *ends, DISCOUNT, LAMBDA)
    theirs = GAE(gamma=DISCOUNT, lmbda=LAMBDA, value_network=value_module(Sum()))(data)["advantage"]
    torch.testing.assert_close(advantage, theirs.reshape(advantage.shape))


class Sum(nn.Module):
    def forward(self, observation: Tensor) -> Tensor:
        return observation.sum(-1, keepdim=True)


def test_split_trajectories_become_rows_with_lengths() -> None:
    data = collected(0)
    batch = from_torchrl(split_trajectories(data))
    assert batch.lengths.sum() == 120
    assert torch.equal(batch.flatten()["frame"], data["observation"])
    assert batch["_done"].sum(1).tolist() == [1] * (len(batch.lengths) - 1) + [
        int(data["next", "done"][-1])
    ]
    without = data.exclude("collector")  # as from a buffer: the mask is at the root
    assert torch.equal(
        from_torchrl(split_trajectories(without, done_key="done")).lengths, batch.lengths
    )


# The page -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(blocks_of("docs/neighbours/torchrl.md"))))
def test_a_program_of_the_page_runs(
    number: int, program_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_block("docs/neighbours/torchrl.md", number, program_folder)
    expected = ["entropy: 0", "torch.Size([32, 8, 4]) torch.Size([32])", "_reward"]
    assert expected[number] in capfd.readouterr().out
