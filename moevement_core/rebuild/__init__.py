"""Recovery as one rank takes part in it: the rank prepares, executes, and compares the result with digests."""
