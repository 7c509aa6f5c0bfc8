"""Forged certificates get a one-line refusal with the reason; docs/certificates.md lists them."""

import contextlib
import json
import re
from typing import Any

import numpy as np
import pytest

from manifoldmuon_verify import Refused, _network, verify
from manifoldmuon_verify.__main__ import main
from tests.verify import forge
from tests.verify.forge import FILES, Forgery, change, drop, every, insert, put, refusal, weights
from tests.verify.independent import claimed_too_much


def bit(number):
    """Return a function that flips a bit of a single array entry."""

    def flipped(values):
        values.view(np.uint32).reshape(-1)[5] ^= np.uint32(1 << number)
        return values

    return flipped


def at(place, value):
    """Return a function that sets a single array entry."""

    def changed(values):
        values.reshape(-1)[place] = value
        return values

    return changed


def other(name, dtype, shape):
    """Return an edit that declares another dtype and shape for the bytes of an array."""
    return lambda f: f.weights.update({name: (dtype, shape, f.weights[name][2])})


def zeros(name, dtype, shape, count):
    """Return an edit that adds an array of zero bytes."""
    return weights(**{name: (dtype, shape, bytes(count))})


def test_genuine_certificates_are_accepted(tight, tmp_path, monkeypatch):
    report = verify(tight)
    claims = json.loads((tight / "certificate.json").read_text())["claims"]
    assert report.correct == claims["correct"]
    assert report.certified == tuple((c["radius"], c["images"]) for c in claims["certified"])
    assert np.all(np.asarray(claims["radii"]) <= report.radii)
    assert np.max(report.radii - claims["radii"]) < 1e-5  # tight, so that small forgeries fail
    monkeypatch.setattr(_network, "_BATCH_NUMBERS", 40)  # in batches of three, not all at once
    again = verify(Forgery(tight).write(tmp_path / "repacked"))
    np.testing.assert_allclose(again.radii, report.radii, rtol=1e-9)


# Forgeries with the original digests.
CHANGED_BYTES = {
    **{f"bit {n} of a weight": change("0.linear", bit(n)) for n in (0, 12, 31)},
    "a bias": change("1.bias", lambda b: b * 1.0000001),
    "a weight of the stack": change("5.linear", at(-1, 0.5)),
    "rows of a matrix": change("2.linear", lambda w: w[::-1]),
    "two equal layers": lambda f: f.weights.update(
        {"1.bias": f.weights["4.bias"], "4.bias": f.weights["1.bias"]}
    ),
    "a dtype": other("8.bias", "F16", [6]),
    "a shape": other("3.linear", "F32", [4, 16]),
    "an extra array": zeros("x", "F32", [1], 4),
    "a missing array": weights(**{"8.bias": None}),
    "one pixel": change("images", at(7, 0.5), "images"),
    "the order of images": change("images", lambda x: x[::-1], "images"),
    "a label": change("labels", lambda y: (y + 1) % 3, "images"),
}


@pytest.mark.parametrize("name", CHANGED_BYTES)
def test_changed_bytes_fail_their_digest(tight, tmp_path, name):
    forged = Forgery(tight, CHANGED_BYTES[name])
    assert "SHA-256" in refusal(forged.write(tmp_path / "forged", digests=False))
    # With the file's digest repaired, the array's digest or declaration is refused.
    for part in ("weights", "images"):
        forged.told[part]["sha256"] = forge.sha256(forge.pack(getattr(forged, part)))
    text = refusal(forged.write(tmp_path / "half", digests=False))
    assert re.match(r"(weights|images), '.*(SHA-256|declared)", text)


def best(f):
    return int(np.argmax(f.told["claims"]["radii"]))


NUMBERS = r"claims.* (is not proved|larger logit|are proved)"
BRANCHES = "network.6.layers.0.branches"

