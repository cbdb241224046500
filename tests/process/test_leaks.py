"""What is taken is given back, what is handed over stays, and the caller is left as it was."""

from __future__ import annotations

import gc
import io
import os
import pickle
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from process.watching import Script, Struck, n_descriptors, worker_pids

from rlpool import (
    Agent,
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    TemporalDictTensor,
)

from support.faults import create_agent, create_env, faults_at

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(280)]

RunScript = Callable[..., Script]

N_CYCLES = int(os.environ.get("RLPOOL_LEAK_CYCLES", "8"))
"""Open/close cycles; 50 for the full check."""


def open_batcher(
    n_threads: int = 1,
    n_timesteps: int = 4,
    n_slots: int = 8,
    on_worker_failure: str = "raise",
    **env_args: object,
) -> EpisodeBatcher:
    return EpisodeBatcher(
        n_timesteps,
        n_slots,
        create_agent,
        {},
        create_env,
        env_args,
        n_threads=n_threads,
        seeds=1,
        on_worker_failure=on_worker_failure,
    )


@pytest.fixture(scope="module", autouse=True)
def opened_once() -> None:
    """Open what stays open from the first use on: a template, a tracker, libraries' own files."""
    with open_batcher() as batcher:
        run(batcher, 1)


def result_of(batcher: EpisodeBatcher | Batcher) -> TemporalDictTensor:
    result = batcher.get()
    assert result is not None
    return result


def run(batcher: EpisodeBatcher, n_episodes: int, identity: int = 0) -> TemporalDictTensor:
    batcher.execute(n_episodes, env_info=DictTensor({"id": torch.full((n_episodes,), identity)}))
    return result_of(batcher)


def n_blocks_mapped() -> int:
    """Mappings of anonymous shared memory in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:")


def shared_and_private_bytes(pid: int | None = None) -> int:
    return psutil.Process(pid).memory_info().rss


# Descriptors, processes, memory ---------------------------------------------------------------


def look() -> dict[str, float]:
    """What this process holds."""
    gc.collect()
    return {
        "descriptors": n_descriptors(),
        "processes": len(psutil.Process().children(recursive=True)),
        "in /dev/shm": len(os.listdir("/dev/shm")),
        "shared mappings": n_blocks_mapped(),
        "threads": psutil.Process().num_threads(),
        "mib": psutil.Process().memory_info().rss / 2**20,
    }


def one_life(number: int) -> None:
    """Open a batcher, let it succeed and fail, and close or drop it."""
    batcher = open_batcher(1, 50, 100, on_worker_failure="restart")
    for _ in range(3):
        batcher.update(number)
        run(batcher, 10)
    batcher.execute(10, env_info=faults_at(10, 5, "raise", 1))
    if number % 3 == 0:
        with pytest.raises(EnvError):
            batcher.get()
    if number % 3 != 1:
        batcher.close()


def test_nothing_grows_over_many_batchers() -> None:
    seen = []
    for number in range(2 + N_CYCLES):
        one_life(number)
        seen.append(look())
    first, last = seen[1], seen[-1]
    assert last.pop("mib") < first.pop("mib") + 8
    assert last == first
    assert not worker_pids()


@pytest.mark.parametrize(
    ("n_threads", "on_worker_failure", "n_kept"), [(1, "raise", 2), (2, "restart", 21)]
)
def test_a_worker_costs_at_most_three_descriptors_and_a_batcher_a_few(
    n_threads: int, on_worker_failure: str, n_kept: int
) -> None:
    # With successors to be provided for: what they map, of which no more than 16 are blocks.
    most = 3 * n_threads + n_kept
    gc.collect()  # of what other tests have left in cycles
    before = n_descriptors()
    with open_batcher(n_threads, on_worker_failure=on_worker_failure) as batcher:
        assert n_descriptors() - before <= 3 * n_threads + 2
        (worker, *_) = worker_pids()
        run(batcher, 4)
        n_in_worker = psutil.Process(worker).num_fds()
        kept = []
        for number in range(30):
            batcher.update(number)
            kept.append(run(batcher, 4, number))
            batcher.execute(4, env_info=faults_at(4, 1, "raise", 1))
            with pytest.raises(EnvError):
                batcher.get()
        assert n_descriptors() - before <= most
        assert psutil.Process(worker).num_fds() == n_in_worker
    assert n_descriptors() == before


def test_a_failing_start_leaves_no_descriptor(struck: Struck) -> None:
    gc.collect()
    before = n_descriptors()
    for kind in ("raise", "os_exit"):
        with pytest.raises(RuntimeError):
            open_batcher(fault=kind)
    gc.collect()
    assert n_descriptors() == before


def test_failed_requests_give_their_memory_back() -> None:
    with open_batcher(n_slots=4) as batcher:
        for number in range(60):
            if number == 10:
                before = n_blocks_mapped()
            batcher.execute(4, env_info=faults_at(4, 1, "raise", 1))
            with pytest.raises(EnvError):
                batcher.get()
        assert n_blocks_mapped() <= before + 1


def test_memory_stays_flat_over_many_requests() -> None:
    with open_batcher(n_timesteps=100, n_slots=64) as batcher:
        (worker,) = worker_pids()
        pids = (os.getpid(), worker)
        for number in range(400):
            if number == 100:
                before = [shared_and_private_bytes(pid) for pid in pids]
                blocks = n_blocks_mapped()
            batcher.update(number)
            run(batcher, 8, number)
        grown = [shared_and_private_bytes(pid) - b for pid, b in zip(pids, before, strict=True)]
        assert n_blocks_mapped() <= blocks + 1
    assert max(grown) < 0.9 * 2**20, grown  # 3 KiB per request


def test_more_episodes_than_slots_are_drained_from_bounded_shared_memory() -> None:
    with open_batcher(n_timesteps=100, n_slots=4) as batcher:
        (worker,) = worker_pids()
        run(batcher, 4)
        before = n_blocks_mapped()
        kept = run(batcher, 500, 7)
        assert (kept["frame"][:, :, 0] == 7).all()
        assert kept.lengths.tolist() == [3] * 500
        assert n_blocks_mapped() <= before + 1
        shared = psutil.Process(worker).memory_info().shared
        run(batcher, 1000)
        assert psutil.Process(worker).memory_info().shared < shared + 2**20


KEYS = [f"key_{i}" for i in range(300)]


class EnvOfManyKeys(gymnasium.Env[Any, Any]):
    """Counts the steps of its episodes, of which each has three."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Dict(
        {key: gymnasium.spaces.Box(-1e3, 1e3, (2,), np.float32) for key in KEYS}
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.observe(), 1.0, self.t == 3, False, {}

    def observe(self) -> dict[str, Any]:
        return {key: np.full(2, i + self.t, np.float32) for i, key in enumerate(KEYS)}


