"""Named tensors with a batch and a time dimension: trajectories of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from rlpool.data import agent_axis
from rlpool.data import rows as base
from rlpool.data.dict_tensor import DictTensor, DictTensorBase, cat_named, check_alike
from rlpool.errors import SpecError
from rlpool.machine.arguments import whole_number
from rlpool.machine.imports import import_extra


class TemporalDictTensor(DictTensorBase):
    """B trajectories of up to T steps: named tensors ``[B, T, ...]`` on one device.

    Row ``b`` has ``lengths[b]`` steps, followed by padding. Methods that add padding fill it with
    zeros; the others keep existing padding. ``info`` holds one value per trajectory and is
    selected, joined and copied together with the rows. The dicts are copied, the tensors are not.
    Iteration yields keys.

    ``index(int)`` returns a single trajectory, views without the batch dimension: tensors
    ``[T, ...]``, ``lengths`` 0-d, ``info`` one row. Methods that need rows refuse it.

    Args:
        tensors: Tensors ``[B, T, ...]`` of any dtype by name.
        lengths: int64 ``[B]``, each from 0 to T. By default every row has T steps.
        info: Tensors ``[B, ...]``. By default an empty ``DictTensor``.

    Raises:
        SpecError: If a value is not a tensor, or shapes, devices, dtypes or lengths do not match.

    Example:
        >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
        >>> batch.mask()
        tensor([[1., 1., 1.],
                [1., 0., 0.]])
        >>> batch.flatten()["reward"].shape
        torch.Size([4])
    """

    __slots__ = ("_info", "_lengths")

    _lengths: Tensor
    _info: DictTensor

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | DictTensor,
        lengths: Tensor | None = None,
        info: Mapping[str, Tensor] | DictTensor | None = None,
    ) -> None:
        self._tensors = DictTensor(tensors)._tensors
        self._info = DictTensor(info)
        steps = list(self._tensors.items())
        base.check(steps, 2)
        first = steps[0][1] if steps else None
        if lengths is None:
            like = torch.empty(0, 0, device="cpu") if first is None else first
            lengths = like.new_full(like.shape[:1], like.shape[1], dtype=torch.int64)
        else:
            _check_lengths(lengths, first)
        self._lengths = lengths
        named_info = [(f"info/{key}", tensor) for key, tensor in self._info.items()]
        base.check([*steps[:1], ("lengths", lengths), *named_info])
        self._info._n_rows()

    @staticmethod
    def _wrap(tensors: dict[str, Tensor], lengths: Tensor, info: DictTensor) -> TemporalDictTensor:
        """Wrap these objects without copying or checking them, for the library's own code."""
        made = object.__new__(TemporalDictTensor)
        made._tensors, made._lengths, made._info = tensors, lengths, info
        return made

    def _with(self, tensors: dict[str, Tensor]) -> TemporalDictTensor:
        return self._wrap(tensors, self._lengths, copy(self._info))

    def _map(self, change: Callable[[Tensor], Tensor]) -> TemporalDictTensor:
        tensors = {key: change(tensor) for key, tensor in self._tensors.items()}
        return self._wrap(tensors, change(self._lengths), self._info._map(change))

    def _n_rows(self) -> int:
        return self.n_elems()

    @property
    def _steps(self) -> DictTensor:
        return DictTensor._wrap(self._tensors)

    @property
    def lengths(self) -> Tensor:
        """Number of steps of every row, int64 ``[B]``."""
        return self._lengths

    @property
    def info(self) -> DictTensor:
        """Values per trajectory: tensors ``[B, ...]``."""
        return self._info

    def n_elems(self) -> int:
        """Return the number of rows B; ``SpecError`` for a single trajectory of ``index(int)``."""
        if not self._lengths.ndim:
            raise SpecError(
                "a single trajectory, as returned by index(int), has no batch dimension",
                fix="slice(i) keeps the batch dimension",
            )
        return self._lengths.shape[0]

    def __len__(self) -> int:
        """Return the number of rows, as ``n_elems`` does."""
        return self.n_elems()

    def __bool__(self) -> bool:
        """Return True, even without rows: ``get`` returns ``None`` if there is no result."""
        return True

    def n_timesteps(self) -> int:
        """Return the size T of the time dimension; without keys, the largest length."""
        for tensor in self._tensors.values():
            return tensor.shape[self._lengths.ndim]
        return base.longest(self._lengths)

    def device(self) -> torch.device:
        """Return the device of all tensors and of the lengths."""
        return self._lengths.device

    def specs(self) -> dict[str, dict[str, Any]]:
        """Return ``{"size": shape of one step, "dtype": dtype}`` per key."""
        n_leading = self._lengths.ndim + 1
        return {k: {"size": t.shape[n_leading:], "dtype": t.dtype} for k, t in self.items()}

    def mask(self) -> Tensor:
        """Return float32 ``[B, T]``: 1 for steps, 0 for padding.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.mask()
            tensor([[1., 1., 1.],
                    [1., 0., 0.]])
        """
        return base.steps_within(self._lengths, self.n_timesteps()).to(torch.float32)

    def full(self) -> bool:
        """Whether every row has T steps."""
        return bool((self._lengths == self.n_timesteps()).all())

    def shorten(self) -> TemporalDictTensor:
        """Drop the steps that are padding in every row: views of the first ``max(lengths)``."""
        return self._with(self._in_time(0, base.longest(self._lengths)))

    def expand(self, n_elems: int) -> TemporalDictTensor:
        """Add rows of zeros with length 0, copying; dtypes are kept.

        Args:
            n_elems: The new number of rows, at least the current one.

        Raises:
            SpecError: If it is smaller.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.expand(3).lengths
            tensor([3, 1, 0])
        """
        fix = "slice(0, n) removes rows"
        n_elems = whole_number("n_elems", n_elems, self.n_elems(), fix=fix)
        try:
            return self._map(base.padded(0, n_elems))
        except (TypeError, RuntimeError) as error:
            raise SpecError(f"cannot expand to {n_elems} rows: {error}", fix=fix) from error

    def temporal_slice(self, start: int, stop: int) -> TemporalDictTensor:
        """Keep steps ``start <= t < stop`` of every trajectory.

        Args:
            start: First step kept, 0-based.
            stop: One past the last step kept.

        Returns:
            Views ``[B, stop - start, ...]``. ``lengths`` is new, clipped to ``[0, stop - start]``.
            The ``first_step`` in the info of a window is dropped unless ``start`` is 0.

        Raises:
            SpecError: If not ``0 <= start <= stop <= T``.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.temporal_slice(1, 3).lengths
            tensor([2, 0])
        """
        start = whole_number("start", start, 0)
        stop = whole_number("stop", stop, start)
        if stop > self.n_timesteps():
            raise SpecError(
                f"steps {start} to {stop} are not within 0 to {self.n_timesteps()}",
                fix="count steps from the start: rows end at different steps",
            )
        lengths = (self._lengths - start).clamp(0, stop - start)
        info = copy(self._info)
        if start:  # first_step describes the first step of a window
            info._tensors.pop("first_step", None)
        return self._wrap(self._in_time(start, stop), lengths, info)

    def temporal_index(self, step: int) -> DictTensor:
        """Return views ``[B, ...]`` of step 0 to T - 1 (else ``SpecError``), padding included."""
        step, dim = self._checked_step(step), self._lengths.ndim
        return self._steps._map(lambda tensor: tensor.select(dim, step))

    def temporal_multi_index(self, steps: Tensor) -> DictTensor:
        """Copy one step of every row, chosen per row.

        Args:
            steps: Int ``[B]``, each from 0 to T - 1.

        Returns:
            Tensors ``[B, ...]``: row ``b`` is step ``steps[b]``.

        Raises:
            SpecError: Unless there is one step per row, each within range.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.arange(6.0).view(2, 3)})
            >>> batch.temporal_multi_index(batch.lengths - 1)["reward"]
            tensor([2., 5.])
        """
        n_elems = self.n_elems()
        is_int = isinstance(steps, Tensor) and steps.dtype in base.INDEX_DTYPES
        if not is_int or steps.shape != (n_elems,):
            raise SpecError(f"steps are {base.kind(steps)}", fix=f"use an int64 [{n_elems}]")
        for bound in steps.aminmax() if n_elems else ():
            self._checked_step(int(bound))
        rows, times = torch.arange(n_elems, device=self.device()), steps.to(self.device()).long()
        return self._steps._map(lambda tensor: base.taken(tensor, rows, times))

    def masked_temporal_index(self, step: int) -> tuple[DictTensor, Tensor]:
        """Copy one step of the rows that have it.

        Args:
            step: From 0 to T - 1.

        Returns:
            Tensors ``[N, ...]`` of the rows with ``step < length``, and the indices of these rows,
            int64 ``[N]``, ascending.

        Raises:
            SpecError: If the step is out of range.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> steps, rows = batch.masked_temporal_index(2)
            >>> steps["reward"], rows
            (tensor([1.]), tensor([0]))
        """
        self.n_elems()  # refuses a single trajectory
        step = self._checked_step(step)
        rows = (self._lengths > step).nonzero().squeeze(1)
        return self.temporal_index(step).index(rows), rows

    def flatten(self, with_info: bool = False) -> DictTensor:
        """Concatenate the steps of all trajectories, without the padding.

        Args:
            with_info: Whether to add the keys of ``info``, repeated for every step of a row.

        Returns:
            Copies ``[sum(lengths), ...]`` in row-then-time order.

        Raises:
            SpecError: If ``info`` and the steps have a key in common.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.flatten()["reward"]
            tensor([1., 1., 1., 1.])
        """
        self.n_elems()  # refuses a single trajectory
        rows, times = base.steps_within(self._lengths, self.n_timesteps()).nonzero(as_tuple=True)
        flat = self._steps._map(lambda tensor: base.taken(tensor, rows, times))
        return flat + self._info.index(rows) if with_info else flat

    def _in_time(self, start: int, stop: int) -> dict[str, Tensor]:
        dim = self._lengths.ndim
        return {key: t.narrow(dim, start, stop - start) for key, t in self.items()}

    def _checked_step(self, step: Any) -> int:
        fix = "temporal_multi_index(lengths - 1) gives the last step of every row"
        number = whole_number("step", step, 0, fix=fix)
        if number >= self.n_timesteps():
            raise SpecError(f"step {number} of {self.n_timesteps()} steps", fix=fix)
        return number

    @classmethod
    def from_packed(
        cls,
        transitions: Mapping[str, Tensor] | DictTensor,
        lengths: Tensor,
        info: Mapping[str, Tensor] | DictTensor | None = None,
    ) -> TemporalDictTensor:
        """Split concatenated steps into trajectories: the inverse of ``flatten``.

        Args:
            transitions: Tensors ``[sum(lengths), ...]`` in row-then-time order.
            lengths: int64 ``[B]``, at least 0.
            info: Tensors ``[B, ...]``.

        Returns:
            Copies ``[B, max(lengths), ...]``, padded with zeros.

        Raises:
            SpecError: If the sum of the lengths is not the number of transitions.

        Example:
            >>> steps = {"reward": torch.tensor([1.0, 2.0, 3.0, 4.0])}
            >>> TemporalDictTensor.from_packed(steps, torch.tensor([3, 1]))["reward"]
            tensor([[1., 2., 3.],
                    [4., 0., 0.]])
        """
        packed = DictTensor(transitions)
        _check_lengths(lengths, None)
        n_elems, n_timesteps, n_steps = len(lengths), base.longest(lengths), int(lengths.sum())
        if not packed.empty() and packed._n_rows() != n_steps:
            message = f"{packed.n_elems()} transitions for lengths with sum {n_steps}"
            raise SpecError(message, fix="give one row per step of every trajectory")
        places = base.steps_within(lengths, n_timesteps).view(-1).nonzero().squeeze(1)

        def unpack(tensor: Tensor) -> Tensor:
            rows = tensor.new_zeros((n_elems * n_timesteps, *tensor.shape[1:]))
            base.as_signed(rows).index_copy_(0, places, base.as_signed(tensor))
            return rows.view(n_elems, n_timesteps, *tensor.shape[1:])

        return cls(packed._map(unpack), lengths, info)

    def slice(self, start: int, stop: int | None = None) -> TemporalDictTensor:
        """Return views of rows ``start <= i < stop``, or of row ``start`` with B = 1."""
        if stop is None:
            start = base.instance(base.resolve_rows(start, self.n_elems()), int, "start")
            stop = start + 1
        return self.index(slice(start, stop))

    @staticmethod
    def cat(parts: Iterable[TemporalDictTensor]) -> TemporalDictTensor:
        """Concatenate trajectories, copying; T becomes the largest T, padded with zeros.

        Args:
            parts: Batches with the same keys, dtypes, step shapes, info keys and device. An empty
                list gives an empty ``TemporalDictTensor``. The ``first_step`` of windows is dropped
                unless all parts have it; slices of later steps do not.

        Raises:
            SpecError: If the parts differ.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> TemporalDictTensor.cat([batch, batch]).lengths
            tensor([3, 1, 3, 1])
        """
        batches = base.listed(parts, TemporalDictTensor, "cat")
        if not batches:
            return TemporalDictTensor({})
        for part in batches:
            part.n_elems()  # refuses a single trajectory
        longest = max(part.n_timesteps() for part in batches)
        steps = [
            part._steps
            if part.n_timesteps() == longest
            else part._steps._map(base.padded(1, longest))
            for part in batches
        ]
        tensors = cat_named(steps, "part")._tensors
        infos = [copy(part._info) for part in batches]
        if not all("first_step" in info for info in infos):
            for info in infos:
                info._tensors.pop("first_step", None)
        info = cat_named(infos, "the info of part")
        return TemporalDictTensor._wrap(tensors, torch.cat([p._lengths for p in batches]), info)

    def set(self, key: str, tensor: Tensor) -> None:
        """Add or replace a tensor, in place; the tensor is not copied.

        Args:
            key: Its name.
            tensor: ``[B, T, ...]`` on the same device. Without keys and rows, it determines B and
                T, and every row is full.

        Raises:
            SpecError: If it is not a tensor, or its first two dimensions or its device differ.
        """
        n_elems = self.n_elems()
        steps = [*self._tensors.items(), (key, tensor)]
        base.check(steps, 2)
        if not self._tensors:
            lengths = self._lengths if n_elems else None
            self._lengths = TemporalDictTensor({key: tensor}, lengths, self._info)._lengths
        self._tensors[key] = tensor

    def copy_(
        self, source: TemporalDictTensor, source_indexes: Tensor, destination_indexes: Tensor
    ) -> None:
        """Copy trajectories of ``source`` over rows of ``self``; storage is kept.

        Lengths and ``info`` are copied too. T may differ: if ``source`` has fewer time steps, the
        rest becomes zeros.

        Args:
            source: Has at least the keys of ``self`` (and of its ``info``), with the same dtypes,
                step shapes and device.
            source_indexes: Rows to read, int ``[N]`` or a bool mask.
            destination_indexes: Rows to write, as many. If a row occurs twice, either may win.

        Raises:
            IndexError: If a row does not exist.
            SpecError: If batches or numbers of rows do not match, a trajectory is longer than T, or
                a tensor of ``self`` cannot be written in place.

        If it raises, nothing has been written.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> store = batch.expand(3)
            >>> store.copy_(batch, torch.tensor([0]), torch.tensor([2]))
            >>> store.lengths
            tensor([3, 1, 3])
        """
        sizes = base.instance(source, TemporalDictTensor, "source").n_elems(), self.n_elems()
        check_alike(self, source, 2, "source", subset=True)
        info = self._info
        check_alike(info, source._info, 1, "the info of source", subset=True)
        read, write = base.row_pair(source_indexes, destination_indexes, sizes, self.device())
        lengths, n_timesteps = source._lengths[read], self.n_timesteps()
        if base.longest(lengths) > n_timesteps:
            text = f"a trajectory of {base.longest(lengths)} steps does not fit into {n_timesteps}"
            raise SpecError(text, fix="cut it with temporal_slice(0, T)")
        n_common = min(n_timesteps, source.n_timesteps())
        pad = base.padded(1, n_timesteps) if n_common < n_timesteps else lambda tensor: tensor
        steps = source.get(self)._in_time(0, n_common)
        base.write_rows_(
            [
                *((key, t, pad(base.selected(steps[key], read))) for key, t in self.items()),
                *((f"info/{k}", t, base.selected(source._info[k], read)) for k, t in info.items()),
                ("lengths", self._lengths, lengths),
            ],
            write,
        )

    def per_agent(
        self, group: str = "", *, shared: Collection[str] = ("state", "noise")
    ) -> TemporalDictTensor:
        """Split joint episodes of a ``PettingZooEnv`` by agent, for independent learners.

        Each agent gets a row with its own steps, from the one in which it was born to the one in
        which it left. Keys with an axis of agents, such as ``frame [B, T, A, ...]``, become
        ``[B * A, T', ...]``. ``_rewards`` becomes ``_reward``; ``_terminations`` and
        ``_truncations`` become ``_terminated`` and ``_truncated``, which are also True for agents
        alive at the end of the joint episode. Keys without that axis, such as ``state`` and
        ``noise``, are repeated for each agent. The joint reward is dropped.

        Args:
            group: The group of agents, if there are several. Its name is removed from the keys, and
                the keys of other groups are dropped.
            shared: First parts of keys without an axis of agents. Only needed for keys of a single
                group whose third dimension happens to have size A.

        Returns:
            Copies ``[B * A, T', ...]``, T' being the longest life, zero-padded past ``lengths``.
            Row ``i * A + a`` is agent ``a`` of row ``i``, ``info["agent"]`` is ``a``,
            ``info["episode"]`` is numbered likewise (in windows ``info["lane"]``), and the rest of
            ``info`` is that of the joint episode. An agent that was never alive has length 0. In
            windows of a ``Batcher``, a row holds an agent's successive lives.

        Raises:
            SpecError: If the group does not exist.
        """
        return TemporalDictTensor.from_packed(*agent_axis.packed(self, group, shared))

    def from_agents(self, values: Tensor, group: str = "") -> Tensor:
        """Scatter values of each agent's own steps to joint episodes: the inverse of ``per_agent``.

        Args:
            values: ``[B * A, T', ...]``, such as advantages of ``per_agent(group)``.
            group: The group of agents.

        Returns:
            A copy ``[B, T, A, ...]``, zero where an agent was not alive.

        Raises:
            SpecError: If the group does not exist, or ``values`` have another shape.

        Example:
            >>> steps = {
            ...     "alive": torch.tensor([[[True, True], [True, False]]]),
            ...     "born": torch.tensor([[[True, True], [False, False]]]),
            ... }
            >>> episodes = TemporalDictTensor(steps)  # one of two agents, the second leaves early
            >>> episodes.from_agents(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
            tensor([[[1., 3.],
                     [2., 0.]]])
        """
        return agent_axis.joined(self, values, group)

    def unpadded(self, key: str, n_values: str) -> list[list[Tensor]]:
        """Return values of different lengths, such as texts, without their padding.

        Args:
            key: Key of padded values ``[B, T, L, ...]``.
            n_values: Key of their lengths, integers ``[B, T]`` or ``[B, T, 1]`` from 0 to L.

        Returns:
            A list of views ``[n, ...]`` per row, one for each step.

        Raises:
            KeyError, SpecError: If a key is missing, or lengths and values do not match.

        Example:
            >>> text, n = torch.tensor([[[7, 8, 0], [9, 0, 0]]]), torch.tensor([[2, 1]])
            >>> TemporalDictTensor({"text": text, "n": n}).unpadded("text", "n")
            [[tensor([7, 8]), tensor([9])]]
        """
        values, numbers = self[key], self[n_values]
        numbers = numbers.squeeze(2) if numbers.shape[2:] == (1,) else numbers
        used = numbers[base.steps_within(self._lengths, self.n_timesteps())]
        fits = values.ndim > 2 and numbers.ndim == 2 and not used.is_floating_point()
        if not fits or (len(used) and not 0 <= used.min() <= used.max() <= values.shape[2]):
            message = f"{n_values!r} is {base.kind(self[n_values])}, {key!r} is {base.kind(values)}"
            fix = f"{n_values!r} has to hold the lengths, 0 to L, of {key!r} [B, T, L, ...]"
            raise SpecError(message, fix=fix)
        rows = zip(values, numbers.tolist(), self._lengths.tolist(), strict=True)
        return [[row[step, : ns[step]] for step in range(length)] for row, ns, length in rows]

    def to_tensordict(self) -> Any:
        """Convert to a ``tensordict.TensorDict`` without copying (needs ``tensordict``).

        It has batch size ``[B]`` and the entries ``steps`` (a ``TensorDict`` ``[B, T]``),
        ``lengths`` and ``info`` (a ``TensorDict`` ``[B]``).

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.to_tensordict()["steps"].batch_size
            torch.Size([2, 3])
        """
        make, size = import_extra("tensordict", "tensordict").TensorDict, [self.n_elems()]
        steps = make(self._tensors, [*size, self.n_timesteps()])
        info = make(self._info._tensors, size)
        return make({"steps": steps, "lengths": self._lengths, "info": info}, size)

    @staticmethod
    def from_tensordict(tensordict: Any) -> TemporalDictTensor:
        """Convert a ``TensorDict`` of the layout of ``to_tensordict`` without copying.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> TemporalDictTensor.from_tensordict(batch.to_tensordict()).lengths
            tensor([3, 1])
        """
        entries = DictTensor._wrap(base.of_tensordict(tensordict))
        if "lengths" not in entries:
            raise SpecError(
                f"the TensorDict has the entries {list(entries)}",
                fix="it needs steps [B, T], lengths [B] and optionally info [B]",
            )
        steps, info = entries.truncate_key("steps/"), entries.truncate_key("info/")
        return TemporalDictTensor(steps, entries["lengths"], info)

    def __reduce__(self) -> tuple[Callable[..., TemporalDictTensor], tuple[Any, ...]]:
        return _from_parts, (self._steps, base.compact(self._lengths), self._info)

    def __repr__(self) -> str:
        info = self._info.prepend_key("info/").items()
        entries = [*self.items(), ("lengths", self._lengths), *info]
        notes = {"reward": "  before the step; _reward: earned by it"} if "_reward" in self else {}
        return base.table("TemporalDictTensor", entries, **notes)


def _from_parts(steps: DictTensor, lengths: Tensor, info: DictTensor) -> TemporalDictTensor:
    return TemporalDictTensor._wrap(steps._tensors, lengths, info)


torch.serialization.add_safe_globals([_from_parts])  # as for DictTensor

_pytree.register_pytree_node(
    TemporalDictTensor,
    lambda data: ([data._steps, data._lengths, data._info], None),
    lambda parts, _: _from_parts(*parts),
)


def _check_lengths(lengths: Tensor, first: Tensor | None) -> None:
    """Refuse lengths that are not int64 ``[B]`` from 0 to T, given ``first``, ``[B, T, ...]``."""
    fix = "lengths are int64 [B], each from 0 to T"
    if not isinstance(lengths, Tensor) or lengths.dtype is not torch.int64 or lengths.ndim != 1:
        raise SpecError(f"lengths are {base.kind(lengths)}", fix=fix)
    low, high = (int(bound) for bound in lengths.aminmax()) if len(lengths) else (0, 0)
    if low < 0 or (first is not None and high > first.shape[1]):
        size = "" if first is None else f", T is {first.shape[1]}"
        raise SpecError(f"lengths go from {low} to {high}{size}", fix=fix)
