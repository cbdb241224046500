"""Which of the process's global random generators users' code draws from."""

from __future__ import annotations

from rlpool.generators import generator_states


class GeneratorWatch:
    """Notices which global generators are used after it was made."""

    def __init__(self) -> None:
        self._before = _fingerprints()

    def used(self) -> list[str]:
        """Names of the generators that have moved."""
        now = _fingerprints()
        return [name for name, state in self._before.items() if state != now[name]]


def _fingerprints() -> dict[str, bytes]:
    of_random, of_numpy, of_torch = generator_states()
    return {
        "random": repr(of_random).encode(),
        "numpy.random": of_numpy[1].tobytes() + repr(of_numpy[2:]).encode(),
        "torch": of_torch.numpy().tobytes(),
    }
