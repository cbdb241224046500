"""Crash capsules of environments in processes, for those who drive them by hand.

What was asked of a lane since its last reset is in the caller's log; that is all there is: no
agent, no ``agent_info``, and rewards are not remembered. A rollout over the environments knows
more, and puts a capsule of its own in place of this one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlpool.envs.columns import converted
from rlpool.errors import EnvError, Where
from rlpool.manager.env_messages import Call
from rlpool.manager.episode_log import EpisodeLog, Reached, RemoteStep
from rlpool.memory.storage import Array
from rlpool.record.crash_capsule import CrashCapsule
from rlpool.record.crash_files import CrashDir, CrashFiles
from rlpool.record.failures import Scene, described
from rlpool.specs import Structure, TensorSpec, flattener

_LOG = logging.getLogger("rlpool")


class LaneCapsules:
    """Puts capsules together, and files if they are wanted.

    Args:
        n_lanes: Number of lanes.
        log: What lanes were asked for, ``None`` if nobody keeps it: then there are no capsules.
        crash_dir: Where files are written, ``None`` for nowhere.
    """

    def __init__(self, n_lanes: int, log: EpisodeLog | None, crash_dir: CrashDir) -> None:
        self._n_lanes = n_lanes
        self._log = log
        self._files = CrashFiles(crash_dir)
        self._reached: dict[int, dict[int, Reached | None]] = {}  # of workers that failed
        self._noted: dict[int, tuple[CrashCapsule | None, str]] = {}  # what remotes will be told of
        self._structure: Structure | None = None
        self._specs: Mapping[str, TensorSpec] = {}

    def bind(self, structure: Structure | None, specs: Mapping[str, TensorSpec] | None) -> None:
        """Tell how actions fall into keys, and in which dtypes environments take them."""
        self._structure, self._specs = structure, specs or {}

    def remember(self, worker: int, lanes: Sequence[int]) -> None:
        """Remember what lanes of a worker did one of which has failed, before it is forgotten."""
        if self._log is not None:
            self._reached[worker] = {lane: self._log.reached(lane) for lane in lanes}

    def of_order(self, error: EnvError, call: str, where: Where) -> EnvError:
        """An error with its capsule: that of a step or a reset of several lanes.

        Args:
            error: What happened.
            call: ``"reset"`` or ``"step"``.
            where: Where, with the seed and the options of the lane's last reset.
        """
        reached = self._reached.pop(where.worker or 0, {}).get(where.lane or 0)
        return self._with_capsule(error, call, where, reached, [])

    def of_remote(self, error: EnvError, call: Call) -> EnvError:
        """An error with its capsule: that of a remote's request, before the log loses the lane.

        Args:
            error: What happened, and where.
            call: What was asked for.
        """
        where = error.where
        if self._log is None or call.command not in ("reset", "step"):
            return error
        reached, more = self._log.reached(where.lane or 0), [RemoteStep(call.data)]
        if call.command == "reset":
            reached, more = Reached(where.seed or 0, where.env_info), []
        if reached is None:
            return error
        where = where._replace(step=reached.n_steps)
        return self._with_capsule(error, call.command, where, reached, more)

    def note(self, lane: int, error: EnvError, hint: str) -> None:
        """Take note of what a lane's remote will be told of, and what to do with its file."""
        self._noted[lane] = error.capsule, hint

    def forget_noted(self, lane: int) -> None:
        """Take note that a lane's remote will be told of something else."""
        self._noted.pop(lane, None)

    def noted(self, lane: int) -> tuple[CrashCapsule | None, str]:
        """What was noted of a remote's last error; ``None`` and nothing if nothing was."""
        return self._noted.get(lane, (None, ""))

    def _with_capsule(
        self,
        error: EnvError,
        call: str,
        where: Where,
        reached: Reached | None,
        more: Sequence[RemoteStep],
    ) -> EnvError:
        if reached is None or reached.why_lost:
            return error
        try:
            capsule = self._capsule(error, call, where, [*reached.steps, *more])
        except Exception as failure:
            # It must not hide the failure itself.
            _LOG.warning("a failure has no crash capsule: %s", described(failure))
            return error
        placed = type(error)(
            error.what,
            where=where,
            fix=error.fix,
            traceback_text=error.traceback_text,
            capsule=capsule,
        )
        return self._files.with_file(placed)

    def _capsule(
        self, error: EnvError, call: str, where: Where, steps: Sequence[Any]
    ) -> CrashCapsule:
        parts = [
            self._flat(part.action) if isinstance(part, RemoteStep) else part for part in steps
        ]
        keys = list(parts[0]) if parts else []
        actions = {key: np.concatenate([part[key] for part in parts]) for key in keys}
        n_actions = len(actions[keys[0]]) if keys else 0
        scene = Scene(
            n_lanes=self._n_lanes,
            env_type="ParallelEnvManager",
            actions=actions,
            rewards=np.full(max(0, n_actions - (call == "step")), np.nan, np.float32),
        )
        return scene.capsule(call, error.what, where, error.traceback_text)

    def _flat(self, action: Any) -> dict[str, Array]:
        """One action as an environment takes it, by key, ``[1, ...]``."""
        if self._structure is None:
            return {"action": np.array(action)[None]}
        values = flattener(self._structure, "action")(action)
        return {
            key: np.array(converted(value, spec, key))[None]
            for (key, spec), value in zip(self._specs.items(), values, strict=True)
        }
