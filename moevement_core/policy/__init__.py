"""Decisions on what is saved when: window, order, schedule and reordering.

They depend on plain data alone, and are the same in live runs and in the simulator.
"""
