"""The two data structures: ``DictTensor`` and ``TemporalDictTensor``.

You will learn

- that a ``DictTensor`` holds the named tensors of a batch, such as an observation or an output;
- that a ``TemporalDictTensor`` holds trajectories of different lengths, and how to read them by
  row, by time and as transitions;
- which operations return views, and which copy;
- how a loss over trajectories uses the mask to exclude padding.

Run it: ``python tutorials/datastructures.py``. It takes a second and needs only rlpool.
"""

from __future__ import annotations

import argparse
import pickle

import torch

from rlpool import DictTensor, TemporalDictTensor, episode_returns, masked_dicttensor


def tensors_of_a_batch() -> DictTensor:
    """A DictTensor is a dict of tensors that share their first dimension, the batch."""
    batch = DictTensor(
        {
            "frame": torch.rand(4, 3),
            "action": torch.tensor([0, 1, 1, 0]),
            "is_new": torch.tensor([True, False, False, True]),
        }
    )
    assert batch.n_elems() == 4
    assert batch["frame"].shape == (4, 3)

    # A string returns a tensor; anything else selects rows of all tensors. Slices are views, int
    # tensors and bool masks copy, a single int also drops the batch dimension.
    assert batch[1:3]["action"].tolist() == [1, 1]
    assert batch[torch.tensor([3, 0])]["frame"].equal(batch["frame"][[3, 0]])
    assert batch[batch["is_new"]].n_elems() == 2
    assert batch[2]["frame"].shape == (3,)

    # Batches can be split and concatenated; keys can be joined, selected and renamed.
    assert DictTensor.cat(batch.unfold())["action"].equal(batch["action"])
    info = DictTensor({"task": torch.arange(4)}).prepend_key("agent_info/")
    assert list(batch + info) == ["frame", "action", "is_new", "agent_info/task"]
    assert list((batch + info).truncate_key("agent_info/")) == ["task"]

    # Rows of two batches can be mixed bit for bit in any dtype, for example to reset a state.
    state = DictTensor({"memory": torch.full((4, 2), float("nan"))})
    fresh = DictTensor({"memory": torch.zeros(4, 2)})
    state = masked_dicttensor(state, fresh, batch["is_new"])
    assert state["memory"][0].tolist() == [0, 0]
    return batch


def trajectories_of_different_lengths() -> TemporalDictTensor:
    """A TemporalDictTensor holds tensors [B, T, ...]; row b has lengths[b] steps, then padding."""
    lengths = torch.tensor([3, 1, 5])
    # Real trajectories come from a batcher. These are built from consecutive steps.
    steps = {"frame": torch.rand(9, 2), "_reward": torch.arange(1.0, 10.0)}
    trajectories = TemporalDictTensor.from_packed(
        steps, lengths, info=DictTensor({"env_info/task": torch.tensor([7, 8, 9])})
    )
    assert trajectories["frame"].shape == (3, 5, 2)
    assert trajectories["_reward"][1].tolist() == [4, 0, 0, 0, 0]
    assert trajectories.mask()[0].tolist() == [1, 1, 1, 0, 0]

    # By row: lengths and info are selected too, so a task stays with its trajectory.
    longest_first = trajectories[lengths.argsort(descending=True)]
    assert longest_first.lengths.tolist() == [5, 3, 1]
    assert longest_first.info["env_info/task"].tolist() == [9, 7, 8]

    # By time: one step of all rows, of the rows that have it, or a different step of each row.
    assert trajectories.temporal_index(0)["_reward"].tolist() == [1, 4, 5]
    running, numbers = trajectories.masked_temporal_index(2)
    assert running["_reward"].tolist() == [3, 7]
    assert numbers.tolist() == [0, 2]
    last = trajectories.temporal_multi_index(lengths - 1)
    assert last["_reward"].tolist() == [3, 4, 9]
    assert trajectories.temporal_slice(1, 4).lengths.tolist() == [2, 0, 3]

    # As transitions, for a replay buffer or a critic: flatten drops the padding.
    transitions = trajectories.flatten(with_info=True)
    assert transitions["_reward"].equal(steps["_reward"])
    assert transitions["env_info/task"].tolist() == [7, 7, 7, 8, 9, 9, 9, 9, 9]
    return trajectories


def mean_return(trajectories: TemporalDictTensor) -> float:
    """Rewards are zero in padding, but outputs of networks are not: use the mask."""
    baseline = torch.full_like(trajectories["_reward"], 0.5)  # a network's output, even in padding
    advantage = (trajectories["_reward"] - baseline) * trajectories.mask()
    assert advantage[1].tolist() == [3.5, 0, 0, 0, 0]
    return float(episode_returns(trajectories).mean())


def views_and_files(trajectories: TemporalDictTensor) -> int:
    """Slices share memory, but a pickle or a file contains only the values of the slice."""
    block = trajectories.expand(1000)  # 997 more rows, with length 0
    part = block[:3]
    assert part["frame"].data_ptr() == block["frame"].data_ptr()
    n_bytes = len(pickle.dumps(part))
    assert n_bytes < len(pickle.dumps(block)) / 20
    assert pickle.loads(pickle.dumps(part))["frame"].equal(trajectories["frame"])
    return n_bytes


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    torch.manual_seed(0)
    batch = tensors_of_a_batch()
    print(f"A batch:\n{batch}\n")
    trajectories = trajectories_of_different_lengths()
    print(f"Trajectories with {trajectories.lengths.tolist()} steps:\n{trajectories}\n")
    print(f"Transitions:\n{trajectories.flatten()}\n")
    print(f"Mean return: {mean_return(trajectories):.2f}")
    print(f"Three of 1000 rows, pickled: {views_and_files(trajectories)} bytes")


if __name__ == "__main__":
    main()
