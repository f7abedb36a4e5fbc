"""Decisions on which state each snapshot holds: window, order of operators, schedule and reordering.

The code here works on plain data alone, and live runs and the simulator use the same functions.
"""
