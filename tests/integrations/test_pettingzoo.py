"""PettingZoo: its environments, compared step by step with loops over its interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlpool import EpisodeBatcher
from rlpool.integrations.pettingzoo import PettingZooEnv

from support.many_agents import RandomAgents, check_agents, check_joint_episode
from support.programs import run_block

pytest.importorskip("pymunk", reason="needs the extra: pip install 'rlpool[integrations]'")

from mpe2 import simple_speaker_listener_v4, simple_spread_v3, simple_tag_v3
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies
from pettingzoo.classic.rps import rps
from pettingzoo.classic.tictactoe import tictactoe
from pettingzoo.sisl.pursuit import pursuit
from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel

with warnings.catch_warnings():
    # Box2D crashes where a DeprecationWarning is an error; these packages import deprecated names.
    warnings.simplefilter("ignore")
    from pettingzoo.sisl.multiwalker import multiwalker

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "many_agents.md"

Make = Callable[[], Any]

PARALLEL: dict[str, Make] = {
    "speaker": partial(simple_speaker_listener_v4.parallel_env, max_cycles=8),
    "tag": partial(simple_tag_v3.parallel_env, max_cycles=8),
    "continuous": partial(simple_spread_v3.parallel_env, max_cycles=8, continuous_actions=True),
    "walkers that fall alone": partial(
        multiwalker.parallel_env, max_cycles=120, terminate_on_fall=False, remove_on_fall=True
    ),
    "pursuit": partial(pursuit.parallel_env, max_cycles=8),
    "zombies": partial(knights_archers_zombies.parallel_env, max_cycles=300),
}
TURNS: dict[str, Make] = {
    "tictactoe": tictactoe.env,
    "rock": partial(rps.env, max_cycles=4),
}


def sizes_of(env: PettingZooEnv) -> dict[str, int]:
    """Return each group's action key with its number of choices, 0 for numbers."""
    spaces = env.action_space.spaces if len(env.groups) > 1 else {"": env.action_space}
    return {
        f"action/{name}" if name else "action": int(space.nvec[0]) if hasattr(space, "nvec") else 0
        for name, space in spaces.items()
    }


def collected(make: Make, n_episodes: int = 4) -> Any:
    """Return episodes and the groups of their agents."""

    def create_env(seed: int) -> PettingZooEnv:
        return PettingZooEnv([make(), make()], seed)

    env = create_env(0)
    agent_args = {"sizes": sizes_of(env)}
    with EpisodeBatcher(
        64, 8, RandomAgents, agent_args, create_env, n_workers=0, seed=3
    ) as batcher:
        batcher.execute(n_episodes)
        return batcher.get(), env.groups


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.filterwarnings("ignore:.*calling render method:UserWarning")
def test_a_joint_episode_matches_a_hand_written_loop(name: str) -> None:
    make = PARALLEL[name]
    n_episodes = 2 if name == "zombies" else 4  # its second episode depends on its first one
    episodes, groups = collected(make, n_episodes)
    for row in range(n_episodes):
        check_joint_episode(episodes, row, make(), groups)
    check_agents(episodes, groups)
    if name in ("zombies", "walkers that fall alone"):
        alive = episodes["alive"] & (episodes.mask().bool())[..., None]
        assert (alive.any(-1) & ~alive.all(-1)).any()  # some die earlier than others


@pytest.mark.parametrize("name", TURNS)
def test_turn_based_games_match_pettingzoos_conversion(name: str) -> None:
    make = TURNS[name]
    is_parallelizable = make().metadata["is_parallelizable"]
    convert = aec_to_parallel if is_parallelizable else turn_based_aec_to_parallel
    episodes, groups = collected(make)
    for row in range(4):
        check_joint_episode(episodes, row, convert(make()), groups)
    check_agents(episodes, groups)
    if not is_parallelizable:
        assert (episodes["acting"].sum(-1) == episodes.mask()).all()


def test_the_example_in_the_docs_runs(program_folder: Path, capfd: Any) -> None:
    run_block("docs/many_agents.md", 0, program_folder)
    output, errors = capfd.readouterr()
    assert errors == ""
    assert f"```text\n{output}```" in PAGE.read_text(encoding="utf-8")
