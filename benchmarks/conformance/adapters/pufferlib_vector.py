"""PufferLib: vector environments over emulated ones, with the loop of its `clean_pufferl.py`."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
import pufferlib.vector
from pufferlib.emulation import GymnasiumPufferEnv

from benchmarks.conformance import interface
from benchmarks.conformance.interface import Job, Stepping

LACKS = interface.NO_EPISODES | interface.NO_EVALUATION | interface.NO_TARGETS
LACKS |= {"options": "`reset` takes no options"}
LACKS |= {"frame_stack": "stacks no frames, leaves that to wrappers"}


class Serial(Stepping):
    package = "pufferlib"
    lacks: ClassVar[dict[str, str]] = LACKS | interface.IN_CALLER

    def open(self, job: Job) -> None:
        make_env = partial(GymnasiumPufferEnv, env_creator=job.make_env)
        self.envs = pufferlib.vector.make(make_env, num_envs=job.n_envs, **self.backend())
        seed = {} if job.seed is None else {"seed": job.seed}
        self.observation = self.envs.reset(**seed)[0].copy()

    def backend(self) -> dict[str, Any]:
        return {"backend": pufferlib.vector.Serial}

    def step(self, action: np.ndarray) -> tuple:
        self.envs.send(action)
        after, reward, terminated, truncated, infos, _, mask = self.envs.recv()
        after = after.copy()  # the next step writes there
        rows = zip(reward, terminated, truncated, after, strict=True)
        found = [(*row, dict(enumerate(infos)).get(i)) for i, row in enumerate(rows)]
        return after, [row if valid else None for row, valid in zip(found, mask, strict=True)]


class Multiprocessing(Serial):
    lacks: ClassVar[dict[str, str]] = LACKS

    def backend(self) -> dict[str, Any]:
        workers = {"num_workers": self.job.n_workers, "overwork": True}
        return {"backend": pufferlib.vector.Multiprocessing, **workers}
