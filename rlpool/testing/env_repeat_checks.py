"""Clauses about what happens when an episode of an environment is run again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import LaneError, VecEnv
from rlpool.errors import SpecError
from rlpool.failures import described
from rlpool.testing.env_subject import EnvSubject, Opened
from rlpool.testing.episodes import (
    ActionArrays,
    Episode,
    LaneOf,
    bits,
    difference,
    place,
    run_episode,
    run_together,
)
from rlpool.testing.findings import CannotCheck, Failed, Finding, error, warning
from rlpool.testing.generators import seeded_generators

Findings = Iterator[Finding]

_RNG_FIX = "draw from self.np_random, which super().reset(seed=seed) seeds, and from nothing else"


def repeats(subject: EnvSubject) -> Findings:
    """The same seed and actions give the same bits, whatever ran in between."""
    with subject.opened() as opened:
        with seeded_generators(1):
            first = subject.run(opened, 0)
            subject.run(opened, 1)
            subject.run(opened, 1, n_steps=max(1, subject.n_steps // 3))
        with seeded_generators(2):
            again = subject.run(opened, 0)
        _refuse_failed(first)
        what = difference(first, again)
        if not what:
            return
        with seeded_generators(3):
            one = subject.run(opened, 0)
        with seeded_generators(3):
            other = subject.run(opened, 0)
        is_global = not difference(one, other)
    yield error(
        "repeats",
        f"reset(seed={first.seed}) and the same actions twice, with other episodes in between: "
        f"{what}" + (", as it depends on global random generators" if is_global else ""),
        _RNG_FIX if is_global else f"let reset() put everything back; {_RNG_FIX}",
    )


def fresh_instance_repeats(subject: EnvSubject) -> Findings:
    """Another instance gives the same bits, as after a worker was replaced."""
    if not subject.can_copy:
        raise CannotCheck(
            f"the instance cannot be copied ({subject.why_no_copy}): pass what makes it"
        )
    with subject.opened(0) as opened, seeded_generators(1):
        subject.run(opened, 1)
        first = subject.run(opened, 0)
    with subject.opened(1) as opened, seeded_generators(1):
        subject.run(opened, 1)
        again = subject.run(opened, 0)
    _refuse_failed(first)
    what = difference(first, again)
    if what:
        yield error(
            "fresh_instance_repeats",
            f"reset(seed={first.seed}) and the same actions in two instances: {what}",
            "let an episode depend on reset(seed, options) and the actions alone, not on what the "
            "constructor drew or on the seed of create_env",
        )


def no_global_generators(subject: EnvSubject) -> Findings:
    """Nothing is drawn from generators that the whole process shares."""
    if subject.used_generators:
        yield warning(
            "no_global_generators",
            f"episodes use the global generators of {', '.join(subject.used_generators)}",
            _RNG_FIX,
        )


def own_buffers(subject: EnvSubject) -> Findings:
    """What was handed out stays as it was."""
    for number, episode in enumerate(subject.episodes):
        for t, step in enumerate(episode.steps):
            if bits(step.observation) != bits(step.handed_out):
                yield warning(
                    "own_buffers",
                    f"episode {number}: the observation of {place(t)} was changed later",
                    "return a copy: rlpool copies observations at once, other code that keeps "
                    "them sees them change",
                )
                return


def lanes_agree(subject: EnvSubject) -> Findings:
    """An episode is the same in every lane of a ``GymEnv``, and beside any others."""
    if not subject.can_copy:
        raise CannotCheck(
            f"the instance cannot be copied ({subject.why_no_copy}): pass what makes it"
        )
    with subject.opened(0) as first, subject.opened(1) as second:
        both = _side_by_side(first, second)
        n = min(both.n_lanes, len(subject.seeds))
        seeds = [subject.seeds[lane % n] for lane in range(both.n_lanes)]
        actions = subject.actions(first, 0)
        with seeded_generators(1):
            try:
                together = run_together(both, seeds, subject.options, actions, subject.n_steps)
            except LaneError as failure:
                raise Failed(f"it fails: {described(failure.__cause__ or failure)}") from None
    with subject.opened(2) as one, subject.opened(3) as other:
        both = _side_by_side(one, other)
        for lane, episode in enumerate(together):
            with seeded_generators(1):
                alone = _alone(both, episode.seed, subject, actions)
            what = difference(alone, episode)
            if what:
                yield error(
                    "lanes_agree",
                    f"an episode alone in lane 0, and in lane {lane} beside others: {what}",
                    "let lanes share nothing that changes (class attributes, module globals, "
                    "buffers), and make all environments of one create_env alike",
                )
                return


def _refuse_failed(episode: Episode) -> None:
    if episode.failure:
        raise Failed(f"it fails: {episode.failure}")


def _side_by_side(first: Opened, second: Opened) -> VecEnv:
    """Several lanes in one ``VecEnv``."""
    if first.vec is not None:
        return first.vec
    try:
        return GymEnv([first.made, second.made])
    except SpecError as failure:
        raise CannotCheck(f"they make no GymEnv: {described(failure)}") from None


def _alone(env: VecEnv, seed: int, subject: EnvSubject, actions: Any) -> Episode:
    lane = LaneOf(env, 0, ActionArrays(getattr(env, "action_space", None), actions[0]))
    return run_episode(lane, seed, subject.options, actions, subject.n_steps)
