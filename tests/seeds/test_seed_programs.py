"""The programs of the original documents run with the documented results."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import Pool

from support.programs import run_as_main
from support.variants import variants

PROGRAMS = Path(__file__).resolve().parent

Run = Callable[..., tuple[str, Any]]


@pytest.fixture
def run(program_folder: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a program and returns its output and the value of an expression.

    Arguments of the function: the program's name, the expression, arguments of the script, and
    texts of the program to replace.
    """

    def run(name: str, kept: str, *arguments: str, replaced: dict[str, str] | None = None) -> Any:
        source = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
        for old, new in (replaced or {}).items():
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        script = program_folder / f"{name}.py"
        script.write_text(source, encoding="utf-8")
        value = eval(kept, run_as_main(script, *arguments))
        if isinstance(value, Pool):
            value.close()  # its processes write what they have printed when they end
        output, errors = capfd.readouterr()
        assert "Traceback" not in errors
        return output, value

    return run


# Pool ------------------------------------------------------------------------------------------


def assert_transitions(arrays: Any) -> None:
    """Check DummyEnv's transition from each row to the next state."""
    state, action, next_state, reward, done = arrays
    grown = next_state - state
    assert ((grown >= 0) & (grown < 0.1)).all()
    np.testing.assert_allclose(reward, next_state.sum(1), rtol=1e-6)
    assert set(action.tolist()) <= {0, 1}
    assert done.dtype == bool


def test_the_pool_example_gives_two_episodes_of_ten_steps(run: Run) -> None:
    output, pool = run("pool", "pool_manager")
    arrays = pool.get_pool()
    assert [a.shape for a in arrays] == [(20, 4), (20,), (20, 4), (20,), (20,)]
    assert "Collected States Shape: (20, 4)" in output
    assert output.count("Resetting") == 2
    assert all(output.count(f"Env {number}: Step 10.") == 1 for number in (0, 1))
    assert_transitions(arrays)
    assert sum(pool.lengths) == 20
    assert min(pool.lengths) >= 1
    state, _, next_state, _, done = arrays
    assert done.sum() == 2
    # Two chains: every state but the first ones is the next state of another row.
    following = {row.tobytes() for row in next_state}
    assert sum(row.tobytes() not in following for row in state) == 2


def test_the_other_pool_example_clears_each_episode_twice(run: Run) -> None:
    arguments = "envs, num_processes, total_pool_size, window_size=5, random=True"
    replaced = {
        f"    pool_manager = Pool({arguments})\n": "",
        "    # pool_manager = Pool(": "    pool_manager = Pool(",
    }
    _, pool = run("pool", "pool_manager", replaced=replaced)
    assert pool.lengths == [6, 6]
    arrays = pool.get_pool()
    assert_transitions(arrays)
    state, _, next_state, _, done = arrays
    for start in (0, 6):  # the last six steps of each process, in order
        np.testing.assert_array_equal(state[start + 1 : start + 6], next_state[start : start + 5])
        assert done[start : start + 6].tolist() == [False] * 5 + [True]


# Episode batcher -------------------------------------------------------------------------------


@pytest.mark.parametrize("n_threads", variants([4], [0]))
def test_the_episode_batcher_program_gives_32_episodes_twice(run: Run, n_threads: int) -> None:
    output, requests = run(
        "episode_batcher",
        "[({k: t[k] for k in t.keys()}, t.lengths) for t in (first_trajectories, trajectories)]",
        replaced={"n_threads=4,": f"n_threads={n_threads},"},
    )
    assert output == ""
    for values, lengths in requests:
        _assert_episodes(values, lengths.tolist())
    first, again = (values["x"][:, 0] for values, _ in requests)
    assert len({*first.tolist(), *again.tolist()}) == 64  # every episode has its own noise


def _assert_episodes(values: dict[str, torch.Tensor], lengths: list[int]) -> None:
    observed = ["x", "identifier", "env_id", "reward", "terminated", "truncated", "done"]
    observed += ["initial_state", "last_action", "timestep"]
    outputs = ["action", "action_probabilities", "agent_id"]
    assert {*values} == {*observed, *outputs, *(f"_{key}" for key in observed)}
    whole = ("env_id", "agent_id", "timestep", "action")
    assert {values[key].dtype for key in whole} == {torch.int64}
    assert {values[key].dtype for key in ("x", "identifier")} == {torch.float32}
    for row, length in enumerate(lengths):
        mine = {key: tensor[row, :length] for key, tensor in values.items()}
        moved = mine["x"] + torch.where(mine["action"] == 0, -0.3, 0.3)
        torch.testing.assert_close(mine["_x"], moved)
        torch.testing.assert_close(mine["action_probabilities"].sum(-1), torch.ones(length))
        is_outside = (mine["_x"].abs() > 1).tolist()
        assert not any(is_outside[:-1])
        assert is_outside[-1] or length == 100
        expected: dict[str, Any] = {
            **dict.fromkeys(("env_id", "_env_id", "agent_id"), [row] * length),
            **dict.fromkeys(("identifier", "_identifier"), [float(mine["identifier"][0])] * length),
            "timestep": list(range(length)),
            "_timestep": list(range(1, length + 1)),
            "x": [float(mine["x"][0]), *mine["_x"][:-1].tolist()],
            "_reward": mine["_x"].tolist(),
            "_terminated": is_outside,
            "_done": [False] * (length - 1) + [True],
            "_last_action": mine["action"].tolist(),
        }
        assert {key: mine[key].tolist() for key in expected} == expected
        assert all(not tensor[row, length:].any() for tensor in values.values())


