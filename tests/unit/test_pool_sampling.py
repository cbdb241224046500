"""What samples, n-step returns and sequences consist of, and how they are drawn."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import NotEnoughDataError, Pool, SpecError, TemporalDictTensor

BOOL = torch.bool


def episodes(
    lengths: list[int], ends: str = "terminated", first: int = 0, **more: torch.Tensor
) -> TemporalDictTensor:
    """Episodes whose frames and rewards say which steps they are of.

    Step t of episode e has ``number`` 100 * e + t, frame [number] * 3, reward number + 1.

    Args:
        lengths: Steps of each.
        ends: ``"terminated"``, ``"truncated"`` or ``"cut"``: a piece without an end.
        first: Number of the first episode.
        **more: Further keys.
    """
    n, longest = len(lengths), max(lengths)
    number = 100 * (first + torch.arange(n))[:, None] + torch.arange(longest)
    is_last = torch.arange(longest) == torch.tensor(lengths)[:, None] - 1
    tensors = {
        "number": number,
        "frame": number[..., None].expand(n, longest, 3).float(),
        "_frame": number[..., None].expand(n, longest, 3).float() + 1,
        "_reward": number.float() + 1,
        "_done": is_last if ends != "cut" else torch.zeros(n, longest, dtype=BOOL),
        "_terminated": is_last if ends == "terminated" else torch.zeros(n, longest, dtype=BOOL),
        **more,
    }
    return TemporalDictTensor(tensors, torch.tensor(lengths))


def pool_of(trajectories: TemporalDictTensor, pool_size: int = 1000, **options: Any) -> Pool:
    pool = Pool(pool_size=pool_size, **{"seed": 0, **options})
    pool.extend(trajectories)
    return pool


# Samples -------------------------------------------------------------------------------------


def test_every_key_of_a_sampled_transition_is_of_the_same_step() -> None:
    pool = pool_of(episodes([5, 3, 7]))
    batch = pool.sample(15)
    number = batch["number"]
    assert set(batch.keys()) == set(episodes([1]).keys())
    assert torch.equal(batch["frame"], number[:, None].expand(15, 3).float())
    assert torch.equal(batch["_frame"], number[:, None].expand(15, 3).float() + 1)
    assert torch.equal(batch["_reward"], number.float() + 1)
    assert torch.equal(batch["_done"], torch.isin(number, torch.tensor([4, 102, 206])))


@pytest.mark.parametrize("processes", [1, 3])
def test_samples_are_uniform_over_what_is_held(processes: int) -> None:
    pool = Pool(processes=processes, pool_size=45, seed=2)
    for start in range(0, 60, 3):  # wraps round
        numbers = torch.arange(start, start + 3)[None]
        pool.extend(TemporalDictTensor({"number": numbers}), (start // 3 % 4) % processes)
    held = pool.transitions()["number"]
    n, size = 20_000, len(pool)
    drawn = torch.cat([pool.sample(size)["number"] for _ in range(n // size)])
    counts = np.array([(drawn == number).sum() for number in held])
    assert counts.sum() == len(drawn)
    expected = len(drawn) / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # Mean size - 1, variance twice that; four standard deviations.
    assert abs(chi_square - (size - 1)) < 4 * np.sqrt(2 * (size - 1))


def test_a_batch_may_hold_a_transition_twice() -> None:
    pool = pool_of(episodes([4]))
    assert any(len(set(pool.sample(4)["number"].tolist())) < 4 for _ in range(20))


def test_samples_are_copies() -> None:
    pool = pool_of(episodes([4]))
    before = pool.transitions()
    for _ in range(3):
        for tensor in (*pool.sample(4).values(), *pool.sample_sequences(4, 2).values()):
            tensor.zero_()
        for tensor in pool.transitions().values():
            tensor.zero_()
    for key, tensor in pool.transitions().items():
        assert torch.equal(tensor, before[key])


@pytest.mark.parametrize("alpha", [None, 0.7])
def test_the_same_seed_gives_the_same_samples(alpha: float | None) -> None:
    def draw(seed: int) -> list[Any]:
        pool = Pool(processes=2, pool_size=100, priority_exponent=alpha, seed=seed)
        for first in range(6):
            pool.extend(episodes([5], first=first))
        batches = [pool.sample(8), pool.sample(8, n_step=3), pool.sample_sequences(8, 3)]
        return [pool.lengths, *(batch["number"].tolist() for batch in batches)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_without_a_seed_pools_draw_differently() -> None:
    first, second = (pool_of(episodes([100]), seed=None) for _ in range(2))
    assert first.sample(50)["number"].tolist() != second.sample(50)["number"].tolist()


def test_the_callers_generators_are_untouched() -> None:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    pool = Pool(processes=3, pool_size=100, priority_exponent=0.5)
    for first in range(4):
        pool.extend(episodes([5], first=first))
    pool.update_priorities(pool.sample(8)["index"], np.ones(8))
    pool.sample(8, n_step=2)
    pool.sample_sequences(8, 2)
    after = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    assert before[0] == after[0]
    assert before[1][1].tolist() == after[1][1].tolist()  # type: ignore[index]
    assert torch.equal(before[2], after[2])


def step_of(number: int) -> tuple[Any, ...]:
    return np.full(3, number, np.float32), 0, np.full(3, number + 1, np.float32), 1.0, False


@pytest.mark.parametrize("call", ["sample", "sample_sequences"])
def test_more_than_there_is_cannot_be_drawn(call: str) -> None:
    def draw(pool: Pool, n: int) -> Any:
        return pool.sample(n) if call == "sample" else pool.sample_sequences(n, 2)

    with pytest.raises(NotEnoughDataError, match="1 transitions were asked for, but there are 0"):
        draw(Pool(pool_size=10), 1)
    pool = pool_of(episodes([4]))
    with pytest.raises(NotEnoughDataError, match="5 transitions were asked for, but there are 4"):
        draw(pool, 5)
    assert draw(pool, 4).n_elems() == 4
    pool.clear()
    with pytest.raises(NotEnoughDataError, match="there are 0"):
        draw(pool, 1)


@pytest.mark.parametrize("wrong", [0, -1, 1.0, "4", None, True])
def test_counts_that_are_none_are_named(wrong: Any) -> None:
    pool = pool_of(episodes([4]))
    state = pool._generator.bit_generator.state
    with pytest.raises(SpecError, match="batch_size"):
        pool.sample(wrong)
    with pytest.raises(SpecError, match="batch_size"):
        pool.sample_sequences(wrong, 2)
    with pytest.raises(SpecError, match="length"):
        pool.sample_sequences(2, wrong)
    if wrong is not None:
        with pytest.raises(SpecError, match="n_step"):
            pool.sample(2, n_step=wrong)
    assert pool._generator.bit_generator.state == state


@pytest.mark.parametrize("discount", [-0.1, 1.1, float("nan"), float("inf"), "0.9", None])
def test_a_discount_that_makes_no_sense_is_refused(discount: Any) -> None:
    with pytest.raises(SpecError, match="discount"):
        pool_of(episodes([4])).sample(2, n_step=2, discount=discount)


def test_batches_are_a_stream_of_samples() -> None:
    first, second = pool_of(episodes([20])), pool_of(episodes([20]))
    stream = first.batches(4, n_step=2)
    for _ in range(3):
        assert torch.equal(next(stream)["number"], second.sample(4, n_step=2)["number"])
    first.clear()
    with pytest.raises(NotEnoughDataError):  # drawn when it is asked for
        next(stream)
    assert [batch.n_elems() for batch in second.batches(5, 3)] == [5, 5, 5]


# n steps -------------------------------------------------------------------------------------


def slow_n_step(
    number: int, lengths: list[int], ends: str, n_step: int, discount: float
) -> tuple[float, float, int]:
    """Return, factor of the value after it, and number of the last of the steps."""
    episode, step = divmod(number, 100)
    total, factor = 0.0, 1.0
    for _ in range(n_step):
        total += factor * (100 * episode + step + 1)
        factor *= discount
        if step == lengths[episode] - 1:
            return total, 0.0 if ends == "terminated" else factor, 100 * episode + step
        step += 1
    return total, factor, 100 * episode + step - 1


@pytest.mark.parametrize("ends", ["terminated", "truncated", "cut"])
@pytest.mark.parametrize("n_step", [1, 2, 3, 50])
def test_n_step_returns_stop_at_the_end_of_an_episode(ends: str, n_step: int) -> None:
    lengths = [5, 1, 3]
    pool = pool_of(episodes(lengths, ends))
    batch = pool.sample(9, n_step=n_step, discount=0.9)
    for row, number in enumerate(batch["number"].tolist()):
        total, factor, last = slow_n_step(number, lengths, ends, n_step, 0.9)
        assert batch["n_step_return"][row].item() == pytest.approx(total)
        assert batch["n_step_discount"][row].item() == pytest.approx(factor)
        assert batch["_frame"][row].tolist() == [last + 1.0] * 3
        assert batch["_done"][row].item() == (
            ends != "cut" and last % 100 + 1 == lengths[last // 100]
        )
        assert batch["_terminated"][row].item() == (batch["_done"][row] and ends == "terminated")
        assert batch["_reward"][row].item() == number + 1
        assert batch["frame"][row].tolist() == [number] * 3
    assert batch["n_step_return"].dtype == batch["n_step_discount"].dtype == torch.float32


def test_one_step_returns_are_the_rewards() -> None:
    batch = pool_of(episodes([5, 3])).sample(8, n_step=1, discount=0.5)
    assert torch.equal(batch["n_step_return"], batch["_reward"])
    assert torch.equal(batch["n_step_discount"], torch.where(batch["_terminated"], 0.0, 0.5))


def test_n_step_returns_stop_at_the_newest_transition() -> None:
    pool = Pool(pool_size=100, seed=0)
    for number in range(5):
        pool(*step_of(number))
    while (batch := pool.sample(5, n_step=3, discount=0.5))["frame"][:, 0].max() < 4:
        pass
    row = int(batch["frame"][:, 0].argmax())
    assert batch["n_step_return"][row] == 1.0
    assert batch["n_step_discount"][row] == 0.5
    assert batch["_frame"][row].tolist() == [5.0] * 3


def test_n_step_returns_cross_the_seam_of_the_ring_but_not_the_oldest() -> None:
    pool = Pool(pool_size=10, seed=0)
    for number in range(17):
        pool(*step_of(number))
    batches = [pool.sample(10, n_step=4, discount=1.0) for _ in range(20)]
    frames = torch.cat([batch["frame"][:, 0] for batch in batches])
    returns = torch.cat([batch["n_step_return"] for batch in batches])
    after = torch.cat([batch["_frame"][:, 0] for batch in batches])
    assert frames.min() == 7
    assert torch.equal(returns, (17 - frames).clamp(max=4))
    assert torch.equal(after, frames + returns)


def test_without_terminated_an_end_counts_as_a_termination() -> None:
    pool = pool_of(episodes([3], "truncated"), keys=["frame", "_frame", "_reward", "_done"])
    batch = pool.sample(3, n_step=5)
    assert batch["n_step_discount"].tolist() == [0.0] * 3


@pytest.mark.parametrize("missing", ["_reward", "_done"])
def test_n_steps_need_rewards_and_ends(missing: str) -> None:
    keys = [key for key in ("frame", "_reward", "_done") if key != missing]
    with pytest.raises(SpecError, match=missing):
        pool_of(episodes([3]), keys=keys).sample(2, n_step=2)


# Sequences -----------------------------------------------------------------------------------


def test_sequences_never_cross_the_end_of_an_episode() -> None:
    lengths = [5, 1, 8]
    pool = pool_of(episodes(lengths, hidden=torch.rand(3, 8, 2), _hidden=torch.rand(3, 8, 2)))
    every = pool.transitions()
    for _ in range(10):
        batch = pool.sample_sequences(14, 4)
        first = batch["number"][:, 0]
        left = torch.tensor(lengths)[first // 100] - first % 100
        assert torch.equal(batch.lengths, left.clamp(max=4))
        for row, length in enumerate(batch.lengths.tolist()):
            begin = int((every["number"] == first[row]).nonzero())
            for key, tensor in batch.items():
                assert torch.equal(tensor[row, :length], every[key][begin : begin + length]), key
                assert not tensor[row, length:].any()


def test_sequences_start_from_the_stored_state_of_the_agent() -> None:
    hidden = torch.arange(40.0).view(1, 10, 4)
    pool = pool_of(episodes([10], hidden=hidden, _hidden=hidden + 4))
    batch = pool.sample_sequences(10, 3)
    assert torch.equal(batch["hidden"][:, 0], hidden[0, batch["number"][:, 0]])


def test_pieces_of_one_episode_that_were_stored_apart_are_not_joined() -> None:
    pool = Pool(pool_size=100, seed=0)
    pool.extend(episodes([3], "cut"))
    pool.extend(episodes([3], "cut", first=1))
    assert pool.sample_sequences(6, 6).lengths.max() <= 3


def test_an_inner_reset_ends_a_sequence() -> None:
    frame = torch.tensor([0.0, 1, 2, 10, 11, 20])[None, :, None].expand(1, 6, 3)
    after = torch.tensor([1.0, 2, 3, 11, 12, 21])[None, :, None].expand(1, 6, 3)
    pool = pool_of(TemporalDictTensor({"frame": frame, "_frame": after}))
    ends = {0: 3, 1: 3, 2: 3, 10: 12, 11: 12, 20: 21}
    batch = pool.sample_sequences(6, 6)
    for row, length in enumerate(batch.lengths.tolist()):
        first = int(batch["frame"][row, 0, 0])
        assert batch["_frame"][row, length - 1, 0] == ends[first]
    assert torch.equal(pool.transitions()["_frame"], after[0])


@pytest.mark.parametrize("flag", ["_done", "_truncated", "_terminated"])
def test_any_flag_of_an_end_ends_a_sequence_even_if_it_is_not_stored(flag: str) -> None:
    steps = {"number": torch.arange(6)[None], flag: (torch.arange(6) == 2)[None]}
    pool = pool_of(TemporalDictTensor(steps), keys=["number"])
    for _ in range(5):
        batch = pool.sample_sequences(6, 6)
        first = batch["number"][:, 0]
        assert torch.equal(batch.lengths, torch.where(first <= 2, 3 - first, 6 - first))


def test_a_start_within_a_row_ends_the_sequence_before() -> None:
    starts = torch.tensor([[True, False, False, True, False, True]])
    steps = {"number": torch.arange(6)[None], "initial_state": starts}
    pool = pool_of(TemporalDictTensor(steps))
    for _ in range(5):
        batch = pool.sample_sequences(6, 6)
        left = torch.tensor([3, 2, 1, 2, 1, 1])
        assert torch.equal(batch.lengths, left[batch["number"][:, 0]])


def test_a_sequence_may_be_longer_than_the_pool() -> None:
    batch = pool_of(episodes([4]), pool_size=6).sample_sequences(2, 50)
    assert batch["frame"].shape == (2, 50, 3)
    assert batch.lengths.max() <= 4


def test_sequences_go_on_from_one_single_transition_to_the_next() -> None:
    pool = Pool(pool_size=6, seed=0)
    for number in range(9):
        pool(*step_of(number))
    batch = pool.sample_sequences(6, 6)
    assert torch.equal(batch.lengths, 9 - batch["frame"][:, 0, 0].long())
    pool(*step_of(20))  # does not follow
    batch = pool.sample_sequences(6, 6)
    first = batch["frame"][:, 0, 0].long()
    assert torch.equal(batch.lengths, torch.where(first == 20, 1, 9 - first))
    last = batch["_frame"][torch.arange(6), batch.lengths - 1, 0]
    assert torch.equal(last, torch.where(first == 20, 21.0, 9.0))


def test_more_steps_than_there_are_take_no_more_memory() -> None:
    pool = pool_of(episodes([5, 3]))
    many, few = (pool.sample(8, n_step=n, discount=1.0) for n in (10**15, 5))
    for batch in (many, few):
        number, reward = batch["number"], batch["n_step_return"]
        last = torch.where(number < 100, 4, 102)
        assert torch.equal(reward, ((number + last) / 2 + 1) * (last - number + 1))


def test_rewards_and_ends_may_have_a_dimension_of_one() -> None:
    steps = episodes([5, 3])
    plain = pool_of(steps).sample(8, n_step=3)
    for key in ("_reward", "_done", "_terminated"):
        steps.set(key, steps[key][..., None])
    batch = pool_of(steps).sample(8, n_step=3)
    assert torch.equal(batch["n_step_return"], plain["n_step_return"])
    assert torch.equal(batch["n_step_discount"], plain["n_step_discount"])


def test_n_step_returns_of_several_rewards_per_step_are_refused() -> None:
    pool = pool_of(episodes([4], _reward=torch.zeros(1, 4, 2)))
    with pytest.raises(SpecError, match="'_reward' is float32"):
        pool.sample(2, n_step=2)


def test_without_terminated_an_end_that_is_truncated_is_no_termination() -> None:
    flags = torch.tensor([[False, False, True]])
    trajectories = TemporalDictTensor(
        {"_reward": torch.ones(1, 3), "_done": flags, "_truncated": flags}
    )
    pool = Pool(pool_size=3, seed=0)
    pool.extend(trajectories)
    discounts = pool.sample(3, n_step=1, discount=0.5)["n_step_discount"]
    assert discounts.tolist() == [0.5] * 3
