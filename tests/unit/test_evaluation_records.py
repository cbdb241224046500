"""Records of evaluations: saved, loaded, verified, compared, and gone on with after a kill."""

from __future__ import annotations

import json
import os
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
from rlpool.__main__ import main

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


def create_cartpoles(seed: int, n_lanes: int = 3) -> GymEnv:
    return GymEnv([gymnasium.make("CartPole-v1", max_episode_steps=60) for _ in range(n_lanes)])


def same(one: Evaluation, other: Evaluation) -> bool:
    keys = "returns", "lengths", "seeds"
    return list(one.entries) == list(other.entries) and all(
        torch.equal(getattr(one, key), getattr(other, key)) for key in keys
    )


def made(scale: float = 1.0, **options: Any) -> Evaluation:
    return evaluate(Policy(scale), create_cartpoles, episode_seeds=SEEDS, **options)


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
    assert np.float32(loaded.entries[7]["agent_info"]["sharpness"]) == info["sharpness"][7].numpy()
    assert {entry["terminated"] for entry in loaded.entries} <= {True, False}
    spec = loaded.protocol["environment"]["spec"]
    assert (spec["id"], spec["max_episode_steps"]) == ("CartPole-v1", 60)
    assert loaded.protocol["agent_rows"] == 16
    assert loaded.protocol["machine"]["torch"]
    assert loaded.protocol["parameters"] != made(2.0).protocol["parameters"]


def test_torch_loads_it_with_weights_only(tmp_path: Path) -> None:
    evaluation = made()
    torch.save(evaluation, tmp_path / "evaluation.pt")
    assert same(evaluation, torch.load(tmp_path / "evaluation.pt", weights_only=True))
    by_hand = Evaluation(torch.tensor([1.0]), torch.tensor([3]), None, torch.tensor([7]))
    torch.save(by_hand, tmp_path / "by_hand.pt")
    assert same(by_hand, torch.load(tmp_path / "by_hand.pt", weights_only=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: {**whole, "format": "other"}, "its format is 'other'"),
        (lambda whole: {**whole, "version": 2}, "has version 2 of the format, this is 1"),
        (lambda whole: {**whole, "episodes": whole["episodes"][:3]}, "3 of 20 episodes"),
        (lambda whole: [], "no record of an evaluation"),
    ],
)
def test_what_is_no_record_of_this_version_is_refused(
    change: Any, message: str, tmp_path: Path
) -> None:
    made().save(tmp_path / "a.json")
    whole = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(change(whole)))
    with pytest.raises(SpecError, match=message):
        Evaluation.load(tmp_path / "a.json")


def test_what_is_no_file_of_its_kind_is_told(tmp_path: Path) -> None:
    made().save(tmp_path / "saved.json")
    with pytest.raises(SpecError, match=r"(?s)line 1 of .*saved.json.*what save\(\) wrote is no"):
        made(record=tmp_path / "saved.json")
    (tmp_path / "torn.jsonl").write_text('{"format": "rlp')
    with pytest.raises(SpecError, match="its format is missing or incomplete"):
        Evaluation.load(tmp_path / "torn.jsonl")
    with pytest.raises(SpecError, match="path should be a path, got 5"):
        Evaluation.load(5)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"evaluation should be an Evaluation, got 'a.json'"):
        verify("a.json", Policy(), create_cartpoles)  # type: ignore[arg-type]


# Verifying ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent_rows", [16, None])
def test_episodes_that_are_run_again_agree(agent_rows: int | None) -> None:
    info = {"sharpness": torch.linspace(0.1, 3, 20)}
    evaluation = made(agent_rows=agent_rows, agent_info=info)
    verification = verify(evaluation, Policy(), create_cartpoles, n_episodes=7)
    assert verification.differences == []
    assert verification.episodes[0] == 0
    assert verification.episodes[-1] == 19


def test_an_episode_that_was_changed_is_found() -> None:
    evaluation = made()
    entries = [dict(entry) for entry in evaluation.entries]
    entries[19]["return"] += 1
    changed = Evaluation.of_entries(entries, evaluation.protocol)
    (difference,) = verify(changed, Policy(), create_cartpoles).differences
    assert "episode 19, return" in difference


def test_another_agent_or_environment_is_refused_with_both_sides() -> None:
    def create_others(seed: int) -> GymEnv:
        return GymEnv([gymnasium.make("CartPole-v1", max_episode_steps=50)])

    evaluation = made()
    with pytest.raises(SpecError, match=r"parameters are sha256:.*were sha256:"):
        verify(evaluation, Policy(2.0), create_cartpoles)
    with pytest.raises(SpecError, match="max_episode_steps: 60 and 50"):
        verify(evaluation, Policy(), create_others)


