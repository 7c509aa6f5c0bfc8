"""Learning-rate transfer: whether the best learning rate moves with the size of a network."""
