"""What all binaries share: flags from dataclasses, the runner, scores, tables and pictures."""
