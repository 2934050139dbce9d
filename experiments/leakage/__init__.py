"""What a curious server reconstructs from messages."""
