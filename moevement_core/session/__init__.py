"""One rank's fault tolerance, on top of a trainer that a :class:`~moevement_core.session.binding.Binding` describes."""
