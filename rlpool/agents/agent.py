"""The contract of an agent."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, UsageError, compose

_DEFINE_CALL = (
    "define __call__(self, state, observation, agent_info=None, history=None) in its class"
)

AgentStep = tuple[DictTensor | None, DictTensor, DictTensor | None]
"""What a call returns: the state it started from, its outputs, the state after it."""


class Agent:
    """Chooses the actions of a batch of lanes. Subclass it and implement ``__call__``.

    An instance lives in each worker process (or in the caller's with ``n_workers=0``) and runs
    there under ``torch.inference_mode`` with one torch thread.

    A call always gets one row per lane of the worker, even when fewer episodes are left than
    there are lanes: rows of idle lanes are copies of a running one (observation, state, infos,
    history and noise alike) whose results are dropped, and an episode keeps its row from beginning
    to end. Rounding in a matrix product depends on the number of rows and on the position of a
    row, so this makes results independent of the number of workers.

    Attributes:
        n_noise: How many random numbers per row and step the agent needs. They arrive as
            ``observation["noise"]``, float32 ``[B, n_noise]``, uniform in [0, 1), and depend only
            on the episode and its step. An agent that takes all its randomness from them (see
            ``sample_normal``) gives bitwise the same episodes for any number of workers.

    Example:
        >>> class Coin(Agent):
        ...     n_noise = 1
        ...
        ...     def __call__(self, state, observation, agent_info=None, history=None):
        ...         action = (observation["noise"][:, 0] < 0.5).long()
        ...         return DictTensor(), DictTensor({"action": action}), DictTensor()
        >>> evaluate(Coin(), create_env, n_episodes=3).returns
        tensor([10., 10., 10.])
    """

    n_noise: int = 0

    def __call__(
        self,
        state: DictTensor | Any,
        observation: DictTensor,
        agent_info: DictTensor | Any = None,
        history: TemporalDictTensor | Any = None,
    ) -> AgentStep:
        """Choose one action per row.

        Args:
            state: The new state that this agent returned one step before, row by row, in float32
                where it returned bfloat16. ``None`` means that all rows start an episode; rows that
                start get a separate call, unless the agent overrides ``initial_state`` or keeps no
                state.
            observation: The environments' keys, ``reward``, ``terminated``, ``truncated``,
                ``done``, ``initial_state``, ``last_action`` and ``noise`` if ``n_noise``, each
                ``[B, ...]``. The tensors are buffers that are rewritten after the call: clone
                anything you keep outside the state. What is changed in place changes nothing that
                is recorded.
            agent_info: Each episode's row of ``execute(agent_info=...)``, ``None`` if it was not
                given.
            history: All previous steps of the same episodes, if ``require_history()``: the keys
                of a trajectory, with lengths of 0 at the first step. A copy.

        Returns:
            ``(state, output, new_state)``: the state the call started from (initialised where it
            got ``None``), the outputs with at least ``action`` (for nested action spaces
            ``action/...``), and the state after the step. An agent without a memory returns an
            empty ``DictTensor``, or ``None``, as both states. Outputs and states are stored in the
            trajectory under their keys, those in bfloat16 as float32. Shapes and dtypes must never
            change, but what is float32 at first may be a half precision later, as autocast has it.
        """
        # The next class in the order of bases, such as nn.Module, may have one.
        call = getattr(super(), "__call__", None)  # noqa: B004  (of the next class)
        if call is None:
            what = f"{type(self).__name__} does not say how to choose actions"
            raise NotImplementedError(compose(what, fix=_DEFINE_CALL))
        result: AgentStep = call(state, observation, agent_info, history)
        return result

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor | None:
        """The state of rows that start an episode, for agents that override this.

        Overriding it saves a call whenever lanes start at different times, since the agent is
        never called with ``state=None`` then.

        Args:
            agent_info: The rows' ``agent_info``, ``[n, ...]``, or ``None``.
            n: Number of rows.

        Returns:
            The state, ``[n, ...]``.
        """
        return None

    def makes_initial_states(self) -> bool:
        """Whether to call ``initial_state``: whether it is overridden.

        An agent that wraps another one returns ``self.inner.makes_initial_states()``.
        """
        return type(self).initial_state is not Agent.initial_state

    def require_history(self) -> bool:
        """Whether ``__call__`` needs ``history``. Called once."""
        return False

    if TYPE_CHECKING:
        update: Callable[..., Any]  # also nn.Module.load_state_dict
    else:

        def update(self, info: Any) -> None:
            """Apply the object passed to ``batcher.update(info)``, such as a state dict.

            Args:
                info: The caller's object. Its tensors may be views of memory that is released after
                    the call: copy them, as ``load_state_dict`` does.
            """
            raise UsageError(
                f"{type(self).__name__} does not implement update(info)",
                fix="define update(self, info), for instance self.model.load_state_dict(info)",
            )

        def to(self, *arguments: Any, **named: Any) -> Any:
            """Move the agent to a device, as ``nn.Module.to``, if it is a module."""
            if not isinstance(self, nn.Module):
                what = f"{type(self).__name__} is not a torch module, so it has no to()"
                fix = "class MyAgent(Agent, nn.Module), or move its network: self.network.to(...)"
                raise UsageError(what, fix=fix)
            return super().to(*arguments, **named)

    def seed(self, seed: int) -> None:
        """Seed the agent's own generators. Called once.

        Args:
            seed: In ``[0, 2**31)``, different in every worker.
        """

    def close(self) -> None:
        """Release the agent's resources. Called once, when the worker ends."""


def refuse_no_agent(agent: Any, called: str = "agent is") -> None:
    """Raise unless an object is an agent that can be called.

    The method called is ``__call__`` or, if ``nn.Module`` provides that, ``forward``.

    Args:
        agent: The object.
        called: How errors begin.

    Raises:
        SpecError: If it is a class, something else, or an agent that cannot be called.
    """
    if isinstance(agent, type):
        fix = f"an instance is needed: {agent.__name__}(...)"
        raise SpecError(f"{called} the class {agent.__name__}, not an Agent", fix=fix)
    kind, method, fix = type(agent), "__call__", _DEFINE_CALL
    if not isinstance(agent, Agent):
        fix = "make it an instance of a subclass of rlpool.Agent: class MyAgent(Agent, nn.Module)"
        raise SpecError(f"{called} {kind.__name__}, not an Agent", fix=fix)
    if isinstance(agent, nn.Module) and "_modules" not in vars(agent):
        what = f"{kind.__name__}.__init__ does not call that of nn.Module"
        raise SpecError(what, fix="call super().__init__() first in it")
    if kind.__call__ in (Agent.__call__, nn.Module.__call__):
        method = "forward"
        forward = agent.forward if isinstance(agent, nn.Module) else nn.Module.forward
        if getattr(forward, "__func__", forward) is nn.Module.forward:
            agents = (k for k in kind.__mro__ if issubclass(k, Agent) and k is not Agent)
            if any("__call__" in vars(k) for k in agents):
                fix += ", or put nn.Module last in its bases: its __call__ hides the agent's"
            raise SpecError(f"{kind.__name__} does not say how to choose actions", fix=fix)
    function = getattr(agent, method)
    try:
        inspect.signature(function).bind(None, None, None, None)
    except ValueError:
        pass  # it has no signature that is known
    except TypeError:
        what = f"{kind.__name__}.{method} takes {inspect.signature(function)}"
        raise SpecError(f"{what}, not the four arguments of agents", fix=fix) from None
    n_noise = agent.n_noise
    if isinstance(n_noise, bool) or not isinstance(n_noise, int) or n_noise < 0:
        what = f"n_noise of the agent is {n_noise!r}, not a number of random numbers per step"
        raise SpecError(what, fix="set n_noise to an int of at least 0")


def refuse_no_factory(name: str, function: Any) -> None:
    """Refuse what is not a function; agents and environments may be callable, too.

    Raises:
        SpecError: With the name of the argument.
    """
    is_agent = isinstance(function, Agent | nn.Module)
    if callable(function) and not is_agent:
        return
    what, fix = f"{function!r:.80}", f"pass a function as {name}"
    if is_agent or hasattr(function, "step"):
        what = f"an object, {type(function).__name__}"
        fix = f"pass the function or class that makes it, which every worker calls: {name}=" + (
            "MyAgent, agent_args={...}" if name == "create_agent" else "lambda seed: GymEnv(...)"
        )
    raise SpecError(f"{name} is {what}", fix=fix)
