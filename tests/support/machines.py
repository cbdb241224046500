"""Made-up machines: the files by which a kernel tells its limits, in a directory."""

from __future__ import annotations

from pathlib import Path

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 {mounted} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 {mounted} /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"""


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine whose files are these."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def new_machine(root: Path, group: str, files: dict[str, str]) -> Path:
    """A machine with control groups of version 2, whose files these are."""
    own = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    of_process = {"proc/self/cgroup": f"0::{group}", "proc/self/mountinfo": V2_MOUNT}
    return machine(root, {**of_process, **own})


def old_machine(root: Path, group: str, mounted: str, files: dict[str, str]) -> Path:
    """A machine with control groups of version 1, of which ``mounted`` can be seen."""
    groups = f"9:name=systemd:/\n8:pids:{group}\n4:memory:{group}\n1:cpu,cpuacct:/other\n0::/"
    of_process = {
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": V1_MOUNTS.format(mounted=mounted),
    }
    own = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return machine(root, {**of_process, **own})
