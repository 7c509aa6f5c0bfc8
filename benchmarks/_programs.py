"""Cost per chip of a program compiled for TPUs or CPUs, read from its text.

`cost_analysis` counts the body of a loop once, whatever its length, and weights float32 products
equally at highest and lowest precision. Here a body counts as often as it runs, and products are
kept apart by their number of passes through the multiplier, which takes only bfloat16. A
conditional counts its cheapest branch, the usual branch in training: the other handles long steps
and gradients with hardly a tangent part.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable

from tests.oracles.passes import PASSES

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<kind>[a-z][a-z0-9\-]*)\((?P<rest>.*)"
)
_ARRAY = re.compile(r"([a-z]+[0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|called_computations|"
    r"branch_computations|true_computation|false_computation)="
    r"(?:\{([^}]*)\}|%([\w.\-]+))"
)
_COLLECTIVE = re.compile(
    r"(all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?"
)
_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}


@dataclasses.dataclass
class Work:
    """Cost per chip.

    Attributes:
      flops: flops of the matrix products by number of passes, two flops per multiplication.
      flops_once: total flops with each loop body counted once.
      cycles: the compiler's estimate for everything except collectives.
      collectives: number and received bytes of each kind.
      collectives_in_loops: number of collectives in loop bodies.
      unknown_loops: number of loops with data-dependent length; their bodies count once.
    """

    flops: dict[int, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    flops_once: float = 0.0
    cycles: float = 0.0
    collectives: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: defaultdict(lambda: [0, 0.0])
    )
    collectives_in_loops: int = 0
    unknown_loops: int = 0

    def add(self, other: "Work", times: float = 1) -> None:
        """Add the work of a part that runs `times` times."""
        for passes, flops in other.flops.items():
            self.flops[passes] += times * flops
        for kind, (number, size) in other.collectives.items():
            self.collectives[kind][0] += times * number
            self.collectives[kind][1] += times * size
        self.cycles += times * other.cycles
        self.flops_once += other.flops_once
        self.collectives_in_loops += other.collectives_in_loops
        self.unknown_loops += other.unknown_loops

    @property
    def multiplier_flops(self) -> float:
        """Flops weighted by their passes."""
        return sum(passes * flops for passes, flops in self.flops.items())

    @property
    def moved(self) -> float:
        """Bytes received in all collectives."""
        return sum(size for _, size in self.collectives.values())


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    kind: str
    shape: str
    rest: str
    root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split(")", 1)[0])

    def attribute(self, name: str, default: str = "") -> str:
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.rest)
        return found[1].strip("{}%") if found else default


_Computation = dict[str, _Instruction]


def read(text: str, taken: Callable[..., Work] = min) -> Work:
    """Return the work of a compiled program.

    Args:
      text: `compiled.as_text()` of a program compiled for TPUs or CPUs.
      taken: `min` counts the cheapest branch of every conditional, `max` the costliest.

    Raises:
      ValueError: `text` is no such program.
    """
    computations, entry = _parse(text)
    if entry is None:
        raise ValueError("the text has no ENTRY; pass the text of a compiled program")
    return _work(computations, entry, taken)


def _parse(text: str) -> tuple[dict[str, _Computation], str | None]:
    computations: dict[str, _Computation] = {}
    entry, inside = None, {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            inside = computations.setdefault(header["name"], {})
            entry = header["name"] if header["entry"] else entry
        elif found := _INSTRUCTION.match(line):
            root = line.lstrip().startswith("ROOT")
            inside[found["name"]] = _Instruction(**found.groupdict(), root=root)
    return computations, entry


def _work(
    computations: dict[str, _Computation],
    name: str,
    taken: Callable[..., Work],
    looped: bool = False,
    fused: bool = False,
) -> Work:
    """Return the work per run of a computation; `looped`, `fused`: inside a loop or fusion."""
    work, computation = Work(), computations[name]
    again = name.startswith("async_collective_fusion") or any(
        "AsyncCollectiveDone" in x.rest for x in computation.values()
    )
    for x in computation.values():
        if x.kind in ("convolution", "dot"):
            product = _product if x.kind == "convolution" else _dot
            flops, passes = product(x, computation)
            work.flops[passes] += flops
            work.flops_once += flops
        # A collective that overlaps with products is repeated wherever it continues.
        elif (kind := _COLLECTIVE.fullmatch(x.kind)) and not again:
            # A fused all-reduce keeps only a slice of its result: a reduce-scatter.
            sliced = fused and kind[1] == "all-reduce"
            size = _received(kind[1], x) / (1 + sliced)
            number_and_size = work.collectives["reduce-scatter" if sliced else kind[1]]
            number_and_size[0] += 1
            number_and_size[1] += size
            work.collectives_in_loops += looped
        if not fused and (cycles := re.search(r'"estimated_cycles":"(\d+)"', x.rest)):
            work.cycles += int(cycles[1])
        inside = fused or x.kind == "fusion"
        if x.kind == "while":
            length = _length(x, computation, computations[x.attribute("condition")])
            work.unknown_loops += length is None
            body = _work(computations, x.attribute("body"), taken, True, inside)
            work.add(body, length or 1)
            continue
        called = [
            _work(computations, n, taken, looped, inside)
            for many, one in _CALLED.findall(x.rest)
            for n in re.findall(r"[\w.\-]+", many or one)
        ]
        if x.kind == "conditional":
            # If only some devices have a matrix, count the branch of the busiest device.
            chosen = max if 'own_matrix/cond"' in x.rest else taken
            called = [chosen(called, key=lambda branch: (branch.multiplier_flops, branch.cycles))]
        for part in called:
            work.add(part)
    return work


def _length(loop: _Instruction, around: _Computation, condition: _Computation) -> int | None:
    """Return the iterations of a loop that counts up by ones; None for other loops."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    end = next(x for x in condition.values() if x.root)
    if end.kind != "compare" or end.attribute("direction") != "LT":
        return None
    counter, limit = (condition[name] for name in end.operands)
    begin = around[loop.operands[0]]
    if counter.kind != "get-tuple-element" or begin.kind != "tuple":
        return None
    start = around[begin.operands[int(counter.attribute("index"))]]
    first, last = _constant(start, around), _constant(limit, condition)
    return None if first is None or last is None else last - first


