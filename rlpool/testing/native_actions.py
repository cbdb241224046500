"""From an agent's output to the actions that environments get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlpool.envs.gym_env import action_decoder
from rlpool.specs import leaves_of, structure_of_space


def native_actions(space: Any, actions: Mapping[str, torch.Tensor]) -> list[Any]:
    """One action per row, as the environments of a ``GymEnv`` get them.

    Args:
        space: The action space.
        actions: ``action`` or ``action/...`` to ``[B, ...]``, of the space's kind.
    """
    structure = structure_of_space(space, keep_float64=False, name="action_space")
    leaves = leaves_of({"action": structure}, "")
    own = leaves_of(
        {"action": structure_of_space(space, keep_float64=True, name="action_space")}, ""
    )
    decode = action_decoder(structure, leaves, [leaf.spec.dtype for leaf in own.values()])
    return decode({key: tensor.numpy() for key, tensor in actions.items()})
