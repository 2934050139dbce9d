"""What curious servers reconstruct (`reconstruction`), and what hostile agents send."""
