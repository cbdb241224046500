"""Clauses about what happens when an episode of an environment is run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import LaneError, VecEnv
from rlpool.errors import SpecError
from rlpool.generators import seeded_generators
from rlpool.record.failures import described
from rlpool.testing.env_subject import EnvSubject
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
    first = subject.episodes[0]
    _refuse_failed(first)
    with subject.opened(1) as opened, seeded_generators(1):
        again = subject.run(opened, 0)
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
    actions = subject.actions(0)
    with _several_lanes(subject) as env, seeded_generators(1):
        seeds = [subject.seeds[lane % len(subject.seeds)] for lane in range(env.n_lanes)]
        try:
            together = run_together(env, seeds, subject.options, actions, subject.n_steps)
        except LaneError as failure:
            raise Failed(f"it fails: {described(failure.__cause__ or failure)}") from None
        lane_0 = LaneOf(env, 0, ActionArrays(getattr(env, "action_space", None), actions[0]))
        for lane, episode in enumerate(together):
            alone = run_episode(lane_0, seeds[lane], subject.options, actions, subject.n_steps)
            if what := difference(alone, episode):
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


@contextmanager
def _several_lanes(subject: EnvSubject) -> Iterator[VecEnv]:
    """A ``VecEnv`` that was made, or two single environments as one."""
    with subject.opened(0) as first:
        if first.vec is not None:
            yield first.vec
            return
        with subject.opened(1) as second:
            try:
                both = GymEnv([first.made, second.made])
            except SpecError as failure:
                raise CannotCheck(f"they make no GymEnv: {described(failure)}") from None
            yield both
