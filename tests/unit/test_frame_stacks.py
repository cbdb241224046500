"""Pools of stacked observations: what is a stack, what it takes, and where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import (
    FlattenObservation,
    FrameStackObservation,
    TransformObservation,
)

from rlpool import Batcher, EpisodeBatcher, GymEnv, GymEnvInf, Pool, SpecError, TemporalDictTensor
from rlpool.data.storage import allocate
from rlpool.machine.limits import machine_bytes

from support.agents import ConstantAgent
from support.envs import CountingEnv, assert_same_tensors
from support.machines import limit_disk
from support.variants import variants

FRAME_BYTES = 12 * 12


class Images(gym.Env[Any, Any]):
    """Random images, in episodes of a given length."""

    observation_space = gym.spaces.Box(0, 255, (12, 12), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 60) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return self.image(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        return self.image(), 1.0, self.n_steps >= self.length, False, {}

    def image(self) -> Any:
        return self.np_random.integers(0, 256, (12, 12), dtype=np.uint8)


def stacked_env(padding: str, length: int = 60, *, is_last: bool = False) -> Any:
    env = FrameStackObservation(Images(length), 4, padding_type=padding)
    if not is_last:
        return env
    space = gym.spaces.Box(0, 255, (12, 12, 4), np.uint8)
    return TransformObservation(env, lambda value: np.moveaxis(value, 0, -1), space)


def create_env(seed: int, padding: str, is_last: bool, kind: Any = GymEnv) -> GymEnv:
    envs = [stacked_env(padding, length, is_last=is_last) for length in (60, 75, 90)]
    return kind(envs, seed)


def stacks(start: int, stop: int, shape: tuple[int, ...] = (4,)) -> torch.Tensor:
    """Values of steps, each a stack of four numbers along its first axis."""
    numbers = torch.arange(start, stop)[:, None] + torch.arange(4)
    whole: torch.Tensor = numbers.reshape(-1, 4, *[1] * (len(shape) - 1)).expand(-1, *shape)
    return whole.contiguous()


def steps(start: int, stop: int, **others: torch.Tensor) -> TemporalDictTensor:
    """One row of steps whose stacks go on from ``start``."""
    frame = stacks(start, stop + 1, (4, 9))
    done = torch.zeros(stop - start, dtype=torch.bool)
    tensors = {"frame": frame[:-1], "_frame": frame[1:], "_done": done, **others}
    return TemporalDictTensor({key: tensor[None] for key, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("padding", "is_last"),
    variants([("reset", False), ("zero", True)], [("reset", True), ("zero", False)]),
)
def test_what_batchers_give_is_sampled_bit_by_bit_from_single_frames(
    padding: str, is_last: bool
) -> None:
    pools = [Pool(pool_size=500, seed=0, frame_stack=stack) for stack in (4, {})]
    arguments = {"padding": padding, "is_last": is_last}
    with EpisodeBatcher(
        100, 6, ConstantAgent, {}, create_env, arguments, n_threads=0, seeds=1
    ) as batcher:
        batcher.execute(6)
        episodes = batcher.get()
    for pool in pools:
        pool.extend(episodes)
    # An episode has its frames, those that it begins with, and the one after its last step.
    n_frames = int(episodes.lengths.sum()) + 6 * (2 if padding == "reset" else 3)
    assert pools[0].nbytes - n_frames * FRAME_BYTES < 100 * len(pools[0])
    with Batcher(
        4,
        create_agent=ConstantAgent,
        create_env=create_env,
        env_args={**arguments, "kind": GymEnvInf},
        n_threads=0,
        seeds=1,
    ) as batcher:
        batcher.reset()
        for _ in range(60):
            batcher.execute()
            window = batcher.get()
            for pool in pools:
                pool.extend(window)
    assert_same_tensors(pools[0].transitions(), pools[1].transitions())
    for options in ({}, {"n_step": 5}):
        assert_same_tensors(pools[0].sample(200, **options), pools[1].sample(200, **options))
    assert_same_tensors(pools[0].sample_sequences(50, 8), pools[1].sample_sequences(50, 8))
    assert pools[0].nbytes < 2 * FRAME_BYTES * 500  # the windows of a lane share their frames


@pytest.mark.parametrize("n_steps", [1, 3])
def test_windows_that_go_on_share_their_frames(n_steps: int) -> None:
    pool = Pool(pool_size=90, seed=0, frame_stack=4)
    for start in range(0, 300, n_steps):
        pool.extend(TemporalDictTensor.cat([steps(start, start + n_steps)] * 2))
    rows = 90 * (16 + 16 + 1 + 1 + 4)
    assert pool.nbytes - rows <= (90 + 2 * 4 + n_steps) * 9 * 8
    assert torch.equal(pool.sample(90)["frame"][:, :, 0].diff(dim=1), torch.ones(90, 3).long())


def vectors(shape: tuple[int, ...]) -> TemporalDictTensor:
    frame = stacks(0, 10, shape)
    tensors = {"frame": frame[:-1], "_frame": frame[1:], "_done": torch.zeros(9).bool()}
    return TemporalDictTensor({key: tensor[None] for key, tensor in tensors.items()})


def test_a_number_means_vectors_only_where_nothing_else_is_a_stack() -> None:
    alone = Pool(pool_size=20, seed=0, frame_stack=4)
    alone.extend(vectors((4,)))
    whole = Pool(pool_size=20, seed=0)
    whole.extend(vectors((4,)))
    assert_same_tensors(alone.sample(9), whole.sample(9))
    assert alone.nbytes < whole.nbytes
    vector = torch.rand(10, 4)  # no stack
    angles = {"angles": vector[:-1], "_angles": vector[1:]}
    Pool(pool_size=20, frame_stack=4).extend(steps(0, 9, **angles))


@pytest.mark.parametrize(
    ("frame_stack", "change", "words"),
    [
        (1, {}, "frame_stack should be an int of at least 2"),
        ("4", {}, "frame_stack should be an int"),
        ({"frame": (4, 0, 1)}, {}, r"\(4, 0, 1\).*\n.*pairs with the axis"),
        (5, {}, r"no observation has 5 frames.*frame int64\[4, 9\](.|\n)*leave frame_stack out"),
        (3, {}, r"no observation has 3 frames(.|\n)*frame_stack=\{'frame': \(3, 1\)\}"),
        ({"image": 4}, {}, "frame_stack names 'image', the transitions have"),
        ({"_frame": 4}, {}, "those of the key without its _"),
        ({"frame": (4, -1)}, {}, r"no 4 frames along axis -1(.|\n)*: \(4, 0\)\}"),
        ({"frame": 5}, {}, r"no 5 frames along axis 0(.|\n)*as many frames as an axis has"),
        ({"frame": (3, 1)}, {}, "'_frame' of row 0, step 0 is not 'frame' shifted by one frame"),
        (4, {"at": 5}, r"'_frame' of row 0, step 5 (.|\n)*frame_stack=\{"),
    ],
)
def test_what_is_no_stack_is_refused_with_the_fix(
    frame_stack: Any, change: dict[str, int], words: str
) -> None:
    batch = steps(0, 9)
    for step in change.values():
        batch["_frame"][0, step] += 7
    with pytest.raises(SpecError, match=words):
        Pool(pool_size=20, frame_stack=frame_stack).extend(batch)


def test_after_a_step_that_ends_an_episode_there_may_be_anything() -> None:
    batch, other = steps(0, 9), steps(50, 53)
    batch["_done"][0, 8] = True
    batch["_frame"][0, 8] = 0
    pool = Pool(pool_size=20, frame_stack=4)
    pool.extend(TemporalDictTensor.cat([batch, other]))
    assert torch.equal(pool.transitions()["_frame"][:9], batch["_frame"][0])
    state = np.arange(4 * 9).reshape(4, 9)
    with pytest.raises(SpecError, match="'_frame' of row 0, step 0"):
        Pool(pool_size=20, frame_stack=4)(state, 0, state + 1, 0.0, False)


def test_images_whose_axes_were_moved_are_found() -> None:
    images = stacks(0, 11, (4, 8)).to(torch.uint8)
    done = torch.zeros(1, 10, dtype=torch.bool)
    pools = [Pool(pool_size=20, frame_stack=4) for _ in range(2)]
    for pool, frames in zip(pools, (images, images.mT.contiguous().mT), strict=True):
        tensors = {"frame": frames[None, :10], "_frame": frames[None, 1:11], "_done": done}
        pool.extend(TemporalDictTensor(tensors))
    assert_same_tensors(pools[0].transitions(), pools[1].transitions())
    frames = images.mT.contiguous().mT.numpy()
    alone = Pool(pool_size=20, frame_stack=4)
    alone(frames[0], 0, frames[1], 0.0, False)
    assert torch.equal(alone.transitions()["_frame"], images[1:2])


def test_the_wrapper_of_the_environments_of_store_is_recognised() -> None:
    def envs(wrap: Any) -> list[Any]:
        return [wrap(stacked_env(padding, 25)) for padding in ("reset", "zero")]

    plain, most = envs(lambda env: env), 0.4 * 2 * 4 * FRAME_BYTES * 25
    with Pool(plain, 2, 50, seed=0) as pool, Pool(plain, 2, 50, seed=0, frame_stack={}) as other:
        for each in (pool, other):
            each.store()
        assert_same_tensors(pool.transitions(), other.transitions())
        assert pool.nbytes < most < other.nbytes
    with Pool(envs(FlattenObservation), 2, 50, seed=0) as pool:
        pool.store()  # no stacks any longer
        assert pool.nbytes > most
    number = TransformObservation(CountingEnv(), np.sum, gym.spaces.Box(0, 100, ()))
    numbers = FrameStackObservation(number, 4)
    with Pool([numbers], 1, 50, seed=0) as pool:
        pool.store()
        assert "4 frames" in repr(pool)


def test_a_saved_pool_says_whether_it_holds_frames(tmp_path: Path) -> None:
    pools = {}
    for name, frame_stack in (("frames", 4), ("whole", None)):
        pools[name] = Pool(pool_size=20, seed=0, frame_stack=frame_stack)
        pools[name].extend(steps(0, 9))
        pools[name].save(tmp_path / name)
        pool = Pool(pool_size=20, seed=1)
        pool.load(tmp_path / name)  # whatever it holds
        pool.extend(steps(9, 15))
        expected = torch.cat([steps(0, 9)["frame"][0], steps(9, 15)["frame"][0]])
        assert torch.equal(pool.transitions()["frame"], expected)
    assert 3 * (tmp_path / "frames").stat().st_size < 2 * (tmp_path / "whole").stat().st_size + 3000
    with pytest.raises(SpecError, match=r"frame_stack=4(.|\n)*without any"):
        Pool(pool_size=20, frame_stack=4).load(tmp_path / "whole")


def test_a_disk_that_is_full_keeps_the_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(pool_size=5000, storage="memmap", directory=tmp_path, frame_stack=4)
    pool.extend(steps(0, 20))
    before = pool.transitions()
    limit_disk(monkeypatch, lambda start, n_bytes: n_bytes > 3000 * 9 * 8)  # frames
    with pytest.raises(SpecError, match="disk"):
        pool.extend(steps(20, 3800))
    monkeypatch.undo()
    assert_same_tensors(pool.transitions(), before)
    pool.extend(steps(20, 3800))
    assert torch.equal(pool.transitions()["frame"], steps(0, 3800)["frame"][0])


@pytest.mark.parametrize("storage", ["local", "shared"])
def test_memory_of_which_little_is_used_may_be_larger_than_the_machine(storage: str) -> None:
    n_bytes = 2 * machine_bytes()
    with pytest.raises(SpecError, match="in all"):
        allocate(storage, n_bytes)
    root = allocate(storage, n_bytes, n_used=2).root()
    root[-1] = 1
    assert root[0] == 0
    assert len(root) == n_bytes
