"""``python -m rlpool evaluate``, ``compare`` and ``verify``."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlpool.agents.agent import Agent, refuse_no_agent
from rlpool.errors import RlpoolError, SpecError, described
from rlpool.evaluation.evaluate import AGENT_ROWS, evaluate
from rlpool.evaluation.figures import compare, returns_of
from rlpool.evaluation.result import Evaluation
from rlpool.evaluation.verification import verify
from rlpool.machine.arguments import real_number
from rlpool.machine.files import checked_target
from rlpool.machine.imports import import_extra

COMMANDS = ("evaluate", "compare", "verify")


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands.

    Args:
        arguments: What follows ``python -m rlpool``.

    Returns:
        The exit code: 1 if ``verify`` finds a difference, 2 for what cannot be done.
    """
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except Exception as error:  # 1 would say that verify has found a difference
        is_told = isinstance(error, RlpoolError | ImportError | OSError)
        sys.stderr.write(f"{error if is_told else described(error)}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlpool")
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    env_args = _taking('a JSON object such as {"size": 3}', lambda text: {**json.loads(text)})
    seeds = _taking("a range such as 0:200, or seeds such as 3,5,8", _seeds)
    failures = _taking("exclude or a finite number", _failures)

    def add_subject(made: argparse.ArgumentParser) -> None:
        made.add_argument("create_env", help="module:function, as for evaluate()")
        made.add_argument("load_agent", help="module:function without arguments: the agent")
        made.add_argument("--env-args", type=env_args, default={}, help="JSON: {...}")
        made.add_argument("--n-workers", "--workers", type=int, default=0, help="worker processes")

    one = command("evaluate", _evaluate, "Evaluate an agent, show figures, write a record.")
    add_subject(one)
    one.add_argument("--episodes", type=int, help="how many")
    one.add_argument("--seed", type=int, default=0, help="from which all seeds derive")
    one.add_argument("--episode-seeds", type=seeds, help="seeds of the episodes: 0:200, or 3,5,8")
    one.add_argument("--agent-rows", type=int, default=AGENT_ROWS, help="see evaluate()")
    one.add_argument("--infos", nargs="+", default=[], help="keys of infos to record")
    one.add_argument("--on-env-error", default="raise", help="raise, restart or truncate")
    one.add_argument("--record", help="append episodes to this file, and go on from it")
    one.add_argument("--out", help="write the record to this JSON file")
    one.add_argument("--plot", help="draw returns and intervals into this file")
    one.add_argument("--failures", type=failures, help="how failed episodes count")

    two = command("compare", _compare, "Compare two records, episode by episode of one seed.")
    two.add_argument("first")
    two.add_argument("second")
    two.add_argument("--failures", type=failures, help="exclude, or the return that they get")
    two.add_argument("--plot", help="draw both into this file")

    three = command("verify", _verify, "Run some episodes of a record again.")
    three.add_argument("record")
    add_subject(three)
    three.add_argument("--episodes", type=int, default=5, help="how many")
    return parser


