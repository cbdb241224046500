"""Which node runs which lanes of windows."""

from __future__ import annotations

from rlpool.errors import RlpoolError


class Assignment:
    """The node of every part, one of the equal parts into which all lanes are divided.

    A part stays where it is from window to window, as its environments are in the middle of
    episodes. What a lost node had goes to the nodes that have the fewest, and a node that has
    joined gets its share with the next window, if the episodes can be repeated there.

    Args:
        n_parts: Number of parts.

    Attributes:
        n_parts: As given.
        moved: Parts whose environments are not where the last window has left them, to what ended
            the node that had them; ``None`` if nothing did.
    """

    def __init__(self, n_parts: int) -> None:
        self.n_parts = n_parts
        self.moved: dict[int, RlpoolError | None] = {}
        self._parts: dict[int, list[int]] = {}  # node: its parts, the last one that it got last

    def join(self, node: int) -> None:
        """Let a node have parts from now on; nothing changes if it has."""
        self._parts.setdefault(node, [])

    def leave(self, node: int, error: RlpoolError) -> None:
        """Take the parts of a node that is gone."""
        for part in self._parts.pop(node, ()):
            self.move(part, error)

    def move(self, part: int, error: RlpoolError | None = None) -> None:
        """Note that a part's environments are not where the last window has left them."""
        self.moved[part] = self.moved.get(part) or error

    def parts_of(self, node: int) -> list[int]:
        """The parts of a node."""
        self._settle()
        return self._parts.get(node, [])

    def balance(self) -> None:
        """Let nodes that have too many parts give some away."""
        most = -(-self.n_parts // max(1, len(self._parts)))
        given = [part for parts in self._parts.values() for part in parts[most:]]
        for parts in self._parts.values():
            del parts[most:]
        for part in given:
            self.move(part)
        self._settle()

    def _settle(self) -> None:
        """Give parts without a node to those that have the fewest, if possible that of its number.

        So at first part i is on node i, and its workers have the numbers, and with them the seeds,
        that they would have on one machine.
        """
        settled = {part for parts in self._parts.values() for part in parts}
        for part in sorted(set(range(self.n_parts)) - settled if self._parts else ()):
            node = min(self._parts, key=lambda n: (len(self._parts[n]), n != part, n))
            self._parts[node].append(part)
