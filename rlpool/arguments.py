"""Says which argument was meant by one that does not exist."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from rlpool.errors import UnknownArgumentError

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")

_SYNONYMS = (
    "n_threads num_threads n_workers num_workers workers n_processes num_processes processes",
    "seeds seed random_seed root_seed rng_seed",
    "n_timesteps n_steps num_steps num_timesteps timesteps steps rollout_length",
    "n_slots num_slots slots",
    "n_episodes num_episodes episodes batch_size",
    "create_env env_fn env_fns make_env env_creator env_factory env envs environments",
    "create_agent agent_fn make_agent agent_creator agent_factory agent policy",
    "env_args env_kwargs env_config",
    "agent_args agent_kwargs agent_config",
    "env_info env_infos options",
    "agent_info agent_infos",
    "pool_size capacity max_size buffer_size size",
    "blocking block wait",
    "timeout timeout_s",
)
"""Names for one thing, in rlpool and elsewhere."""

_NUMBER_OF_ENVS = "n_envs num_envs n_environments num_environments n_lanes num_lanes"

_CLOSE = 0.8
"""Names that are more alike than this are taken for misspellings of each other, from 0 to 1."""


def names_arguments(function: Callable[ParametersT, ResultT]) -> Callable[ParametersT, ResultT]:
    """Let a function refuse keywords that it does not have by naming those that it has.

    A function with ``**keywords`` of its own refuses only other names for its arguments.
    """
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name != "self"]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    @functools.wraps(function)
    def checked(*args: ParametersT.args, **kwargs: ParametersT.kwargs) -> ResultT:
        for name in kwargs:
            if name in parameters:
                continue
            meant = _synonym(name, names)
            if meant or not takes_any:
                what = f"{function.__qualname__.removesuffix('.__init__')}() takes no {name!r}"
                fix = f"pass {meant}" if meant else _guess(name, names)
                raise UnknownArgumentError(what, fix=fix)
        return function(*args, **kwargs)

    return checked


def _synonym(name: str, names: Sequence[str]) -> str:
    """Another name for the same thing, ``""`` if there is none."""
    for synonyms in map(str.split, _SYNONYMS):
        if name in synonyms:
            return next((other for other in synonyms if other in names), "")
    return ""


def _guess(name: str, names: Sequence[str]) -> str:
    """What to do about a name that stands for no argument."""
    if name in _NUMBER_OF_ENVS.split() and "create_env" in names:
        return "let create_env return so many: GymEnv([make() for _ in range(n)], seed)"
    close = difflib.get_close_matches(name, names, 1, _CLOSE)
    return f"pass {close[0]}" if close else f"it takes {', '.join(names)}"
