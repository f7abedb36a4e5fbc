"""Simulator of a training with failures: iteration time, failures, strategies, effective training time ratio (ETTR).

Windows, rollback and budgets come from ``moevement_core.policy``, as in a live run.
"""
