"""Drawing of samples, n-step returns and sequences, uniformly and by priority."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import NotEnoughDataError, Pool, SpecError, TemporalDictTensor
from rlpool.pool.priorities import PriorityTree

BOOL = torch.bool


def episodes(lengths: list[int], first: int = 0) -> TemporalDictTensor:
    """Return episodes, each with a termination, that are not continuations of each other.

    Step t of episode e has ``number`` 100 * e + t, frame [number] * 3, reward number + 1.
    """
    n, longest = len(lengths), max(lengths)
    number = 100 * (first + torch.arange(n))[:, None] + torch.arange(longest)
    frame = number[..., None].expand(n, longest, 3).float()
    is_last = torch.arange(longest) == torch.tensor(lengths)[:, None] - 1
    tensors = {"number": number, "frame": frame, "_frame": frame + 1, "_reward": number + 1.0}
    tensors |= {"_done": is_last, "_terminated": is_last}
    return TemporalDictTensor(tensors, torch.tensor(lengths))


def pool_of(trajectories: TemporalDictTensor, pool_size: int = 1000, **options: Any) -> Pool:
    pool = Pool(pool_size=pool_size, **{"seed": 0, **options})
    pool.extend(trajectories)
    return pool


def test_the_same_seed_gives_the_same_samples_without_using_the_callers_generators() -> None:
    def draw(seed: int) -> list[Any]:
        pool = Pool(processes=3, pool_size=100, priority_exponent=0.7, seed=seed)
        for first in range(6):
            pool.extend(episodes([5], first=first))
        pool.update_priorities(pool.sample(8)["index"], np.ones(8))
        batches = [pool.sample(8), pool.sample(8, n_step=3), pool.sample_sequences(8, 3)]
        return [pool.lengths, *(batch["number"].tolist() for batch in batches)]

    def states() -> list[str]:
        return list(map(repr, (random.getstate(), np.random.get_state(), torch.get_rng_state())))  # noqa: NPY002

    before = states()
    assert draw(7) == draw(7) != draw(8)
    assert states() == before


def test_batches_form_one_stream_of_samples_and_unseeded_pools_differ() -> None:
    first, second, other = (pool_of(episodes([20]), seed=seed) for seed in (0, 0, None))
    stream = first.batches(4, n_step=2)
    for _ in range(3):
        assert torch.equal(next(stream)["number"], second.sample(4, n_step=2)["number"])
    first.clear()
    with pytest.raises(NotEnoughDataError):  # drawn on demand
        next(stream)
    assert [batch.n_elems() for batch in second.batches(5, 3)] == [5, 5, 5]
    assert not torch.equal(other.sample(20)["number"], pool_of(episodes([20])).sample(20)["number"])


# Ends of episodes (the property test always has every flag) -------------------------------------


@pytest.mark.parametrize(
    "flags", [["_terminated", "_done"], ["_done", "_truncated"], ["_truncated", "_terminated"]]
)
def test_a_time_limit_is_not_a_termination_with_any_stored_flags(flags: list[str]) -> None:
    number = torch.arange(6).reshape(2, 3)
    is_last, is_cut = number % 3 == 2, number < 3
    ends = {"_done": is_last, "_truncated": is_last & is_cut, "_terminated": is_last & ~is_cut}
    steps = {"number": number, "_reward": torch.ones(2, 3), **{key: ends[key] for key in flags}}
    for n_stored in range(3):
        keys = ["number", "_reward", *flags[:n_stored]]
        pool, other = pool_of(TemporalDictTensor(steps), keys=keys), Pool(pool_size=1000)
        other.load_state_dict(pool.state_dict())
        for each in (pool, other):
            batch = each.sample(6, n_step=3, discount=0.5)
            right = torch.where(batch["number"] < 3, 0.5 ** (3 - batch["number"]), 0.0)
            assert torch.equal(batch["n_step_discount"], right)


def test_an_end_without_other_flags_is_a_termination() -> None:
    steps = {"_reward": torch.ones(1, 3), "_done": torch.arange(3)[None] == 2}
    batch = pool_of(TemporalDictTensor(steps)).sample(3, n_step=5)
    assert not batch["n_step_discount"].any()


AT_2 = (torch.arange(6) == 2)[None]


def two_episodes(flags: list[str]) -> TemporalDictTensor:
    """Return a row with three steps of each of two episodes; the first flag marks their ends.

    The second one starts in the final state of the first, so values do not reveal the boundary.
    """
    number = torch.arange(6)[None]
    starts = {"initial_state": AT_2.roll(1)}
    ends = {key: starts.get(key, AT_2 if key == flags[0] else AT_2 & False) for key in flags}
    steps = {"number": number, "_number": number + 1, "_reward": torch.ones(1, 6), **ends}
    return TemporalDictTensor(steps)


@pytest.mark.parametrize(
    "flags", [["_done"], ["initial_state"], ["_terminated", "_truncated"], ["_truncated", "_done"]]
)
def test_flags_of_ends_delimit_sequences_even_if_not_stored(
    flags: list[str],
) -> None:
    pool = pool_of(two_episodes(flags), keys=["number", "_number"])
    batch = pool.sample_sequences(6, 6)
    first = batch["number"][:, 0]
    assert torch.equal(batch.lengths, torch.where(first <= 2, 3 - first, 6 - first))


def refuses(pool: Any, key: str) -> bool:
    """Whether a pool refuses look-ahead, but not single steps, and names the key to add."""
    pool.sample(4)
    pool.sample_sequences(4, 1)
    looks = [lambda: pool.sample_sequences(4, 2)]
    looks += [lambda: pool.sample(4, n_step=2)] if "_terminated" in pool.specs else []
    for look in looks:
        with pytest.raises(SpecError, match=f"trajectories that have {key!r}"):
            look()
    return True


@pytest.mark.parametrize(
    ("flags", "key"), [([], "_done"), (["_terminated"], "_truncated"), (["_truncated"], "_done")]
)
def test_look_ahead_is_refused_where_ends_of_episodes_are_unknown(
    flags: list[str], key: str
) -> None:
    pool = pool_of(unknown := two_episodes(flags))
    known = TemporalDictTensor({**unknown._steps, "_terminated": AT_2, "_truncated": AT_2 & False})
    pool.extend(known)  # some steps with every flag are not enough
    assert refuses(pool, key)
    other = Pool(pool_size=1000)
    other.load_state_dict(pool.state_dict())
    for each in (pool, other):
        assert refuses(each, key)
        each.clear()
        each.extend(known)
        assert each.sample_sequences(6, 6).lengths.max() <= 3


def test_returns_cut_short_at_the_ends_of_rows_are_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = pool_of(two_episodes(["_done"]))  # a row of six steps that ends within an episode
    pool.sample(4, n_step=6)
    assert not caplog.messages
    for _ in range(2):
        pool.sample(4, n_step=7)
    (message,) = caplog.messages
    assert "n_step is 7" in message


def test_discontinuous_steps_end_a_segment_of_any_size() -> None:
    for width, place in ((1, 0), (2, 0), (3, 2), (4, 3)):
        number = torch.arange(6.0)[None, :, None].expand(1, 6, width)
        after = number + 1
        after[0, 2, place] += 1
        steps = {"frame": number, "_frame": after, "_reward": torch.ones(1, 6)}
        steps |= {
            "_done": AT_2 & False,
            "reward": torch.rand(1, 6),
        }  # rewards need not be continuous
        batch = pool_of(TemporalDictTensor(steps)).sample(6, n_step=9, discount=1.0)
        first = batch["frame"][:, 0]
        assert torch.equal(batch["n_step_return"], torch.where(first < 3, 3 - first, 6 - first))


def window(start: int, first_step: int, episode: int = 0) -> TemporalDictTensor:
    """Return two steps of a lane with numbers from ``start``."""
    number = torch.arange(start, start + 2)[None]
    place = {"batcher": 0, "lane": 0, "episode": episode, "first_step": first_step}
    return TemporalDictTensor(
        {"number": number, "_number": number + 1, "_done": number < 0},
        info={key: torch.tensor([value]) for key, value in place.items()},
    )


def test_windows_are_joined_only_where_position_and_values_continue() -> None:
    for second, longest in [
        (window(2, first_step=2), 4),
        (window(2, first_step=3), 2),
        (window(3, first_step=2), 2),
        (window(2, first_step=2, episode=1), 2),
        (window(1, first_step=2).temporal_slice(1, 2), 2),  # it is step 3
    ]:
        pool = pool_of(window(0, first_step=0))
        pool.extend(second)
        sequences = [pool.sample_sequences(3, 9) for _ in range(20)]
        assert max(int(each.lengths.max()) for each in sequences) == longest


# Priorities -------------------------------------------------------------------------------------


def prioritised(n: int) -> Pool:
    """Return a pool of n transitions with ``number`` from 0."""
    pool = Pool(pool_size=n, priority_exponent=1.0, seed=0)
    add(pool, 0, n)
    return pool


def add(pool: Pool, start: int, stop: int) -> None:
    pool.extend(TemporalDictTensor({"number": torch.arange(start, stop)[None]}))


def index_of_all(pool: Pool) -> np.ndarray[Any, Any]:
    """Return the indices of the transitions, ordered by number."""
    known: dict[int, int] = {}
    while len(known) < len(pool):
        batch = pool.sample(len(pool))
        known.update(zip(batch["number"].tolist(), batch["index"].tolist(), strict=True))
    return np.array([known[number] for number in sorted(known)])


def counts(pool: Pool, n_batches: int, batch_size: int, size: int) -> Any:
    """Count how often each number was drawn."""
    drawn = [pool.sample(batch_size)["number"] for _ in range(n_batches)]
    return np.bincount(torch.cat(drawn).numpy(), minlength=size)


@pytest.mark.parametrize("alpha", [None, 0.0, 0.5])
def test_transitions_are_drawn_in_proportion_to_priority_to_the_power_of_alpha(
    alpha: float | None,
) -> None:
    pool = Pool(processes=3, pool_size=12, priority_exponent=alpha, seed=1)
    for start in range(-6, 12, 2):  # wraps around
        pool.extend(TemporalDictTensor({"number": torch.arange(start, start + 2)[None]}), start % 3)
    priorities = np.arange(1.0, 13.0)
    if alpha is not None:
        pool.update_priorities(index_of_all(pool), priorities)
    n = 24_000
    expected = priorities ** (alpha or 0.0) / (priorities ** (alpha or 0.0)).sum() * n
    observed = counts(pool, n // 12, 12, 12)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 31.3  # 11 degrees of freedom: the probability of more is 0.001


def test_transitions_without_priority_are_never_drawn() -> None:
    pool = prioritised(50)
    priorities = np.zeros(50)
    priorities[[7, 31]] = 1e-12
    pool.update_priorities(index_of_all(pool), priorities)
    assert set(counts(pool, 100, 50, 50).nonzero()[0].tolist()) == {7, 31}


def test_prioritised_batches_are_in_random_order() -> None:
    pool = prioritised(8)
    orders = {tuple(pool.sample(8)["number"].tolist()) for _ in range(9)}
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(8))}
    assert len(orders) > 1


def test_prioritised_draws_are_stratified() -> None:
    pool = prioritised(8)
    for _ in range(5):
        assert sorted(pool.sample(8)["number"].tolist()) == list(range(8))
    first, second = index_of_all(pool)[:2]
    pool.update_priorities([first, second, first], [5.0, 3.0, 0.0])  # the last one counts
    assert set(counts(pool, 20, 8, 8).nonzero()[0].tolist()) == {1, 2, 3, 4, 5, 6, 7}


def test_importance_weights_correct_for_priorities() -> None:
    pool = prioritised(3)
    pool.update_priorities(index_of_all(pool), [1.0, 4.0, 16.0])
    batch, sequences = pool.sample(3, beta=0.5), pool.sample_sequences(3, 1, beta=0.5)
    for number, weight in (
        (batch["number"], batch["weight"]),
        (sequences["number"][:, 0], sequences.info["weight"]),
    ):
        expected = 0.5**number
        assert torch.allclose(weight, expected / expected.max())


@pytest.mark.parametrize("capacity", [1, 65, 2**14 + 1, 2_000_000])
def test_the_tree_finds_any_row_and_its_sums_do_not_drift(capacity: int) -> None:
    tree = PriorityTree(capacity)
    generator = np.random.default_rng(0)
    for _ in range(50):
        rows = generator.integers(capacity, size=64)
        tree.set(rows, generator.random(64) * 10.0 ** generator.integers(-8, 8))
    assert tree.total == pytest.approx(tree.leaves.sum(), rel=1e-12)
    tree.set(slice(0, capacity), 0.0)
    assert tree.total == 0.0
    rows = np.unique(generator.integers(capacity, size=20))
    tree.set(rows, np.full(len(rows), 0.5))
    assert tree.draw(len(rows), generator).tolist() == rows.tolist()


def test_priorities_may_be_tensors_arrays_or_lists() -> None:
    pool = prioritised(4)
    index = index_of_all(pool)
    losses = torch.tensor([1.0, 0.0, 0.0, 0.0], requires_grad=True)
    pool.update_priorities(torch.from_numpy(index), losses)
    assert pool.sample(4)["number"].tolist() == [0] * 4
    pool.update_priorities(torch.from_numpy(index), losses.flip(0).bfloat16())
    assert pool.sample(4)["number"].tolist() == [3] * 4
