"""The interface of an agent."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rlpool.data.dict_tensor import DictTensor
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import signature_of

_GIVEN = ("state", "observation", "agent_info", "history")
"""Arguments that a call can receive, in positional order."""

_DEFINE_CALL = "define __call__(self, observation) in its class, or forward in a module"

Tensors = DictTensor | Mapping[str, Tensor]

AgentStep = tuple[DictTensor | None, DictTensor, DictTensor | None]
"""The state before a step, the outputs of the step, and the state after it."""


class Agent:
    """Chooses the actions of a batch of lanes. Subclass it and define ``__call__``.

    A subclass that is also an ``nn.Module`` defines ``forward`` instead. Each worker process (or
    the caller with ``n_workers=0``) has one instance and calls it under ``torch.inference_mode``
    with one torch thread.

    A call receives the arguments that its signature names, in any order, by keyword:

    - ``observation``: a ``DictTensor`` of the environments' keys, ``reward``, ``terminated``,
      ``truncated``, ``done``, ``initial_state``, ``last_action``, and ``noise`` if ``n_noise``,
      each ``[B, ...]``. The tensors are buffers that are overwritten after the call: clone anything
      you keep outside the state. Changes in place do not affect the recorded values.
    - ``state``: a ``DictTensor``, the state returned by the previous call, row by row (bfloat16 as
      float32). Rows that start an episode get the state from ``initial_state``. An agent that does
      not override ``initial_state`` is called with ``None`` for the rows that start.
    - ``agent_info``: a ``DictTensor``, each episode's row of ``execute(agent_info=...)``, or
      ``None`` without that argument.
    - ``history``: a ``TemporalDictTensor``, a copy of all previous steps of the same episodes with
      the keys of a trajectory; lengths are 0 at the first step. ``None`` unless it is required.

    Parameters with other names keep their defaults. A signature of four parameters in the order
    ``(state, observation, agent_info, history)`` may rename some of them: all four are then passed
    by position.

    A call returns one row per row of the observation, as one of:

    - ``outputs``, for agents without state: a dict or ``DictTensor`` with at least ``action``
      (``action/...`` for nested action spaces).
    - ``(outputs, next_state)``, for agents with ``initial_state``.
    - ``(state, outputs, next_state)``, for agents that create their own state when they are called
      with ``state=None``. ``state`` is the state before the step.

    Outputs and states are stored in the trajectory under their keys, bfloat16 as float32. Shapes
    and dtypes must never change, except that float32 values may become half precision later, as
    under autocast.

    A call always gets one row per lane of the worker, even when fewer episodes are left than
    lanes. Idle lanes repeat the row of a running lane (observation, state, infos, history and
    noise), and their results are dropped. An episode keeps its row from beginning to end. Rounding
    in a matrix product depends on the number of rows and on the position of a row, so this makes
    results independent of the number of workers.

    Attributes:
        n_noise: Number of random numbers per row and step that the agent needs. They arrive as
            ``observation["noise"]``, float32 ``[B, n_noise]``, uniform in [0, 1), and depend only
            on the episode and its step. An agent without any other randomness (see
            ``sample_normal``) produces bitwise the same episodes for any number of workers.

    Example:
        >>> class Coin(Agent):
        ...     n_noise = 1
        ...
        ...     def __call__(self, observation):
        ...         return {"action": (observation["noise"][:, 0] < 0.5).long()}
        >>> evaluate(Coin(), create_env, n_episodes=3).returns
        tensor([10., 10., 10.])
    """

    n_noise: int = 0

    if TYPE_CHECKING:
        __call__: Callable[..., Any]

    def initial_state(self, agent_info: DictTensor | None, n: int) -> Tensors | None:
        """Return the state of rows that start an episode. Optional.

        An agent that overrides this is never called with ``state=None``, which saves a call
        whenever lanes start at different times.

        Args:
            agent_info: The rows' ``agent_info``, ``[n, ...]``, or ``None``.
            n: Number of rows.

        Returns:
            The state, ``[n, ...]``, a dict or ``DictTensor``.
        """
        return None

    def makes_initial_states(self) -> bool:
        """Whether ``initial_state`` is overridden.

        An agent that wraps another one returns ``self.inner.makes_initial_states()``.
        """
        return type(self).initial_state is not Agent.initial_state

    def require_history(self) -> bool:
        """Whether calls need ``history``. Called once.

        By default they do if the signature has ``history`` without a default.
        """
        return False

    if TYPE_CHECKING:
        update: Callable[..., Any]  # also nn.Module.load_state_dict
    else:

        def update(self, info: Any) -> None:
            """Apply the object passed to ``batcher.update(info)``: for a module, a state dict.

            Args:
                info: The caller's object. Its tensors may be views of memory that is released after
                    the call: copy them, as ``load_state_dict`` does.
            """
            if not isinstance(self, nn.Module):
                name = getattr(self, "_called", type(self).__name__)
                raise UsageError(
                    f"{name} does not implement update(info)",
                    fix="define update(self, info), for instance self.model.load_state_dict(info)",
                )
            self.load_state_dict(info)

        def to(self, *arguments: Any, **named: Any) -> Any:
            """Move the agent to a device if it is a module, as ``nn.Module.to`` does."""
            if not isinstance(self, nn.Module):
                message = f"{type(self).__name__} is not a torch module, so it has no to()"
                fix = "class MyAgent(Agent, nn.Module), or move its network: self.network.to(...)"
                raise UsageError(message, fix=fix)
            return super().to(*arguments, **named)

    def seed(self, seed: int) -> None:
        """Seed the agent's own generators. Called once.

        Args:
            seed: In ``[0, 2**31)``, different in every worker.
        """

    def close(self) -> None:
        """Release the agent's resources. Called once, when the worker ends."""


