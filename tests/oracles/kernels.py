"""Kernels of a compiled program, read from its text."""

import re


def distinct_kernels(text: str) -> int:
    """Count the different fusions of a compiled program."""
    bodies: dict[str, str] = {}
    for name, body in re.findall(r"^%([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S):
        body = re.sub(r", metadata=\{[^}]*\}|/\*.*?\*/", "", body)
        # Called computations (sums, maxima) were printed before; names are arbitrary.
        body = re.sub(r"to_apply=%([\w.\-]+)", lambda m: f"to_apply=<{bodies[m[1]]}>", body)
        names: dict[str, str] = {}
        bodies[name] = re.sub(
            r"%[\w.\-]+", lambda m, names=names: names.setdefault(m[0], f"v{len(names)}"), body
        )
    return len({bodies[name] for name in re.findall(r" fusion\(.*?calls=%([\w.\-]+)", text)})
