"""Part of one rank in a recovery: prepare, execute, and compare with digests."""
