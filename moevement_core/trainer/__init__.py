"""Interface and configuration of a trainer: the binding, the commit point, the flags."""
