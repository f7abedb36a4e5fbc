"""First steps of a user with an installed package, which tests try in several environments."""

from __future__ import annotations

import json

from moevement_cli.main import COMMANDS
from tests.packaging.environments import Environment
from tests.training import flags


def help_names_all_commands(environment: Environment) -> None:
    """Check that the console script is installed and lists all commands."""
    printed = environment.run("moevement", "--help")
    listed = {line.split()[0] for line in printed.splitlines() if line.startswith("    ") and line[4:5].strip()}
    assert listed == set(COMMANDS), printed


def plan_knows_its_presets(environment: Environment) -> None:
    """Check that `moevement plan` finds the example configurations."""
    printed = environment.run(
        "moevement", "plan", "deepseek_moe", "--ranks", "96", "--iteration-time", "2.75", "--cluster",
        "moevement-a100", "--json",
    )  # fmt: skip
    assert json.loads(printed.splitlines()[-1])["window"] >= 1


def two_ranks_train(environment: Environment) -> None:
    """Check that the example trains on two ranks with sparse checkpoints and two distributed optimizer instances."""
    script = environment.run(
        "python", "-c", "from moevement_cli.examples import EXAMPLES as e; print(e / 'pretrain_moe/pretrain_gpt.py')"
    ).strip()
    run = environment.folder / "run"
    environment.run(
        "moevement", "launch", "--nproc", "2", script,
        *flags(
            use_distributed_optimizer=True, num_distributed_optimizer_instances=2, moevement_sparse_ckpt=True,
            moevement_window=2, train_iters=3, run_dir=str(run),
        ),
    )  # fmt: skip
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["state_digest"]["all"]
    assert len((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 3
