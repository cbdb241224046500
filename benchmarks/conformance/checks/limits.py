"""Limits: does it work in a container or a daemon? Each check runs in its own process."""

from __future__ import annotations

import multiprocessing
import resource
from signal import SIGKILL

from benchmarks.conformance import expect
from benchmarks.conformance.checks import Library, check
from benchmarks.conformance.checks.faults import attempt, collect_forever
from benchmarks.conformance.interface import Collector

FRAMES = {"dtype": "uint8", "shape": (84, 84, 4), "lengths": (50,)}


@check("limits", "ray-project/ray#14616", shm_mb=64)
def small_shared_memory(library: Library) -> None:
    """64 MB of /dev/shm, as in a container, are enough for 8 environments with stacked frames.

    Windows of 128 steps hold 29 MB of observations, as in ordinary PPO on images. A full /dev/shm
    causes a bus error, which cannot be caught.
    """
    with library.open(job={"n_envs": 8}, **FRAMES) as collector:
        if library.has("window"):
            collector.window(128)
            steps = [len(stream) for stream in collector.window(128)]
        else:
            steps = [len(episode) for episode in collector.episodes(16)]
    expect.holds(f"steps, not {steps}", min(steps) > 0)


@check("limits", "DLR-RM/rl-baselines3-zoo#516", standard_env=True)
def few_descriptors(library: Library) -> None:
    """256 file descriptors, the default of some systems, are enough for 16 environments."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    attempt(library, job={"n_envs": 16, "n_workers": 4})


def attempt_there(adapter: type[Collector], folder: str) -> None:
    """Run in the daemonic process."""
    attempt(Library(adapter, folder, lambda: None))


@check("limits", "pytorch/rl#3198", standard_env=True)
def daemonic_caller(library: Library) -> None:
    """Collecting works in a daemonic process, such as one of a `multiprocessing.Pool`.

    Sweeps and schedulers start programs there.
    """
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(attempt_there, (library.adapter, library.folder))


@check("limits", "minerllabs/minerl#378")
def environment_starts_processes(library: Library) -> None:
    """Environments may use `multiprocessing` themselves, as wrappers of simulators do."""
    attempt(library, forks=True, lengths=(40,))


@check("limits", "facebookresearch/CompilerGym#326", "workers", signal=SIGKILL, leaves_no="sleep")
def processes_of_environments_end_with_the_caller(library: Library) -> None:
    """Simulators started by environments also end if the program is killed."""
    collect_forever(library.make(helper=True), library)
