"""What is said about blocks that do not fit, and that what it advises fits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from rlpool import Batcher, EpisodeBatcher, MonoThreadEpisodeBatcher, SpecError
from rlpool.machine import limits
from rlpool.machine.limits import Bound
from rlpool.memory.storage import Memory
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.slots.preflight import block_warning, checked
from rlpool.specs import TensorSpec

from support.agents import StepCounter
from support.envs import create_counting

SPEC = TensorSpec((), np.dtype(np.float32))
BOTH = ("n_slots", "n_timesteps")


def layout(n_slots: int, n_timesteps: int, n_workers: int = 2, n_pixels: int = 1000) -> Layout:
    flags = ("terminated", "truncated", "done", "initial_state")
    observation = {key: TensorSpec((), np.dtype(bool)) for key in flags}
    observation |= {"frame": TensorSpec((n_pixels,), np.dtype(np.uint8)), "reward": SPEC}
    specs = StepSpecs(3, False, observation, {"action": SPEC}, {})
    return Layout(specs, n_slots, n_timesteps, n_workers)


def bounded(monkeypatch: pytest.MonkeyPatch, most: int, free: int) -> None:
    bound = Bound("this machine has", most, free, most)
    monkeypatch.setattr(limits, "memory_bounds", lambda **_: [bound])


def refusal(block: Layout, lowerable: tuple[str, ...] = BOTH) -> tuple[str, str]:
    with pytest.raises(SpecError) as caught:
        checked(block, lowerable)
    what, fix = str(caught.value).splitlines()
    return what, fix.removeprefix("  fix:   ")


def test_a_block_that_fits_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    block = layout(10, 10)
    bounded(monkeypatch, block.n_bytes, block.n_bytes)
    assert checked(block, BOTH) is block
    assert block_warning(block, BOTH) is None


def test_the_whole_block_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    block = layout(10, 10)
    bounded(monkeypatch, block.n_bytes - 1, block.n_bytes - 1)
    what, _ = refusal(block)
    frame = block.bytes_of_key()["frame"]
    assert what.startswith("a block of 10 slots of 10 steps would need ")
    assert f"(frame {frame / 1024:.3g} KiB, " in what
    assert "rlpool's bookkeeping " in what
    assert what.endswith("KiB are free")


@pytest.mark.parametrize("free", [10**6, 3 * 10**6, 2 * 10**7])
def test_what_is_advised_fits_and_not_much_more_would(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    bounded(monkeypatch, free, free)
    _, fix = refusal(layout(400, 100))
    found = dict(re.findall(r"(n_slots|n_timesteps)=(\d+)", fix))
    assert fix.startswith("lower n_slots or n_timesteps (")
    for name, value in found.items():
        sizes = {"n_slots": 400, "n_timesteps": 100, name: int(value)}
        assert layout(**sizes).n_bytes <= free
        assert layout(**{**sizes, name: int(int(value) * 1.2) + 1}).n_bytes > free
    assert "n_timesteps" in found


def test_one_slot_per_lane_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    least = layout(6, 100).n_bytes
    bounded(monkeypatch, least, least)
    assert "(n_slots=6 or n_timesteps=" in refusal(layout(40, 100))[1]
    bounded(monkeypatch, least - 1, least - 1)
    assert "(n_timesteps=" in refusal(layout(40, 100))[1]


def test_if_no_single_argument_is_enough_both_are_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    free = layout(6, 7, n_pixels=100_000).n_bytes
    bounded(monkeypatch, free, free)
    _, fix = refusal(layout(400, 100, n_pixels=100_000))
    assert fix == "lower n_slots or n_timesteps (n_slots=6 with n_timesteps=7 would fit)"


def test_if_nothing_would_fit_there_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded(monkeypatch, 100, 100)
    _, fix = refusal(layout(400, 100))
    assert fix == (
        "lower n_slots or n_timesteps, or use smaller observations: "
        "a step of one of 6 lanes takes 1008 B"
    )
    assert refusal(layout(400, 100), ())[1].startswith("use fewer environments, or use smaller")


def test_only_what_can_be_lowered_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded(monkeypatch, 2 * 10**7, 2 * 10**7)  # n_slots=18 would fit as well
    fix = refusal(layout(40, 1000), ("n_timesteps",))[1]
    assert re.fullmatch(r"lower n_timesteps \(n_timesteps=\d+ would fit\)", fix)


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (EpisodeBatcher, {"n_timesteps": 500, "n_slots": 64}, "lower n_slots or n_timesteps (n_"),
        (Batcher, {"n_timesteps": 5000}, "lower n_timesteps (n_timesteps="),
        (MonoThreadEpisodeBatcher, {}, "use fewer environments"),
    ],
)
def test_batchers_refuse_before_they_allocate(
    monkeypatch: pytest.MonkeyPatch, kind: Any, arguments: dict[str, int], words: str
) -> None:
    bounded(monkeypatch, 102_400, 102_400)
    monkeypatch.setattr(MonoThreadEpisodeBatcher, "_N_TIMESTEPS", 10_000)

    def fail(*_: Any) -> Memory:
        raise LookupError("allocated")

    monkeypatch.setattr(Memory, "local", fail)
    monkeypatch.setattr(Memory, "shared", fail)
    arguments = {**arguments, "n_threads": 0} if arguments else {}
    with pytest.raises(SpecError) as caught:
        kind(create_agent=StepCounter, create_env=create_counting, seeds=0, **arguments)
    what, fix = str(caught.value).splitlines()
    assert "frame" in what
    assert "of the 100 KiB that this machine has 100 KiB are free" in what
    assert words in fix
