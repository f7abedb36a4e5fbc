"""Training scripts that measure; `moevement bench` starts them."""
