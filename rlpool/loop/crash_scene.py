"""Turns failures in a rollout into errors that carry a crash capsule.

The actions of a lane's current slot are in the block anyway. What has left it, the earlier chunks
of a long episode, is on the lane's tape. So a step costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlpool.envs.vec_env import LaneError, VecEnv
from rlpool.errors import Where, WorkerError
from rlpool.loop.agent_driver import AgentFailure
from rlpool.loop.plan import Lane
from rlpool.memory.storage import Array
from rlpool.record.crash_capsule import CrashCapsule
from rlpool.record.failures import agent_error, attempted, env_error
from rlpool.record.tape import MOST_BYTES, REWARD, Tape, slot_steps

Named = Mapping[str, Array]


class CrashScene:
    """What is known about the episodes of one rollout when one fails.

    Args:
        env: The environments.
        worker_seed: The ``seed`` that they were created with, ``None`` if that is not known.
    """

    def __init__(self, env: VecEnv, worker_seed: int | None) -> None:
        self._env = env
        self._worker_seed = worker_seed
        self._most_bytes = MOST_BYTES // env.n_lanes

    def bind(self, rows: Named, shown: Named, state: Named, numbers: Array) -> None:
        """Read from another block from now on.

        Args:
            rows: Its rows by key, ``[n_slots + 1, T, ...]``.
            shown: Key to array ``[n_lanes, ...]``: what the agent is shown, rewritten in place.
            state: Likewise: the agent's state.
            numbers: Number of each lane's row, ``slot * T + step``, rewritten in place.
        """
        self._rows, self._shown, self._state, self._numbers = rows, shown, state, numbers

    def leave_slot(self, running: Lane, lane: int) -> None:
        """Record a full slot that a lane is about to leave."""
        n_timesteps, last_reward = self._rows[REWARD].shape[1], self._env.current[REWARD][lane]
        chunk = slot_steps(self._rows, running.slot, running.start, n_timesteps, last_reward)
        running.tape_so_far.add(chunk, self._most_bytes)

    def of_probe(self, failure: LaneError, where: Where, agent_info: Named) -> WorkerError:
        """The error for the reset, or the call, that tells what a step consists of.

        Args:
            failure: What failed.
            where: Where it did.
            agent_info: ``[n_lanes, ...]``, empty if there is none.
        """
        return _error(failure, where, self._of_probe(failure.call, where, agent_info))

    def running(
        self,
        failure: LaneError,
        where: Where,
        running: Lane,
        row: int,
        infos: tuple[Named, Named],
    ) -> WorkerError:
        """The error for an episode that was running, or about to begin.

        Args:
            failure: What failed.
            where: Where it did.
            running: What the lane runs; its tape becomes that of all of the episode.
            row: The row of its slot in which it failed.
            infos: ``agent_info`` by episode, ``[n, ...]``, and by lane, as the agent is shown it.
        """
        return _error(failure, where, self._running(failure.call, where, running, row, infos))

    @attempted
    def _of_probe(self, call: str, where: Where, agent_info: Named) -> CrashCapsule:
        tape, lane = Tape(where.seed or 0, where.env_info), where.lane or 0
        info, batch = _row(agent_info, lane), {}
        if call != "reset":
            tape.observation = _row(self._env.current, lane)
            batch = _batch(observation=self._env.current, agent_info=agent_info)
        return self._capsule(tape, call, where, info, batch=batch)

    @attempted
    def _running(
        self, call: str, where: Where, running: Lane, row: int, infos: tuple[Named, Named]
    ) -> CrashCapsule:
        agent_info, shown_info = infos
        lane, current, tape = where.lane or 0, self._env.current, running.tape_so_far
        slot, failing, batch = running.slot, None, {}
        tape.add(slot_steps(self._rows, slot, running.start, row, current[REWARD][lane]))
        if call == "initial_state":
            tape.observation = _row(current, lane)
            batch = _batch(agent_info=shown_info)
        elif call != "reset":
            tape.observation = _row(self._before_the_call(self._shown), lane)
        if call == "step":
            steps = slot_steps(self._rows, slot, row, row + 1, 0)
            failing = {key: array for key, array in steps.items() if key != REWARD}
        elif call == "agent":
            shown, state = map(self._before_the_call, (self._shown, self._state))
            batch = _batch(observation=shown, agent_info=shown_info, state=state)
        info = _row(agent_info, where.episode or 0)
        return self._capsule(tape, call, where, info, failing, batch)

    def _capsule(
        self,
        tape: Tape,
        call: str,
        where: Where,
        agent_info: Named,
        failing: Named | None = None,
        batch: Named | None = None,
    ) -> CrashCapsule:
        env = self._env
        seed = env.seed_used(where.lane or 0)
        tape.seed = tape.seed if seed is None else seed
        return CrashCapsule.of_tape(
            tape,
            call,
            where,
            failing,
            worker_seed=self._worker_seed,
            n_lanes=env.n_lanes,
            env_type=type(env).__name__,
            agent_info=agent_info,
            batch=batch or {},
        )

    def _before_the_call(self, arrays: Named) -> Named:
        """What the agent was called with, before it could change it: the block lacks only flags."""
        slots, steps = np.divmod(self._numbers, self._rows[REWARD].shape[1])
        return {
            key: self._rows[key][slots, steps] if key in self._rows else array
            for key, array in arrays.items()
        }


def _error(failure: LaneError, where: Where, capsule: CrashCapsule | None) -> WorkerError:
    if not isinstance(failure, AgentFailure):
        return env_error(failure, where, capsule)
    who = "the agent" if failure.call == "agent" else "agent.initial_state"
    return agent_error(failure.__cause__ or failure, where, who, capsule)


def _row(arrays: Named, number: int) -> dict[str, Array]:
    return {key: np.array(array[number]) for key, array in arrays.items()}


def _batch(**groups: Named) -> dict[str, Array]:
    return {
        f"{group}/{key}": np.array(array)
        for group, arrays in groups.items()
        for key, array in arrays.items()
    }
