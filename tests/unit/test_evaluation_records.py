"""Records of evaluations: saved, loaded, verified, compared, and gone on with after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from rlpool import (
    Agent,
    DictTensor,
    Evaluation,
    GymEnv,
    SpecError,
    compare,
    evaluate,
    sample_categorical,
    verify,
)

from support.agents import ConstantAgent, StepCounter
from support.faults import FailingEnv

SEEDS = range(20)


class Policy(nn.Module, Agent):
    """A stochastic policy.

    Args:
        scale: Of its parameters.
    """

    n_noise = 1

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.Parameter(scale * torch.randn(4, 2, generator=generator))

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, history: Any = None):
        logits = observation["frame"] @ self.weights
        if agent_info is not None:
            logits = logits * agent_info["sharpness"][:, None]
        action, _ = sample_categorical(logits, observation["noise"])
        return DictTensor(), DictTensor({"action": action}), DictTensor()


def create_cartpoles(seed: int, n_lanes: int = 3, speed: int = 1) -> GymEnv:
    return GymEnv([gymnasium.make("CartPole-v1", max_episode_steps=60) for _ in range(n_lanes)])


def same(one: Evaluation, other: Evaluation) -> bool:
    keys = "returns", "lengths", "seeds"
    return list(one.entries) == list(other.entries) and all(
        torch.equal(getattr(one, key), getattr(other, key)) for key in keys
    )


def made(create_env: Any = create_cartpoles, **options: Any) -> Evaluation:
    return evaluate(Policy(), create_env, episode_seeds=SEEDS, **options)


def create_shorter(seed: int) -> GymEnv:
    return GymEnv([gymnasium.make("CartPole-v1", max_episode_steps=50)])


def create_wrapped(seed: int) -> GymEnv:
    env = gymnasium.make("CartPole-v1", max_episode_steps=60)
    return GymEnv([gymnasium.wrappers.TransformReward(env, lambda reward: 2 * reward)])


@pytest.mark.parametrize(("n_lanes", "n_workers"), [(1, 0), (7, 0), (20, 0), (7, 2)])
def test_no_bit_depends_on_lanes_or_workers(n_lanes: int, n_workers: int) -> None:
    found = made(n_workers=n_workers, env_args={"n_lanes": n_lanes})
    assert same(found, made(env_args={"n_lanes": 3}))
    assert found.seeds.tolist() == list(SEEDS)


def test_what_was_saved_is_loaded_bit_by_bit(tmp_path: Path) -> None:
    info = {"sharpness": torch.linspace(0.1, 3, 20)}
    evaluation = made(agent_info=info)
    evaluation.save(tmp_path / "evaluation.json")
    loaded = Evaluation.load(tmp_path / "evaluation.json")
    assert same(evaluation, loaded)
    assert loaded.protocol == evaluation.protocol
    assert json.loads((tmp_path / "evaluation.json").read_text())["protocol"] == loaded.protocol
    assert np.float32(loaded.entries[7]["agent_info"]["sharpness"]) == info["sharpness"][7].numpy()
    spec = loaded.protocol["environment"]["spec"]
    assert (spec["id"], spec["max_episode_steps"]) == ("CartPole-v1", 60)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: {**whole, "format": "other"}, "not a record"),
        (lambda whole: {**whole, "version": 1}, "in version 2"),
        (lambda whole: {**whole, "episodes": whole["episodes"][:3]}, "3 of 20 episodes"),
        (lambda whole: {**whole, "episodes": whole["episodes"][1:]}, "missing or repeated"),
        (lambda whole: [], "not a record"),
    ],
)
def test_what_is_not_a_record_of_this_version_is_refused(
    change: Any, message: str, tmp_path: Path
) -> None:
    made().save(tmp_path / "a.json")
    whole = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(change(whole)))
    with pytest.raises(SpecError, match=message):
        Evaluation.load(tmp_path / "a.json")


# Verifying ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent_rows", [16, None])
def test_episodes_that_are_run_again_agree(agent_rows: int | None) -> None:
    info = {"sharpness": torch.linspace(0.1, 3, 20)}
    evaluation = made(agent_rows=agent_rows, agent_info=info)
    for create_agent in (Policy, Policy()):
        found = verify(evaluation, create_agent, create_cartpoles)
        assert (found.n_episodes, found.episodes, found.differences) == (20, [], [])


def test_the_seeds_of_the_protocol_are_run_and_changed_episodes_are_found() -> None:
    evaluation = made()
    entries = [dict(entry) for entry in evaluation.entries]
    entries[7]["seed"] = 99
    entries[19]["return"] += 1
    changed = Evaluation.of_entries(entries, evaluation.protocol)
    found = verify(changed, Policy, create_cartpoles, n_workers=1)
    assert found.episodes == [7, 19]
    assert "episode 7, seed: 99 and 7" in found.differences
    assert "18 agree" in str(found)


def test_another_agent_or_environment_is_named_with_both_sides() -> None:
    evaluation = made()
    found = verify(evaluation, lambda: Policy(2.0), create_cartpoles)
    assert re.search(r"parameters: 'sha256:.*' and 'sha256:", found.differences[0])
    assert found.episodes
    found = verify(evaluation, Policy, create_shorter)
    assert "environment.spec.max_episode_steps: 60 and 50" in found.differences
    torch.set_float32_matmul_precision("high")
    try:
        found = verify(evaluation, Policy, create_cartpoles)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "torch.float32_matmul_precision: 'highest' and 'high'" in found.differences


# Going on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent_rows", [16, None])
@pytest.mark.parametrize("n_kept", [0, 1, 13, 20])
def test_what_is_missing_is_run_and_nothing_else(
    n_kept: int, agent_rows: int | None, tmp_path: Path
) -> None:
    whole = made(record=tmp_path / "whole.jsonl", agent_rows=agent_rows)
    data = (tmp_path / "whole.jsonl").read_bytes()
    lines = data.splitlines(keepends=True)
    assert len(lines) == 21
    path = tmp_path / "run.jsonl"
    for tail in (b"", lines[-1][:30], lines[-1][:-1]):
        path.write_bytes(b"".join(lines[: 1 + n_kept]) + tail * (n_kept < 20))
        counted = Counting()
        again = made(record=path, agent_rows=agent_rows, create_env=counted)
        n_whole = n_kept if agent_rows or n_kept == 20 else n_kept // 12 * 12
        assert counted.n_episodes == 20 - n_whole
        assert same(whole, again)
        assert path.read_bytes() == data
    assert same(Evaluation.load(path), whole)


class Counting:
    """A ``create_env`` that counts the episodes of its environments."""

    __module__, __qualname__ = create_cartpoles.__module__, create_cartpoles.__qualname__

    def __init__(self) -> None:
        self.seeds: set[int] = set()

    @property
    def n_episodes(self) -> int:
        return len(self.seeds.intersection(SEEDS))

    def __call__(self, seed: int) -> GymEnv:
        env = create_cartpoles(seed)
        reset_lanes = env.reset_lanes

        def counted(lanes: Any, seeds: Any, options: Any) -> None:
            self.seeds.update(seeds)
            reset_lanes(lanes, seeds, options)

        env.reset_lanes = counted  # type: ignore[method-assign]
        return env


def test_a_record_that_was_cut_anywhere_in_its_first_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whole = made(record=path)
    data = path.read_bytes()
    n_first = data.index(b"\n") + 1
    for n_bytes in (0, 1, n_first // 2, n_first - 1, n_first):
        path.write_bytes(data[:n_bytes])
        assert same(made(record=path), whole)
        assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("agent", "options", "key"),
    [
        (Policy(2.0), {}, "parameters"),
        (Policy(), {"agent_info": {"sharpness": [2.0] * 20}}, "infos_digest"),
        (Policy(), {"create_env": lambda seed: create_shorter(seed)}, "max_episode_steps"),
        (Policy(), {"create_env": lambda seed: create_wrapped(seed)}, "wrappers"),
        (Policy(), {"env_args": {"n_lanes": 5, "speed": 3}}, "speed"),
        (Policy(), {"seeds": 1}, "seeds"),
        (Policy(), {"episode_seeds": range(1, 21)}, "episode_seeds"),
        (Policy(), {"agent_rows": 8}, "agent_rows"),
        (Policy(), {"infos": ["reward"]}, "infos"),
    ],
)
def test_a_record_of_another_evaluation_is_left_as_it_is(
    agent: Any, options: Any, key: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    made(record=path)
    before = path.read_bytes()
    arguments = {"create_env": create_cartpoles, "episode_seeds": SEEDS, **options}
    with pytest.raises(SpecError, match=f"another evaluation: .*{key}"):
        evaluate(agent, record=path, **arguments)
    assert path.read_bytes() == before


def test_the_scores_of_an_agent_without_parameters_do_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        evaluate(ConstantAgent(0), create_cartpoles, 3, record=path)
    with pytest.raises(SpecError, match="another evaluation: parameters"):
        evaluate(ConstantAgent(1), create_cartpoles, 3, record=path)


def test_other_files_are_left_as_they_are(tmp_path: Path) -> None:
    made().save(tmp_path / "saved.json")
    (tmp_path / "notes").write_text("mine")
    for name in ("saved.json", "notes"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(SpecError, match="not a record"):
            made(record=tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


def test_the_number_of_environments_and_training_mode_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whole = evaluate(Policy(), create_cartpoles, 4, record=path, env_args={"n_lanes": 3})
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    again = evaluate(
        Policy().eval(), create_cartpoles, 4, record=path, env_args={"n_lanes": 1}, n_workers=1
    )
    assert same(whole, again)


PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from unit.test_evaluation_records import made

if __name__ == "__main__":
    made(record="run.jsonl", n_workers=1)
"""


