"""Codecs: a chunk's payload made smaller on its way to a tier."""
