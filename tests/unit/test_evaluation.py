"""Evaluating an agent: the same results for any number of workers, and an unchanged agent."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import RecordEpisodeStatistics

from rlpool import (
    Batcher,
    EnvSpecError,
    EpisodeBatcher,
    Estimate,
    Evaluation,
    GymEnv,
    NotRepeatedError,
    ParallelEnvManager,
    SpecError,
    VectorGymEnv,
    compare,
    evaluate,
    plot,
    verify,
)
from rlpool.seeding import episode_seeds, root_from

from support.agents import StepCounter, StochasticPolicy
from support.envs import CountingEnv, create_counting
from support.keeping import KEEPING, Seeded, create_keeping
from support.vector_envs import ArrayEnv


def create_cartpole(seed: int, n_envs: int = 2) -> GymEnv:
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def test_results_do_not_depend_on_lanes_or_workers() -> None:
    policy, info = StochasticPolicy(), {"is_greedy": torch.arange(21) % 2 == 0}
    first, *others = (
        evaluate(
            policy,
            create_cartpole,
            21,
            env_args={"n_envs": n_envs},
            n_workers=n_workers,
            seeds=3,
            agent_info=info,
        )
        for n_envs, n_workers in ((3, 0), (1, 0), (7, 2))
    )
    assert torch.equal(first.returns.long(), first.lengths)
    assert len(set(first.seeds.tolist())) == 21
    assert first.successes is None
    for other in others:
        assert other.entries == first.entries
        assert torch.equal(other.returns, first.returns)
    again = evaluate(policy, create_cartpole, 21, seeds=4, agent_info=info)
    of_a_batcher = episode_seeds(root_from(3), 0, 80)  # with the same seed
    for seeds in (again.seeds.tolist(), of_a_batcher):
        assert not set(seeds) & set(first.seeds.tolist())


@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_copy_is_in_evaluation_mode_and_the_caller_keeps_agent_and_generators(
    n_workers: int,
) -> None:
    policy = StochasticPolicy().train()
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    torch.manual_seed(0)
    random.seed(0)
    drawn = torch.rand(3), random.random()
    torch.manual_seed(0)
    random.seed(0)
    evaluate(policy, create_cartpole, 5, n_workers=n_workers)
    assert all(module.training for module in policy.all_modules())
    assert torch.equal(torch.rand(3), drawn[0])
    assert random.random() == drawn[1]
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())
    assert all(value.grad is None and value.requires_grad for value in policy.parameters())


def test_infos_reach_their_episodes_for_any_request_size() -> None:
    n = 3 * 2 * 4 + 1
    lengths = torch.arange(n) % 7 + 1
    result = evaluate(StepCounter(), create_counting, n, env_info={"length": lengths})
    assert torch.equal(result.lengths, lengths)
    assert result.returns.tolist() == [k * (k + 1) / 2 for k in lengths.tolist()]


# Successes ---------------------------------------------------------------------------------------


class Reporting(CountingEnv):
    """Environment with values in the infos of its steps.

    Args:
        info_of: Returns the info, given the step from 1 and the length of the episode.
    """

    def __init__(self, info_of: Callable[[int, int], dict[str, Any]]) -> None:
        super().__init__()
        self.info_of = info_of

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], self.info_of(self.t, self.length)


def successes_of(info_of: Any, keys: Any, lengths: Any, n_lanes: int = 1, **kwargs: Any) -> Any:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([Reporting(info_of) for _ in range(n_lanes)], seed, info_keys=keys)

    kwargs["env_info"] = {"length": lengths}
    found = evaluate(StepCounter(), create_env, len(lengths), **kwargs).successes
    return None if found is None else found.tolist()


@pytest.mark.parametrize(
    ("key", "expected"), [("success", [False, True, True]), ("is_success", [False, True, False])]
)
@pytest.mark.parametrize("values", [[0.3, 0.6, 0.4], [np.array([each]) for each in (0, 1, 0)]])
def test_numbers_and_arrays_above_one_half_count_as_successes_in_any_or_the_last_step(
    values: list[Any], key: str, expected: list[bool]
) -> None:
    keys = {key: (float, np.shape(values[0]))}
    assert successes_of(lambda t, _: {key: values[t - 1]}, keys, [1, 2, 3]) == expected


@pytest.mark.parametrize("policy", [{}, {"n_workers": 1, "on_env_error": "truncate"}])
def test_a_success_key_missing_from_all_infos_raises(policy: Any) -> None:
    with pytest.raises(EnvSpecError, match="'succes'"):
        successes_of(lambda *_: {"success": True}, ["succes"], [3, 3, 3], **policy)


def sometimes(t: int, length: int) -> dict[str, Any]:
    """Report a success at the end of episodes with three steps, and nothing otherwise."""
    return {"success": True} if t == length == 3 else {}


def test_a_rare_success_key_does_not_depend_on_lanes_or_request_size(tmp_path: Path) -> None:
    run = partial(successes_of, sometimes, ["success"], [2, 3, 2, 2, 2, 2])
    expected = [False, True, False, False, False, False]
    record = tmp_path / "record.jsonl"
    assert run() == run(2, n_workers=2) == run(record=record) == expected
    lines = record.read_bytes().splitlines(keepends=True)
    for n_kept in (1, 3):
        record.write_bytes(b"".join(lines[:n_kept]))
        assert run(record=record) == expected


# State carried from one episode to the next ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n_envs", "n_workers", "over_manager"),
    [
        *((name, 1, 0, 0) for name in KEEPING),
        ("NormalizeReward", 2, 2, 0),
        ("the environment, later", 2, 0, 1),
    ],
)
def test_wrappers_that_carry_state_over_are_named(
    name: str, n_envs: int, n_workers: int, over_manager: int, tmp_path: Path
) -> None:
    arguments = {"name": name, "n_envs": n_envs, "over_manager": over_manager}
    how: Any = {"env_args": arguments, "n_workers": n_workers, "record": tmp_path / "run.jsonl"}
    with pytest.raises(NotRepeatedError, match=f"^{name.partition(',')[0]} "):
        evaluate(StepCounter(), create_keeping, 30, **how)
    if "later" not in name:
        assert len(how["record"].read_text().splitlines()) == 1, "nothing that may be wrong"
    found = evaluate(StepCounter(), create_keeping, 30, check_repeatable=False, **how)
    assert len(found.entries) == 30


def test_lanes_reset_together_are_not_checked() -> None:
    def create_env(seed: int) -> VectorGymEnv:
        return VectorGymEnv(ArrayEnv(2, AutoresetMode.NEXT_STEP), seed, seeding="request")

    assert evaluate(StepCounter(), create_env, 6, max_steps=3).lengths.max() == 3


def test_infos_need_not_be_repeated() -> None:
    def create_env(seed: int) -> GymEnv:
        envs = [RecordEpisodeStatistics(Seeded())]
        return GymEnv(envs, seed, info_keys={"episode/t": np.float64})

    assert evaluate(StepCounter(), create_env, 5, infos=["episode/t"]).entries


@pytest.mark.parametrize(
    ("kind", "make", "names"),
    [
        (Batcher, KEEPING["NormalizeReward"], ["NormalizeReward", "NormalizeObservation"]),
        (EpisodeBatcher, KEEPING["EpisodicLifeEnv"], ["EpisodicLifeEnv"]),
        (EpisodeBatcher, Seeded, []),
    ],
)
def test_batchers_warn_about_wrappers_that_keep_state(
    kind: Any, make: Any, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([make()], seed)

    caplog.set_level("WARNING", "rlpool")
    kind(8, 2, StepCounter, {}, create_env, n_workers=0).close()
    assert [name for name in names if name in caplog.text] == names
    assert len(caplog.records) == bool(names)


# Episodes that never end -------------------------------------------------------------------------


@pytest.mark.parametrize(("max_steps", "over_manager"), [(1, False), (200, False), (4, True)])
def test_episodes_are_truncated_at_the_step_limit(max_steps: int, over_manager: bool) -> None:
    def create_env(seed: int) -> Any:
        makers = [partial(CountingEnv, length) for length in (3, 10**9, 4)]
        if over_manager:
            return ParallelEnvManager(makers, seed=seed, min_ready=2)
        return GymEnv([maker() for maker in makers], seed)

    found = evaluate(StepCounter(), create_env, 6, max_steps=max_steps)
    lengths = [min(n, max_steps) for n in (3, 10**9, 4)] * 2
    assert found.lengths.tolist() == lengths
    terminated = [n < 10**9 and n <= max_steps for n in (3, 10**9, 4)] * 2
    assert [entry["terminated"] for entry in found.entries] == terminated
    assert not verify(found, StepCounter(), create_env).differences


def test_a_possibly_endless_episode_is_warned_about_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpool.batch.dispatch._LONG_STEPS", 200)  # 100,000 steps take long
    for max_steps, n_warnings in ((200, 0), (400, 1)):
        evaluate(StepCounter(), create_counting, 4, env_info={"length": 5000}, max_steps=max_steps)
        assert sum("max_steps" in record.msg for record in caplog.records) == n_warnings


# Statistics, compared with their definitions ------------------------------------------------------

RETURNS = [1.0, 4.0, 2.0, 8.0, 5.0, 7.0, 3.0, 6.0]


def evaluation_of(
    returns: Any, successes: Any = None, seeds: Any = None, **changes: Any
) -> Evaluation:
    n = len(returns)
    return Evaluation(
        returns=torch.tensor(returns, dtype=torch.float32),
        lengths=torch.arange(1, n + 1),
        successes=None if successes is None else torch.tensor(successes),
        seeds=torch.arange(n) if seeds is None else torch.tensor(seeds),
        **changes,
    )


def test_summary_statistics_match_their_definitions() -> None:
    summary = evaluation_of(RETURNS, [True] * 6 + [False] * 2).summary()
    assert summary.n_episodes == 8
    assert summary.mean.value == 4.5
    assert summary.mean.low < 4.5 < summary.mean.high
    assert summary.median == 4.5
    assert summary.interquartile_mean == np.mean(sorted(RETURNS)[2:6])
    assert summary.std == pytest.approx(math.sqrt(sum((r - 4.5) ** 2 for r in RETURNS) / 7))
    assert summary.mean_length == 4.5
    # Wilson's interval for 6 of 8, by its formula.
    z, p, n = 1.959964, 0.75, 8
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    width = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    assert summary.success_rate == pytest.approx((0.75, centre - width, centre + width))
    assert summary == evaluation_of(RETURNS, [True] * 6 + [False] * 2).summary()  # seeded
    low, high = summary.success_rate[1:]
    assert f"success rate               0.75 [{low:.6g}, {high:.6g}]" in str(summary).splitlines()


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_or_equal_returns_have_valid_intervals(n: int) -> None:
    summary = evaluation_of([3.0] * n, [True] * n).summary()
    assert summary.mean.value == summary.median == summary.interquartile_mean == 3.0
    assert math.isnan(summary.mean.low) == (n == 1)
    assert math.isnan(summary.std) == (n == 1)
    assert summary.success_rate is not None
    assert summary.success_rate.high == 1.0
    assert evaluation_of([1.0]).summary().success_rate is None
    assert "success" not in str(evaluation_of([1.0]).summary())


def test_episodes_are_paired_by_seed() -> None:
    first = evaluation_of([1.0, 5.0, 3.0, 9.0], [True, True, False, True], [4, 7, 2, 1])
    second = evaluation_of([2.0, 1.0, 3.0, 0.0], [False, True, False, True], [2, 7, 4, 99])
    found = compare(first, second)
    # Seeds 4, 7 and 2: 1 - 3, 5 - 1, 3 - 2.
    assert (found.n_pairs, found.n_unpaired) == (3, 2)
    assert found.difference.value == 1.0
    assert found.probability_of_improvement.value == pytest.approx(2 / 3)
    assert found.success_difference == pytest.approx(1 / 3)
    assert found.mcnemar_p == 1.0  # one pair differs


def test_mcnemar_counts_discordant_pairs() -> None:
    wins = evaluation_of([1.0] * 10, [True] * 10)
    losses = evaluation_of([0.0] * 10, [False] * 8 + [True] * 2)
    assert compare(wins, losses).mcnemar_p == pytest.approx(2 / 2**8)
    assert compare(wins, wins).mcnemar_p == 1.0
    assert compare(wins, wins).probability_of_improvement.value == 0.5
    assert compare(wins, wins).difference == Estimate(0.0, 0.0, 0.0)


def test_a_plot_shows_all_returns_and_paired_differences() -> None:
    one, other = evaluation_of(RETURNS), evaluation_of([0.0] * 8)
    (axes,) = plot(one).axes
    (points,) = axes.collections[:1]
    assert sorted(points.get_offsets()[:, 1]) == sorted(RETURNS)
    assert len(plot(one, other, one).axes) == 1
    left, right = plot(one, other, names=["a", "b"]).axes
    assert [label.get_text() for label in left.get_xticklabels()] == ["a", "b"]
    assert right.get_xticklabels()[0].get_text() == "a - b"
    assert sorted(right.collections[0].get_offsets()[:, 1]) == sorted(RETURNS)


# Refusals ----------------------------------------------------------------------------------------


def uncopyable() -> StochasticPolicy:
    policy = StochasticPolicy()
    policy.cache = policy.layers[0].weight * 2  # part of a graph
    return policy


def fails_with(**changes: Any) -> Callable[[Path], Any]:
    arguments = {"agent": StepCounter(), "create_env": create_counting, "n_episodes": 2, **changes}
    return lambda _: evaluate(**arguments)


ONE, OTHER = evaluation_of([1.0, 2.0]), evaluation_of([1.0, 2.0], protocol={"max_steps": 3})
TWICE, ELSEWHERE = evaluation_of([1.0, 2.0], seeds=[3, 3]), evaluation_of([1.0], seeds=[99])
NOT_ONE: Any = "a.json"

REFUSED: list[tuple[Callable[[Path], Any], str]] = [
    (fails_with(agent=StepCounter), "agent is the class"),
    (fails_with(agent=uncopyable()), "__deepcopy__"),
    (fails_with(create_env=None), "create_env"),
    (fails_with(n_episodes=0), "n_episodes"),
    (fails_with(seeds=-1), "seeds"),
    (fails_with(env_info={"length": [1]}), "'length' in env_info"),
    (fails_with(agent_rows=0), "agent_rows"),
    (fails_with(infos=["score"]), "infos names 'score'"),
    (fails_with(episode_seeds=[1, 2], n_episodes=3), "episode_seeds"),
    (fails_with(episode_seeds=range(10**30), n_episodes=None), "episode_seeds"),
    (lambda _: successes_of(lambda *_: {"success": np.nan}, ["success"], [2]), "success"),
    (lambda folder: evaluate(StepCounter(), create_counting, 2, record=folder), "record="),
    (lambda folder: evaluate(StepCounter(), NOT_ONE, 2, record=folder / "no" / "a"), "record="),
    (lambda folder: ONE.save(folder / "no" / "a"), "path="),
    (lambda _: ONE.summary(failures="skip"), "failures"),
    (lambda _: evaluation_of([]).summary(), "no episodes"),
    (lambda _: evaluation_of([1.0, np.nan]).summary(), "episode 1 "),
    (lambda _: compare(ONE, NOT_ONE), "'a.json'"),
    (lambda _: compare(TWICE, TWICE), "seeds"),
    (lambda _: compare(ONE, ELSEWHERE), "share a seed"),
    (lambda _: compare(ONE, OTHER), "max_steps"),
    (lambda _: verify(ONE, StepCounter, create_counting), "no record"),
    (lambda _: plot(), "nothing to plot"),
    (lambda _: plot(ONE, names=["a", "b"]), "names"),
]


@pytest.mark.parametrize(("call", "named"), REFUSED)
def test_invalid_input_is_named(call: Callable[[Path], Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=named):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []
