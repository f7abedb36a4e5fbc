"""Everything of this project that one GPU can check, in one call and ten minutes."""
