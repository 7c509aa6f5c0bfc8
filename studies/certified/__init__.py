"""Certified networks: compare ways to train networks with Lipschitz constant 1."""
