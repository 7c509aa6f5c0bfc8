"""Work, traffic and memory of MaxText's training step on eight TPU chips, by optimizer.

    pip install 'maxtext[tpu]' .    # in an environment of its own; no TPU is needed
    python -m benchmarks maxtext    # tens of minutes; docs/benchmarks/results/maxtext.*

Nothing runs: MaxText's `train_compile` compiles its own training step for eight v5e chips, with
parameters and state divided over all of them (FSDP), and the costs are read from the program. The
record is saved after every program; the same command resumes from it.
"""

# pyright: reportMissingImports=false

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import time
from typing import Any

import jax
from tqdm import tqdm

from benchmarks._harness import command, compile_without_tpus
from benchmarks.scale import costs, short
from studies.display import markdown_table
from studies.program import interrupted, parse, save
from studies.records import plain

MODEL = {
    "base_num_decoder_layers": 12,
    "base_emb_dim": 1024,
    "base_mlp_dim": 4096,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 16,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_target_length": 1024,
    "per_device_batch_size": 4,
}
SETTINGS = {
    "run_name": "run",
    "compile_topology": "v5e-8",
    "compile_topology_num_slices": 1,
    "dataset_type": "synthetic",
    "attention": "dot_product",
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "log_config": False,
    "jax_cache_dir": "",
    "skip_jax_distributed_system": True,
}
ADAMW, MUON = {"opt_type": "adamw"}, {"opt_type": "muon"}
THEIRS = MUON | {"muon_type": "maxtext_muon"}
# Settings of MaxText, and the optimizer of `examples.trainers.runs` in place of Optax's Muon.
OPTIMIZERS: dict[str, tuple[dict[str, Any], str | None]] = {
    "optax.adamw": (ADAMW, None),
    "optax.contrib.muon": (MUON, None),
    "MaxText's Muon": (THEIRS, None),
    "MaxText's Muon, all-to-all": (THEIRS | {"muon_use_all_to_all": True}, None),
    "optim.optax_muon": (MUON, "drop-in"),
    "muonh": (MUON, "muonh"),
    "manifold_muon, Stiefel()": (MUON, "stiefel"),
}
BASE = "optax.adamw"


def compiled(name: str, model: dict[str, Any]) -> Any:
    """Return MaxText's compiled step with the optimizer of this name."""
    from maxtext.optimizers import optimizers
    from maxtext.trainers.pre_train import train_compile

    from examples.trainers.maxtext import muon

    choice, ours = OPTIMIZERS[name]
    theirs, compile_step, programs = optimizers.optax_muon, train_compile.jit_and_compile, []

    def keep(*args: Any, **options: Any) -> Any:
        programs.append(compile_step(*args, **options))
        return programs[0]

    with tempfile.TemporaryDirectory() as folder:
        settings = model | SETTINGS | choice | {"base_output_directory": folder}
        try:
            train_compile.jit_and_compile = keep
            if ours is not None:
                optimizers.optax_muon = functools.partial(muon, ours)
            train_compile.main(["", *[f"{key}={value}" for key, value in settings.items()]])
        finally:
            train_compile.jit_and_compile, optimizers.optax_muon = compile_step, theirs
    return programs[0]


def measure(name: str, model: dict[str, Any]) -> dict[str, Any]:
    """Return the work per chip of a training step."""
    start, busy = time.perf_counter(), time.process_time()
    program = compiled(name, model)
    seconds = {
        "compile_seconds": time.perf_counter() - start,
        "compile_cpu_seconds": time.process_time() - busy,
    }
    return seconds | costs(program)


def table(cells: dict[str, dict[str, Any]]) -> str:
    """Return a table with a line for each optimizer: what it adds to the step with AdamW."""
    lines, base = [], cells.get(BASE)
    for name in (name for name in OPTIMIZERS if name in cells):
        cell = cells[name]
        flops = sum(cell["flops"].values()), cell["multiplier_flops"]
        moved, kept = cell["moved"], cell["temporary"]
        compile_time = f"{cell['compile_cpu_seconds']:.0f} s"
        if base is None or name == BASE:
            kinds = "in all"
        else:
            flops = flops[0] - sum(base["flops"].values()), flops[1] - base["multiplier_flops"]
            moved, kept = moved - base["moved"], kept - base["temporary"]
            more = {
                kind: size - base["collectives"].get(kind, (0, 0))[1]
                for kind, (_, size) in cell["collectives"].items()
            }
            sizes = {kind: f"{short(x / 1e6)} {kind}" for kind, x in more.items() if x > 1e6}
            kinds = ", ".join(sizes.values())
        lines.append([
            name, *(f"{x / 1e12:.3g}" for x in flops), f"{moved / 1e6:,.0f} MB", kinds,
            f"{kept / 1e6:,.0f} MB", compile_time,
        ])  # fmt: skip
    header = ["optimizer", "TFLOP", "times passes", "moved", "by kind (MB)", "temporary", "compile"]
    return markdown_table(header, lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("maxtext", __doc__)
    p.add_argument("--only", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS], metavar="NAME",
                   help=f"optimizers: {', '.join(OPTIMIZERS)} (default: all)")  # fmt: skip
    given = parse(p, argv, resumes=True)
    missing = [name for name in ("maxtext", "libtpu") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"maxtext: skipped, {' and '.join(missing)} missing; pip install 'maxtext[tpu]'")
        return
    compile_without_tpus()
    jax.config.update("jax_platforms", "cpu")
    try:
        measure_all(given)
    except KeyboardInterrupt:
        sys.exit(interrupted(f"what was compiled is kept in {given.out}"))


def measure_all(given: argparse.Namespace) -> None:
    """Complete the record and write the table next to it."""
    cells: dict[str, dict[str, Any]] = {}
    if given.out.exists() and not given.overwrite:
        cells = json.loads(given.out.read_text(encoding="utf-8"))["cells"]
    versions = {name: importlib.metadata.version(name) for name in ("maxtext", "libtpu", "optax")}
    for name in tqdm([name for name in given.only if name not in cells], unit="program"):
        cells[name] = plain(measure(name, MODEL))
        save(given, {"versions": versions, "model": MODEL, "cells": cells}, replace=True)
    text = table(cells)
    print(text)
    given.out.with_suffix(".md").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
