"""What a rollout knows about an episode that fails, for its crash capsule.

The actions of a lane's current slot are in the block anyway. What has left it, the earlier chunks
of a long episode, is on the lane's tape. So a step costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlpool.envs.vec_env import FLAGS, VecEnv
from rlpool.errors import Where
from rlpool.memory.storage import Array
from rlpool.record.crash_capsule import CrashCapsule
from rlpool.record.failures import attempted
from rlpool.record.tape import MOST_BYTES, REWARD, Tape, is_action

Named = Mapping[str, Array]


class CrashScene:
    """Makes the capsules of one rollout.

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
        self._actions = {key: array for key, array in rows.items() if is_action(key)}

    def leave_slot(self, tape: Tape, lane: int, slot: int, start: int) -> None:
        """Record a full slot that a lane is about to leave, its own from row ``start`` on."""
        rewards = self._rows[REWARD]
        chunk = {key: array[slot, start:].copy() for key, array in self._actions.items()}
        # Each row has the reward of the step before.
        chunk[REWARD] = np.empty(rewards.shape[1] - start, rewards.dtype)
        chunk[REWARD][:-1] = rewards[slot, start + 1 :]
        chunk[REWARD][-1] = self._env.current[REWARD][lane]
        tape.add(chunk, self._most_bytes)

    @attempted
    def first(self, call: str, where: Where, agent_info: Named, *, has_begun: bool) -> CrashCapsule:
        """The capsule of a failure in the reset, or the call, that tells what a step consists of.

        Args:
            call: What failed.
            where: Where it did.
            agent_info: ``[n_lanes, ...]``, empty if there is none.
            has_begun: Whether the environments were reset.
        """
        tape, lane = Tape(where.seed or 0, where.env_info), where.lane or 0
        if not has_begun:
            return self._capsule(tape, call, where, _row(agent_info, lane))
        tape.observation = _row(self._env.current, lane)
        batch = _batch(observation=self._env.current, agent_info=agent_info)
        return self._capsule(tape, call, where, _row(agent_info, lane), batch=batch)

    @attempted
    def running(
        self,
        call: str,
        where: Where,
        tape: Tape,
        at: tuple[int, int, int],
        agent_info: Named,
        shown_info: Named,
    ) -> CrashCapsule:
        """The capsule of a failure in an episode that was running, or about to begin.

        Args:
            call: What failed.
            where: Where it did.
            tape: What the episode did in slots that it has left; becomes that of all of it.
            at: Its slot, the first row there that is its own, and the row of the failure.
            agent_info: ``[n, ...]`` by episode.
            shown_info: ``[n_lanes, ...]``: the ``agent_info`` that the agent is shown.
        """
        slot, start, stop = at
        failing, batch = None, {}
        done = {key: array[slot, start:stop] for key, array in self._actions.items()}
        tape.add({**done, REWARD: self._rows[REWARD][slot, start + 1 : stop + 1]})
        if call == "initial_state":
            tape.observation = _row(self._env.current, where.lane or 0)
            batch = _batch(agent_info=shown_info)
        elif call != "reset":
            shown = {key: self._rows[key][slot] for key in self._shown if key in self._rows}
            # While an episode runs, no other flag is True.
            flags = {key: np.array(False) for key in FLAGS}
            flags["initial_state"] = np.array(tape.n_steps == 0)
            tape.observation = {**_row(shown, stop), **flags}
        if call == "step":
            failing = {k: np.array(a[slot, stop : stop + 1]) for k, a in self._actions.items()}
        elif call == "agent":
            observation, state = map(self._before_the_call, (self._shown, self._state))
            batch = _batch(observation=observation, agent_info=shown_info, state=state)
        info = _row(agent_info, where.episode or 0)
        return self._capsule(tape, call, where, info, failing, batch)

    @attempted
    def repeating(self, call: str, where: Where, tape: Tape, agent_info: Named) -> CrashCapsule:
        """The capsule of a failure in an episode that is repeated, at ``where.step``.

        Args:
            call: What failed.
            where: Where it did.
            tape: What is repeated.
            agent_info: ``[n, ...]`` by episode.
        """
        n_steps, failing = where.step or 0, None
        if call == "step":
            tape, failing = tape.head(n_steps + 1).without_last()
        else:
            tape = tape.head(n_steps)
        return self._capsule(tape, call, where, _row(agent_info, where.episode or 0), failing)

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
        found = dict(arrays)
        for key in arrays.keys() & self._rows.keys():
            slots, steps = np.divmod(self._numbers, self._rows[key].shape[1])
            found[key] = self._rows[key][slots, steps]
        return found


def _row(arrays: Named, number: int) -> dict[str, Array]:
    return {key: np.array(array[number]) for key, array in arrays.items()}


def _batch(**groups: Named) -> dict[str, Array]:
    return {
        f"{group}/{key}": np.array(array)
        for group, arrays in groups.items()
        for key, array in arrays.items()
    }