class _Adapted(Agent):
    """Adapts an agent with any signature to calls by position.

    Args:
        call: Calls the agent.
        made: The agent, an ``Agent`` or any callable.
        name: Its name in errors.
        named: Parameters of its call that are passed by keyword; ``None`` passes all by position.
    """

    def __init__(
        self, call: Any, made: Any, name: str, named: list[inspect.Parameter] | None
    ) -> None:
        self._call, self._called = call, name
        self._takes_all = named is None
        self._names = [each.name for each in named or ()]
        self._places = [_GIVEN.index(name) for name in self._names]
        self._needs_history = any(p.name == "history" and p.default is p.empty for p in named or ())
        self.n_noise = getattr(made, "n_noise", 0)
        if isinstance(made, Agent):
            for name in ("initial_state", "makes_initial_states", "update", "seed", "close"):
                setattr(self, name, getattr(made, name))
            if type(made).require_history is not Agent.require_history:
                self._needs_history = made.require_history()
        elif isinstance(made, nn.Module):
            self.update = made.load_state_dict

    def __call__(self, *given: Any) -> Any:
        if self._takes_all:
            return self._call(*given)
        taken = map(given.__getitem__, self._places)
        return self._call(**dict(zip(self._names, taken, strict=True)))

    def require_history(self) -> bool:
        return self._needs_history


def as_agent(made: Any, called: str = "agent is") -> Agent:
    """Return an agent that is called by position, wrapping the user's agent if necessary.

    Args:
        made: An ``Agent``, an ``nn.Module``, or another callable.
        called: Start of error messages.

    Raises:
        SpecError: If it is a class, or cannot be called as an agent.
    """
    call, made = made, getattr(made, "_orig_mod", made)  # the module inside torch.compile's wrapper
    kind = type(made)
    if isinstance(made, type):
        fix = f"an instance is needed: {made.__name__}(...)"
        raise SpecError(f"{called} the class {made.__name__}, not an agent", fix=fix)
    if isinstance(made, nn.Module) and "_modules" not in vars(made):
        message = f"{kind.__name__}.__init__ does not call nn.Module.__init__"
        raise SpecError(message, fix="call super().__init__() first in it")
    derives, function, method = isinstance(made, Agent), made, ""
    if not callable(made):
        if derives:
            raise SpecError(f"{kind.__name__} cannot choose actions", fix=_DEFINE_CALL)
        fix = "make it a module, a function of observation, or an instance of an rlpool.Agent"
        raise SpecError(f"{called} {kind.__name__}, not an agent", fix=fix)
    if kind.__call__ is nn.Module.__call__:
        function, method, fix = made.forward, ".forward", _DEFINE_CALL
        if getattr(function, "__func__", function) is nn.Module.forward:
            if any("__call__" in vars(k) for k in kind.__mro__ if issubclass(k, Agent)):
                fix = "put nn.Module last in its bases: its __call__ hides the agent's"
            raise SpecError(f"{kind.__name__} cannot choose actions", fix=fix)
    for name in ("n_noise", "initial_state", "require_history", "update") if not derives else ():
        if hasattr(made, name):
            bases = "nn.Module, Agent" if isinstance(made, nn.Module) else "Agent"
            fix = f"derive it from rlpool.Agent: class {kind.__name__}({bases})"
            raise SpecError(f"{called} {kind.__name__} with {name}, not an Agent", fix=fix)
    name = getattr(made, "__name__", kind.__name__) + method
    n_noise = made.n_noise if derives else 0
    if isinstance(n_noise, bool) or not isinstance(n_noise, int) or n_noise < 0:
        message = f"n_noise of the agent is {n_noise!r}, not a number of random numbers"
        raise SpecError(message, fix="set n_noise to an int of at least 0")
    named = _named_by(function, name)
    takes_all = named is None or tuple(p.name for p in named) == _GIVEN
    is_plain = takes_all and not (named and named[-1].default is named[-1].empty)
    if derives and is_plain and call is made:
        return made  # type: ignore[no-any-return]
    return _Adapted(call, made, name, named)


