"""The app that `flwr run` submits."""
