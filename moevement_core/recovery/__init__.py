"""From snapshots back to a dense state: which are used, where they come from, the replay, and what was checked."""
