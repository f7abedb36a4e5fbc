"""Restart of Megatron in place: survivors of a failure stop, meet again, and enter the trainer again."""
