"""Devices: copies between an engine's KV pages and places, ordered against compute."""
