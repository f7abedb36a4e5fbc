"""What failures cost a training: iteration time, failures, strategies, effective training time ratio (ETTR).

It decides nothing that a live run decides otherwise: windows, rollback and budgets are ``moevement_core.policy``'s.
"""
