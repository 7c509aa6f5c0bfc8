"""Geometries from the module types of Flax NNX, Flax Linen and Equinox.

Each framework has a module with the function `geometry`. Only this module imports the framework:
`from manifoldmuon.frameworks import nnx`.
"""

__all__: list[str] = []
