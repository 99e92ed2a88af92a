"""Sections of the settings, one file each: structs, with defaults and descriptions."""
