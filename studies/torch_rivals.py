# pyright: reportMissingImports=false
"""Train PyTorch's orthogonal layers, for the study `torch_layers`: a script for an environment with
torch, geotorch and geoopt, which imports nothing of this package.

`python -I torch_rivals.py METHOD` reads runs from the standard input and writes weights, times and
versions to the standard output: npz files with a leading axis of runs, see `Runs` and `Trained`.
"""

import importlib.metadata
import io
import sys
import time

import geoopt
import geotorch
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils import parametrizations

MAPS = "matrix_exp", "cayley", "householder"


def layers(method, start):
    """Return the hidden layers with these initial weights, and the parameters to train."""
    found = []
    for weight in map(torch.from_numpy, start):
        layer = torch.nn.Linear(*weight.shape[::-1], bias=False)
        layer.weight.data = weight.clone()
        if method in MAPS:
            parametrizations.orthogonal(layer, orthogonal_map=method)
        elif method == "geotorch":
            geotorch.orthogonal(layer, "weight")
            layer.weight = weight
        elif method == "geoopt":
            layer.weight = geoopt.ManifoldParameter(weight.clone(), manifold=geoopt.Stiefel())
        found.append(layer)
    return found, [parameter for layer in found for parameter in layer.parameters()]


def train(method, images, labels, order, start, head, rates):
    """Train once: return the weights, and the processor time at the start and after each step."""
    times = [time.process_time()]
    torch.manual_seed(0)  # completes tall matrices to square ones
    hidden, body = layers(method, start)
    head = torch.nn.Parameter(torch.from_numpy(head).clone())
    groups = [{"params": body, "lr": rates[0]}, {"params": [head], "lr": rates[1]}]
    if method == "geoopt":
        optimizer = geoopt.optim.RiemannianAdam(groups)
    elif method == "AdamW":
        groups[1]["weight_decay"] = 0.0
        optimizer = torch.optim.AdamW(groups, weight_decay=1e-2)
    else:
        optimizer = torch.optim.Adam(groups)
    images, labels = torch.from_numpy(images), torch.from_numpy(labels).long()
    for k, batch in enumerate(torch.from_numpy(order).long()):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = float(rate) * (1 - k / len(order))
        x = images[batch]
        for layer in hidden:
            x = torch.relu(layer(x))
        optimizer.zero_grad()
        F.cross_entropy(x @ head.T, labels[batch]).backward()
        optimizer.step()
        times.append(time.process_time())
    return [w.detach().numpy() for w in (*(layer.weight for layer in hidden), head)], times


def main():
    """Train all runs."""
    torch.set_num_threads(1)
    runs = zip(*np.load(io.BytesIO(sys.stdin.buffer.read())).values(), strict=True)
    found = []
    for images, labels, order, first, second, head, rates in runs:
        weights, times = train(
            sys.argv[1], images, labels, order, (first, second), head, rates.tolist()
        )
        found.append((*weights, times))
    packages = "torch", "geotorch", "geoopt"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    output = io.BytesIO()
    np.savez(output, *map(np.array, zip(*found, strict=True)), versions)
    sys.stdout.buffer.write(output.getvalue())


if __name__ == "__main__":
    main()
