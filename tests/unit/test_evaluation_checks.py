"""What evaluations refuse, find out or tell: records in use, damaged files, other environments."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TransformReward
from torch import nn

from rlpool import (
    Agent,
    DictTensor,
    Evaluation,
    GymEnv,
    ParallelEnvManager,
    SpecError,
    VectorGymEnv,
    compare,
    evaluate,
    verify,
)

from support.agents import ConstantAgent, StepCounter
from support.envs import CountingEnv, create_counting
from support.variants import variants


def create_cartpoles(seed: int, n_envs: int = 2, **options: Any) -> GymEnv:
    return GymEnv([gymnasium.make("CartPole-v1", max_episode_steps=20) for _ in range(n_envs)])


def create_pendulums(seed: int, is_wrapped: bool = False, **kwargs: Any) -> GymEnv:
    envs = [gymnasium.make("Pendulum-v1", max_episode_steps=3, **kwargs) for _ in range(2)]
    return GymEnv([TransformReward(env, lambda r: 2 * r) for env in envs] if is_wrapped else envs)


def create_at_once(seed: int) -> VectorGymEnv:
    """Lanes that only one reset of all begins."""
    mode = "vector_entry_point"
    return VectorGymEnv(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode=mode))


class Still(Agent):
    """Does nothing in a pendulum."""

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, history: Any = None):
        return DictTensor(), DictTensor({"action": observation["frame"][:, :1] * 0}), DictTensor()


def made(create_env: Any = create_cartpoles, n_episodes: int = 4, **options: Any) -> Evaluation:
    pendulums = create_env is create_pendulums
    return evaluate(Still() if pendulums else ConstantAgent(), create_env, n_episodes, **options)


# Records -----------------------------------------------------------------------------------------


def test_a_record_that_another_evaluation_writes_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    class Evaluates(CountingEnv):
        def reset(self, **options: Any) -> Any:
            if path.exists():
                made(record=path)
            return super().reset(**options)

    with pytest.raises(Exception, match=r"another evaluation is writing to .*run\.jsonl"):
        evaluate(StepCounter(), lambda seed: GymEnv([Evaluates()]), 2, record=path)
    path.unlink()
    assert len(made(record=path).entries) == len(made(record=path).entries) == 4


LINES = {
    "twice": (lambda lines: [*lines[:3], *lines[2:]], "line 4 is episode 1, not 2 of 4"),
    "swapped": (lambda lines: [lines[0], lines[2], lines[1]], "line 2 is episode 1, not 0 of 4"),
    "missing": (lambda lines: [*lines[:2], *lines[3:]], "line 3 is episode 2, not 1 of 4"),
    "too many": (
        lambda lines: [*lines, lines[-1].replace(b": 3", b": 4", 1)],
        "line 6 is episode 4",
    ),
    "a number": (lambda lines: [lines[0], b"5\n"], "line 2 is 5"),
    "no episode": (lambda lines: [lines[0], b"{}\n"], "line 2 lacks 'episode'"),
    "torn": (lambda lines: [*lines[:2], b'{"a\n'], "line 3 of .* cannot be read"),
    "binary": (lambda lines: [b"\x80\xff\n\x00\n"], "line 1 of .* cannot be read"),
    "no protocol": (
        lambda lines: [b'{"format": "rlpool evaluation", "version": 1, "protocol": null}\n'],
        "it has None as 'protocol'",
    ),
}


@pytest.mark.parametrize("damage", LINES)
def test_damaged_records_are_refused_where_the_damage_is(damage: str, tmp_path: Path) -> None:
    path, (change, message) = tmp_path / "run.jsonl", LINES[damage]
    made(record=path)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    with pytest.raises(SpecError, match=message):
        made(record=path)
    with pytest.raises(SpecError, match=message):
        Evaluation.load(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["version"], True, "has version True of the format"),
        (["protocol"], 5, "it has 5 as 'protocol'"),
        (["episodes"], None, "it has None as 'episodes'"),
        (["protocol", "n_episodes"], "4", "its protocol has '4' as 'n_episodes'"),
        (["protocol", "machine"], ..., "its protocol lacks 'machine'"),
        (["episodes", 1, "return"], "a", "number 1 of its episodes has 'a' as 'return'"),
        (["episodes", 1, "return"], ..., "number 1 of its episodes lacks 'return'"),
        (["episodes", 1, "episode"], 2, "number 1 of its episodes is episode 2"),
    ],
)
def test_damaged_files_are_refused(path: Any, value: Any, message: str, tmp_path: Path) -> None:
    made().save(tmp_path / "a.json")
    whole = part = json.loads((tmp_path / "a.json").read_text())
    for key in path[:-1]:
        part = part[key]
    if value is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    (tmp_path / "a.json").write_text(json.dumps(whole))
    with pytest.raises(SpecError, match=message):
        Evaluation.load(tmp_path / "a.json")


def test_records_of_older_versions_are_verified_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    made(record=path)
    header, *episodes = path.read_text().splitlines(keepends=True)
    whole = json.loads(header)
    for key in ("wrappers", "seeding"):
        del whole["protocol"]["environment"][key]
    path.write_text(json.dumps(whole) + "\n" + "".join(episodes[:2]))
    assert made(record=path).entries == made().entries
    older = Evaluation.load(path)
    assert verify(older, ConstantAgent(), create_cartpoles).differences == []
    assert compare(older, made()).n_pairs == 4


@dataclass
class Settings:
    """Of an environment."""

    length: int
    names: frozenset[str] = frozenset({"a", "b", "c"})


def create_set(seed: int, settings: Any) -> GymEnv:
    return GymEnv([CountingEnv(getattr(settings, "length", 3))])


def create_with_function(seed: int, settings: Any) -> GymEnv:
    return GymEnv([gymnasium.make("rlpool/Configured-v0", value=create_set)])


def test_other_wrappers_are_another_environment(tmp_path: Path) -> None:
    plain, path = made(create_pendulums), tmp_path / "run.jsonl"
    made(create_pendulums, record=path)

    def create_wrapped(seed: int) -> GymEnv:
        return create_pendulums(seed, is_wrapped=True)

    message = r"wrappers.2 .*TransformReward: None and \{'func': '.*lambda"
    with pytest.raises(SpecError, match=message):
        evaluate(Still(), create_wrapped, 4, record=path)
    with pytest.raises(SpecError, match=message):
        verify(plain, Still(), create_wrapped)
    with pytest.raises(SpecError, match=message):
        compare(plain, evaluate(Still(), create_wrapped, 4))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Settings(4), Settings(40)),
        ({(1, 2): 3, "a": np.arange(5000)}, {(1, 2): 3, "a": np.arange(5000) * 2}),
        pytest.param(torch.ones(3), torch.zeros(3), marks=pytest.mark.slow),
        pytest.param(len, max, marks=pytest.mark.slow),
    ],
)
def test_other_arguments_are_another_environment(one: Any, other: Any) -> None:
    def of(settings: Any) -> Evaluation:
        return evaluate(StepCounter(), create_set, 2, env_args={"settings": settings})

    assert compare(of(one), of(one)).n_pairs == 2
    with pytest.raises(SpecError, match=r"different environments: args\.settings.*: .* and "):
        compare(of(one), of(other))


class Configured(CountingEnv):
    """Takes what is recorded of its specification."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()


