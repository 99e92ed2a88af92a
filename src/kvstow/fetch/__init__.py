"""Transfers in flight between the pool and lower tiers: single flight, owners' waits, deadlines."""
