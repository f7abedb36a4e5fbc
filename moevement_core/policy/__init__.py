"""Decisions on what is saved when: window, order, schedule, reorder trigger. Pure, the same live and simulated."""
