"""One rank's sparse checkpoints: what is captured, how long it lives, where copies of it go. Threads, no policy."""
