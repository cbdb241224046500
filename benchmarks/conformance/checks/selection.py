"""Selection: which episodes are returned, and does that depend on their properties?"""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks.conformance import data, expect
from benchmarks.conformance.checks import Library, check
from benchmarks.conformance.envs import LENGTH, LONG, SHORT, TAG, is_slow
from benchmarks.conformance.interface import Steps

MANY, MIXED = {"n_envs": 8}, (SHORT, SHORT, SHORT, LONG)


def requests(library: Library, n: int, times: int, **arguments: object) -> list[list[Steps]]:
    """Return the results of several requests of ``n`` episodes each to one collector."""
    with library.open(**arguments) as collector:
        return [collector.episodes(n) for _ in range(times)]


@check("selection", "thu-ml/tianshou#555", "episodes")
def as_many_episodes_as_requested(library: Library) -> None:
    """A request for N episodes returns N, even if N is not a multiple of the environments."""
    for n in (3, 5, 9):
        expect.equal("number of episodes", len(requests(library, n, 1)[0]), n)


@check("selection", "DLR-RM/stable-baselines3#402", "episodes")
def episodes_are_complete(library: Library) -> None:
    """Each episode has all its steps, from reset to end, and is returned once.

    This holds across three requests to the same collector.
    """
    episodes = list(itertools.chain(*requests(library, 5, 3, lengths=(2, 7, 4))))
    tags = {int(data.numbers(episode.observation)[0, TAG]) for episode in episodes}
    expect.equal("number of different episodes", len(tags), len(episodes))
    for episode in episodes:
        length = data.numbers(episode.observation)[0, LENGTH]
        expect.equal("steps", data.steps(episode.observation), np.arange(length))
        expect.holds("an end", (episode.terminated | episode.truncated)[-1])


@check("selection", "astooke/rlpyt#93", "episodes")
def short_episodes_are_not_favoured(library: Library) -> None:
    """Requests with one episode per environment contain the true share of long episodes.

    A quarter of them are long. Taking the first to end favours short ones, which are failures in
    one task and successes in another.
    """
    found = itertools.chain(*requests(library, 8, 10, job=MANY, lengths=MIXED))
    long = np.mean([len(episode) == LONG for episode in found])
    expect.holds(f"about 25 % of long episodes, at least 10 %, not {long:.0%} of 80", long >= 0.1)


@check("selection", "HumanCompatibleAI/imitation#183", "episodes")
def slow_episodes_are_not_dropped(library: Library) -> None:
    """Episodes with slow steps, a quarter of all, are returned as often as they start."""
    found = itertools.chain(*requests(library, 8, 10, job=MANY, lengths=(5,), slow_s=0.01))
    slow = np.mean([is_slow(data.numbers(episode.observation)[0, TAG]) for episode in found])
    expect.holds(f"about 25 % of slow episodes, at least 10 %, not {slow:.0%} of 80", slow >= 0.1)


@check("selection", "robocasa/robocasa-gr1-tabletop-tasks#27", "episodes", "seed")
def order_does_not_depend_on_speed(library: Library) -> None:
    """The same episodes are returned in the same order, whether some are slow or not.

    In order of completion, successes come first, and rows no longer match their tasks.
    """
    orders = []
    for slow_s in (0.0, 0.1):
        (episodes,) = requests(library, 12, 1, lengths=(2, 6), slow_s=slow_s)
        orders.append([data.numbers(episode.observation)[0, TAG] for episode in episodes])
    expect.equal("tags of episodes, in order, with slow ones", orders[1], orders[0])


@check("selection", "entity-neural-network/incubator#95", "evaluate")
def evaluation_counts_whole_episodes(library: Library) -> None:
    """Returns are sums over whole episodes, in the first evaluation and in later ones."""
    with library.open(lengths=(7,)) as collector:
        for n in (3, 5, 8):
            returns = collector.evaluate(n)
            expect.equal("mean return", np.mean(returns), 28)  # 1 + 2 + ... + 7
            expect.holds(f"{n} returns or one mean, not {len(returns)}", len(returns) in (1, n))


@check("selection", "NVIDIA/Isaac-GR00T#260", "evaluate")
def evaluation_does_not_depend_on_the_number_of_environments(library: Library) -> None:
    """One environment and sixteen give the same score, up to chance.

    Comparisons of scores between papers assume this.
    """
    scores: dict[int, list[float]] = {1: [], 16: []}
    for n_envs, seed in itertools.product(scores, range(4)):
        job = {"n_envs": n_envs, "n_workers": 1, "seed": seed}
        with library.open(job=job, lengths=MIXED) as collector:
            scores[n_envs].append(float(np.mean(collector.evaluate(16))))
    one, many = map(np.mean, scores.values())
    text = f"scores near 207, the mean of all episodes, not {one:.0f} and {many:.0f}"
    expect.holds(text, max(abs(one - 207), abs(many - 207)) < 133)  # three standard deviations


@check("selection", "NetHack-LE/nle#131", "evaluate")
def environments_that_ignore_seeds_are_evaluated(library: Library) -> None:
    """An environment whose `reset` ignores its seed can be evaluated like any other."""
    with library.open(global_random=True, lengths=(7,)) as collector:
        expect.equal("mean return", np.mean(collector.evaluate(5)), 28)
