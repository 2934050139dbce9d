"""MGCD: its door, tables and figures."""
