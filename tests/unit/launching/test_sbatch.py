"""The batch script works with stand-ins for Slurm's commands, which record the arguments of each call."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.training import ROOT, SCRIPT

SBATCH = ROOT / "examples" / "pretrain_moe" / "slurm" / "pretrain.sbatch"
_COMMANDS = {
    "scontrol": 'if [ "$1" = show ]; then printf "a1\\na2\\n"; else echo "scontrol $*" >> "$CALLS"; fi',
    "srun": 'echo "srun $* [${MOEVEMENT_STORE:-} ${MOEVEMENT_FIRST_TASK:-} ${MOEVEMENT_TASKS:-}]" >> "$CALLS";'
    'echo "${MOEVEMENT_JOB_TOKEN:-}" >> "$TOKENS"',
    "moevement": 'echo "moevement $*" >> "$CALLS"; echo "${MOEVEMENT_JOB_TOKEN:-}" >> "$TOKENS";'
    ' exec sleep "${COORDINATES_S:-0}"',
}


class Shell:
    """Folder and environment in which the script runs, with stand-ins for the commands that it calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.calls.touch()
        commands = folder / "bin"
        commands.mkdir()
        for name, body in _COMMANDS.items():
            (commands / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (commands / name).chmod(0o755)
        self.environment = {
            "PATH": f"{commands}:/usr/bin:/bin", "CALLS": str(self.calls), "TOKENS": str(folder / "tokens"),
            "SLURM_JOB_NAME": "moe", "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_NTASKS": "4", "SPARES": "1", "HOME": str(folder),
            "SCRIPT": str(SCRIPT),
        }  # fmt: skip

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", str(SBATCH), *arguments], env={**self.environment, **variables}, capture_output=True, text=True,
            timeout=60, check=False, cwd=self.folder,
        )  # fmt: skip
        return done.returncode, done.stderr

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()

    def tokens(self) -> list[str]:
        return (self.folder / "tokens").read_text().splitlines()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_the_coordinator_starts_the_tasks(shell: Shell) -> None:
    code, err = shell.run("--moevement-sparse-ckpt", "--lr", "1e-4", NPROC="2", SRUN_ARGS="--mpi=pmix --export=ALL")
    assert (code, err) == (0, "")
    (call,) = shell.called()
    assert call == (
        f"moevement coordinate --ranks 7 --host a1 --port 20007 --run-dir {shell.folder}/runs/moe-7 --nodes a1,a2 "
        "--tasks-per-node 2 -- srun --mpi=pmix --export=ALL --no-kill --kill-on-bad-exit=0 --overlap --nodes=1 "
        f"--ntasks=2 --nodelist={{host}} moevement launch --nproc 2 --spares 1 {SCRIPT} "
        f"--moevement-sparse-ckpt --lr 1e-4 --run-dir {shell.folder}/runs/moe-7"
    )


def test_in_a_container_coordinator_and_tasks_are_steps_with_pyxis_flags(shell: Shell) -> None:
    code, err = shell.run(
        IMAGE="nvcr.io#moe", CONTAINER_MOUNTS="/data:/data", CONTAINER_NAME="moe", CONTAINER_ENV="WANDB_API_KEY",
        SRUN_ARGS="--mpi=pmix",
    )  # fmt: skip
    assert (code, err) == (0, "")
    calls = shell.called()
    assert len(calls) == 3
    flags = (
        f"--container-image nvcr.io#moe --container-mounts /data:/data --container-workdir {shell.folder} "
        "--no-container-mount-home --container-name moe --container-env WANDB_API_KEY"
    )
    coordinator = next(call for call in calls if "coordinate" in call)
    tasks = sorted(call for call in calls if "launch" in call)
    assert f"{flags} --overlap --nodes=1 --ntasks=1 --nodelist=a1 moevement coordinate --ranks 3" in coordinator
    for call, node, first in zip(tasks, ("a1", "a2"), (0, 2), strict=True):
        options = f"--no-kill --kill-on-bad-exit=0 --overlap --nodes=1 --ntasks=2 --nodelist={node}"
        assert call.startswith(f"srun --mpi=pmix {flags} {options} moevement launch --nproc 1")
        assert call.endswith(f"[a1:20007 {first} 4]")
    assert len(set(shell.tokens())) == 1, "all know each other"


