"""What methods of several families are made of."""