# Forgeries with all digests repaired: only the numbers are wrong.
CHANGED_NUMBERS = {
    **{f"bit {n} of a weight": change("0.linear", bit(n)) for n in (21, 25, 31)},
    "a bias": change("1.bias", lambda b: b + 0.01),
    "a bias of the last layer": change("8.bias", at(0, 0.9)),
    **{
        f"{name} scaled by {c}": change(name, lambda w, c=c: c * w)
        for name in ("0.linear", "2.linear", "3.linear", "5.linear", "7.linear")
        for c in (0.9, 1.001, 1.1, -1)
        # Signs matter: -1 negates the logits, except biases.
    },
    "a matrix transposed": change("3.linear", lambda w: w.T),
    "rows exchanged": change("7.linear", lambda w: w[::-1]),
    "weights zero": change("7.linear", lambda w: 0 * w),
    "two layers swapped": forge.swap("network.4", "network.5"),
    "a matrix and MaxMin swapped": forge.swap("network.2", "network.5"),
    "copies of the stack swapped": change("5.linear", lambda w: w[::-1]),
    "biases swapped": forge.swap("network.1.weight", "network.4.weight"),
    **{
        f"MaxMin declared as {kind}": put("network.5", {"kind": kind})
        for kind in ("identity", "abs", "relu", "mean_subtract")
    },
    "MaxMin declared with groups of four": put("network.5.size", 4),
    "MaxMin left out": drop("network.5"),
    "a matrix declared as MaxMin": every(
        put("network.2", {"kind": "group_sort", "size": 2}), weights(**{"2.linear": None})
    ),
    "a bias left out": every(drop("network.4"), weights(**{"4.bias": None})),
    "a hidden factor": insert("network.3", kind="scale", factor=1.5),
    "a hidden sign": insert("network.9", kind="scale", factor=-1),
    "a changed factor": put(f"{BRANCHES}.0.0.factor", 0.75),
    "an extra branch": put(BRANCHES, lambda old: [*old, [{"kind": "scale", "factor": 0.1}]]),
    "a smaller pixel scale": put("input.scale", 0.45),
    "a larger pixel scale": put("input.scale", 0.55),
    "another shift": put("input.shift", 0.3),
    "the order of images": change("images", lambda x: x[::-1], "images"),
    "brighter images": change("images", lambda x: 1.1 * x, "images"),
    "the order of labels": change("labels", lambda y: y[::-1], "images"),
    "one radius": put("claims.radii.3", 0.0213),
    "all radii by a thousandth": put("claims.radii", lambda radii: [1.001 * r for r in radii]),
    "an endless radius": put("claims.radii.0", 1e50),
    "the order of radii": put("claims.radii", lambda radii: radii[::-1]),
    "the order of predictions": put("claims.predictions", lambda found: found[::-1]),
    "a prediction, with radius 0": lambda f: every(
        put(f"claims.predictions.{best(f)}", 0), put(f"claims.radii.{best(f)}", 0)
    )(f),
    "clean accuracy": put("claims.correct", lambda n: n + 1),
    "certified accuracy": put("claims.certified.1.images", 40),
    "certified accuracy by one image": put("claims.certified.0.images", lambda n: n + 1),
    "the radius of a certified accuracy": put("claims.certified.0.radius", 0.02),
    "float32 where real was certified": put("arithmetic", "float32"),
}


@pytest.mark.parametrize("name", CHANGED_NUMBERS)
def test_changed_numbers_with_valid_digests_are_refused(tight, tmp_path, name):
    forged = Forgery(tight, CHANGED_NUMBERS[name])
    assert re.match(NUMBERS, refusal(forged.write(tmp_path / "forged")))


def test_weaker_claims_are_accepted(tight, tmp_path):
    """Smaller radii and doubled logits are proved as well, so they are no forgeries."""
    weaker = put("claims.radii", lambda radii: [0.9 * r for r in radii])
    smaller = Forgery(tight, weaker, put("claims.certified", []))
    assert verify(smaller.write(tmp_path / "smaller")).certified == ()
    twice = Forgery(tight, insert("network.9", kind="scale", factor=2))
    assert verify(twice.write(tmp_path / "twice")).correct > 0


def nest(f):
    inner = [{"kind": "abs"}]
    for _ in range(200):
        inner = [{"kind": "sum", "branches": [inner]}]
    f.told["network"] = inner + f.told["network"]


