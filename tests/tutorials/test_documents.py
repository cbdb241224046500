"""Programs in the README and the documents run and print the documented output."""

from __future__ import annotations

import doctest
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.programs import blocks_of, run_as_main, run_source, run_with_ray, save_program
from support.variants import variants

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    "README.md",
    *(str(path.relative_to(REPOSITORY)) for path in sorted((REPOSITORY / "docs").rglob("*.md"))),
]


def text_of(document: str) -> str:
    return (REPOSITORY / document).read_text(encoding="utf-8")


BLOCKS = {
    f"{document}-{number}": source
    for document in DOCUMENTS
    for number, source in enumerate(blocks_of(document))
}
# A block with a main guard is a program. These have their own tests below.
NOT_RUN = {"docs/cluster.md-0", "docs/processes.md-1", "docs/training.md-0"}
# Programs of these pages are tested with the adapters.
WITH_LIBRARIES = ("docs/integrations.md-", "docs/many_agents.md-")
PROGRAMS = {
    name: source
    for name, source in BLOCKS.items()
    if 'if __name__ == "__main__":' in source and re.search(r"^(import|from) rlpool", source, re.M)
    if name not in NOT_RUN and not name.startswith(WITH_LIBRARIES)
}


QUOTED = {
    name: output
    for name, source in BLOCKS.items()
    for output in re.findall(
        rf"^```python\n{re.escape(source)}```\n\n```text\n(.*?)^```$",
        text_of(name.rpartition("-")[0]),
        re.MULTILINE | re.DOTALL,
    )
    if not name.startswith(WITH_LIBRARIES)
}
"""What a document says that a program prints, in the block right below it."""


def says(quoted: str, output: str) -> bool:
    """Whether the documented output matches, where ``...`` matches anything.

    Numbers in warnings about workers vary from run to run.
    """

    def comparable(text: str) -> str:
        return re.sub(r"^WARNING:.*$", lambda line: re.sub(r"\d+", "0", line[0]), text, flags=re.M)

    return doctest.OutputChecker().check_output(
        comparable(quoted), comparable(output), doctest.ELLIPSIS
    )


@contextmanager
def without_handlers() -> Iterator[None]:
    """Reset the root logger to the state of a new process, for programs that configure it."""
    level = logging.root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.root, "handlers", [])
        try:
            yield
        finally:
            logging.root.setLevel(level)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_runs(name: str, program_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with without_handlers():
        run_source(PROGRAMS[name], program_folder)
    output, errors = capfd.readouterr()
    assert errors == ""
    assert output
    if name in QUOTED:
        assert says(QUOTED[name], output), output
    if name == "README.md-0":
        returns = [float(value) for value in re.findall(r"average return (\d+)", output)]
        assert returns[0] < 50
        assert max(returns) > 200  # it learns


def test_guides_contain_programs_and_every_other_block_is_valid_python() -> None:
    assert set(BLOCKS) > NOT_RUN
    assert len(PROGRAMS) > 12
    assert {"docs/tour.md-0", "docs/migration.md-0"} <= set(QUOTED) <= set(PROGRAMS)
    for name, source in BLOCKS.items():
        compile(source, name, "exec")


@pytest.mark.ray
def test_the_cluster_program_runs_on_one_machine(program_folder: Path) -> None:
    script = save_program(blocks_of("docs/cluster.md")[0], program_folder)
    assert re.search(
        r"action +int64 \[256, \d+\]", run_with_ray(str(script), folder=program_folder)
    )


LEARNED_THE_SAME = """
    largest = torch.stack([p.detach().abs().max() for p in policy.parameters()])
    others = [torch.zeros_like(largest) for _ in range(dist.get_world_size())]
    dist.all_gather(others, largest)
    assert torch.equal(others[0], others[1])
    dist.destroy"""


@pytest.mark.slow
def test_the_multi_gpu_program_learns_the_same_in_two_processes(program_folder: Path) -> None:
    source = blocks_of("docs/processes.md")[1].replace("\n    dist.destroy", LEARNED_THE_SAME)
    script = save_program(source, program_folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    output = subprocess.check_output(
        command, cwd=program_folder, env=environment, text=True, timeout=240.0
    )
    assert output.count("average return") == 6


ADAPTERS = {
    "AtariVectorEnv": """
from ale_py.vector_env import AtariVectorEnv
from rlpool import VectorGymEnv

env = AtariVectorEnv("breakout", num_envs=4, num_threads=1, max_num_frames_per_episode=80)
env, seeding = VectorGymEnv(SeededLanes(env), 0, info_keys=["lives"]), "episode"
""",
    "envpool": """
import envpool
from rlpool import VectorGymEnv

pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, seed=0)
env, seeding = VectorGymEnv(PoolLanes(pool), 0, info_keys=["elapsed_step"]), "request"
""",
}
COLLECTING = """
from rlpool import EpisodeBatcher

def agent(observation):
    return {"action": (observation["reward"] * 0).long()}

assert env.seeding == seeding
with EpisodeBatcher(500, 16, lambda: agent, {}, lambda seed: env, n_workers=0, seed=42) as batcher:
    batcher.execute(16)
    print(batcher.get().lengths)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_vector_environment_runs_with_its_adapter(name: str, program_folder: Path) -> None:
    module = {"AtariVectorEnv": "ale_py.vector_env"}.get(name, name)
    pytest.importorskip(module)
    wrapper = blocks_of("docs/processes.md")[3 + [*ADAPTERS].index(name)]
    run_source(f"{wrapper}{ADAPTERS[name]}{COLLECTING}", program_folder)


@pytest.mark.filterwarnings("ignore:.*HalfCheetah-v4 is out of date:DeprecationWarning")
def test_a_tutorials_checkpoint_can_be_evaluated(
    program_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tutorial = REPOSITORY / "tutorials" / "ppo_continuous.py"
    sizes = {"N_STEPS": 256, "BATCH_SIZE": 256, "N_EPOCHS": 1, "N_MINIBATCHES": 4}
    run_as_main(tutorial, "--total-timesteps=256", folder=program_folder, constants=sizes)
    monkeypatch.syspath_prepend(str(tutorial.parent))  # where the page saves the program
    source = BLOCKS["docs/training.md-0"]
    assert "create_env, 20," in source
    run_source(source.replace("create_env, 20,", "create_env, 2,"), program_folder)
    assert "mean length                1000" in capfd.readouterr().out
    assert (program_folder / "ppo_continuous.json").exists()


@pytest.mark.parametrize("name", variants(["memory"], ["lanes"]))
def test_a_picture_is_drawn_from_a_real_run(name: str, program_folder: Path) -> None:
    script = REPOSITORY / "docs" / "pictures" / f"{name}.py"
    run_as_main(script, "--output", "drawn.svg", folder=program_folder)
    assert (REPOSITORY / "docs" / "pictures" / f"{name}.svg").exists()
    assert "</svg>" in (program_folder / "drawn.svg").read_text(encoding="utf-8")
