"""Decisions on which state each snapshot holds: window, order of operators, schedule and reordering.

The functions take and return plain data only. Live runs and the simulator call the same functions.
"""