# Inconsistent declarations, with all digests repaired: edit and message.
STRUCTURE = {
    "a future version": (put("version", 3), "version must be 2; got 3"),
    "a fractional version": (put("version", 2.0), "must be 2; got 2.0"),
    "no version": (drop("version"), "must be 2; got None"),
    "another format": (put("format", "x"), "format"),
    "another norm": (put("norm", "linf"), "norm must be 'l2'; got 'linf'"),
    "another arithmetic": (put("arithmetic", "tf32"), "float32; got 'tf32'"),
    "an extra key": (put("note", ""), "unknown key 'note'"),
    "a missing section": (drop("claims"), "missing key 'claims'"),
    "an unknown kind": (put("network.5.kind", "elu"), r"network\[5\]: unknown kind 'elu'"),
    "a hidden key": (put("network.0.factor", 2), r"network\[0\]: linear takes the keys weight;"),
    "a missing key": (drop("network.5.size"), r"network\[5\]: group_sort takes the keys size;"),
    "no list of layers": (put("network", {}), "must be a list"),
    "a number as a layer": (put("network", lambda old: [*old, 3]), "must be a layer, .* got 3"),
    "a number as a kind": (put("network.5.kind", 7), "must be a layer"),
    "an unknown array": (put("network.0.weight", "9"), "'9' is not declared"),
    "a list as an array": (put("network.0.weight", []), "is not declared"),
    "an unused array": (zeros("x", "F32", [1], 4), "'x': no layer uses it"),
    "an array falsely shared": (put("weights.shared", ["1.bias"]), "'1.bias': used in .* and decl"),
    "an unknown array shared": (put("weights.shared", ["q"]), "unknown arrays .*'q'"),
    "shared is no list": (put("weights.shared", "1.bias"), "shared must be a list"),
    "an empty array": (zeros("8.bias", "F32", [0], 0), "is empty"),
    "integers as weights": (zeros("8.bias", "I32", [3], 12), "must be floating point; got I32"),
    "float64 deployed in float32": (
        every(zeros("8.bias", "F64", [3], 24), put("arithmetic", "float32")), "float64 arrays .*8"),
    "a stack of one": (put("network.6.copies", 1), "after the axes .* of the stacks"),
    "a stack of none": (put("network.6.copies", 0), "a stack takes copies"),
    "an endless stack": (
        insert("network.0", kind="stack", copies=10**9, layers=[{"kind": "abs"}]),
        "10001 layers and branches"),
    "a stack that changes the shape": (
        every(zeros("x", "F32", [2, 8, 12], 768),
              insert("network.0", kind="stack", copies=2,
                     layers=[{"kind": "linear", "weight": "x"}])),
        r"must keep the shape \(12,\); got \(8,\)"),
    "a stack of a matrix as one": (
        lambda f: put("network.6", f.told["network"][6]["layers"][0])(f), "expected 2 axes"),
    "branches of different shapes": (
        insert("network.0", kind="sum", branches=[[], [{"kind": "linear", "weight": "0.linear"}]]),
        "must have the same shape"),
    "a sum of nothing": (insert("network.0", kind="sum", branches=[]), "a sum takes branches"),
    "endless layers": (nest, "nested too deeply"),
    "a matrix for another input": (change("0.linear", lambda w: w[:, :11]), "does not fit the"),
    "a matrix as a bias": (put("network.1.weight", "0.linear"), "expected 1 axes"),
    "groups that do not fit": (put("network.5.size", 3), "size=3 does not divide"),
    "groups of none": (put("network.5.size", 0), "must be at least 1"),
    "groups of 2.0": (put("network.5.size", 2.0), "must be a whole number"),
    "a boolean factor": (insert("network.0", kind="scale", factor=True), "must be a number"),
    "a huge factor": (insert("network.0", kind="scale", factor=10**30), "at most 2..64"),
    "missing axes": (insert("network.0", kind="space_to_depth", side=2), "takes 3 axes"),
    "no layers": (put("network", []), "no layer uses it"),
    "no logits": (
        every(put("network", []), lambda f: f.weights.clear(), put("input.shape", [3, 4])),
        "must return logits"),
    "a negative shape": (put("input.shape", [-12]), "shape must be"),
    "another input shape": (put("input.shape", [3, 4]), "does not fit the input"),
    "a scale of zero": (put("input.scale", 0), "scale must be within"),
    "a negative scale": (put("input.scale", -0.5), "scale must be within"),
    "shifts for other channels": (put("input.shift", [1, 2]), "shift must be a number or 12"),
    "fewer radii": (drop("claims.radii.39"), "radii must be 40"),
    "more predictions": (put("claims.predictions", lambda old: [*old, 0]), "predictions must"),
    "an unknown class": (put("claims.predictions.0", 3), "must be in .0, 3"),
    "a negative radius": (put("claims.radii.0", -1), "must be a finite number"),
    "a radius in words": (put("claims.radii.0", "1"), "must be a finite number"),
    "half an image": (put("claims.correct", 0.5), "correct must be a count; got 0.5"),
    "a certified accuracy in words": (
        put("claims.certified", [{"radius": 1, "images": "all"}]), "certified"),
    "labels out of range": (change("labels", at(0, 3), "images"), "labels must be in"),
    "labels as floats": (
        lambda f: f.images.update(labels=("F32", [40], bytes(160))), "labels must be .* got F32"),
    "fewer labels": (change("labels", lambda y: y[1:], "images"), "labels must be .* got I64"),
    "no labels": (lambda f: f.images.pop("labels"), "expected images and labels"),
    "an extra array of images": (
        lambda f: f.images.update(masks=("U8", [1], b"0")), "expected images and labels"),
    "another shape of images": (
        change("images", lambda x: x[:, :11], "images"), "each image is"),
    **{
        f"{value} in {name}": (change(name, at(1, value), part), "finite")
        for name, part in (("0.linear", "weights"), ("1.bias", "weights"), ("images", "images"))
        for value in (np.nan, np.inf)
    },
    **{
        f"a file named {name!r}": (put("weights.file", name), "file must be a name without folders")
        for name in ("../tight/weights.safetensors", "/etc/passwd", "a/b", "a\\b", "..", "",
                     "w\0", ".hidden", 3, None)
    },
    "the same file for both": (put("images.file", "weights.safetensors"), "SHA-256"),
    "a missing file": (put("images.file", "x"), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURE)
def test_inconsistent_declarations_are_refused(tight, tmp_path, name):
    edit, wanted = STRUCTURE[name]
    assert re.search(wanted, refusal(Forgery(tight, edit).write(tmp_path / "forged")))


# The text of the certificate.
TEXT = {
    "a key twice": ('"version"', '"version": 2, "version"', "'version' appears twice"),
    "claims twice": ('"claims"', '"claims": {}, "claims"', "'claims' appears twice"),
    "NaN": ('"scale": 0.5', '"scale": NaN', "'NaN' is not a finite number"),
    "Infinity": ('"scale": 0.5', '"scale": -Infinity', "'-Infinity' is not a finite number"),
    "a number that overflows": ('"scale": 0.5', '"scale": 1e999', "'1e999' is not a finite"),
    "a number that underflows": (
        '"scale": 0.5',
        '"scale": 1e-9999999999999999999',
        "certificate: '1e-9*' is not a float64",
    ),
    "a number of many digits": ('"version": 2', '"version": 2' + "0" * 9999, "not JSON"),
    "a comment": ('"version"', '// "version"', "not JSON"),
    "more behind it": ("}\n}\n", "}\n}{}\n", "not JSON"),
    "bytes that are no text": ("manifoldmuon", "\udcff", "not JSON"),
    "brackets without end": ('"network": [', '"network": ' + "[" * 200_000, "not JSON"),
}


@pytest.mark.parametrize("name", TEXT)
def test_invalid_json_is_refused(tight, tmp_path, name):
    old, new, wanted = TEXT[name]
    text = (tight / "certificate.json").read_text()
    assert old in text
    path = tmp_path / "certificate.json"
    path.write_bytes(text.replace(old, new, 1).encode("utf-8", "surrogateescape"))
    files = (tight / "weights.safetensors", tight / "images.safetensors")
    assert re.search(wanted, refusal(path, *files))


def place(dtype: Any = "F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# Headers of safetensors files, and the number of bytes after them.
HEADERS = {
    "arrays that overlap": ({"a": place(), "b": place(offsets=(4, 12))}, 12, "overlaps"),
    "two arrays in one place": ({"a": place(), "b": place()}, 8, "overlaps"),
    "a hole": ({"a": place(), "b": place(offsets=(9, 17))}, 17, "leaves a gap"),
    "bytes of no array": ({"a": place()}, 9, "9 bytes of arrays"),
    "arrays beyond the end": ({"a": place()}, 7, "7 bytes of arrays"),
    "a negative size": ({"a": place(shape=(-2, -1))}, 8, "must be sizes"),
    "a size that is true": ({"a": place(shape=(True, 2))}, 8, "must be sizes"),
    "a size that is no whole number": ({"a": place(shape=(2.0,))}, 8, "must be sizes"),
    "a size that overflows": ({"a": place(shape=(2**47,) * 3 + (0,))}, 8, "offsets span 8"),
    "negative offsets": ({"a": place(offsets=(-8, 0))}, 8, "must be sizes"),
    "offsets reversed": ({"a": place(offsets=(8, 0))}, 8, "offsets span -8"),
    "three offsets": ({"a": place(offsets=(0, 8, 8))}, 8, "must be sizes"),
    "a shape of other bytes": ({"a": place(shape=(3,))}, 8, "takes 12 bytes"),
    "a dtype that is unknown": ({"a": place(dtype="C64")}, 8, "dtype must be in .*'C64'"),
    "a dtype that is a list": ({"a": place(dtype=[])}, 8, "dtype must be in"),
    "an array that is a number": ({"a": 3}, 8, "dtype, shape and data_offsets"),
    "a key more": ({"a": place() | {"strides": [1]}}, 8, "dtype, shape and data_offsets"),
    "metadata that is no text": ({"__metadata__": {"a": 1}, "a": place()}, 8, "__metadata__"),
    "a shape of 65 axes": ({"a": place(shape=[1] * 65)}, 8, "65 axes; at most 16 are accepted"),
    "a shape of 20,000 axes": ({"a": place(shape=[2**47] * 20_000)}, 8, "20000 axes; at most 16"),
    "a list": ([], 0, "must be an object"),
    "a key twice": (b'{"a": 1, "a": 2}', 0, "appears twice"),
    "no JSON": (b"\xff\xff", 0, "not JSON"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_inconsistent_headers_are_refused(tight, tmp_path, name):
    header, count, wanted = HEADERS[name]
    data = forge.with_header(header, bytes(count))
    assert re.search(wanted, weights_refused(tight, tmp_path, data))


def weights_refused(tight, tmp_path, data):
    forged = Forgery(tight)
    folder = forged.write(tmp_path / "forged")
    forged.replace(folder, "weights", data)
    return refusal(folder)


@pytest.mark.parametrize("size", [2**63 - 1, 2**64 - 1, 2**25, 10_000])
def test_huge_header_lengths_are_refused(tight, tmp_path, size):
    data = size.to_bytes(8, "little") + bytes(100)
    assert "truncated: " in weights_refused(tight, tmp_path, data)


@pytest.mark.parametrize("name", FILES)
def test_truncated_files_are_refused(tight, tmp_path, name):
    whole = (tight / name).read_bytes()
    for i, size in enumerate([0, 4, 8, 20, len(whole) // 2, len(whole) - 3]):
        folder = Forgery(tight).write(tmp_path / f"{i}")
        (folder / name).write_bytes(whole[:size])
        assert re.search("not JSON|SHA-256", refusal(folder))
        if name == "weights.safetensors":
            text = weights_refused(tight, tmp_path / f"{i}", whole[:size])
            assert re.search("truncated: |of arrays", text)


@pytest.mark.parametrize("name", FILES[:2])
def test_corrupt_bytes_never_verify_false_claims(tight, tmp_path, name):
    """All digests are repaired; the verifier raises no exception but `Refused`."""
    rng, forged, accepted = np.random.default_rng(0), Forgery(tight), 0
    folder = forged.write(tmp_path / "it")
    data = (folder / name).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for i in range(400):
        changed = bytearray(data)
        if name == FILES[0]:
            changed[rng.integers(len(data))] = rng.choice(list(b'0123456789.-e"{}[],: x\\'))
            (folder / name).write_bytes(changed)
        else:
            changed[rng.integers(header if i % 2 else len(data))] = rng.integers(256)
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                forged.told["weights"]["arrays"] = forge.declared(forge.unpack(bytes(changed)))
            forged.replace(folder, "weights", changed)
        with contextlib.suppress(Refused):
            verify(folder)
            accepted += 1
            assert not claimed_too_much(folder)
    assert 0 < accepted < 60


def test_command_exit_codes_and_output(tight, tmp_path, capsys):
    assert main([str(tight)]) == 0
    printed = capsys.readouterr()
    assert "certified at 0.05" in printed.out
    assert not printed.err
    report = verify(tight)
    for name in ("weights", "images"):
        assert forge.sha256((tight / f"{name}.safetensors").read_bytes()) in printed.out
    low, high, constant = re.findall(r"\d+\.\d{9}", re.sub("pixels claimed.*", "", printed.out))
    assert 0 <= report.least_singular - float(low) < 1e-8
    assert 0 <= float(high) - report.most_singular < 1e-8
    assert 0 <= float(constant) - report.lipschitz < 1e-8
    folder = Forgery(tight, put("claims.radii.3", 1)).write(tmp_path / "forged")
    assert main([str(folder / "certificate.json")]) == 1
    printed = capsys.readouterr()
    assert re.fullmatch("refused: claims, image 3: the radius 1.0 .*\n", printed.err)
    assert not printed.out
    files = [f"{tight / name}.safetensors" for name in ("weights", "images")]
    options = ["--weights", files[0], "--images", files[1]]
    assert main([str(tight / "certificate.json"), *options]) == 0
    assert main([str(tight), "--weights", files[1]]) == 1
    assert "weights: the SHA-256 of the file differs" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 1
