"""Training scripts for measurements, which `moevement bench` starts."""
