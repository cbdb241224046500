"""Whether a block fits into memory, before it is allocated, and what to change if it does not."""

from __future__ import annotations

from collections.abc import Sequence

from rlpool.machine.limits import check_size
from rlpool.slots.blocks import Layout


def checked(layout: Layout, lowerable: Sequence[str]) -> Layout:
    """Return a layout whose blocks fit into memory; warn if they do not fit into what is free.

    Args:
        layout: The layout.
        lowerable: Which of ``n_slots`` and ``n_timesteps`` the user can change.

    Raises:
        SpecError: If a block is larger than the machine, naming bytes per key and what to lower.
    """
    sizes = layout.bytes_of_key()
    sizes["rlpool's bookkeeping"] = layout.n_bytes - sum(sizes.values())
    lower = f"lower {' or '.join(lowerable)}" if lowerable else "use fewer environments"

    def advice(n_free: int) -> str:
        factor = -(-layout.n_bytes // max(1, n_free))
        return f"{lower}, by a factor of {factor} (python -m rlpool doctor lists all limits)"

    what = f"a block of {layout.n_slots} slots of {layout.n_timesteps} steps"
    check_size(sizes, advice, what)
    return layout
