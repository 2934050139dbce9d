"""What hostile clients do to methods, and what robust reductions save."""
