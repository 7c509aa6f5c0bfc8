"""Levanter: an optimizer for its configuration files, `manifold_muon`.

Import this module in the program that starts Levanter's training; then use in a configuration

    optimizer: {type: manifold_muon, learning_rate: 0.02, adam_lr: 6.0e-4}
"""

# pyright: reportMissingImports=false

import dataclasses
from typing import Any

import haliax
import jax
import optax
from haliax.util import ensure_tuple
from levanter.optim.config import OptimizerConfig

import manifoldmuon as mm
from manifoldmuon.manifolds import Stiefel


def _is_linear(node: Any) -> bool:
    return isinstance(node, haliax.nn.Linear)


def geometry(model: Any, matrix: Any = Stiefel()) -> Any:
    """Return `matrix` for the weights of linear layers except `lm_head`, None (AdamW) for the rest.

    A `haliax.nn.Linear` declares its fan-in and fan-out axes. Other axes are scanned layers or
    experts, and can have any position: independent copies.
    """
    rules = {}
    for path, layer in jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_linear):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not _is_linear(layer) or "lm_head" in name or layer.weight is None:
            continue
        axes = [axis.name for axis in layer.weight.axes]
        ins, outs = (
            tuple(axes.index(axis.name) - len(axes) for axis in ensure_tuple(fan))
            for fan in (layer.In, layer.Out)
        )
        rules[f"{name}/weight/**"] = matrix.with_axes(ins, outs, ndim=len(axes))
    return mm.optim.by_path(rules | {"**": None})


@OptimizerConfig.register_subclass("manifold_muon")
@dataclasses.dataclass(frozen=True)
class ManifoldMuonConfig(OptimizerConfig):
    """Manifold Muon for the matrices of linear layers, AdamW for the rest."""

    adam_lr: float = 6e-4
    momentum: float = 0.95
    max_grad_norm: float = 1.0

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """Return the optimizer; Levanter logs both rates from its state."""

        def optimizer(learning_rate: Any, adam_lr: Any) -> optax.GradientTransformation:
            def of(params: Any) -> Any:
                rest = optax.adamw(adam_lr, weight_decay=self.weight_decay)
                spaces = geometry(params)
                descent = mm.optim.manifold_muon(
                    learning_rate, spaces, self.momentum, clip=self.max_grad_norm, rest=rest
                )
                return mm.optim.start_on(descent, spaces)  # `train_lm` makes the weights

            return optax.GradientTransformation(
                lambda params: of(params).init(params),
                lambda updates, state, params=None: of(params).update(updates, state, params),
            )

        return optax.inject_hyperparams(optimizer)(
            learning_rate=self.lr_scheduler(num_train_steps),
            adam_lr=self.lr_scheduler(num_train_steps, override_lr=self.adam_lr),
        )


def project(model: Any) -> Any:
    """Project the matrices of a model onto their manifolds; call this after `init`."""
    return mm.optim.project_tree(geometry(model), model)
