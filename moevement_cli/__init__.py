"""Command-line tool `moevement`, with one module per subcommand and the modules that they share."""
