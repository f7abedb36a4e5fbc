"""The `moevement` command."""