gymnasium.register("rlpool/Configured-v0", entry_point=Configured)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(5000), 1.0 * (np.arange(5000) == 2500)),
        pytest.param(list(range(40_000)), list(range(1, 40_001)), marks=pytest.mark.slow),
        pytest.param({(1, 2): 3, "a": 4}, {(1, 2): 3, "a": 5}, marks=pytest.mark.slow),
    ],
)
def test_arguments_of_a_specification_are_recorded(one: Any, other: Any) -> None:
    def of(value: Any) -> Any:
        return lambda seed: GymEnv([gymnasium.make("rlpool/Configured-v0", value=value)])

    found = evaluate(StepCounter(), of(one), 2)
    assert verify(found, StepCounter(), of(one)).differences == []
    with pytest.raises(SpecError, match=r"the environment is another one: spec.*: .* and "):
        verify(found, StepCounter(), of(other))


PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from unit.test_evaluation_checks import *

if __name__ == "__main__":
    arguments = {{"settings": {{"fn": made, "of": Settings(4)}}}}
    if sys.argv[1] == "save":
        evaluate(StepCounter(), create_with_function, 2, env_args=arguments).save("a.json")
    else:
        found = Evaluation.load("a.json")
        print(verify(found, StepCounter(), create_with_function, env_args=arguments))
