"""Elastic jobs: experts with unequal numbers of replicas, and jobs whose number of ranks changes.

The package has Lazarus's computations (section 4 and appendix A of that paper), and moves state to other ranks after
a resize. ``megatron/moevement/elastic`` trains with them, and the simulator computes their cost.
"""