def create_env_of_many_keys(seed: int) -> GymEnv:
    return GymEnv([EnvOfManyKeys(), EnvOfManyKeys()], seed)


class StillAgent(Agent):
    def __call__(
        self, state: Any, observation: Any, agent_info: Any = None, history: Any = None
    ) -> Any:
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor({}), DictTensor({"action": action}), DictTensor({})


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """So many more than there are this process and its workers may open."""
    before, number = resource.getrlimit(resource.RLIMIT_NOFILE), 39
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_descriptors() + number, before[1]))
    yield number
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_three_hundred_keys_and_many_results_need_few_descriptors(few_descriptors: int) -> None:
    kept = []
    with EpisodeBatcher(
        4, 8, StillAgent, {}, create_env_of_many_keys, {}, n_threads=2, seeds=1
    ) as batcher:
        for n_episodes in [*[4] * few_descriptors, 20]:
            batcher.execute(n_episodes)
            kept.append(result_of(batcher))
    first = torch.arange(300)[:, None, None] + torch.arange(3)
    for result in kept:
        shown = torch.stack([result[key] for key in KEYS])
        after = torch.stack([result["_" + key] for key in KEYS])
        assert (shown[..., 0] == first).all()
        assert (after[..., 1] == first + 1).all()


FULL_SHM = """
import os, sys
from rlpool import EpisodeBatcher
from support.faults import create_agent, create_env

def main():
    with open("/dev/shm/filler", "wb", 0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    assert os.statvfs("/dev/shm").f_bavail == 0
    with EpisodeBatcher(
        100, 1000, create_agent, {}, create_env, {"n_lanes": 4}, n_threads=1, seeds=1
    ) as batcher:
        batcher.update(3)
        batcher.execute(1000)
        print(int(batcher.get().lengths.sum()), os.listdir("/dev/shm"))

if __name__ == "__main__":
    main()
"""

OWN_SHM = ("unshare", "-m", "sh", "-c")
MOUNT = "mount -t tmpfs -o size=64k tmpfs /dev/shm"


