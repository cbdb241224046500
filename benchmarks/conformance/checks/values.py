"""Values: does the returned data match the environment's, at every boundary?"""

from __future__ import annotations

import numpy as np

from benchmarks.conformance import data, expect
from benchmarks.conformance.checks import Library, check
from benchmarks.conformance.envs import LENGTH, STEP, TAG
from benchmarks.conformance.interface import Steps

BIG = 2**24  # the first integer after which float32 skips some
GAMMA = 0.5


def length_of(episode: Steps) -> int:
    """Return the scripted length of an episode."""
    return int(data.numbers(episode.observation)[0, LENGTH])


def ends_with_its_own_observation(library: Library, ends: str) -> None:
    for episode in data.finished(library, ends=ends):
        own = data.numbers(episode.observation)[0]
        last = data.numbers(data.after(episode))[-1]
        expect.equal("tag, length, step after the last one", last, [*own[:STEP], own[LENGTH]])


@check("values", "Farama-Foundation/Gymnasium#1103")
def final_observation_at_truncation(library: Library) -> None:
    """The last next observation of a truncated episode is its own, not that of the next reset.

    Its value is the bootstrap target; that of a reset observation belongs to another episode.
    """
    ends_with_its_own_observation(library, "truncated")


@check("values", "isaac-sim/IsaacLab#4369")
def final_observation_at_termination(library: Library) -> None:
    """The last next observation of a terminated episode is its own, not that of a reset.

    Dynamics models, discriminators and goal relabelling use it.
    """
    ends_with_its_own_observation(library, "terminated")


@check("values", "Farama-Foundation/Gymnasium#914", standard_env=True)
def final_observation_of_cartpole(library: Library) -> None:
    """The fallen pole of CartPole-v1 is observed outside the bounds that end an episode.

    This is the same property on a standard environment: resets lie within 0.05.
    """
    for episode in data.ended(library, None, "CartPole-v1"):  # it falls within 10 steps
        x, _, angle, _ = np.abs(data.after(episode)[-1])
        expect.holds(f"|x| > 2.4 or |angle| > 0.2094, not {x}, {angle}", x > 2.4 or angle > 0.2094)


@check("values", "Farama-Foundation/Gymnasium#1624")
def rewards_of_all_steps(library: Library) -> None:
    """Every step has its own reward, including the last one.

    In sparse tasks only the last reward counts.
    """
    for episode in data.finished(library):
        expect.equal("the rewards of an episode", episode.reward, np.arange(length_of(episode)) + 1)


@check("values", "sail-sg/envpool#194")
def reset_is_not_a_transition(library: Library) -> None:
    """No transition leads from one episode's end to the next one's start.

    Such a row has an action that the environment never received and a reward it never returned.
    """
    for piece in data.pieces(library):
        steps = data.steps(piece.observation)
        expect.holds(f"no final one in steps {steps.tolist()}", max(steps) < length_of(piece))


@check("values", "Farama-Foundation/Gymnasium#1122", "window")
def windows_follow_each_other(library: Library) -> None:
    """Across two windows, each environment's steps appear once, in order, without gaps.

    A lost or repeated step at a boundary breaks returns, advantages and recurrent states.
    """
    with library.open(lengths=(40,)) as collector:
        for stream in data.window(collector):
            steps = data.steps(stream.observation)
            expect.equal("steps of two windows", steps, steps[0] + np.arange(2 * data.PART))


@check("values", "Toni-SM/skrl#363")
def truncation_is_not_termination(library: Library) -> None:
    """An episode that is cut short is flagged truncated and not terminated.

    A value function that treats a time limit as a terminal state is wrong near it.
    """
    for episode in data.finished(library, ends="truncated"):
        flags = [episode.terminated[-1], episode.truncated[-1]]
        expect.equal("terminated, truncated", np.array(flags, bool), [False, True])


