"""Recurrent matrices: the learning rate of a weight used T times, and rivals of constraints."""
