"""How lanes of windows go on: tapes of what they have done, and a worker that repeats these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from rlpool.data.specs import FLAGS
from rlpool.data.storage import NDArray
from rlpool.envs.vec_env import VecEnv
from rlpool.errors import NotRepeatedError, Where
from rlpool.loop.active_plan import ActivePlan, Lane
from rlpool.loop.agent_calls import AgentCalls
from rlpool.loop.plan import Episode
from rlpool.record.repeat import take_over_together
from rlpool.record.tape import Actions, Tape


def marked(
    running: Collection[Lane], env: VecEnv, state: Mapping[str, NDArray]
) -> Callable[[], dict[int, Tape]]:
    """Keep what lanes have done between two windows.

    Args:
        running: The lanes that run episodes; they are parked.
        env: The environments.
        state: Key to array ``[n_lanes, ...]``: the agent's states.

    Returns:
        Makes the tapes of these lanes, whatever they have done since.
    """
    if not running:
        return dict
    shown = {key: array.copy() for key, array in env.current.items() if key not in FLAGS}
    states = {key: array.copy() for key, array in state.items()}
    lanes: list[tuple[Lane, Episode, Tape, list[Actions], int, str]] = []
    for lane in running:
        tape = lane.tape_so_far
        so_far = list(tape.chunks), tape.first_step, tape.lost
        lanes.append((lane, lane.episode, tape, *so_far))

    def tapes() -> dict[int, Tape]:
        made: dict[int, Tape] = {}
        for lane, episode, tape, chunks, first_step, lost in lanes:
            so_far = episode.n_restarts, first_step, chunks
            made[lane.number] = copy = Tape(tape.seed, tape.options, *so_far, lost=lost)
            if copy.n_steps:
                copy.observation = {key: array[lane.number] for key, array in shown.items()}
                copy.state = {key: array[lane.number] for key, array in states.items()}
        return made

    return tapes


def take_over(active: ActivePlan, env: VecEnv, calls: AgentCalls, where: Where) -> list[Lane]:
    """Bring lanes to where another worker was with a plan's episodes.

    Args:
        active: The plan, with their tapes.
        env: The environments.
        calls: The agent's calls.
        where: This worker.

    Returns:
        What the lanes run; they are parked.

    Raises:
        EnvError: If an environment does not repeat what it did.
    """
    plan = active.plan
    lanes: list[Lane] = []
    able: dict[int, Tape] = {}
    wheres: dict[int, Where] = {}
    for number, known in plan.tapes.items():
        episode = replace(plan.resumed(number, known.n_restarts), options=known.options)
        tape, n_steps = replace(known, seed=episode.seed), known.n_steps
        lanes.append(Lane(number, episode, active, episode.slot, steps_before=n_steps, tape=tape))
        here = Where(where.worker, number, episode.number, 0, tape.seed, tape.options)
        if _can_begin(episode, tape, here):
            able[number], wheres[number] = tape, here
        else:
            env.begin_lanes([number])
    take_over_together(env, able, wheres, calls.record.steps)
    for lane in lanes:
        calls.infos.show(plan.agent_info or {}, {lane.number: lane.episode.number})
        if lane.steps_before:
            calls.driver.resume(lane.number, plan.tapes[lane.number].state, lane.episode)
        else:
            calls.driver.start([lane.number], calls.infos.tensors, [lane.episode])
    return lanes


def _can_begin(episode: Episode, tape: Tape, where: Where) -> bool:
    """Whether a lane can be reset to repeat its tape: not if it was given up in its reset.

    Raises:
        NotRepeatedError: If it was given up in what it has done before.
    """
    fails_at = episode.gives_up_at
    if fails_at is None or fails_at >= tape.n_steps:
        return True
    if tape.n_steps:
        call = f"step {fails_at}" if fails_at >= 0 else "its reset or its first step"
        raise NotRepeatedError(
            f"the environment did not repeat an episode: {call} fails now, but succeeded before",
            where=where._replace(step=max(fails_at, 0)),
            fix="the log has the failure: the same seed and actions have to lead to the same in "
            "another process",
        )
    return False
