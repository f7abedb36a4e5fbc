"""What the papers publish, made again and set beside it."""
