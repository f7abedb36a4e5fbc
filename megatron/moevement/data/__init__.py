"""Text to Megatron's token files, the embedded corpus, and batches that can be asked for again."""