def _constant(x: _Instruction, around: _Computation) -> int | None:
    while x.kind == "copy":
        x = around[x.operands[0]]
    return int(x.rest.split(")", 1)[0]) if x.kind == "constant" else None


def _arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (dtype, tuple(int(n) for n in sizes.split(",") if n))
        for dtype, sizes in _ARRAY.findall(shape)
    ]


def _product(x: _Instruction, around: _Computation) -> tuple[float, int]:
    """Return flops and passes of a convolution, the compiler's form of every matrix product.

    Stack axes become spatial axes with a window that covers one matrix at a time; the rest of the
    window is padding, and is not counted.
    """
    (left_dtype, left), (right_dtype, right) = (
        _arrays(around[name].shape)[0] for name in x.operands[:2]
    )
    ((_, out),) = _arrays(x.shape)
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", x.attribute("dim_labels"))
    assert labels is not None
    of = {
        (which, label): size
        for which, sizes, written in zip("lro", (left, right, out), labels.groups(), strict=True)
        for label, size in zip(written, sizes, strict=True)
    }
    window = dict(part.split("=") for part in x.attribute("window").split())
    flops = 2.0 * of["o", "b"] * of["o", "f"] * of["r", "i"]
    for axis in (label for label in labels[1] if label.isdigit()):
        i = int(axis)
        stride, low, spread, apart = (
            _entry(window, key, i, default)
            for key, default in (
                ("stride", "1"), ("pad", "0_0"), ("lhs_dilate", "1"), ("rhs_dilate", "1"),
            )
        )  # fmt: skip
        last = (of["l", axis] - 1) * spread
        flops *= sum(
            0 <= (at := o * stride + k * apart - low) <= last and at % spread == 0
            for o in range(of["o", axis])
            for k in range(of["r", axis])
        )
    precision = x.attribute("operand_precision", "default").split(",")[0]
    wide = "f32" in (left_dtype, right_dtype)
    passes = PASSES[precision.upper()] if wide else 1
    return flops / int(x.attribute("batch_group_count", "1")), passes


def _dot(x: _Instruction, around: _Computation) -> tuple[float, int]:
    """Return flops and passes of a product on CPUs."""
    ((_, left),) = _arrays(around[x.operands[0]].shape)
    ((_, out),) = _arrays(x.shape)
    summed = [int(axis) for axis in x.attribute("lhs_contracting_dims").split(",") if axis]
    return 2.0 * math.prod(out) * math.prod(left[axis] for axis in summed), 1


def _entry(window: dict[str, str], key: str, axis: int, default: str) -> int:
    entries = window[key].split("x") if key in window else None
    return int((entries[axis] if entries else default).split("_")[0])


def _received(kind: str, x: _Instruction) -> float:
    """Return the bytes that a chip receives, in a ring that divides the work evenly."""
    arrays = _arrays(x.shape)
    if x.kind in ("all-gather-start", "collective-permute-start"):
        arrays = [array for array in arrays if array != ("u32", ())]  # bookkeeping
        arrays = arrays[len(arrays) // 2 :]  # inputs come first
    size = sum(_BYTES.get(dtype, 4) * math.prod(sizes) for dtype, sizes in arrays)
    others = 1 - 1 / _group(x)
    if kind == "collective-permute":
        return size
    return size * {"all-reduce": 2 * others, "reduce-scatter": others * _group(x)}.get(kind, others)


def _group(x: _Instruction) -> int:
    """Return the number of chips in a collective."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", x.rest):
        sizes = dict(part.split("=") for part in mesh[1].replace("'", "").split(","))
        return math.prod(int(sizes[name.strip(" '")]) for name in mesh[2].split(","))
    if groups := re.search(r"replica_groups=\[\d+,(\d+)\]", x.rest):
        return int(groups[1])
    if groups := re.search(r"replica_groups=\{\{([\d,]+)\}", x.rest):
        return len(groups[1].split(","))
    return 2