def test_a_full_dev_shm_does_not_matter(run_script: RunScript) -> None:
    if subprocess.run([*OWN_SHM, MOUNT], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small /dev/shm for a process of its own")
    script = run_script(FULL_SHM, prefix=(*OWN_SHM, f'{MOUNT} && exec "$@"', "sh"))
    script.finish()
    assert (script.stdout, script.stderr) == ("3000 ['filler']\n", "")


# Results --------------------------------------------------------------------------------------


def test_kept_results_never_change_and_dropped_ones_are_recycled() -> None:
    with open_batcher(n_timesteps=8, n_slots=8) as batcher:
        kept, copies, addresses = [], [], set()
        for number in range(60):
            result = run(batcher, 8, number)
            addresses.add(result["frame"].data_ptr())
            if number % 10 == 3:
                # Any part of a result keeps its memory, however it was made.
                parts = [
                    result["frame"][2:3],
                    result["_frame"],
                    result["reward"].numpy()[:, 1:],
                    result["frame"].view(torch.int32)[0],
                    result.slice(1, 2)["action"],
                    result["frame"].permute(2, 1, 0)[1].unbind()[0],
                ]
                kept.append(parts[(number // 10) % len(parts)])
                copies.append(torch.as_tensor(kept[-1]).clone())
            del result
        for part, copy in zip(kept, copies, strict=True):
            assert torch.equal(torch.as_tensor(part), copy)
    # Six are kept; the other 54 requests shared a few blocks.
    assert 6 <= len(addresses) <= 6 + 4


def test_a_result_holds_no_block_once_its_tensors_are_gone() -> None:
    with open_batcher() as batcher:
        before = n_blocks_mapped()
        results = [run(batcher, 4, number) for number in range(20)]
        assert n_blocks_mapped() >= before + 19
        info = [result.info for result in results]
        del results
        run(batcher, 4)
        assert n_blocks_mapped() <= before + 3
        assert all((row["episode"] == torch.arange(4)).all() for row in info)


def test_writing_into_a_result_is_the_users_own_affair() -> None:
    with open_batcher() as batcher:
        first = run(batcher, 4, 1)
        first["frame"][:] = 99.0
        del first
        second, third = run(batcher, 4, 2), run(batcher, 4, 3)
        for result, identity in ((second, 2), (third, 3)):
            assert (result["frame"][:, :, 0] == identity).all()
        for row, length in enumerate((1, 2, 3, 4)):
            second["reward"][row, length:] = 5.0
        del second, third
        lengths = torch.tensor([1, 2, 3, 1])
        batcher.execute(4, env_info=DictTensor({"id": torch.ones(4), "length": lengths}))
        result = result_of(batcher)
    for row, length in enumerate(lengths.tolist()):
        for key, values in result.items():
            assert not values[row, length:].any(), key


def test_saving_a_result_writes_its_values_only() -> None:
    with open_batcher(n_timesteps=1000, n_slots=200) as batcher:
        result = run(batcher, 10)
        values = sum(t.numel() * t.element_size() for t in result.values())
        one = result["frame"].numel() * result["frame"].element_size()
        assert len(pickle.dumps(result)) < values + 20_000
        assert saved_bytes(result) < values + 20_000
        assert len(pickle.dumps(result.slice(0, 2))) < values + 20_000
        assert len(pickle.dumps(result["frame"].numpy())) < one + 1_000
        # A tensor saves its storage: that of one key, never that of the block.
        block = 200 * 1000 * 2 * 4
        assert saved_bytes(result["frame"]) < block
        again = pickle.loads(pickle.dumps(result))
        for key, tensor in result.items():
            assert torch.equal(again[key], tensor)


def saved_bytes(value: object) -> int:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.tell()


# The caller -----------------------------------------------------------------------------------


def test_the_caller_builds_no_environment(tmp_path: Path) -> None:
    with open_batcher(2, created_in=str(tmp_path), n_lanes=2) as batcher:
        assert {path.name for path in tmp_path.iterdir()} == set(map(str, worker_pids()))
        run(batcher, 4)
    assert str(os.getpid()) not in {path.name for path in tmp_path.iterdir()}


GOOD_GUEST = """
import logging, multiprocessing, os, random, signal, sys, threading, warnings
import numpy, torch
torch.set_num_threads(2)
torch.manual_seed(5)
numpy.random.seed(6)
random.seed(7)

def look():
    state = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": (state[0], state[1].tolist(), *state[2:]),
        "random": random.getstate(),
        "torch threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "handlers": [(s, signal.getsignal(s)) for s in signal.valid_signals()],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "path": list(sys.path),
        "warnings": list(warnings.filters),
        "excepthook": sys.excepthook,
        "python threads": threading.active_count(),
        "root handlers": list(logging.getLogger().handlers),
        "level": logging.getLogger().level,
        "main": sys.modules["__main__"].__dict__["__file__"],
        "umask": (os.umask(0o22), os.umask(0o22))[1],
        "printoptions": numpy.get_printoptions(),
    }

def compare(before, when):
    after = look()
    for key, value in before.items():
        if after[key] != value:
            sys.exit(f"{when}: {key} was {value!r:.300}, is {after[key]!r:.300}")

if __name__ == "__main__":
    import gymnasium  # theirs, not ours
    from gymnasium.utils import seeding  # the same
    before = look()
    import rlpool
    from rlpool import Batcher, EpisodeBatcher
    compare(before, "importing")
    from support.faults import create_agent, create_env, faults_at
    compare(before, "importing the environments")
    for n_threads in (0, 1):
        batcher = EpisodeBatcher(
            4, 8, create_agent, {}, create_env, {"n_lanes": 2}, n_threads=n_threads
        )
        compare(before, f"opening with n_threads={n_threads}")
        batcher.update(1)
        batcher.execute(9)
        batcher.get()
        batcher.execute(4, env_info=faults_at(4, 1, "raise", 1))
        try:
            batcher.get()
        except rlpool.EnvError:
            pass
        compare(before, f"running with n_threads={n_threads}")
        batcher.close()
        compare(before, f"closing with n_threads={n_threads}")
    windows = Batcher(4, None, create_agent, {}, create_env, {"n_lanes": 2}, n_threads=0)
    windows.reset()
    windows.execute()
    windows.get()
    compare(before, "windows")
"""


def test_the_caller_is_left_as_it_was(run_script: RunScript) -> None:
    script = run_script(GOOD_GUEST)
    script.finish()
    assert (script.stdout, script.stderr, script.returncode) == ("", "", 0)
