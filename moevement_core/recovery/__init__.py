"""Recovery of a dense state from snapshots: agreement, scope, plan, fetches, replay and checks."""
