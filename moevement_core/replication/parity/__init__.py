"""Parity instead of copies: groups of ranks on different nodes of whose snapshots other nodes keep combinations."""
