"""Recipes of training jobs, and the four gates that each must pass: docs/determinism.md."""
