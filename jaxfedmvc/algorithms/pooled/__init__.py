"""Centralised methods: the peers of the federated ones, which see all rows of all clients."""
