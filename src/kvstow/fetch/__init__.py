"""Fetching from lower tiers into the pool: estimates, a pure decision, and the executor that applies it."""
