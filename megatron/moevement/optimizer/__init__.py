"""Extensions of Megatron's optimizers for commit points, replays and snapshots."""
