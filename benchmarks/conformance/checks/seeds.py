"""Seeds: do episodes differ and repeat where they should?"""

from __future__ import annotations

import random
import sys

import numpy as np

from benchmarks.conformance import data, expect
from benchmarks.conformance.checks import Library, check

NUMPY_STATE = np.random.get_state
CARTPOLE = (data.leaning, "CartPole-v1")


def observed(library: Library, **job: object) -> list[np.ndarray]:
    """Return all observations of CartPole, one array per environment or episode."""
    streams = data.collected(library, *CARTPOLE, job=job, max_episode_steps=8)
    return [np.asarray(stream.observation, np.float32) for stream in streams]


def begins(library: Library, **job: object) -> list[list[bytes]]:
    """Return each environment's first observations of episodes."""
    with library.open(*CARTPOLE, job=job, max_episode_steps=4) as collector:
        pieces = [data.cut(stream) for stream in collector.window(2 * data.PART)]
    return [[np.float32(piece.observation[0]).tobytes() for piece in each] for each in pieces]


def is_same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(np.array_equal(*pair) for pair in pairs)


@check("seeds", "Farama-Foundation/Gymnasium#1468", "window", "seed", standard_env=True)
def episodes_differ(library: Library) -> None:
    """With a seed, an environment's episodes start differently.

    Passing the same seed to every reset repeats one episode forever.
    """
    for shown in begins(library):
        expect.equal("number of different episodes", len(set(shown)), len(shown))


@check("seeds", "hill-a/stable-baselines#79", "window", "seed", standard_env=True)
def environments_differ(library: Library) -> None:
    """With one seed, no two environments run the same episode, in one process or two."""
    shown = [each for episodes in begins(library) for each in episodes]
    expect.equal("number of different episodes", len(set(shown)), len(shown))


@check("seeds", "ray-project/ray#18245", "seed", standard_env=True)
def same_seed_same_data(library: Library) -> None:
    """Two collectors with the same seed return the same observations, bit for bit.

    This includes seed 0, which `if seed:` mistakes for no seed.
    """
    for seed in (3, 0):
        first, second = (observed(library, seed=seed) for _ in range(2))
        expect.holds(f"the same data with seed {seed}", is_same(first, second))


@check("seeds", "HazyResearch/flash-fft-conv#26", standard_env=True)
def unseeded_runs_differ(library: Library) -> None:
    """Without a seed, two runs differ. Otherwise ten runs are one run repeated ten times."""
    expect.holds("other data", not is_same(*(observed(library, seed=None) for _ in range(2))))


@check("seeds", "minerllabs/minerl#244", "seed", "worker_count", standard_env=True)
def number_of_workers_does_not_matter(library: Library) -> None:
    """One, two and four workers with four environments in total return the same data.

    Otherwise results cannot be reproduced on a machine with a different number of cores.
    """
    one = observed(library, n_workers=1)
    for n_workers in (2, 4):
        more = observed(library, n_workers=n_workers)
        expect.holds(f"the data of one process from {n_workers}", is_same(one, more))


@check("seeds", "kermitt2/delft#41", standard_env=True)
def global_generators_are_left_alone(library: Library) -> None:
    """Collecting neither seeds nor uses the caller's global generators.

    Otherwise the user's own draws depend on the number of collected steps.
    """
    torch = sys.modules.get("torch")

    def states() -> dict[str, str]:
        _, key, position, *_ = NUMPY_STATE()
        draws = {"random": str(random.getstate()), "NumPy": f"{position} {key.tolist()}"}
        return draws | ({"torch": str(torch.get_rng_state().tolist())} if torch else {})

    before = states()
    observed(library, seed=17)  # unlike the other checks, whose seeding would have the same result
    now = states()
    expect.equal("generators that were changed", [n for n in before if before[n] != now[n]], [])


@check("seeds", "DLR-RM/stable-baselines3#2268", "window", "seed", standard_env=True)
def neighbouring_seeds_share_nothing(library: Library) -> None:
    """Runs with seeds 42 and 43 do not share episodes.

    With seed + i for environment i they share most of them and are not independent.
    """
    first, second = (
        {each for episodes in begins(library, seed=seed) for each in episodes} for seed in (42, 43)
    )
    expect.equal("number of common episodes", len(first & second), 0)
