"""Learning-rate transfer: does the best learning rate move with the size of a network?"""