# Going on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_kept", [0, 1, 8, 20])
@pytest.mark.parametrize("tail", [b"", b'{"episode": 3, "se'])
def test_what_is_missing_is_run_and_nothing_else(n_kept: int, tail: bytes, tmp_path: Path) -> None:
    whole, path = made(record=tmp_path / "whole.jsonl"), tmp_path / "run.jsonl"
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 21
    path.write_bytes(b"".join(lines[: 1 + n_kept]) + tail)
    again = made(record=path)
    assert same(whole, again)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert same(Evaluation.load(path), whole)


def test_a_record_of_another_evaluation_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    made(record=path)
    before = path.read_bytes()
    with pytest.raises(SpecError, match=r"another evaluation: parameters: 'sha256:.* and 'sha256:"):
        made(2.0, record=path)
    path.with_name("notes").write_text("mine")
    with pytest.raises(SpecError, match="no record of an evaluation"):
        made(record=path.with_name("notes"))
    assert path.read_bytes() == before
    assert path.with_name("notes").read_text() == "mine"


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


# Failures ----------------------------------------------------------------------------------------


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
    assert "broken" in loaded.failures[0].what
    with pytest.raises(SpecError, match=r"first is episode 3: env.step raised.*broken") as told:
        loaded.summary()
    assert str(told.value).count("fix:") == 1
    with pytest.raises(SpecError, match="failures should be a number"):
        found.summary(failures="leave out")


def test_restarts_are_recorded() -> None:
    found = evaluate(
        Policy(), create_broken, episode_seeds=range(6), n_workers=1, on_env_error="restart",
        max_episode_restarts=2,
    )  # fmt: skip
    restarts = {entry["seed"]: entry["restarts"] for entry in found.entries}
    assert restarts[3] >= 1
    assert found.failed is not None
    assert found.failed.tolist()[3]


def create_deadly(seed: int) -> GymEnv:
    return GymEnv([FailingEnv("sigkill", at_step=2)], seed)


def test_a_death_is_listed_with_seed_and_step() -> None:
    found = evaluate(StepCounter(), create_deadly, 1, n_workers=1, on_env_error="truncate")
    (failure,) = found.failures
    assert (failure.where.seed, failure.where.step) == (int(found.seeds[0]), 2)


# Arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episode_seeds": [1, 2, 1]}, "has the seed 1 2 times"),
        ({"episode_seeds": [1, 2], "n_episodes": 3}, "has 2 seeds for 3 episodes"),
        ({"episode_seeds": []}, "episode_seeds has 0 seeds for at least one episode"),
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
    path, told = tmp_path / "no" / "run.jsonl", r"='.*run.jsonl' is in a folder that does not exist"
    with pytest.raises(SpecError, match=f"record{told}.*\n  fix:   create it with os.makedirs"):
        evaluate(Policy(), create_nothing, 2, record=path)
    with pytest.raises(SpecError, match=r"record=.* cannot be written: it is not a file"):
        evaluate(Policy(), create_nothing, 2, record=tmp_path)
    with pytest.raises(SpecError, match=f"path{told}"):
        evaluate(Policy(), create_cartpoles, 1).save(path)
    assert list(tmp_path.iterdir()) == []


def test_an_agent_without_modules_has_no_digest() -> None:
    found = evaluate(ConstantAgent(), create_cartpoles, 2)
    assert found.protocol["parameters"] is None
    assert verify(found, ConstantAgent(), create_cartpoles).differences == []


def test_evaluations_of_other_environments_are_not_compared() -> None:
    def create_others(seed: int) -> GymEnv:
        return GymEnv([gymnasium.make("CartPole-v1", max_episode_steps=50)])

    other = evaluate(Policy(), create_others, episode_seeds=SEEDS)
    with pytest.raises(SpecError, match="different environments"):
        compare(made(), other)
    with pytest.raises(SpecError, match="share no seed"):
        compare(made(), evaluate(Policy(), create_cartpoles, episode_seeds=range(30, 40)))


# The command line --------------------------------------------------------------------------------

MODULE = """
from unit.test_evaluation_records import Policy, create_cartpoles

def sharper():
    return Policy(5.0)
"""


