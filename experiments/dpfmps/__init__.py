"""DPFMPS: what a run has spent."""
