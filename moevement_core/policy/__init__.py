"""What is saved when: window, order, schedule, reorder trigger. Pure decisions, the same live and simulated."""
