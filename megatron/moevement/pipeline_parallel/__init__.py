"""Traffic over stage boundaries: its log, and its replacement for a stage that replays alone."""