def _taking(what: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """What reads the text of a flag: its error says what the flag takes."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"takes {what}, got {text!r}") from None

    return checked


def _seeds(text: str) -> Sequence[int]:
    if ":" in text:
        return range(*map(int, text.split(":")))
    return [int(seed) for seed in text.split(",")]


def _failures(text: str) -> str | float:
    return text if text == "exclude" else real_number("it", float(text), "that is finite")


def _subject(args: argparse.Namespace) -> tuple[Any, Any]:
    """The agent, and what makes the environments.

    The user's modules are imported and called here alone: whatever they raise becomes one error,
    which names the argument.
    """
    found = {}
    for argument in ("create_env", "load_agent"):
        name = getattr(args, argument)
        try:
            found[argument] = _function(name)
            if argument == "load_agent":
                found[argument] = found[argument]()
                refuse_no_agent(found[argument])
        except RlpoolError as error:
            raise SpecError(f"{argument} {name}: {error.what}", fix=error.fix) from error
        except (Exception, SystemExit) as error:
            raise SpecError(f"{argument} {name}: {described(error)}") from error
    return found["load_agent"], found["create_env"]


def _function(name: str) -> Any:
    """What ``module:function`` names; modules of the working directory are found."""
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name):
        raise SpecError("it is not module:function", fix="such as my_module:create_env")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = pkgutil.resolve_name(name)
    if not callable(found) or isinstance(found, Agent):
        raise SpecError(f"it is of type {type(found).__name__}", fix="name a function")
    return found


def _evaluate(args: argparse.Namespace) -> int:
    _check_outputs(args)
    found = evaluate(
        *_subject(args),
        args.episodes,
        env_args=args.env_args,
        n_workers=args.n_workers,
        seeds=args.seed,
        episode_seeds=args.episode_seeds,
        agent_rows=args.agent_rows or None,
        infos=args.infos,
        record=args.record,
        progress=True,
        on_env_error=args.on_env_error,
    )
    if args.out:
        found.save(args.out)
    sys.stdout.write(f"{found.summary(failures=args.failures)}\n")
    if args.plot:
        plot({args.load_agent: found}, args.plot, failures=args.failures)
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse what cannot be written before anything is run."""
    for flag in ("out", "plot"):
        if (path := getattr(args, flag, None)) is not None:
            checked_target(f"--{flag}", path)
    if getattr(args, "plot", None) is not None:
        kinds = _figure_kind()().canvas.get_supported_filetypes()
        if Path(args.plot).suffix[1:].lower() not in kinds:
            what = f"--plot={args.plot!r} does not end as pictures do that matplotlib writes"
            raise SpecError(what, fix=f"choose one of {', '.join(sorted(kinds))}")


def _compare(args: argparse.Namespace) -> int:
    _check_outputs(args)
    first, second = Evaluation.load(args.first), Evaluation.load(args.second)
    for name, each in ((args.first, first), (args.second, second)):
        sys.stdout.write(f"{name}\n{each.summary(failures=args.failures)}\n\n")
    sys.stdout.write(f"{compare(first, second, failures=args.failures)}\n")
    if args.plot:
        plot({args.first: first, args.second: second}, args.plot, failures=args.failures)
    return 0


def _verify(args: argparse.Namespace) -> int:
    found = verify(
        Evaluation.load(args.record),
        *_subject(args),
        n_episodes=args.episodes,
        env_args=args.env_args,
        n_workers=args.n_workers,
    )
    sys.stdout.write(f"{found}\n")
    return int(bool(found.differences))


def _figure_kind() -> Any:
    return import_extra("matplotlib.figure", "evaluation").Figure


def plot(
    evaluations: Mapping[str, Evaluation],
    path: str | os.PathLike[str],
    *,
    failures: str | float | None = None,
) -> None:
    """Draw returns, mean returns with their intervals, and performance profiles.

    Args:
        evaluations: By name, what to draw.
        path: The picture, of a kind that matplotlib writes.
        failures: See ``Evaluation.summary``.
    """
    figure = _figure_kind()(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (name, evaluation) in enumerate(evaluations.items()):
        returns = np.sort(returns_of(evaluation, failures)[0])
        mean = evaluation.summary(failures=failures).mean
        spread = np.linspace(-0.2, 0.2, len(returns))
        left.scatter(number + spread, returns, s=6, alpha=0.5, color=f"C{number}")
        bars = np.nan_to_num([[mean.value - mean.low], [mean.high - mean.value]])
        left.errorbar([number], [mean.value], bars, fmt="o", capsize=8, color="black")
        above = 1 - np.arange(len(returns) + 1) / len(returns)
        right.step(np.append(returns, returns[-1]), above, where="post", label=name)
    left.set_xticks(range(len(evaluations)), [Path(name).name for name in evaluations])
    left.set(ylabel="return", title="episodes, mean and its 95 % interval")
    right.set(xlabel="return", ylabel="share of episodes above it", title="performance profile")
    right.legend()
    figure.savefig(path, dpi=120)