"""


def test_functions_and_objects_are_the_same_in_another_process(program_folder: Path) -> None:
    paths = [path for path in sys.path if path]
    (program_folder / "program.py").write_text(PROGRAM.format(paths=paths))
    for command, seed in (("save", "7"), ("verify", "8")):  # in which sets have another order
        told = subprocess.check_output(
            [sys.executable, "program.py", command],
            cwd=program_folder,
            env={**os.environ, "PYTHONHASHSEED": seed},
            text=True,
        )
    assert "2 agree" in told


def test_the_number_of_environments_and_rendering_do_not_count() -> None:
    one, other = (made(env_args={"n_envs": n}) for n in (2, 3))
    assert compare(one, other).n_pairs == 4
    assert verify(one, ConstantAgent(), create_cartpoles, env_args={"n_envs": 5}).differences == []
    vectors = [
        made(lambda seed, n=n: VectorGymEnv(gymnasium.make_vec("CartPole-v1", n, "sync")), 3)
        for n in (2, 3)
    ]
    assert compare(*vectors).n_pairs == 3
    shown = made(create_pendulums, env_args={"render_mode": "rgb_array"})
    assert compare(made(create_pendulums), shown).n_pairs == 4


def test_a_manager_has_the_environments_that_it_runs() -> None:
    def managed(n_steps: int) -> Evaluation:
        def make_env() -> Any:
            return gymnasium.make("CartPole-v1", max_episode_steps=n_steps)

        return made(lambda seed: ParallelEnvManager([make_env] * 2, envs_per_worker=2))

    found = managed(20)
    assert compare(made(), found).n_pairs == 4
    with pytest.raises(SpecError, match=r"spec\.max_episode_steps: 20 and 10"):
        compare(found, managed(10))


def test_environments_without_a_seed_for_each_episode_are_refused(tmp_path: Path) -> None:
    found = made(create_at_once)
    for function in (
        lambda: verify(found, ConstantAgent(), create_at_once),
        lambda: compare(found, made()),
        lambda: made(create_at_once, record=tmp_path / "run.jsonl"),
    ):
        with pytest.raises(SpecError, match=r"needs a seed for every episode.*seeding='request'"):
            function()
    assert list(tmp_path.iterdir()) == []


class Shifted(StepCounter, nn.Module):
    """Has a buffer that its ``state_dict`` lacks."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(shift), persistent=False)


def test_all_buffers_are_in_the_digest() -> None:
    found = evaluate(Shifted(0.1), create_counting, 2)
    assert verify(found, Shifted(0.1), create_counting).differences == []
    with pytest.raises(SpecError, match="the agent's parameters are"):
        verify(found, Shifted(0.9), create_counting)


# Failures ----------------------------------------------------------------------------------------


