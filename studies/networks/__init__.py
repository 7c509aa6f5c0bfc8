"""Common parts of studies that train networks over a grid of learning rates.

Architectures in two parametrisations, tasks, methods, and training, compiled once for all rates
and seeds.
"""
