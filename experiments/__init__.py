"""Binaries: `python -m experiments.<name>`."""
