"""Speed of ranks: each rank times its own work, and ranks that are slower than their peers are named."""
