"""A pool on a disk that is really full: a small one of its own, in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

MOUNT = "mount -t tmpfs -o size=4m tmpfs /mnt"

SCRIPT = """
import torch
from rlpool import Pool, SpecError, TemporalDictTensor

def trajectories(start, n):
    # What follows a step is no next step, so that it needs room of its own.
    frame = 2 * torch.arange(start, start + n)[None, :, None].repeat(1, 1, 10)
    return TemporalDictTensor({"frame": frame, "_frame": frame + 1})

pool = Pool(pool_size=1_000_000, storage="memmap", directory="/mnt", seed=0)
n_refused = 0
for start in range(0, 100_000, 5000):
    try:
        pool.extend(trajectories(start, 5000))
    except SpecError as error:
        assert "No space left on device" in str(error), error
        n_refused += 1
n = len(pool)
assert n_refused >= 5 and n >= 10_000, (n_refused, n)
assert torch.equal(pool.transitions()["frame"][:, 0], 2 * torch.arange(n))
while True:  # what is left of the disk, transition by transition
    try:
        pool.extend(trajectories(len(pool), 1))
    except SpecError:
        break
assert torch.equal(pool.transitions()["_frame"][:, 0], 2 * torch.arange(len(pool)) + 1)
batch = pool.sample(1000)
assert torch.equal(batch["_frame"], batch["frame"] + 1)
print("readable", len(pool) >= n)
"""


@pytest.fixture
def in_namespace() -> list[str]:
    """A command that runs a shell command where it may mount."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    is_there = shutil.which("unshare") is not None
    if not is_there or subprocess.run([*command, MOUNT], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    return command


def test_a_full_disk_refuses_what_is_new_and_keeps_what_is_stored(in_namespace: list[str]) -> None:
    command = [*in_namespace, f"{MOUNT} && exec {sys.executable} -", "sh"]
    done = subprocess.run(command, input=SCRIPT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "readable True\n", done.stderr