# Array -----------------------------------------------------------------------------------------


def test_the_array_notebook_prints_its_documented_output(run: Run) -> None:
    output, shared = run("arrays", "array.to_ndarray().copy()")
    numbers = np.arange(20, dtype=np.float32).reshape(5, 4)
    columns, row = np.tile(np.arange(4), (5, 1)), np.arange(4, 8)
    shown = [
        *(columns, columns, row, row, row, np.full((5, 4), 7), np.full((5, 4), 42), numbers),
        np.concatenate([np.arange(-4, 0)[None], numbers[:-1]]),
        np.concatenate([numbers[1:], np.zeros((1, 4))]),
        *(numbers[2], numbers[1], numbers[3], shared),
    ]
    printed = re.findall(r"Array\((\[.*?\]), storage", output, re.DOTALL)
    numbers_of = [[float(text) for text in re.findall(r"-?\d+", each)] for each in printed]
    expected = [np.ravel(values).tolist() for values in shown]
    # A process that is not forked, the default since Python 3.14, imports the program first.
    assert numbers_of in (expected, expected[:-1] + expected)
    assert "\n[6. 6. 6. 6. 6.]\n" in output  # the sum of an ndarray
    written = np.zeros((5, 4), np.int32)
    written[[1, 3], [0, 2]] = 42
    np.testing.assert_array_equal(shared, written)


# Parallel environments -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", variants(["memory"], ["markov"]))
def test_the_documents_learner_trains_with_one_worker_and_with_two(run: Run, arch: str) -> None:
    kept = {}
    for n_workers in (1, 2):
        output, (learner, by_hand) = run("learner", "(learner, by_hand)", arch, str(n_workers))
        assert output == "Collecting initial pool of data..\n"
        # A trial has two episodes of five steps: two rollouts at first, then four at a time.
        assert (learner._n_env_steps_total, learner._n_rollouts_total) == (100, 10)
        assert learner.stats == [{"n_env_steps": 60}, {"n_env_steps": 100}]
        storage = learner.policy_storage
        kept[n_workers] = storage.samples, storage.episodes
        _assert_stored(arch, *kept[n_workers])
        assert (by_hand is None) == (n_workers == 1)
        if by_hand is not None:
            _assert_by_hand(*by_hand)
    # The bits do not depend on where environments run.
    assert _bits(kept[1]) == _bits(kept[2])


def _bits(rows: Any) -> Any:
    return [np.asarray(column).tobytes() for kind in rows for row in kind for column in row]


def _assert_stored(arch: str, samples: Any, episodes: Any) -> None:
    if arch == "markov":
        assert (len(samples), len(episodes)) == (100, 0)
        columns = [np.stack(column) for column in zip(*samples, strict=True)]
        rollouts = [[c[start : start + 10] for c in columns] for start in range(0, 100, 10)]
    else:
        assert (len(samples), len(episodes)) == (0, 10)
        rollouts = episodes
    tasks = set()
    for observations, actions, rewards, terminals, following in rollouts:
        assert observations[:, 2].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]  # the flag
        assert following[:, 2].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
        moved = observations[:, :2] + 2 * np.clip(actions, -1, 1)
        same = [0, 1, 2, 3, 4, 6, 7, 8, 9]  # the sixth step starts from a new place
        np.testing.assert_allclose(following[same, :2], moved[same], atol=1e-5)
        assert not terminals.any()  # it is only truncated
        angle = 2 * np.pi * np.arange(7) / 7
        gains = 2 * np.clip(actions, -1, 1) @ np.stack([np.cos(angle), np.sin(angle)])
        fits = np.isclose(gains, np.reshape(rewards, (-1, 1)), atol=1e-4).all(0)
        assert fits.sum() == 1
        tasks.add(int(fits.argmax()))
    assert tasks <= set(range(5))  # for training
    assert len(tasks) > 1


def _assert_by_hand(tasks: list[int], results: Any) -> None:
    assert len(results) == 3 * len(tasks)
    for worker, before, (kind, (observation, reward, done, info)) in results:
        assert kind == "transition"
        np.testing.assert_allclose(observation[:2], before[:2] + 1.0, atol=1e-5)
        angle = 2 * np.pi * tasks[worker] / 7
        assert reward == pytest.approx(np.cos(angle) + np.sin(angle), abs=1e-5)
        assert (bool(done), info["done_mdp"]) == (False, False)