def _named_by(function: Callable[..., Any], name: str) -> list[inspect.Parameter] | None:
    """Return the parameters to pass by keyword, ``None`` to pass all by position.

    Raises:
        SpecError: If neither is possible.
    """
    try:
        signature = signature_of(function)
    except ValueError:
        return None  # the signature is unknown
    every = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p for p in every if p.name in _GIVEN and p.kind in by_keyword]
    others = [p for p in every if p not in named]
    is_moved = any(p in named and _GIVEN.index(p.name) != place for place, p in enumerate(every))
    if others and not is_moved:
        with suppress(TypeError):
            signature.bind(*_GIVEN)
            return None
    if named and all(p.default is not p.empty or p.kind is p.VAR_POSITIONAL for p in others):
        return named
    fix = "name the parameters it needs: observation, state, agent_info, history"
    if not every:
        fix = "pass an agent, not a function that makes one: call it first"
    raise SpecError(f"{name} takes {signature}, which are not the arguments of an agent", fix=fix)


def agent_step(returned: Any, state: DictTensor | None) -> AgentStep:
    """Normalise the return value of a call to ``(state, outputs, next_state)``.

    Args:
        returned: The return value.
        state: The state passed to the call.

    Raises:
        SpecError: If it is not a valid return value.
    """
    n_values = len(returned) if isinstance(returned, tuple | list) else 1
    if n_values == 3:
        return returned  # type: ignore[no-any-return]
    if n_values == 2 and all(isinstance(p, DictTensor | Mapping | None) for p in returned):
        outputs, after = returned
        if state is None and not DictTensor(after).empty():
            message = "the agent returned a next state, but does not define the first one"
            raise SpecError(message, fix="define initial_state(self, agent_info, n) in its class")
        return state, outputs, after
    if not isinstance(returned, DictTensor | Mapping):
        several = f" of {n_values}" if isinstance(returned, tuple | list) else ""
        message = f"the agent returned {type(returned).__name__}{several}, not its outputs"
        fix = 'return {"action": actions, ...}, or with a memory (outputs, next_state), both dicts'
        raise SpecError(message, fix=fix)
    if state is not None and not state.empty():
        raise SpecError("the agent returned no next state", fix="return (outputs, next_state)")
    return None, returned, None  # type: ignore[return-value]


def is_agent(thing: Any) -> bool:
    """Whether something is an agent, rather than a function that makes one."""
    if isinstance(thing, Agent | nn.Module):
        return True
    with suppress(TypeError, ValueError):  # not callable, or without a signature
        return not isinstance(thing, type) and "observation" in signature_of(thing).parameters
    return False


def check_is_factory(name: str, function: Any) -> None:
    """Refuse an argument that is not a factory function; agents and environments can be callable.

    Raises:
        SpecError: Naming the argument.
    """
    is_made = is_agent(function)
    if callable(function) and not is_made:
        return
    got, fix = f"{function!r:.80}", f"pass a function as {name}"
    if is_made or hasattr(function, "step"):
        its_name = getattr(function, "__name__", None)
        got = f"an object, {its_name or type(function).__name__}"
        made = "lambda: policy" if its_name else "MyAgent, agent_args={...}"
        made = made if name == "create_agent" else "lambda seed: GymEnv(...)"
        fix = f"pass the function or class that makes it; every worker calls it: {name}={made}"
    raise SpecError(f"{name} is {got}", fix=fix)
