"""Fault tolerance of one rank, for a trainer that a :class:`~moevement_core.trainer.binding.Binding` describes."""