def test_every_job_has_a_token_of_its_own_that_is_on_no_command_line(shell: Shell) -> None:
    for _ in range(2):
        assert shell.run()[0] == 0
    tokens = shell.tokens()
    assert len(set(tokens)) == 2
    assert all(len(token) == 64 for token in tokens)
    assert not any(token in call for token in tokens for call in shell.called())
    shell.run(MOEVEMENT_JOB_TOKEN="given")
    assert shell.tokens()[-1] == "given"
    shell.run(MOEVEMENT_JOB_TOKEN_FILE="/there")
    assert shell.tokens()[-1] == ""


def test_without_spares_a_task_is_a_rank(shell: Shell) -> None:
    code, _ = shell.run("--lr", "1", SPARES="none")
    assert code == 0
    (call,) = shell.called()
    assert call.startswith(f"srun --kill-on-bad-exit=1 moevement launch {SCRIPT} --lr 1")


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"PATH": "{tools}:/usr/bin:/bin"}, r"\bmoevement\b.*\bPATH\b"),
        ({"SCRIPT": "nothing.py"}, r"\bnothing\.py\b.*\bSCRIPT\b"),
        ({"SPARES": "4"}, r"\bSPARES=4\b.*\b4 processes\b"),
        ({"SLURM_NTASKS": "5"}, r"\b5 tasks\b.*\b2 nodes\b.*--ntasks-per-node\b"),
    ],
)
def test_what_cannot_work_is_said_at_once(shell: Shell, variables: dict[str, str], named: str) -> None:
    tools = shell.folder / "tools"
    tools.mkdir()
    (tools / "scontrol").symlink_to(shell.folder / "bin" / "scontrol")
    code, err = shell.run(**{name: value.format(tools=tools) for name, value in variables.items()})
    assert code == 2
    assert re.match(f"moevement: .*{named}", err)
    assert err.count("\n") == 1
    assert shell.called() == []


def test_a_warning_from_slurm_ends_the_job_in_order_and_queues_it_again(shell: Shell) -> None:
    """Signal a job whose stand-in for the coordinator ends with code 0 at the signal, as the real coordinator does."""
    coordinator = shell.folder / "bin" / "moevement"
    coordinator.write_text(
        '#!/usr/bin/env bash\ntrap "exit 0" USR1\necho "moevement $*" >> "$CALLS"\nwhile :; do sleep 0.05; done\n'
    )
    environment = {**shell.environment, "REQUEUE": "1"}
    process = subprocess.Popen(["bash", str(SBATCH)], env=environment, cwd=shell.folder, stderr=subprocess.PIPE)
    while not shell.called():
        os.sched_yield()
    process.send_signal(10)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
    assert shell.called()[-1] == "scontrol requeue 7"


@pytest.mark.parametrize("code", ["1", "2"])
def test_the_exit_code_is_that_of_the_coordinator(shell: Shell, code: str) -> None:
    (shell.folder / "bin" / "moevement").write_text(f"#!/usr/bin/env bash\nexit {code}\n")
    assert shell.run()[0] == int(code)


def test_tasks_that_cannot_begin_in_a_container_end_the_job(shell: Shell) -> None:
    """Check that the script itself ends the coordinator, which takes the first signal for a request to end in order."""
    (shell.folder / "bin" / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.02\n")
    (shell.folder / "bin" / "sleep").chmod(0o755)
    (shell.folder / "bin" / "srun").write_text(
        "#!/usr/bin/env bash\n"
        'case "$*" in *coordinate*) ;; *) exit 1 ;; esac\n'
        'trap "asked=\\$((asked + 1)); [ \\$asked = 1 ] || exit 143" TERM\nwhile :; do sleep; done\n'
    )
    code, err = shell.run(IMAGE="nvcr.io#moe")
    assert code == 143
    assert re.match(r"moevement: .*\btasks\b.*\bnodes\b", err.splitlines()[-1])
