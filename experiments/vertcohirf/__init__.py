"""VertCoHiRF and its baselines: door, tables, attack."""