def test_an_evaluation_that_was_killed_goes_on_with_the_same_bits(program_folder: Path) -> None:
    paths = [path for path in sys.path if path]
    (program_folder / "program.py").write_text(PROGRAM.format(paths=paths))
    path = program_folder / "run.jsonl"
    program = subprocess.Popen([sys.executable, "program.py"], cwd=program_folder)
    deadline_s = time.monotonic() + 60
    while program.poll() is None and time.monotonic() < deadline_s:
        if path.exists() and path.read_bytes().count(b"\n") > 1:
            os.kill(program.pid, signal.SIGKILL)
            break
    program.wait()
    assert same(made(record=path), made())


# Failures ---------------------------------------------------------------------------------------


class Broken(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Fails in the second step of episodes with the seed 3."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seed, self.n_steps = seed, 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        if self.seed == 3 and self.n_steps == 2:
            raise RuntimeError("broken")
        return super().step(action)


def create_broken(seed: int) -> GymEnv:
    return GymEnv([Broken(gymnasium.make("CartPole-v1")) for _ in range(2)])


def test_episodes_that_failed_count_as_they_are_told_to(tmp_path: Path) -> None:
    found = evaluate(Policy(), create_broken, episode_seeds=range(6), on_env_error="truncate")
    assert found.failed is not None
    assert found.failed.tolist() == [False, False, False, True, False, False]
    with pytest.raises(SpecError, match="1 of 6 episodes failed for good, the first is episode 3"):
        found.summary()
    excluded, zero = found.summary(failures="exclude"), found.summary(failures=0.0)
    assert (excluded.n_episodes, zero.n_episodes, zero.n_failed) == (5, 6, 1)
    assert zero.mean.value == pytest.approx(excluded.mean.value * 5 / 6)
    found.save(tmp_path / "a.json")
    loaded = Evaluation.load(tmp_path / "a.json")
    assert loaded.failed.tolist() == found.failed.tolist()
    assert "broken" in loaded.entries[3]["error"]
    assert found.failures[0].where.episode == 3
    with pytest.raises(SpecError, match=r"first is episode 3: env.step raised.*broken") as told:
        loaded.summary()
    assert str(told.value).count("fix:") == 1
    with pytest.raises(SpecError, match="failures should be a number"):
        found.summary(failures="leave out")


def create_deadly(seed: int) -> GymEnv:
    return GymEnv([FailingEnv("sigkill", at_step=1)], seed)


def test_a_death_is_listed_with_seed_and_step() -> None:
    found = evaluate(StepCounter(), create_deadly, 1, n_workers=1, on_env_error="truncate")
    (failure,) = found.failures
    assert (failure.where.seed, failure.where.step) == (int(found.seeds[0]), 1)


# Arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episode_seeds": [1, 2], "n_episodes": 3}, "has 2 seeds for 3 episodes"),
        ({"episode_seeds": []}, "episode_seeds has 0 seeds for some episodes"),
        ({"episode_seeds": 5}, "episode_seeds should be a list of ints, got 5"),
        ({"episode_seeds": np.array(3)}, r"episode_seeds should be a list of ints, got array\(3\)"),
        ({}, "n_episodes should be an int"),
        ({"n_episodes": 2, "infos": ["score"]}, "infos names 'score'"),
        ({"n_episodes": 2, "agent_rows": 0}, "agent_rows should be an int of at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        evaluate(Policy(), create_cartpoles, **options)


def create_nothing(seed: int) -> GymEnv:
    raise AssertionError("nothing is to be run")


def test_a_file_in_a_folder_that_does_not_exist_is_refused_at_the_start(tmp_path: Path) -> None:
    path, told = tmp_path / "no" / "run.jsonl", r"=.*run.jsonl.* there is no such folder"
    with pytest.raises(SpecError, match=f"record{told}"):
        evaluate(Policy(), create_nothing, 2, record=path)
    with pytest.raises(SpecError, match=r"record=.* cannot be written: it is not a file"):
        evaluate(Policy(), create_nothing, 2, record=tmp_path)
    with pytest.raises(SpecError, match=f"path{told}"):
        evaluate(Policy(), create_cartpoles, 1).save(path)
    assert list(tmp_path.iterdir()) == []


def test_evaluations_of_other_environments_are_not_compared() -> None:
    other = evaluate(Policy(), create_shorter, episode_seeds=SEEDS)
    with pytest.raises(SpecError, match="different environments"):
        compare(made(), other)
    with pytest.raises(SpecError, match="share no seed"):
        compare(made(), evaluate(Policy(), create_cartpoles, episode_seeds=range(30, 40)))
