"""Elastic jobs: the number of ranks may change, and experts may have unequal numbers of replicas.

The package allocates, places and migrates experts as Lazarus does (section 4 and appendix A of that paper). It also
moves state between ranks after a resize. ``megatron/moevement/elastic`` trains elastic jobs with this package, and the
simulator computes the cost of such jobs with it.
"""