def test_the_commands_evaluate_compare_and_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("subjects.py").write_text(MODULE)
    for name, loader in (("a", "Policy"), ("b", "sharper")):
        subject = ["subjects:create_cartpoles", f"subjects:{loader}"]
        arguments = ["evaluate", *subject, "--episode-seeds", "0:12", "--out", f"{name}.json"]
        assert main([*arguments, "--plot", f"{name}.png"]) == 0
        assert main(["verify", f"{name}.json", *subject, "--n-workers", "0"]) == 0
    out = capsys.readouterr().out
    assert "mean return" in out
    assert "5 episodes were run again: 5 agree" in out
    assert main(["compare", "a.json", "b.json", "--plot", "both.png"]) == 0
    assert "probability of improvement" in capsys.readouterr().out
    assert Path("both.png").stat().st_size > 1000
    assert main(["verify", "a.json", "subjects:create_cartpoles", "subjects:sharper"]) == 2
    assert "the agent's parameters are" in capsys.readouterr().err
    assert main(["evaluate", "subjects", "subjects:Policy"]) == 2
    assert main(["compare", "a.json", "missing.json"]) == 2
    capsys.readouterr()
    for flag in ("--out", "--plot"):  # before anything is run
        assert main([*arguments, flag, "no/such/file"]) == 2
        out, error = capsys.readouterr()
        assert f"{flag}='no/such/file' is in a folder that does not exist" in error
        assert out == ""


BROKEN = """
import sys
from unit.test_evaluation_records import Policy, create_cartpoles

VALUE, AGENT = 3, Policy()

def lacks_file():
    raise FileNotFoundError("checkpoint.pt")

def lacks_key():
    raise KeyError("policy")

def exits():
    sys.exit(1)

def returns_none():
    pass
"""


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Runs a command in a folder with modules; returns its exit code and what it says is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("broken_subjects.py").write_text(BROKEN)
    Path("bad_syntax.py").write_text("def f(:")
    Path("bad_import.py").write_text("import nonexistent_thing")

    def run(*arguments: str) -> tuple[int, str]:
        try:
            return main(list(arguments)), capsys.readouterr().err
        except SystemExit as error:  # of argparse
            return int(error.code or 0), capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken_subjects:lacks_file", "FileNotFoundError: checkpoint.pt\n"),
        ("broken_subjects:lacks_key", "KeyError: 'policy'\n"),
        ("broken_subjects:exits", "SystemExit: 1\n"),
        ("broken_subjects:returns_none", "agent is a NoneType, not an Agent\n"),
        ("broken_subjects:VALUE", "it is of type int\n  fix:   name a function"),
        ("broken_subjects:AGENT", "it is of type Policy\n  fix:   name a function"),
        ("broken_subjects:missing", "AttributeError: module 'broken_subjects' has no attribute"),
        ("bad_syntax:f", "SyntaxError: invalid syntax"),
        ("bad_import:f", "ModuleNotFoundError: No module named 'nonexistent_thing'\n"),
        (":f", "it is not module:function"),
        (".broken_subjects:f", "it is not module:function"),
        ("broken_subjects", "it is not module:function"),
    ],
)
def test_a_subject_that_cannot_be_loaded_is_told_by_argument(
    name: str, message: str, command: Any
) -> None:
    code, error = command("evaluate", "broken_subjects:create_cartpoles", name, "--episodes", "1")
    assert (code, error[: len(name) + 13]) == (2, f"load_agent {name}: ")
    assert message in error


def test_a_create_env_that_is_no_function_is_told_before_the_agent_is_loaded(command: Any) -> None:
    code, error = command("evaluate", "broken_subjects:VALUE", "broken_subjects:lacks_file")
    assert (code, error.splitlines()[0]) == (
        2,
        "create_env broken_subjects:VALUE: it is of type int",
    )


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--env-args", "[1]", """takes a JSON object such as {"size": 3}, got '[1]'"""),
        ("--env-args", "5", "takes a JSON object"),
        ("--env-args", "{n: 5}", "takes a JSON object"),
        ("--episode-seeds", "0:8:0", "takes a range such as 0:200, or seeds such as 3,5,8"),
        ("--failures", "excl", "takes exclude or a finite number, got 'excl'"),
        ("--failures", "nan", "takes exclude or a finite number"),
        ("--plot", "a.xyz", "--plot='a.xyz' does not end as pictures do"),
        ("--plot", "noext", "--plot='noext' does not end as pictures do"),
    ],
)
def test_flags_are_refused_before_anything_is_loaded(
    flag: str, value: str, message: str, command: Any
) -> None:
    code, error = command("evaluate", "no_module:f", "no_module:g", flag, value)
    assert code == 2
    assert message in error


def test_files_that_are_no_text_end_commands_with_2(command: Any) -> None:
    Path("binary.json").write_bytes(b"\x89PNG\xff\x00")
    subject = "broken_subjects:create_cartpoles", "broken_subjects:Policy", "--episodes", "1"
    for arguments in (
        ("compare", "binary.json", "binary.json"),
        ("verify", "binary.json", *subject),
        ("evaluate", *subject, "--record", "binary.json"),
    ):
        assert command(*arguments)[0] == 2
