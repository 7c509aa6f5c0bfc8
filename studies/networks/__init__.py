"""Networks that are trained over a grid of learning rates: what transfer and ablation share.

Architectures in two parametrisations, the tasks and the methods that they are trained with, and
training itself, compiled once for all rates and seeds.
"""
