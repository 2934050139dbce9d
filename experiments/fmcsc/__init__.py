"""FMCSC: its door, presets, tables and figures."""
