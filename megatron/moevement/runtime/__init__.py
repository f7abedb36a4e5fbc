"""Wrappers and objects that a rank uses while it trains: metrics, boundary state, replay and dense checkpoints."""
