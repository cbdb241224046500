"""How lanes of windows go on: tapes of what they have done, and a worker that repeats these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from rlpool.envs.vec_env import VecEnv
from rlpool.errors import NotRepeatedError, Where
from rlpool.loop.active_plan import ActivePlan, Lane, Parked
from rlpool.loop.agent_calls import AgentCalls
from rlpool.loop.plan import Episode
from rlpool.memory.storage import Array
from rlpool.record.repeat import take_over_together
from rlpool.record.tape import Actions, Tape
from rlpool.specs import FLAGS


def marked(
    running_lanes: Mapping[int, Lane], env: VecEnv, state: Mapping[str, Array]
) -> Callable[[], dict[int, Tape]]:
    """Keep what lanes have done between two windows.

    Args:
        running_lanes: What the lanes run.
        env: The environments.
        state: Key to array ``[n_lanes, ...]``: the agent's states.

    Returns:
        Makes the tapes of these lanes, whatever they have done since.
    """
    if not running_lanes:
        return dict
    shown, states = list(env.current), list(state)
    kept = [array.copy() for array in (*env.current.values(), *state.values())]
    lanes: list[tuple[int, Episode, Tape, list[Actions], int, str, Parked]] = []
    for lane, running in running_lanes.items():
        tape = running.tape_so_far
        so_far = list(tape.chunks), tape.first_step, tape.lost
        lanes.append((lane, running.episode, tape, *so_far, running.parked))

    def tapes() -> dict[int, Tape]:
        made: dict[int, Tape] = {}
        for lane, episode, tape, chunks, first_step, lost, parked in lanes:
            so_far = episode.n_restarts, first_step, chunks
            made[lane] = copy = Tape(tape.seed, tape.options, *so_far, lost=lost)
            if copy.n_steps:
                rows = [row for _, row in parked] if parked else [a[lane] for a in kept]
                observed = dict(zip(shown, rows, strict=False))
                copy.observation = {k: row for k, row in observed.items() if k not in FLAGS}
                copy.state = dict(zip(states, rows[len(shown) :], strict=True))
        return made

    return tapes


def take_over(
    active: ActivePlan, table: dict[int, Lane], env: VecEnv, calls: AgentCalls, where: Where
) -> None:
    """Bring lanes to where another worker was with a plan's episodes.

    Args:
        active: The plan, with their tapes.
        table: Gets what the lanes run now; they are parked.
        env: The environments.
        calls: The agent's calls.
        where: This worker.

    Raises:
        EnvError: If an environment does not repeat what it did.
    """
    plan = active.plan
    episodes = {
        lane: replace(plan.resumed(lane, tape.n_restarts), options=tape.options)
        for lane, tape in plan.tapes.items()
    }
    tapes = {lane: replace(tape, seed=episodes[lane].seed) for lane, tape in plan.tapes.items()}
    wheres = {
        lane: Where(where.worker, lane, episodes[lane].number, 0, tape.seed, tape.options)
        for lane, tape in tapes.items()
    }
    able = {n: tape for n, tape in tapes.items() if _can_begin(episodes[n], tape, wheres[n])}
    env.begin_lanes([lane for lane in tapes if lane not in able])
    take_over_together(env, able, wheres, calls.record.steps)
    for lane, tape in tapes.items():
        episode = episodes[lane]
        calls.infos.show(plan.agent_info or {}, {lane: episode.number})
        if tape.n_steps:
            calls.driver.resume(lane, tape.state, episode)
        else:
            calls.driver.start([lane], calls.infos.tensors, [episode])
        parked = calls.rows_of(lane)
        table[lane] = Lane(episode, active, episode.slot, 0, tape.n_steps, parked, tape)


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
