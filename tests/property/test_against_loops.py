"""Random batchers and random calls of them, compared with hand-written loops.

A case is determined by its number. ``RLPOOL_CASES=20000`` runs more of them than a
default run, ``RLPOOL_FIRST_CASE=1000`` others; with ``RLPOOL_CASES=1`` a failure shows again.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import AGENT_ARCHS, Batcher, GymEnv, Learner, Pool, VariBadWrapper
from rlpool.agents.noise import NoiseStarts
from rlpool.meta import learner as learner_module
from rlpool.seeding import episode_seeds, noise_keys, root_from, task_draws

from support.by_hand import Episode, ObservedEnv, Values, assert_same, played, same_bits
from support.expected import Expected, WindowsByHand, expectations
from support.meta import DRAWING, LaggingLanes, Storage
from support.random_batchers import CAN_FAIL, Setting, any_setting
from support.scripted import NEVER, ScriptedAgent

N_CASES = int(os.environ.get("RLPOOL_CASES", 150))
FIRST = int(os.environ.get("RLPOOL_FIRST_CASE", 0))
N_REPORTED = 3

pytestmark = pytest.mark.timeout(120 + N_CASES)


def run_cases(
    kind: str, share: float, run: Callable[[int, random.Random, list[Any]], None]
) -> None:
    """Run a share of all cases; each logs its calls in a list that a failure prints."""
    reports, n_failed = [], 0
    for case in range(FIRST, FIRST + max(1, round(share * N_CASES))):
        notes: list[Any] = []
        try:
            run(case, random.Random(f"{kind} {case}"), notes)
        except (Exception, pytest.fail.Exception):
            n_failed += 1
            lines = [f"{kind}, case {case}", *map(repr, notes), traceback.format_exc()]
            reports.append("\n".join(lines))
    assert not reports, f"{n_failed} cases failed\n\n" + "\n".join(reports[:N_REPORTED])


def torch_round_trip(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


class Script:
    """Random calls of a batcher, whose results are compared.

    Args:
        batcher: The batcher.
        by_hand: Computes the expected results.
        rng: Source of the random calls.
        log: Receives a description of each call.
    """

    def __init__(self, batcher: Any, by_hand: Any, rng: random.Random, log: list[Any]) -> None:
        self.batcher, self.by_hand, self.rng, self.log = batcher, by_hand, rng, log
        self.pending: list[Expected] = []
        self.kept: list[tuple[Any, Expected]] = []
        setting = by_hand.setting
        chance = 0.8 if setting.truncates else 0.4
        self.may_fail = setting.over in CAN_FAIL and rng.random() < chance
        # Successors of workers cannot repeat these.
        self.may_kill = setting.n_threads and setting.over != "together" and not setting.history

    def episodes(self) -> None:
        """Let an ``EpisodeBatcher`` run requests."""
        last = None
        for _ in range(self.rng.randint(2, 5)):
            calls = ["execute", "execute", "reexecute", "get", "update", "resume", "seek"]
            call = self.rng.choice([*calls, "stream", "kill"])
            if call in ("update", "resume", "seek", "stream", "kill"):
                getattr(self, call)()
                last = None if call in ("resume", "stream") else last
            elif call == "get" or len(self.pending) == 4:
                self.take()
            elif call == "reexecute" and last is not None:
                self.log.append(call)
                self.batcher.reexecute()
                self.pending.append(self.by_hand.execute(*last))
            else:
                n = self.rng.randint(1, 30 if self.rng.random() < 0.1 else 6)
                last = n, *self.infos(n), self.seeds(n)
                self.log.append(("execute", *last))
                infos = (info or None for info in last[1:3])
                self.batcher.execute(n, *infos, episode_seeds=last[3])
                self.pending.append(self.by_hand.execute(*last))
                if self.pending[-1].breaks:  # all other running requests fail as well
                    self.take_all()
                    last = None
                elif last[3]:  # rows with the same seed would be mistaken for the same episode
                    last = None
        self.take_all()

    def windows(self) -> None:
        """Let a ``Batcher`` run windows."""
        n_lanes = self.by_hand.setting.n_all_lanes
        for _ in range(self.rng.randint(1, 2)):
            if self.rng.random() < 0.3:
                self.resume()
            infos = self.infos(n_lanes)
            self.log.append(("reset", *infos))
            self.batcher.reset(*(info or None for info in infos))
            self.by_hand.reset(*infos)
            self.pending.clear()
            has_stopped = has_failed = False
            for _ in range(self.rng.randint(1, 9)):
                call = self.rng.choice(["execute"] * 4 + ["get", "update", "kill"])
                if call in ("update", "kill"):
                    getattr(self, call)()
                elif call == "get" or len(self.pending) == 3:
                    self.take()
                elif not has_failed:
                    info = env_info = None
                    if self.rng.random() < 0.4:
                        info = self.agent_info(n_lanes, self.by_hand.env_info)
                    elif self.rng.random() < 0.4:
                        env_info = self.later_env_info(n_lanes)
                    self.log.append(("execute", info, env_info))
                    self.batcher.execute(info, env_info)
                    expected = self.by_hand.execute(info, env_info)
                    has_stopped = expected is None
                    if expected is not None:
                        has_failed = bool(expected.failures)
                        self.pending.append(expected)
            if has_failed or self.rng.random() < 0.7:
                self.take_all()
                if has_stopped:
                    assert self.batcher.get() is None
                    assert self.batcher.all_stopped
        self.take_all()

    def resume(self) -> None:
        """Continue with another batcher from a state of this one and collect again."""
        if self.by_hand.setting.n_threads:
            return
        self.log.append("resume")
        state = torch_round_trip(self.batcher.state_dict())
        self.batcher.close()
        self.batcher = self.by_hand.setting.batcher(isinstance(self.batcher, Batcher))
        self.batcher.load_state_dict(state)
        self.by_hand.resume(sum(len(expected.info["seed"]) for expected in self.pending))
        self.pending.clear()
        self.update(self.by_hand.agent.bias)

    def seek(self) -> None:
        """Seek to another episode, if nothing is pending."""
        if self.pending:
            return
        number = self.rng.choice([0, self.rng.randint(1, 40), 2**40 + 1])
        self.log.append(("seek", number))
        self.batcher.seek(number)
        self.by_hand.n_before = number

    def stream(self) -> None:
        """Take some results of a stream and abandon it."""
        if self.pending:
            return
        n, n_pending, n_results = (self.rng.randint(1, 4) for _ in range(3))
        self.may_fail, may_fail = self.may_fail and self.by_hand.setting.truncates, self.may_fail
        infos = [self.infos(n) for _ in range(n_pending + n_results)]
        self.may_fail = may_fail
        self.log.append(("stream", n, n_pending, n_results, infos))
        given = (lambda number, k=k: infos[number][k] or None for k in range(2))
        stream, coming = self.batcher.stream(n, n_pending, *given), iter(infos)
        for _ in range(n_results):
            while len(self.pending) < n_pending:
                self.pending.append(self.by_hand.execute(n, *next(coming)))
            expected = self.pending.pop(0)
            expected.info["policy_age"] = self.by_hand.version - expected.info["policy_version"]
            expected.check(lambda: next(stream))
            if self.rng.random() < 0.5:
                self.update()
        stream.close()
        self.pending.clear()

    def kill(self) -> None:
        """Kill a worker at an arbitrary time."""
        if self.may_kill and self.rng.random() < 0.3:
            workers = self.batcher.stats().workers
            worker = self.rng.randrange(len(workers))
            self.log.append(("kill", worker))
            if workers[worker].state == "alive":
                os.kill(workers[worker].pid, signal.SIGKILL)

    def update(self, bias: float | None = None) -> None:
        info = {"bias": self.rng.randint(-8, 8) / 4 if bias is None else bias}
        self.log.append(("update", info))
        self.batcher.update(info)
        self.by_hand.update(info)

    def take_all(self) -> None:
        while self.pending:
            self.take()
        for got, expected in self.kept:
            expected.check(lambda got=got: got)
        self.kept.clear()

    def take(self) -> None:
        """Take the oldest result, if there is one, and keep, overwrite or drop it."""
        if not self.pending:
            return
        self.log.append("get")
        expected = self.pending.pop(0)
        got = expected.check(self.get)
        if got is None:
            return
        assert [failure.where.row for failure in self.batcher.failures] == list(expected.truncated)
        then = self.rng.choice(["keep", "spoil", "drop"])
        if then == "keep":
            self.kept.append((got, expected))
        elif then == "spoil":
            self.log.append(then)
            for part in (got, got.info):
                for key in part.keys():  # noqa: SIM118  (of named tensors)
                    part[key][:] = 1
            got.lengths[:] = 0

    def get(self) -> Any:
        got = None
        for _ in range(self.rng.choice([0, 3])):
            got = got if got is not None else self.batcher.get(blocking=False)
        return got if got is not None else self.batcher.get()

    def seeds(self, n: int) -> Any:
        """Draw explicit seeds, or ``None`` for those derived from episode numbers."""
        if self.by_hand.setting.over == "together" or self.rng.random() < 0.8:
            return None
        return [self.rng.randrange(2**31) for _ in range(n)]

    def infos(self, n: int) -> tuple[Any, Any]:
        """Draw ``agent_info`` and ``env_info`` of ``n`` rows."""
        rng, env_info = self.rng, {}
        if self.by_hand.setting.over in ("array", "together"):
            if rng.random() < 0.5:
                env_info["length"] = np.full(n, rng.randint(1, 9))
            return self.agent_info(n, env_info), env_info
        if rng.random() < 0.7:
            longest = 140 if rng.random() < 0.02 else rng.choice([2, 5, 9])
            env_info["length"] = np.array([rng.randint(1, longest) for _ in range(n)])
        if rng.random() < 0.5:
            env_info["ends"] = np.array([rng.randrange(3) for _ in range(n)], np.int32)
        if rng.random() < 0.5:
            env_info["id"] = rng.randrange(2**30) + np.arange(n)
        if rng.random() < 0.2:
            env_info["gain"] = np.array([[rng.random()] * 2 for _ in range(n)], np.float32)
        agent_info = self.agent_info(n, env_info)
        if self.may_fail and rng.random() < 0.5:
            steps = np.full(n, NEVER)
            steps[rng.randrange(n)] = rng.randint(-1, 4)
            is_window = isinstance(self.by_hand, WindowsByHand)
            if self.by_hand.setting.truncates:
                # The values of an episode whose reset fails are unknown. Managers replace workers.
                never = [NEVER] * (6 if self.by_hand.setting.over == "manager" else 1)
                each = [rng.choice([*never, rng.randint(0, 6)]) for _ in range(n)]
                env_info["fails_at"] = np.array(each)
            elif self.pending or is_window or rng.random() < 0.4:
                env_info["fails_at"] = steps
            else:
                agent_info["breaks"] = steps.clip(min=-1)
        return agent_info, env_info

    def later_env_info(self, n: int) -> Any:
        """Draw ``env_info`` for later episodes, or ``None`` to keep the current one."""
        if self.by_hand.setting.over == "together" or "id" in self.by_hand.agent_info:
            return None
        _, env_info = self.infos(n)
        env_info.pop("id", None)  # continuing lanes have a different one
        if "fails_at" in env_info:  # except for a reset after the last step of the previous window
            env_info["fails_at"][env_info["fails_at"] == -1] = 0
        return env_info or None

    def agent_info(self, n: int, env_info: Any) -> Any:
        """Draw ``agent_info`` of ``n`` rows."""
        rng, info = self.rng, {}
        if "id" in env_info and rng.random() < 0.5:
            info["id"] = env_info["id"]
        if rng.random() < 0.5:
            info["gain"] = np.array([[rng.random()] * 2 for _ in range(n)], np.float64)
        return info


def scripted(
    kind: str,
    share: float,
    windows: bool,
    n_scripts: int = 1,
    over: str | None = None,
    n_threads: Sequence[int] = (0,),
) -> None:
    """Run cases, each with one batcher and several scripts in sequence."""

    def run(case: int, rng: random.Random, notes: list[Any]) -> None:
        setting = any_setting(rng, over, n_threads=n_threads[case % len(n_threads)])
        notes.append(setting)
        expects = expectations(setting, windows)
        batcher = setting.batcher(windows)
        try:
            for number in range(n_scripts):
                notes[1:] = [f"script {number}"]
                script = Script(batcher, expects, rng, notes)
                script.windows() if windows else script.episodes()
                batcher = script.batcher
        finally:
            batcher.close()

    run_cases(f"{'windows' if windows else 'episodes'} {kind}", share / n_scripts, run)


@pytest.mark.promise("I1")
@pytest.mark.promise("I2")
@pytest.mark.promise("I3")
@pytest.mark.parametrize("windows", [False, True], ids=["episodes", "windows"])
@pytest.mark.parametrize(
    ("kind", "share", "n_scripts", "arguments"),
    [
        ("in this process", 0.18, 1, {}),
        ("reset together", 0.06, 1, {"over": "together"}),
        ("with workers", 0.1, 5, {"n_threads": [1, 2, 3]}),
        ("reset together in workers", 0.03, 5, {"over": "together", "n_threads": [1, 2]}),
        ("in a manager", 0.03, 5, {"over": "manager"}),
    ],
)
def test_results_match_hand_written_loops(
    kind: str, share: float, n_scripts: int, arguments: Any, windows: bool
) -> None:
    scripted(kind, share, windows, n_scripts, **arguments)


# Pools ---------------------------------------------------------------------------------------


WINDOW_KEYS = ("batcher", "lane", "episode", "first_step")


def columns_of(steps: Sequence[Values]) -> Values:
    return {key: np.stack([step[key] for step in steps]) for key in steps[0]}


class PoolByHand:
    """Expected content of a pool as a list of steps, the oldest first.

    Args:
        pool_size: Maximum number of steps.
        info_keys: Keys of the infos stored with each step.
    """

    def __init__(self, pool_size: int, info_keys: list[str]) -> None:
        self.info_keys = info_keys
        # Batcher, lane, episode and number of a step, and its values.
        self.steps: deque[tuple[tuple[int, ...], Values]] = deque(maxlen=pool_size)
        self.n_rows = 0

    def extend(self, result: Expected) -> None:
        for row, steps in enumerate(result.rows):
            self.n_rows += 1
            infos = {key: result.info[key][row] for key in self.info_keys}
            place = [-1, self.n_rows, 0, 0]  # of an episode with its own row
            if "batcher" in result.info:
                place = [int(result.info[key][row]) for key in WINDOW_KEYS]
            *lane, episode, number = place
            for step in steps:
                self.steps.append(((*lane, episode, number), step | infos))
                is_end = bool(step["_done"])
                episode, number = episode + is_end, 0 if is_end else number + 1

    def runs(self, numbers: Sequence[int], length: int) -> list[list[Values]]:
        """Return each step with those that follow it in its episode, as far as stored."""
        held, runs = dict(self.steps), []
        for number in numbers:
            (*place, time), step = self.steps[number]
            run: list[Values] = []
            while step is not None and len(run) < length:
                run.append(step)
                step = None if step["_done"] else held.get((*place, time + len(run)))
            runs.append(run)
        return runs

    def check(self, pool: Pool, n_step: int) -> None:
        """Compare all steps, and samples."""
        n, held = len(self.steps), columns_of([step for _, step in self.steps])
        before = [key for key in held if not key.startswith("_") or key == "_reward"]

        def bits_in(values: Any) -> list[bytes]:
            arrays = [np.asarray(values[key]) for key in before]
            return [b"".join(array[row].tobytes() for array in arrays) for row in range(n)]

        numbers_of = {bits: number for number, bits in enumerate(bits_in(held))}
        if len(numbers_of) < n:  # some are identical
            return
        every = pool.transitions()
        found = [numbers_of[bits] for bits in bits_in(every)]
        assert sorted(found) == list(range(n))
        assert found == sorted(found) or len(pool.lengths) > 1
        for key in held.keys() | every.keys():
            same_bits(key, every[key].numpy(), held[key][found])
        batch = pool.sample(n, n_step=n_step, discount=0.5)
        runs = self.runs([numbers_of[bits] for bits in bits_in(batch)], n_step)
        first, last = (columns_of([run[place] for run in runs]) for place in (0, -1))
        returns = [sum(0.5**k * float(s["_reward"]) for k, s in enumerate(run)) for run in runs]
        assert batch["n_step_return"].tolist() == pytest.approx(returns, rel=1e-5)
        factors = [0.0 if run[-1]["_terminated"] else 0.5 ** len(run) for run in runs]
        assert batch["n_step_discount"].tolist() == factors
        for key in held:
            same_bits(key, batch[key].numpy(), (first if key in before else last)[key])
        sequences = pool.sample_sequences(n, n_step)
        starts = {key: sequences[key][:, 0] for key in sequences} | dict(sequences.info)
        runs = self.runs([numbers_of[bits] for bits in bits_in(starts)], n_step)
        infos = {key: np.stack([run[0][key] for run in runs]) for key in self.info_keys}
        assert_same(sequences, [[drop(step, infos) for step in run] for run in runs], infos)


def drop(step: Values, keys: Values) -> Values:
    return {key: value for key, value in step.items() if key not in keys}


class Source(Script):
    """One of several batchers whose results are added to a pool."""

    is_reset = False

    def result(self) -> tuple[Any, Expected | None]:
        """Return the next result and the expected one, ``None`` if all lanes have stopped."""
        if not isinstance(self.by_hand, WindowsByHand):
            n = self.rng.randint(1, 5)
            infos = self.infos(n)
            self.batcher.execute(n, *(info or None for info in infos))
            expected = self.by_hand.execute(n, *infos)
            return expected.check(self.batcher.get), expected
        if not self.is_reset or self.rng.random() < 0.1:
            infos = self.infos(self.by_hand.setting.n_all_lanes)
            self.batcher.reset(*(info or None for info in infos))
            self.by_hand.reset(*infos)
            self.is_reset = True
        self.batcher.execute()
        expected = self.by_hand.execute(None)
        self.is_reset = expected is not None
        return expected.check(self.batcher.get) if self.is_reset else self.batcher.get(), expected


@pytest.mark.promise("I2")
def test_samples_match_a_list_of_steps_across_windows_of_several_batchers() -> None:
    def run(case: int, rng: random.Random, notes: list[Any]) -> None:
        setting = any_setting(rng, rng.choice(["gym", "gym", "lagging", "array"]))
        size, info_keys = rng.choice([7, 40, 10_000]), rng.choice([[], ["seed", "policy_version"]])
        options = {"pool_size": size, "info_keys": info_keys, "seed": case}
        options["n_workers"] = 2 if size == 10_000 and rng.random() < 0.5 else 1
        pool, by_hand = Pool(**options), PoolByHand(size, info_keys)
        notes += [setting, options]
        with contextlib.ExitStack() as stack:
            sources = []
            for _ in range(rng.randint(1, 3)):
                own = {"seeds": rng.randrange(2**40), "n_timesteps": rng.randint(1, 8)}
                windows = rng.random() < 0.8
                own["restarts"] = rng.random() < 0.7
                each = Setting(**{**vars(setting), **own})
                batcher = stack.enter_context(each.batcher(windows))
                sources.append(Source(batcher, expectations(each, windows), rng, notes))
                sources[-1].may_fail &= setting.truncates
            for _ in range(rng.randint(4, 16)):
                got, expected = rng.choice(sources).result()
                if expected is None or rng.random() < 0.15:  # not added
                    continue
                pool.extend(got if rng.random() < 0.7 else pickle.loads(pickle.dumps(got)))
                by_hand.extend(expected)
                if rng.random() < 0.2:
                    state, pool = torch_round_trip(pool.state_dict()), Pool(**options)
                    pool.load_state_dict(state)
            if by_hand.steps:
                for n_step in (1, 3, 20):
                    by_hand.check(pool, n_step)

    run_cases("pools", 0.06, run)


# Trials --------------------------------------------------------------------------------------


class Trials:
    """A random learner, whose rollouts are compared.

    Args:
        rng: Source of randomness.
        notes: Receives a description of each draw.
    """

    def __init__(self, rng: random.Random, notes: list[Any]) -> None:
        self.rng, self.notes = rng, notes
        self.env, self.per_trial = rng.choice(DRAWING), rng.randint(1, 3)
        self.n_lanes, self.batch_rows = rng.randint(1, 5), rng.randint(1, 8)
        self.arguments = {
            "observes": None,
            "n_noise": rng.choice([0, 2]),
            "keeps": rng.choice(["nothing", "state", "initial"]),
            "history": rng.random() < 0.2,
            "spoils": rng.random() < 0.3,
        }
        self.tasks = rng.choice([None, [1, 4, 6]])
        self.arch = rng.choice([AGENT_ARCHS.Memory, AGENT_ARCHS.Markov])
        self.seed, self.chunk = rng.randrange(2**40), rng.choice([3, 500])
        notes += [vars(self).copy()]

    def trial(self) -> VariBadWrapper:
        return VariBadWrapper(self.env(), self.per_trial)

    def agent(self) -> ScriptedAgent:
        return ScriptedAgent(self.trial().action_space, **self.arguments)

    def lanes(self) -> GymEnv:
        trials = [self.trial() for _ in range(self.n_lanes)]
        if self.arguments["history"] or self.rng.random() < 0.5:
            return GymEnv(trials)
        return LaggingLanes(trials, self.rng.randint(1, self.n_lanes))

    def run(self) -> None:
        storage, expected = Storage(), Storage()
        learner = Learner(
            self.agent(),
            storage,
            None,
            self.tasks,
            self.arch,
            seed=self.seed,
            batch_rows=self.batch_rows,
        )
        n_before = 0
        for collection in range(self.rng.randint(1, 2)):
            # These vary: no result depends on them.
            n, lanes = self.rng.randint(0, 5), self.lanes()
            tasks = self.trial().get_all_task_idx() if self.tasks is None else self.tasks
            self.notes.append((n, type(lanes).__name__, lanes.n_lanes, lanes.min_ready))
            learner.collect_rollouts_parallel(n, parallel_env=lanes)
            draws = [None] * n
            if tasks is not None:
                drawn = task_draws(root_from(self.seed), collection, n, len(tasks))
                draws = [tasks[draw] for draw in drawn]
            self.expect(expected, n_before, draws)
            n_before += n
        assert (learner.n_rollouts_total, learner.n_env_steps_total) == (n_before, self.n_steps)
        for got, wanted in zip(
            (*storage.samples, *storage.episodes),
            (*expected.samples, *expected.episodes),
            strict=True,
        ):
            for name, mine, theirs in zip("oarton", got, wanted, strict=False):
                same_bits(name, np.asarray(mine), np.asarray(theirs))

    n_steps = 0

    def expect(self, storage: Storage, n_before: int, tasks: list[Any]) -> None:
        """Store rollouts that are played sequentially."""
        root, agent, n = root_from(self.seed), self.agent(), len(tasks)
        n_rows = max(self.n_lanes, self.batch_rows)
        seeds = episode_seeds(root, n_before, n)
        noise: Any = [None] * n
        if agent.n_noise:
            noise = NoiseStarts(noise_keys(root, n_before, n), agent.n_noise)
        for i, (seed, task) in enumerate(zip(seeds, tasks, strict=True)):
            env = ObservedEnv(self.trial())
            shown = env.reset(seed, None if task is None else {"task": task})
            steps = played(Episode(agent, i % n_rows, n_rows, noise[i], shown), env, None)
            self.n_steps += len(steps)
            keys = "frame", "action", "_reward", "_terminated", "_frame"
            columns = [np.stack([step[key] for step in steps]) for key in keys]
            if self.arch is AGENT_ARCHS.Markov:
                for sample in zip(*columns, strict=True):
                    storage.add_sample(*sample)
            else:
                columns[2:4] = [column[:, None] for column in columns[2:4]]
                storage.add_episode(*columns)


@pytest.mark.promise("I2")
def test_trials_match_hand_written_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: int, rng: random.Random, notes: list[Any]) -> None:
        trials = Trials(rng, notes)
        monkeypatch.setattr(learner_module, "MAX_CHUNK", trials.chunk)
        trials.run()

    run_cases("trials", 0.1, run)