class Failing(CountingEnv):
    """Fails in the second step, or the reset, of episodes with an even seed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.is_even = how, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.is_even = seed is not None and seed < 100 and seed % 2 == 0
        if self.is_even and self.how == "reset":
            raise RuntimeError("broken")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self.is_even and self.t == 1 and self.how == "exit":
            os._exit(3)
        if self.is_even and self.t == 1 and self.how == "raise":
            raise RuntimeError("broken")
        return super().step(action)


def create_failing(seed: int, how: str = "raise") -> GymEnv:
    return GymEnv([Failing(how) for _ in range(2)])


def failing(how: str = "raise", **options: Any) -> Evaluation:
    options = {"episode_seeds": range(20), "on_env_error": "truncate", **options}
    return evaluate(StepCounter(), create_failing, env_args={"how": how}, **options)


def test_episodes_that_ended_their_worker_do_not_end_the_caller() -> None:
    found = failing("exit", episode_seeds=range(2), n_workers=1)
    assert found.n_failed == 1
    again = verify(found, StepCounter(), create_failing, env_args={"how": "exit"})
    assert again.differences == []


def test_environments_that_fail_are_restarted_without_workers_too() -> None:
    found = failing(on_env_error="restart", episode_seeds=range(4))
    assert found.failed is not None
    assert found.failed.tolist() == [True, False, True, False]


@pytest.mark.parametrize("how", variants(["exit"], ["raise"]))
def test_failures_are_recorded_the_same_by_any_worker(how: str, tmp_path: Path) -> None:
    path, seeds = tmp_path / "run.jsonl", range(10)
    whole = failing(how, episode_seeds=seeds, n_workers=1, record=path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    again = failing(how, episode_seeds=seeds, n_workers=2, record=path)
    # Which episodes run beside one that ends its worker, and are run again, is a matter of time.
    for one, other in zip(again.entries, whole.entries, strict=True):
        assert {**one, "restarts": 0} == {**other, "restarts": 0}
    for number, failure in enumerate(again.failures):
        assert (failure.where.episode, failure.where.step) == (2 * number, 1)
    kinds = {type(failure) for failure in again.failures[2:]}  # of this run
    assert kinds == {type(failure) for failure in whole.failures}


def test_lengths_of_episodes_that_failed_do_not_count() -> None:
    pytest.importorskip("scipy")
    found = failing("reset", episode_seeds=range(4))
    assert found.summary(failures=0.0).mean_length == 3


def test_returns_that_are_not_finite_are_refused_with_their_episode() -> None:
    class Lost(CountingEnv):
        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, float("nan") if self.length == 5 else reward, *rest

    lengths: Any = {"length": [2, 5, 3]}
    found = evaluate(StepCounter(), lambda seed: GymEnv([Lost()]), 3, env_info=lengths)
    for function in (found.summary, lambda: compare(found, found)):
        with pytest.raises(SpecError, match="the return of episode 1 is nan"):
            function()


def test_a_success_that_is_no_number_is_refused_with_its_episode() -> None:
    class Lost(CountingEnv):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"success": [0, float("nan")][self.length == 5]}

    def create_env(seed: int) -> GymEnv:
        return GymEnv([Lost()], info_keys={"success": np.float32})

    with pytest.raises(SpecError, match="the success of episode 2 is nan"):
        evaluate(StepCounter(), create_env, 3, env_info={"length": [2, 3, 5]})


# Arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [np.int64(4), torch.tensor(4)])
def test_numbers_of_numpy_and_torch_are_recorded_as_numbers(rows: Any, tmp_path: Path) -> None:
    made(agent_rows=rows, record=tmp_path / "run.jsonl").save(tmp_path / "a.json")
    assert Evaluation.load(tmp_path / "a.json").protocol["agent_rows"] == 4


def never_stepped(seed: int) -> GymEnv:
    class Unused(CountingEnv):
        def step(self, action: Any) -> Any:
            raise AssertionError("nothing is to be run")

    return GymEnv([Unused()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_info": {"x": np.ones(2, complex)}}, "'x' in env_info is complex128"),
        ({"infos": "frame"}, "(?s)infos is 'frame', not a list of keys.*fix"),
        ({"infos": None}, "infos is None, not a list"),
        ({"infos": [3]}, r"infos is \[3\], not a list"),
        (
            {"infos": ["nope"]},
            r"(?s)infos names 'nope'.*there are \['frame', 'reward'.*last_action'",
        ),
        ({"infos": ["action"]}, "infos names 'action'"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_is_run(
    options: Any, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        evaluate(StepCounter(), never_stepped, 2, **options)


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import gymnasium as gym
from rlpool import GymEnv, evaluate
from support.agents import ConstantAgent
from support.envs import CountingEnv

class Own(CountingEnv):
    pass

class Around(gym.Wrapper):
    pass

def create_env(seed):
    return GymEnv([Around(Own(length=3)) for _ in range(2)], seed)

if __name__ == "__main__":
    for n_workers in (0, 1):
        found = evaluate(ConstantAgent(0), create_env, 3, n_workers=n_workers)
        found.save(str(n_workers) + ".json")
"""


def test_what_a_script_has_evaluated_can_be_verified_where_it_is_imported(
    program_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [path for path in sys.path if path]
    (program_folder / "evaluated.py").write_text(SCRIPT.format(paths=paths))
    subprocess.run([sys.executable, "evaluated.py"], cwd=program_folder, check=True)
    monkeypatch.syspath_prepend(str(program_folder))
    evaluated = importlib.import_module("evaluated")
    for name in ("0.json", "1.json"):
        record = Evaluation.load(program_folder / name)
        assert not verify(record, ConstantAgent(0), evaluated.create_env).differences
