"""Stores: what a tier keeps its frames in."""
