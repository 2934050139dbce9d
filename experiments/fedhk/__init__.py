"""FedHK: its door and its study."""
