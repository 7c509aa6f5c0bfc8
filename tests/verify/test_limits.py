"""Expensive files are refused before the work starts; printed claims are never rounded up."""

import os
import re
import time
import tracemalloc

import numpy as np
import pytest

from manifoldmuon_verify import _layers, verify
from tests.verify import forge, fuzz
from tests.verify.independent import claimed_too_much


def with_network(images, *entries, **arrays):
    """Return an edit to another network and images of class 0, with claims of radius 0."""
    n = len(images)

    def edit(f):
        f.weights = {name: forge.stored(np.asarray(w, np.float32)) for name, w in arrays.items()}
        f.images = {"images": forge.stored(images), "labels": forge.stored(np.zeros(n, np.int64))}
        shape = list(images.shape[1:])
        f.told["network"] = list(entries)
        f.told["input"] = {"shape": shape, "pixels": [0, 255], "shift": 0, "scale": 1}
        f.told["claims"] = {
            "predictions": [0] * n, "radii": [0] * n, "correct": 0, "certified": []
        }  # fmt: skip

    return edit


def linear(name):
    return {"kind": "linear", "weight": name}


FLAT = {"kind": "flatten", "axes": 2}
PIXELS = np.zeros((3, 12), np.uint8)

# Edit and message.
WORK = {
    "an input of four billion numbers": (
        forge.put("input.shape", [65535, 32768, 2]), "does not fit the"),
    "the same without a layer that refuses it": (
        forge.every(with_network(PIXELS, {"kind": "flatten", "axes": 3}),
                    forge.put("input.shape", [65535, 32768, 2])), "each image is"),
    "an image of 1 MB by a matrix of one column": (
        with_network(np.zeros((1, 2**20, 1), np.uint8), linear("w"), FLAT, w=np.ones((4096, 1))),
        "the layer linear: 4294967296 numbers for an image; at most 4194304"),
    "matrices with a slow decomposition": (
        with_network(np.zeros((1, 2), np.uint8), linear("v"), linear("w"),
                     v=np.ones((2048, 2)), w=np.ones((4096, 2048))),
        "weights, 'w': 8388608 numbers in a matrix; at most 4194304 are accepted"),
    "a million empty branches": (
        forge.insert("network.0", kind="sum", branches=[[]] * 10**6),
        "10001 layers and branches; at most 10000"),
    "layers on many images": (
        with_network(np.zeros((20_000, 12), np.uint8),
                     {"kind": "stack", "copies": 9000, "layers": [{"kind": "abs"}]}),
        r"the network: \d+ multiplications; at most"),
    "a table of too many pairs of classes": (
        forge.every(with_network(np.zeros((17, 1), np.uint8), linear("w"), w=np.ones((2**18, 1))),
                    forge.put("claims.predictions", list(range(17)))),
        "the claims: 4456448 pairs of classes; at most 4194304"),
    "unused arrays": (
        forge.weights(**{f"x{i}": ("F32", [1], bytes(4)) for i in range(10_001)}),
        "10010 arrays; at most 10000"),
    "a shape of 65 axes": (
        forge.weights(**{"8.bias": ("F32", [1] * 64 + [3], bytes(12))}), "65 axes; "),
    "a shape of 20,000 axes": (
        forge.weights(**{"8.bias": ("F32", [2**47] * 20_000, bytes(12))}),
        "20000 axes; at most 16"),
    "no numbers in an endless shape": (
        forge.weights(**{"8.bias": ("F32", [0, 2**47, 2**47], b"")}), "is empty"),
    "a layer in 900 lists": (forge.put("network", forge.deep(900)), "must be a layer"),
    "a format in 900 lists": (forge.put("format", forge.deep(900)), "format must be"),
    "a shape in 900 lists": (forge.put("input.shape", forge.deep(900)), "shape must be"),
    "an input of 65 axes": (forge.put("input.shape", [1] * 65), "shape must be"),
    "a radius that underflows": (forge.put("claims.radii.0", "@@1e-400@@"), "is not a float64"),
    "a radius between two numbers": (
        forge.put("claims.radii.0", "@@0.01000000000000000001@@"),
        "'0.01000000000000000001' is not a float64; the nearest is 0.01"),
    "a radius of many digits": (
        forge.put("claims.radii.0", "@@0." + "1" * 100_000 + "@@"), "is not a float64"),
    "an integer that float64 does not hold": (
        forge.put("claims.radii.0", 2**60 + 1), "must be a finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_expensive_files_are_refused_early(tight, tmp_path, name):
    edit, wanted = WORK[name]
    folder = forge.Forgery(tight, edit).write(tmp_path / "forged")
    tracemalloc.start()
    try:
        assert re.search(wanted, forge.refusal(folder))
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


def test_many_keys_take_linear_time(tight, tmp_path):
    """With 200,000 names, quadratic work would take minutes."""
    begun = time.process_time()
    forged = forge.Forgery(tight, forge.put("claims", {f"{i}": 0 for i in range(200_000)}))
    folder = forged.write(tmp_path / "keys")
    assert "claims: unknown key '0'" in forge.refusal(folder)
    text = (folder / "certificate.json").read_text()
    text = text.replace('"199999": 0', '"199999": 0, "199999": 1')
    (folder / "certificate.json").write_text(text)
    assert "'199999' appears twice" in forge.refusal(folder)
    forged = forge.Forgery(tight, forge.put("weights.shared", [f"{i}" for i in range(200_000)]))
    assert "unknown arrays" in forge.refusal(forged.write(tmp_path / "shared"))
    assert time.process_time() - begun < 20


def test_shared_array_is_decomposed_once(tight, tmp_path, monkeypatch):
    made, whole = [], _layers.singular_values
    monkeypatch.setattr(_layers, "singular_values", lambda w: made.append(w) or whole(w))
    many = with_network(PIXELS, *[linear("w")] * 2000, w=np.eye(12))
    forged = forge.Forgery(tight, many, forge.put("weights.shared", ["w"]))
    assert verify(forged.write(tmp_path / "forged")).matrices == 1
    assert len(made) == 1


@pytest.mark.slow
def test_memory_grows_with_predicted_classes_only(tight, tmp_path):
    """For 262,144 classes, a table of all pairs would take 512 GiB."""
    forged = forge.Forgery(tight, with_network(PIXELS, linear("w"), w=np.ones((2**18, 12)) / 2**9))
    assert verify(forged.write(tmp_path / "forged")).matrices == 1


WAYS = {
    "a pipe": (os.mkfifo, "is not a regular file"),
    "an endless device": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
    "a folder": (lambda path: path.mkdir(), "is not a regular file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "cannot be read"),
    "a file of 200 GB": (
        lambda path: (path.touch(), os.truncate(path, 200 * 2**30)),  # takes no disk space
        "214748364800 bytes in .*; at most [14]"),
    "a file without end that has no size": (
        lambda path: path.symlink_to("/proc/self/smaps"), "changes while it is read|SHA-256"),
}  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes and devices of Unix")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", forge.FILES)
def test_non_files_are_refused(tight, tmp_path, name, way):
    make, wanted = WAYS[way]
    folder = forge.Forgery(tight).write(tmp_path / "forged")
    (folder / name).unlink()
    make(folder / name)
    assert re.search(wanted, forge.refusal(folder))


def test_overlong_file_name_is_refused():
    assert "cannot be read" in forge.refusal("x" * 300)


def printed(folder):
    return str(verify(folder)).splitlines()


def test_printed_radii_and_accuracies_round_down(tight, tmp_path):
    """Six digits would round `0.123456789` up to `0.123457`, and 19,999 of 20,000 to 100.00 %."""
    n, radius = 20_000, 0.123456789
    images = np.tile(np.asarray([[0, 1]], np.float32), (n, 1))
    forged = forge.Forgery(tight, with_network(images, {"kind": "identity"}))
    forged.images["labels"] = forge.stored(np.asarray([0, *[1] * (n - 1)], np.int64))
    forged.told["claims"] = {
        "predictions": [1] * n, "radii": [radius] * n, "correct": n - 1,
        "certified": [{"radius": radius, "images": n - 1}],
    }  # fmt: skip
    *_, clean, certified = printed(forged.write(tmp_path / "it"))
    assert clean == "clean accuracy 99.99% (19999 of 20000)"
    assert certified.startswith("certified at 0.123456789, ")
    assert certified.endswith(": 99.99% (19999 of 20000)")
    forged.told["claims"]["radii"][7] = 0.9
    text = forge.refusal(forged.write(tmp_path / "more"))
    shown = re.search("the radius 0.9 is not proved, only ([0-9.]+) ", text)
    assert shown
    assert 0.7071067 < float(shown[1]) < 0.5**0.5


def test_pixel_range_is_checked_and_printed(tight, tmp_path):
    """Scaling images, shift and scale by 50 inflates radii 50 times; the pixel range shows it."""
    factor = 50
    forged = forge.Forgery(
        tight,
        forge.change("images", lambda x: factor * x, "images"),
        forge.put("input.shift", lambda shift: factor * shift),
        forge.put("input.scale", lambda scale: factor * scale),
        forge.put("claims.radii", lambda radii: [factor * 0.999 * radius for radius in radii]),
        forge.put("claims.certified", [{"radius": factor * 0.01, "images": 0}]),
    )
    source = forged.told["input"]
    wanted = r"images: pixels are within \[0\.\d+, 49\.\d+\]; claimed is \[0\.0, 1\.5\]"
    assert re.search(wanted, forge.refusal(forged.write(tmp_path / "hidden")))
    source["pixels"] = [0, 75]
    lines = printed(forged.write(tmp_path / "shown"))
    assert "within [0.0, 75.0]" in lines[-1]
    assert re.search(r"claimed within \[0.0, 75.0\], found within \[0.\d+, 49.\d+\]", lines[-3])
    assert "the network sees (pixel - 12.5) / 25" in lines[-3]
    assert "within [0.0, 1.5]" in printed(tight)[-1]
    for pixels in ([1, 0], [0], 0, [0, "1"], [0, None]):
        source["pixels"] = pixels
        folder = forged.write(tmp_path / f"{pixels}".replace(" ", ""))
        assert "pixels must be [smallest, largest]" in forge.refusal(folder)


def test_positive_radius_on_tied_logits_is_refused(tight, tmp_path):
    """No positive radius holds where the two largest logits are equal at the image itself."""
    forged = forge.Forgery(tight, with_network(np.ones((1, 2), np.float32), {"kind": "identity"}))
    for number, radius in enumerate(["@@1e-400@@", 5e-324, 1e-300]):
        forged.told["claims"]["radii"] = [radius]
        text = forge.refusal(forged.write(tmp_path / f"{number}"))
        assert re.search("is not a float64|is not proved, only 0 ", text)


# A fixed sample of the changes of `python -m tests.verify.fuzz`.


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return fuzz.write_bases(tmp_path_factory.mktemp("bases"))


@pytest.mark.slow
def test_random_changes_verify_or_are_refused(bases):
    found = list(fuzz.outcomes(bases, range(64), 7, list(fuzz.FAMILIES)))
    assert not [one for one in found if one.fault]
    assert 2 <= sum(one.accepted for one in found) <= 40


def test_independent_check_rejects_false_claims(bases):
    """The independent check accepts proved radii and rejects radii larger by 1e-6."""
    for base in bases:
        assert not claimed_too_much(base)
        radii = verify(base).radii
        if base.name.endswith("real"):
            i = int(np.argmax(radii))
            more = forge.put(f"claims.radii.{i}", float(radii[i] * (1 + 1e-6)))
            folder = forge.Forgery(base, more).write(base.with_name(f"{base.name}-false"))
            assert f"of image {i}" in claimed_too_much(folder)
            assert "is not proved" in forge.refusal(folder)


def test_crash_or_exceeded_limit_is_a_fault(tmp_path):
    assert fuzz.fault(tmp_path, 1, 0.1, 50, "refused: x: y\n") == ""
    for status, seconds, mebibytes, text in (
        (70, 0.1, 50, "Traceback ..."),
        (-9, 0.1, 50, ""),
        (1, 30.1, 50, "refused: x: y\n"),
        (1, 0.1, 1025, "refused: x: y\n"),
        (1, 0.1, 50, "refused: x\ny\n"),
        (1, 0.1, 50, "warning\nrefused: x: y\n"),
    ):
        assert fuzz.fault(tmp_path, status, seconds, mebibytes, text)
