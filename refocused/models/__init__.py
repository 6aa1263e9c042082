"""Language models whose forward pass returns the loss."""
