"""Part of one rank in a recovery: prepare it, execute it, and compare the result with digests."""
