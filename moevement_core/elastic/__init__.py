"""Experts with unequal replicas, and jobs whose number of ranks changes.

Lazarus's computations (its section 4 and appendix A), and state from one cut over ranks to another.
``megatron/moevement/elastic`` trains with them, and the simulator costs them.
"""
