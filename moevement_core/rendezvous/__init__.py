"""Rendezvous of a job through failures: its members, their leases, and the rosters that assign ranks to them."""
