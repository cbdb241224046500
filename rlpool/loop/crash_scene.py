"""Turns failures in a rollout into errors with a crash capsule.

Recording costs nothing per step: the actions of the current slot are in the block, those of earlier
slots of a long episode on the lane's tape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlpool.data.storage import NDArray
from rlpool.envs.vec_env import LaneError, VecEnv
from rlpool.errors import Where, WorkerError
from rlpool.loop.active_plan import ActivePlan, Lane
from rlpool.loop.agent_driver import AgentFailure, rows_repeating
from rlpool.record.crash_capsule import CrashCapsule
from rlpool.record.failures import agent_error, attempted, env_error
from rlpool.record.tape import MOST_BYTES, REWARD, Tape, slot_rows, slot_steps

Named = Mapping[str, NDArray]


class CrashScene:
    """Makes the capsules of one rollout.

    Args:
        env: The environments.
        worker_seed: The ``seed`` that they were created with, ``None`` if it is not known.
    """

    def __init__(self, env: VecEnv, worker_seed: int | None) -> None:
        self._env = env
        self._worker_seed = worker_seed
        self._most_bytes = MOST_BYTES // env.n_lanes
        self._active: Sequence[ActivePlan] = ()

    def bind(self, active: Sequence[ActivePlan], shown: Named, state: Named) -> None:
        """Read from other arrays from now on, all of which are rewritten in place.

        Args:
            active: The plans that run.
            shown: Key to array ``[n_lanes, ...]``: the agent's observation.
            state: Key to array ``[n_lanes, ...]``: the agent's state.
        """
        self._active, self._shown, self._state = active, shown, state

    def leave_slots(self, lanes: Sequence[Lane]) -> None:
        """Record full slots on the tapes of lanes of one plan, before they leave them."""
        if self._env.seeding != "episode":
            return  # it cannot be repeated
        plan = lanes[0].active.plan
        slots = [lane.slot for lane in lanes]
        last_rewards = self._env.current[REWARD][[lane.number for lane in lanes]]
        steps = slot_steps(plan.layout, plan.arrays, slots, last_rewards)
        for row, lane in enumerate(lanes):
            if lane.start < plan.layout.n_timesteps:
                chunk = {key: array[row, lane.start :] for key, array in steps.items()}
                lane.tape_so_far.add(chunk, self._most_bytes)

    def error(
        self,
        failure: LaneError,
        where: Where,
        infos: tuple[Named, Named],
        running: Lane | None = None,
        row: int = 0,
    ) -> WorkerError:
        """Make the error for a failure of the user's code, with the capsule of the episode.

        Args:
            failure: The failure.
            where: Worker, lane, episode and step.
            infos: ``agent_info`` by episode, ``[n, ...]``, and by lane, ``[n_lanes, ...]``.
            running: The lane's episode, whose tape is extended; ``None`` for the probe.
            row: The row of the slot in which it failed.
        """
        capsule = None
        if self._env.seeding == "episode":
            capsule = self._capsule(failure.call, where, infos, running, row)
        if not isinstance(failure, AgentFailure):
            return env_error(failure, where, capsule)
        who = "the agent" if failure.call == "agent" else "agent.initial_state"
        return agent_error(failure.__cause__ or failure, where, who, capsule)

    @attempted
    def _capsule(
        self,
        call: str,
        where: Where,
        infos: tuple[Named, Named],
        running: Lane | None,
        row: int,
    ) -> CrashCapsule:
        env, lane = self._env, where.lane or 0
        tape = Tape(where.seed or 0, where.env_info)
        shown: Named = env.current
        state: Named = {}
        failing: dict[str, NDArray] = {}
        batch: dict[str, NDArray] = {}
        if running is not None:
            tape, plan = running.tape_so_far, running.active.plan
            slot = plan.layout, plan.arrays, running.slot
            tape.add(slot_rows(*slot, running.start, row, env.current[REWARD][lane]))
            if call in ("step", "agent"):
                shown, state = map(self.before_the_call, (self._shown, self._state))
            if call == "step":
                steps = slot_rows(*slot, row, row + 1, 0)
                failing = {key: array for key, array in steps.items() if key != REWARD}
        if call != "reset":
            tape.observation = _row(shown, lane)
        if call in ("agent", "initial_state"):
            inputs = {"observation": shown, "agent_info": infos[1], "state": state}
            rows = self._rows_of_batch()
            for group, arrays in inputs.items():
                batch |= {f"{group}/{key}": array[rows] for key, array in arrays.items()}
        seed = env.seed_used(lane)
        tape.seed = tape.seed if seed is None else seed
        return CrashCapsule.of_tape(
            tape,
            call,
            where,
            failing,
            worker_seed=self._worker_seed,
            n_lanes=env.n_lanes,
            env_type=type(env).__name__,
            agent_info=_row(infos[0], where.episode or 0),
            batch=batch,
        )

    def _rows_of_batch(self) -> NDArray:
        """The rows of the batch that the agent was shown: idle lanes show another one's."""
        lanes = np.flatnonzero(sum(active.strides for active in self._active))
        if not lanes.size:
            return np.arange(self._env.n_lanes)
        return rows_repeating(lanes.tolist(), self._env.n_lanes)

    def before_the_call(self, arrays: Named) -> Named:
        """The agent's inputs before it could change them: all but the flags are in the block."""
        before = {key: np.array(array) for key, array in arrays.items()}
        for active in self._active:
            rows = active.plan.arrays.rows
            lanes = np.flatnonzero(active.strides)
            slots, steps = np.divmod(active.rows[lanes], rows[REWARD].shape[1])
            for key in before.keys() & rows.keys():
                before[key][lanes] = rows[key][slots, steps]
        return before


def _row(arrays: Named, number: int) -> dict[str, NDArray]:
    return {key: np.array(array[number]) for key, array in arrays.items()}
