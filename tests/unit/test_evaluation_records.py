"""Records of evaluations: saved, loaded, verified, and resumed after a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

from rlpool import (
    EnvError,
    Evaluation,
    GymEnv,
    SpecError,
    evaluate,
    verify,
)

from support.agents import ConstantAgent, StepCounter
from support.agents import StochasticPolicy as Policy
from support.envs import CountingEnv

SEEDS = range(20)
INFO = {"is_greedy": torch.arange(20) % 2 == 0}


def create_cartpoles(seed: int, n_lanes: int = 3, speed: int = 1, limit: int = 60) -> GymEnv:
    return GymEnv([gymnasium.make("CartPole-v1", max_episode_steps=limit) for _ in range(n_lanes)])


def create_shorter(seed: int) -> GymEnv:
    return create_cartpoles(seed, limit=50)


def create_wrapped(seed: int) -> GymEnv:
    env = gymnasium.make("CartPole-v1", max_episode_steps=60)
    return GymEnv([gymnasium.wrappers.TransformReward(env, lambda reward: 2 * reward)])


def same(one: Evaluation, other: Evaluation) -> bool:
    keys = "returns", "lengths", "seeds"
    return list(one.entries) == list(other.entries) and all(
        torch.equal(getattr(one, key), getattr(other, key)) for key in keys
    )


def made(create_env: Any = create_cartpoles, **options: Any) -> Evaluation:
    return evaluate(Policy(), create_env, episode_seeds=SEEDS, **options)


def test_saved_records_load_bit_for_bit(tmp_path: Path) -> None:
    evaluation = made(agent_info=INFO)
    evaluation.save(tmp_path / "evaluation.json")
    loaded = Evaluation.load(tmp_path / "evaluation.json")
    assert same(evaluation, loaded)
    assert loaded.protocol == evaluation.protocol
    assert [entry["agent_info"]["is_greedy"] for entry in loaded.entries[:2]] == [True, False]
    spec = loaded.protocol["environment"]["spec"]
    assert (spec["id"], spec["max_episode_steps"]) == ("CartPole-v1", 60)


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: [],
        lambda whole: {**whole, "format": "other"},
        lambda whole: {**whole, "version": 1},
        lambda whole: {**whole, "episodes": whole["episodes"][:3]},
        lambda whole: {**whole, "episodes": whole["episodes"][1:]},
    ],
)
def test_incomplete_records_and_other_versions_are_refused_and_left_unchanged(
    change: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    made().save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    before = path.read_bytes()
    for call in (Evaluation.load, lambda path: made(record=path)):
        with pytest.raises(SpecError, match=path.name):
            call(path)
    assert path.read_bytes() == before


# Verifying ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent_rows", [16, None])
def test_rerun_episodes_agree(agent_rows: int | None) -> None:
    evaluation = made(agent_rows=agent_rows, agent_info=INFO)
    for create_agent in (Policy, Policy()):
        found = verify(evaluation, create_agent, create_cartpoles)
        assert (found.n_episodes, found.episodes, found.differences) == (20, [], [])


def test_the_protocols_seeds_are_run_and_changed_episodes_are_found() -> None:
    evaluation = made()
    entries = [dict(entry) for entry in evaluation.entries]
    entries[7]["seed"] = 99
    entries[19]["return"] += 1
    changed = Evaluation.of_entries(entries, evaluation.protocol)
    found = verify(changed, Policy, create_cartpoles, n_workers=1)
    assert found.episodes == [7, 19]
    assert "episode 7, seed: 99 and 7" in found.differences
    assert "18 agree" in str(found)


def test_a_different_agent_environment_or_torch_setting_is_reported_with_both_values() -> None:
    evaluation = made()
    found = verify(evaluation, lambda: Policy(1), create_cartpoles)
    assert found.differences[0].startswith("parameters: ")
    assert found.episodes
    torch.set_float32_matmul_precision("high")
    try:
        found = verify(evaluation, Policy, create_shorter)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "environment.spec.max_episode_steps: 60 and 50" in found.differences
    assert "torch.float32_matmul_precision: 'highest' and 'high'" in found.differences


# Resuming ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_kept", "agent_rows", "n_lanes"),
    [(-1, None, 3), (0, 16, 3), (13, 16, 1), (13, None, 3), (20, None, 3)],
)
def test_only_missing_episodes_are_run(
    n_kept: int,
    agent_rows: int | None,
    n_lanes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resets: list[int] = []
    reset_lanes = GymEnv.reset_lanes

    def noted(env: Any, lanes: Any, seeds: Any, options: Any) -> None:
        resets.extend(seeds)
        reset_lanes(env, lanes, seeds, options)

    monkeypatch.setattr(GymEnv, "reset_lanes", noted)
    whole = made(record=tmp_path / "whole.jsonl", agent_rows=agent_rows)
    data = (tmp_path / "whole.jsonl").read_bytes()
    lines = data.splitlines(keepends=True)
    assert len(lines) == 21
    path = tmp_path / "run.jsonl"
    following = [*lines, b""][1 + n_kept]
    for tail in (b"", following[:30], following[:-1]):
        path.write_bytes(b"".join(lines[: 1 + n_kept]) + tail)
        resets.clear()
        again = made(record=path, agent_rows=agent_rows, env_args={"n_lanes": n_lanes})
        n_whole = max(0, n_kept if agent_rows or n_kept == 20 else n_kept // 12 * 12)
        assert set(SEEDS) & set(resets) == set(SEEDS[n_whole:])
        assert same(whole, again)
        assert path.read_bytes() == data
    assert same(Evaluation.load(path), whole)


@pytest.mark.parametrize(
    ("agent", "options", "key"),
    [
        (Policy(1), {}, "parameters"),
        (ConstantAgent(1), {}, "parameters"),
        (Policy(), {"agent_info": {"is_greedy": [True] * 20}}, "infos_digest"),
        (Policy(), {"create_env": create_shorter}, "max_episode_steps"),
        (Policy(), {"create_env": create_wrapped}, "wrappers"),
        (Policy(), {"env_args": {"n_lanes": 5, "speed": 3}}, "speed"),
        (Policy(), {"seeds": 1}, "seeds"),
        (Policy(), {"episode_seeds": range(1, 21)}, "episode_seeds"),
        (Policy(), {"agent_rows": 8}, "agent_rows"),
        (Policy(), {"infos": ["reward"]}, "infos"),
    ],
)
def test_a_record_of_another_evaluation_is_left_unchanged(
    agent: Any, options: Any, key: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    arguments = {"create_env": create_cartpoles, "episode_seeds": SEEDS}
    for _ in range(2):
        evaluate(Policy() if options else type(agent)(), record=path, **arguments)
    before = path.read_bytes()
    with pytest.raises(SpecError, match=f"another evaluation: .*{key}"):
        evaluate(agent, record=path, **{**arguments, **options})
    assert path.read_bytes() == before


# Failures ---------------------------------------------------------------------------------------


def raise_broken() -> None:
    raise RuntimeError("broken")


def failing(fails_at: int | None) -> Any:
    """Return a factory of environments that raise in the episode with this ``id``."""

    def create_env(seed: int) -> GymEnv:
        script = {} if fails_at is None else {(fails_at, 0): raise_broken}
        return GymEnv([CountingEnv(script=script) for _ in range(2)])

    return create_env


def test_a_failed_evaluation_resumes_after_its_last_complete_request(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    arguments: Any = {"n_episodes": 20, "env_info": {"id": range(20)}}
    with pytest.raises(EnvError):
        evaluate(StepCounter(), failing(13), record=path, **arguments)
    assert len(path.read_bytes().splitlines()) == 1 + 8
    resumed = evaluate(StepCounter(), failing(None), record=path, **arguments)
    assert same(resumed, evaluate(StepCounter(), failing(None), **arguments))


def test_failed_episodes_count_as_requested(tmp_path: Path) -> None:
    arguments: Any = {"env_info": {"id": range(6)}, "on_env_error": "truncate"}
    found = evaluate(StepCounter(), failing(3), 6, **arguments)
    found.save(tmp_path / "a.json")
    loaded = Evaluation.load(tmp_path / "a.json")
    for each in (found, loaded):
        assert each.failed.tolist() == [False, False, False, True, False, False]
        with pytest.raises(SpecError, match=r"1 of 6 .* episode 3: .*broken"):
            each.summary()
    excluded, zero = found.summary(failures="exclude"), found.summary(failures=0.0)
    assert (excluded.n_episodes, zero.n_episodes, zero.n_failed) == (5, 6, 1)
    assert zero.mean.value == pytest.approx(excluded.mean.value * 5 / 6)
    assert "broken" in loaded.entries[3]["error"]
    where = found.failures[0].where
    assert (where.episode, where.step, where.seed) == (3, 0, int(found.seeds[3]))
