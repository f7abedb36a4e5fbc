"""Elastic jobs: the number of ranks may change, and experts may have unequal numbers of replicas.

The package allocates, places and migrates experts as the Lazarus paper does (its section 4 and appendix A). It also
moves state between ranks after the number of ranks has changed. ``megatron/moevement/elastic`` trains elastic jobs with
this package, and the simulator computes their cost with it.
"""
