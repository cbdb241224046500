"""EnvPool: its synchronous Gymnasium interface, with its autoreset steps."""

from __future__ import annotations

from typing import ClassVar

import envpool
import numpy as np

from benchmarks.conformance.interface import NO_EPISODES, NO_EVALUATION, Job, Stepping

PAGE = "(https://envpool.readthedocs.io/en/latest/content/python_interface.html)"


class EnvPool(Stepping):
    package = "envpool"
    lacks: ClassVar[dict[str, str]] = (
        NO_EPISODES
        | NO_EVALUATION
        | {
            "environments": "runs its own environments, which are written in C++",
            "workers": "steps environments in threads of the caller's process",
        }
    )
    intended: ClassVar[dict[str, str]] = {
        "neighbouring_seeds_share_nothing": "“the i-th environment seed will be set with i+seed” "
        f"{PAGE}",
        "unseeded_runs_differ": f"“The default is `42`” {PAGE}",
    }

    def open(self, job: Job) -> None:
        more = job.env_args if job.seed is None else {**job.env_args, "seed": job.seed}
        more = {"num_envs": job.n_envs, "num_threads": job.n_workers, **more}
        self.envs = envpool.make_gymnasium(job.env_id, **more)
        self.observation, _ = self.envs.reset()
        self.starts = np.zeros(job.n_envs, bool)

    def step(self, action: np.ndarray) -> tuple:
        after, *rest, infos = self.envs.step(action)
        info = [{"elapsed_step": each} for each in infos["elapsed_step"]]
        rows = zip(*rest, after, info, strict=True)
        found = [None if starts else row for starts, row in zip(self.starts, rows, strict=True)]
        self.starts = rest[1] | rest[2]
        return after, found
