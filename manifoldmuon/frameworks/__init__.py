"""Geometries read off the module types of Flax NNX, Flax Linen, Equinox and Haiku.

Each framework has a module with one function, `geometry`, and is imported with that module only:
`from manifoldmuon.frameworks import nnx`.
"""

__all__: list[str] = []