@check("values", "openai/spinningup#233", standard_env=True)
def time_limit_is_truncation(library: Library) -> None:
    """`max_episode_steps` truncates an episode of CartPole-v1 after that many steps.

    This is the most common truncation, by Gymnasium's wrapper or the library's own argument.
    """
    script = {"policy": data.leaning, "env_id": "CartPole-v1", "max_episode_steps": 6}
    for stream in data.collected(library, **script):
        episode = data.cut(stream)[0]
        flags = [int(episode.terminated[-1]), int(episode.truncated[-1]), len(episode)]
        expect.equal("terminated, truncated, length", flags, [0, 1, 6])


@check("values", "cogment/cogment-lab#22")
def episodes_of_one_step(library: Library) -> None:
    """Episodes that end with their first step are complete: observation, reward, flag, end.

    Examples are bandits, one-move games, and agents that fail immediately.
    """
    episodes = data.finished(library, lengths=(1,), ends="terminated")
    expect.holds("several episodes of one step", len(episodes) >= 4)
    for episode in episodes:
        expect.equal("steps", data.steps(episode.observation), [0])
        expect.equal("reward", episode.reward, [1])
        expect.equal("step after the last one", data.steps(data.after(episode)), [1])


@check("values", "Farama-Foundation/SuperSuit#116")
def action_belongs_to_its_observation(library: Library) -> None:
    """A row's action is the one chosen for its observation and the one that was rewarded.

    With an off-by-one error, an agent learns from the action one step later.
    """
    for episode in data.finished(library, data.alternating):
        expect.equal("actions", np.ravel(episode.action), data.steps(episode.observation) % 2)
        seen = (np.asarray(episode.reward) // 1000).astype(int)
        expect.equal("actions that the environment saw", seen, np.ravel(episode.action))


@check("values", "chainer/chainerrl#386")
def observations_keep_float64(library: Library) -> None:
    """Observations in float64 keep values that float32 cannot represent.

    In float32, neighbouring time stamps or coordinates become equal.
    """
    for stream in data.collected(library, dtype="float64", base=BIG, lengths=(12,)):
        steps = data.numbers(stream.observation)[:6, STEP] - BIG
        expect.equal("steps", steps - steps[0], np.arange(len(steps)))


@check("values", "DLR-RM/stable-baselines3#40")
def observations_keep_uint8(library: Library) -> None:
    """Images in uint8 remain uint8, with the same values.

    In float32 they take four times the memory, which is the bottleneck of most image agents.
    """
    for episode in data.finished(library, dtype="uint8", shape=(4, 4, 4)):
        dtype = episode.observation.dtype
        expect.holds(f"uint8, not {dtype}", dtype == np.uint8)
        expect.equal("steps", data.steps(episode.observation), np.arange(len(episode)))


@check("values", "tensorflow/agents#204")
def rewards_keep_float64(library: Library) -> None:
    """Rewards, which Gymnasium defines as Python floats, keep values beyond float32.

    With profits or energies, agents learn from small differences between large numbers.
    """
    for stream in data.collected(library, base=BIG, dtype="float64", lengths=(12,)):
        rewards = np.asarray(stream.reward[:6], np.float64)
        expect.equal("rewards", rewards - rewards[0], np.arange(len(rewards)))


@check("values", "PufferAI/PufferLib#172", "infos")
def infos_belong_to_their_steps(library: Library) -> None:
    """Each row's info belongs to its own environment and step, including the last one.

    Costs, action masks and goals shifted by a step or an environment mislead silently.
    Success, return and length are reported with the last step.
    """
    for episode in data.finished(library, job={"info_keys": ("step",)}):
        steps = [int(info["step"]) for info in episode.info]
        expect.equal("`step` in infos", steps, np.arange(len(steps)) + 1)


@check("values", "chainer/chainerrl#157")
def reused_array_is_copied(library: Library) -> None:
    """An environment may return the same array each time, changed in place.

    Simulators do so. Without a copy, all stored observations become the last one.
    """
    for episode in data.finished(library, reuse=True):
        expect.equal("steps", data.steps(episode.observation), np.arange(len(episode)))
        expect.equal("steps after", data.steps(data.after(episode)), np.arange(len(episode)) + 1)


@check("values", "PufferAI/PufferLib#161", "window", "results", standard_env=True)
def results_stay_as_they_are(library: Library) -> None:
    """The data of a window does not change while the next ones are collected.

    Off-policy and asynchronous learners still read it.
    """
    with library.open() as collector:
        first = collector.window(5)
        before = [np.array(stream.observation) for stream in first]
        collector.window(5)
        collector.window(5)
        for stream, copy in zip(first, before, strict=True):
            expect.equal("an earlier window", stream.observation, copy)


@check("values", "DLR-RM/stable-baselines3#1883", "frame_stack")
def frame_stacks_stay_in_their_episode(library: Library) -> None:
    """Stacks never contain another episode's frames, and the final one has the last frames.

    Stacks may start with zeros or with the first frame.
    """
    for episode in data.pieces(library, job={"frame_stack": 3}, lengths=(4,)):
        tags = np.asarray(episode.observation).reshape(len(episode), 3, 3)[..., TAG]
        expect.holds(f"one tag in {tags.tolist()}", set(tags.flat) <= {0, tags[0, -1]})
        if episode.truncated[-1] and len(episode) == 4:
            steps = data.after(episode)[-1].reshape(3, 3)[:, STEP]
            expect.equal("steps in the final stack", steps, [2, 3, 4])


@check("values", "younggyoseo/FastTD3#6", "n_step")
def n_step_returns_stay_in_their_episode(library: Library) -> None:
    """An n-step return sums its own episode's rewards and bootstraps from that episode."""
    with library.open(lengths=(4,), job={"seed": None}) as collector:
        rows = collector.n_step(14, 3, GAMMA)
    shown, later = data.numbers(rows.observation), data.numbers(data.after(rows))
    whole = [each for each in shown if sum(shown[:, TAG] == each[TAG]) == 4]
    expect.holds("returns from all four steps of an episode", len(whole) > 0)
    for now, then, found in zip(shown, later, rows.reward, strict=True):
        if any(now[TAG] == each[TAG] for each in whole):
            paid = np.arange(now[STEP] + 1, 5)[:3]
            expect.equal("return", found, (paid * GAMMA ** np.arange(len(paid))).sum())
            expect.equal("bootstrapped from", then, [*now[:STEP], min(now[STEP] + 3, 4)])


@check("values", "Toni-SM/skrl#449", "targets")
def only_truncation_is_bootstrapped(library: Library) -> None:
    """Among ends, only a truncated step's target has the discounted value of the next state.

    Here, the value of an observation is 100 times its step.
    """
    for ends, target in (("truncated", 4 + GAMMA * 400), ("terminated", 4)):
        with library.open(lengths=(4,), ends=ends) as collector:
            pairs = collector.targets(14, lambda rows: 100.0 * data.steps(rows), GAMMA)
        found = [t[(s.terminated | s.truncated) > 0] for s, t in pairs]
        expect.holds("targets of steps that end an episode", sum(map(len, found)) > 0)
        for each in np.concatenate(found):
            expect.equal(f"the target of a {ends} step", round(float(each), 3), target)


@check("values", "Farama-Foundation/Gymnasium#787", "options")
def options_reach_the_first_episodes(library: Library) -> None:
    """The options of `reset` reach the first episode of every environment."""
    for stream in data.collected(library, job={"options": {"level": 7}})[:4]:
        expect.equal("the level of the first episode", data.numbers(stream.observation)[0, TAG], 7)


@check("values", "DLR-RM/stable-baselines3#2229", "options", "window")
def options_hold_in_later_episodes(library: Library) -> None:
    """Automatically restarted episodes have the current options."""
    with library.open(job={"options": {"level": 7}}) as collector:
        for stream in data.window(collector):
            levels = data.numbers(stream.observation)[:, TAG]
            expect.equal("levels of all episodes", levels, np.full(len(stream), 7))
