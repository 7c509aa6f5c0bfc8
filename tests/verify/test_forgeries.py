"""Forged certificates get a one-line refusal with the reason; docs/certificates.md lists them."""

import contextlib
import json
import re
from typing import Any

import numpy as np
import pytest

from benchmarks._forgeries import Forgery, pack, sha256, unpack, with_header
from manifoldmuon_verify import Refused, _network, verify
from manifoldmuon_verify.__main__ import main
from tests.verify.forge import case, export_radii, write_tight


@pytest.fixture(scope="module")
def tight(tmp_path_factory):
    return write_tight(tmp_path_factory.mktemp("certificate"))


def refusal(folder, *files):
    with pytest.raises(Refused) as caught:
        verify(folder, *files)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


def swap(table, first, second):
    table[first], table[second] = table[second], table[first]


def bit(number, place=5):
    """Return a function that flips a bit of a single array entry."""

    def flipped(values):
        words = values.view(np.uint32).reshape(-1)
        words[place] ^= np.uint32(1 << number)
        return values

    return flipped


def at(place, value):
    def changed(values):
        values.reshape(-1)[place] = value
        return values

    return changed


def test_genuine_certificates_are_accepted(tight, tmp_path, monkeypatch):
    report = verify(tight)
    claims = json.loads((tight / "certificate.json").read_text())["claims"]
    assert report.correct == claims["correct"]
    assert report.certified == tuple((c["radius"], c["images"]) for c in claims["certified"])
    assert np.all(np.asarray(claims["radii"]) <= report.radii)
    assert np.max(report.radii - claims["radii"]) < 1e-5  # tight, so that small forgeries fail
    monkeypatch.setattr(_network, "_MOST_NUMBERS", 40)  # in batches of three, not all at once
    again = verify(Forgery(tight).write(tmp_path / "repacked", digests=True))
    np.testing.assert_allclose(again.radii, report.radii, rtol=1e-9)


# Forgeries with the original digests.
CHANGED_BYTES = {
    **{f"bit {n} of a weight": lambda f, n=n: f.change("0.linear", bit(n)) for n in (0, 12, 31)},
    "a bias": lambda f: f.change("1.bias", lambda b: b * 1.0000001),
    "a weight of the stack": lambda f: f.change("5.linear", at(-1, 0.5)),
    "the reflections": lambda f: f.change("2.householder", lambda v: v[::-1]),
    "two equal layers": lambda f: swap(f.weights, "1.bias", "4.bias"),
    "a dtype": lambda f: f.weights.update(
        {"8.bias": ("F16", [6], f.weights["8.bias"][2])}
    ),
    "a shape": lambda f: f.weights.update(
        {"3.linear": ("F32", [4, 16], f.weights["3.linear"][2])}
    ),
    "an array more": lambda f: f.weights.update({"x": ("F32", [1], bytes(4))}),
    "an array less": lambda f: f.weights.pop("8.bias"),
    "one pixel": lambda f: f.change("images", at(7, 0.5), "images"),
    "the order of images": lambda f: f.change("images", lambda x: x[::-1], "images"),
    "a label": lambda f: f.change("labels", lambda y: (y + 1) % 3, "images"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED_BYTES)
def test_changed_bytes_fail_their_digest(tight, tmp_path, name):
    forged = Forgery(tight)
    CHANGED_BYTES[name](forged)
    assert "SHA-256" in refusal(forged.write(tmp_path / "forged", digests=False))
    # With the file's digest repaired, the array's digest or declaration is refused.
    for part in ("weights", "images"):
        forged.told[part]["sha256"] = sha256(pack(getattr(forged, part)))
    text = refusal(forged.write(tmp_path / "half", digests=False))
    assert re.match(r"(weights|images), '.*(SHA-256|declared)", text)


def entry(f, *path):
    found = f.told["network"]
    for key in path:
        found = found[key]
    return found


def insert(f, index, **layer):
    f.told["network"].insert(index, layer)


def raised(f, key, value):
    f.told["claims"][key] = value


def best(f):
    return int(np.argmax(f.told["claims"]["radii"]))


NUMBERS = r"claims.* (is not proved|larger logit|are proved to be|are by their radii)"

# Forgeries with all digests repaired: only the numbers are wrong.
CHANGED_NUMBERS = {
    **{f"bit {n} of a weight": lambda f, n=n: f.change("0.linear", bit(n)) for n in (21, 25, 31)},
    "a bias": lambda f: f.change("1.bias", lambda b: b + 0.01),
    "a bias of the last layer": lambda f: f.change("8.bias", at(0, 0.9)),
    **{
        f"{name} scaled by {c}": lambda f, name=name, c=c: f.change(name, lambda w: c * w)
        for name in ("0.linear", "2.householder", "3.linear", "5.linear", "7.linear")
        for c in (0.9, 1.001, 1.1, -1)
        # Signs matter: -1 negates the logits (except biases), and v and -v are different layers.
    },
    "a matrix transposed": lambda f: f.change("3.linear", lambda w: w.T),
    "rows exchanged": lambda f: f.change("7.linear", lambda w: w[::-1]),
    "weights zero": lambda f: f.change("7.linear", lambda w: 0 * w),
    "two layers swapped": lambda f: swap(f.told["network"], 4, 5),
    "activations swapped": lambda f: swap(f.told["network"], 2, 5),
    "copies of the stack swapped": lambda f: f.change("5.linear", lambda w: w[::-1]),
    "biases swapped": lambda f: (
        swap(entry(f, 1), "weight", "kind"), swap(entry(f, 1), "weight", "kind"),
        entry(f, 1).update(weight="4.bias"), entry(f, 4).update(weight="1.bias"),
    ),
    **{
        f"MaxMin declared as {kind}": lambda f, kind=kind: (
            entry(f, 5).clear(), entry(f, 5).update(kind=kind)
        )
        for kind in ("identity", "abs", "relu", "mean_subtract")
    },
    "MaxMin declared with groups of four": lambda f: entry(f, 5).update(size=4),
    "MaxMin left out": lambda f: f.told["network"].pop(5),
    "reflections declared as MaxMin": lambda f: (
        f.told["network"].__setitem__(2, {"kind": "group_sort", "size": 2}),
        f.weights.pop("2.householder"),
    ),
    "a bias left out": lambda f: (f.told["network"].pop(4), f.weights.pop("4.bias")),
    "a hidden factor": lambda f: insert(f, 3, kind="scale", factor=1.5),
    "a hidden sign": lambda f: insert(f, 9, kind="scale", factor=-1),
    "a changed factor": lambda f: entry(f, 6, "layers", 0, "branches", 0, 0).update(factor=0.75),
    "a branch more": lambda f: entry(f, 6, "layers", 0, "branches").append(
        [{"kind": "scale", "factor": 0.1}]
    ),
    "a smaller pixel scale": lambda f: f.told["input"].update(scale=0.45),
    "a larger pixel scale": lambda f: f.told["input"].update(scale=0.55),
    "another shift": lambda f: f.told["input"].update(shift=0.3),
    "the order of images": lambda f: f.change("images", lambda x: x[::-1], "images"),
    "brighter images": lambda f: f.change("images", lambda x: 1.1 * x, "images"),
    "the order of labels": lambda f: f.change("labels", lambda y: y[::-1], "images"),
    "one radius": lambda f: f.told["claims"]["radii"].__setitem__(3, 0.0213),
    "all radii by a thousandth": lambda f: raised(
        f, "radii", [1.001 * r for r in f.told["claims"]["radii"]]
    ),
    "a radius without end": lambda f: f.told["claims"]["radii"].__setitem__(0, 1e50),
    "the order of radii": lambda f: raised(f, "radii", f.told["claims"]["radii"][::-1]),
    "the order of predictions": lambda f: raised(
        f, "predictions", f.told["claims"]["predictions"][::-1]
    ),
    "a prediction, with radius 0": lambda f: (
        f.told["claims"]["predictions"].__setitem__(best(f), 0),
        f.told["claims"]["radii"].__setitem__(best(f), 0),
    ),
    "clean accuracy": lambda f: raised(f, "correct", f.told["claims"]["correct"] + 1),
    "certified accuracy": lambda f: f.told["claims"]["certified"][1].update(images=40),
    "certified accuracy by one image": lambda f: f.told["claims"]["certified"][0].update(
        images=f.told["claims"]["certified"][0]["images"] + 1
    ),
    "the radius of a certified accuracy": lambda f: f.told["claims"]["certified"][0].update(
        radius=0.02
    ),
    "float32 where real was certified": lambda f: f.told.update(arithmetic="float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED_NUMBERS)
def test_changed_numbers_with_valid_digests_are_refused(tight, tmp_path, name):
    forged = Forgery(tight)
    CHANGED_NUMBERS[name](forged)
    assert re.match(NUMBERS, refusal(forged.write(tmp_path / "forged", digests=True)))


def weaker(f):
    f.told["claims"]["radii"] = [0.9 * r for r in f.told["claims"]["radii"]]
    f.told["claims"]["certified"] = []


def test_weaker_claims_are_accepted(tight, tmp_path):
    """Smaller radii and doubled logits are proved as well, so they are no forgeries."""
    smaller = Forgery(tight)
    weaker(smaller)
    assert verify(smaller.write(tmp_path / "smaller", digests=True)).certified == ()
    twice = Forgery(tight)
    insert(twice, 9, kind="scale", factor=2)
    assert verify(twice.write(tmp_path / "twice", digests=True)).correct > 0


def test_shared_arrays_must_be_declared(tmp_path):
    net, params, images, labels = case()
    params = (*params[:4], params[1], *params[5:])
    export_radii(tmp_path / "shared", net, params, images, labels, np.zeros(len(images)))
    assert verify(tmp_path / "shared").matrices == 5
    forged = Forgery(tmp_path / "shared")
    forged.told["weights"]["shared"] = []
    text = refusal(forged.write(tmp_path / "forged", digests=True))
    assert "weights, '1.bias': used in ['network[1]', 'network[4]'] and not declared" in text


# Inconsistent declarations, with all digests repaired.
STRUCTURE = {
    "a future version": (lambda f: f.told.update(version=3), "of version 3"),
    "a version that is no whole number": (lambda f: f.told.update(version=1.0), "of version 1.0"),
    "a version that is true": (lambda f: f.told.update(version=True), "of version True"),
    "no version": (lambda f: f.told.pop("version"), "of version None"),
    "another format": (lambda f: f.told.update(format="x"), "format"),
    "another norm": (lambda f: f.told.update(norm="linf"), "norm 'linf'"),
    "another arithmetic": (lambda f: f.told.update(arithmetic="tf32"), "arithmetic 'tf32'"),
    "a key more": (lambda f: f.told.update(note=""), "unknown key 'note'"),
    "a key less": (lambda f: f.told.pop("claims"), "no key 'claims'"),
    "an unknown kind": (lambda f: entry(f, 5).update(kind="elu"), r"network\[5\]: the kind 'elu'"),
    "a hidden key": (lambda f: entry(f, 0).update(factor=2), r"network\[0\]: linear takes weight"),
    "a missing key": (lambda f: entry(f, 5).pop("size"), r"network\[5\]: group_sort takes size"),
    "no list of layers": (lambda f: f.told.update(network={}), "not a list"),
    "a layer that is none": (lambda f: f.told["network"].append(3), "3 is not a layer"),
    "a number as a kind": (lambda f: entry(f, 5).update(kind=7), "is not a layer"),
    "an array that is not there": (lambda f: entry(f, 0).update(weight="9"), "'9' is not declared"),
    "an array that is a list": (lambda f: entry(f, 0).update(weight=[]), "is not declared"),
    "an array that no layer uses": (
        lambda f: f.weights.update({"x": ("F32", [1], bytes(4))}), "'x': no layer uses it"),
    "an array said to be shared": (
        lambda f: f.told["weights"].update(shared=["1.bias"]), "'1.bias': used in .* and declared"),
    "an unknown array shared": (
        lambda f: f.told["weights"].update(shared=["q"]), "'q'.* is no array"),
    "shared is no list": (lambda f: f.told["weights"].update(shared="1.bias"), "not a list"),
    "an empty array": (lambda f: f.weights.update({"8.bias": ("F32", [0], b"")}), "is empty"),
    "whole numbers as weights": (
        lambda f: f.weights.update({"8.bias": ("I32", [3], bytes(12))}), "of dtype I32"),
    "float64 as deployed in float32": (
        lambda f: (f.weights.update({"8.bias": ("F64", [3], bytes(24))}),
                   f.told.update(arithmetic="float32")), "in float64"),
    "a stack of three": (lambda f: entry(f, 6).update(copies=3), r"behind those of the stacks"),
    "a stack of one": (lambda f: entry(f, 6).update(copies=1), r"behind those of the stacks"),
    "a stack of none": (lambda f: entry(f, 6).update(copies=0), "a stack takes copies"),
    "a stack without end": (
        lambda f: insert(f, 0, kind="stack", copies=10**9, layers=[{"kind": "abs"}]), "more than"),
    "a stack that changes the shape": (
        lambda f: (f.weights.update({"x": ("F32", [2, 8, 12], bytes(768))}),
                   insert(f, 0, kind="stack", copies=2,
                          layers=[{"kind": "linear", "weight": "x"}])),
        r"a copy makes \(8,\) of \(12,\)"),
    "a stack of a matrix as one": (
        lambda f: f.told["network"].__setitem__(6, entry(f, 6, "layers", 0)), "wanted are 2 axes"),
    "branches of different shapes": (
        lambda f: insert(
            f, 0, kind="sum", branches=[[], [{"kind": "linear", "weight": "0.linear"}]]),
        "different shapes"),
    "a sum of nothing": (lambda f: insert(f, 0, kind="sum", branches=[]), "a sum takes branches"),
    "layers without end": (lambda f: nest(f, 200), "nested too deeply"),
    "a matrix for another input": (
        lambda f: f.change("0.linear", lambda w: w[:, :11]), "for an input"),
    "a matrix as a bias": (lambda f: entry(f, 1).update(weight="0.linear"), "wanted are 1 axes"),
    "groups that do not fit": (lambda f: entry(f, 5).update(size=3), "do not fall into groups"),
    "groups of none": (lambda f: entry(f, 5).update(size=0), "not at least 1"),
    "groups of 2.0": (lambda f: entry(f, 5).update(size=2.0), "no whole number"),
    "a factor that is true": (lambda f: insert(f, 0, kind="scale", factor=True), "not a number"),
    "a factor too large": (lambda f: insert(f, 0, kind="scale", factor=10**30), "too large"),
    "axes that are not there": (lambda f: insert(f, 0, kind="norm_pool", side=2), "takes 3 axes"),
    "no layers": (lambda f: f.told.update(network=[]), "no layer uses it"),
    "no logits": (lambda f: (f.told.update(network=[]), f.weights.clear(),
                             f.told["input"].update(shape=[3, 4])), "no logits"),
    "a shape that is none": (lambda f: f.told["input"].update(shape=[-12]), "the shape"),
    "an input of another shape": (lambda f: f.told["input"].update(shape=[3, 4]), "for an input"),
    "a scale of zero": (lambda f: f.told["input"].update(scale=0), "the scale"),
    "a negative scale": (lambda f: f.told["input"].update(scale=-0.5), "the scale"),
    "shifts for other channels": (lambda f: f.told["input"].update(shift=[1, 2]), "the shift"),
    "fewer radii": (lambda f: f.told["claims"]["radii"].pop(), "radii must be 40"),
    "more predictions": (lambda f: f.told["claims"]["predictions"].append(0), "predictions must"),
    "a class that is none": (
        lambda f: f.told["claims"]["predictions"].__setitem__(0, 3), "no class"),
    "a negative radius": (lambda f: f.told["claims"]["radii"].__setitem__(0, -1), "no length"),
    "a radius in words": (lambda f: f.told["claims"]["radii"].__setitem__(0, "1"), "no length"),
    "half an image": (lambda f: f.told["claims"].update(correct=0.5), "correct is 0.5"),
    "a certified accuracy in words": (
        lambda f: f.told["claims"].update(certified=[{"radius": 1, "images": "all"}]), "certified"),
    "labels out of range": (lambda f: f.change("labels", at(0, 3), "images"), "a label is none"),
    "labels as floats": (
        lambda f: f.images.update(labels=("F32", [40], bytes(160))), "labels F32"),
    "fewer labels": (lambda f: f.change("labels", lambda y: y[1:], "images"), "labels I64"),
    "no labels": (lambda f: f.images.pop("labels"), "wanted are the arrays"),
    "an array beside the images": (
        lambda f: f.images.update(masks=("U8", [1], b"0")), "wanted are the arrays"),
    "images of another shape": (
        lambda f: f.change("images", lambda x: x[:, :11], "images"), "the images are"),
    **{
        f"{value} in {name}": (
            lambda f, name=name, part=part, value=value: f.change(name, at(1, value), part),
            "finite")
        for name, part in (("0.linear", "weights"), ("1.bias", "weights"), ("images", "images"))
        for value in (np.nan, np.inf)
    },
    **{
        f"a file named {name!r}": (
            lambda f, name=name: f.told["weights"].update(file=name), "is not the name of a file")
        for name in ("../tight/weights.safetensors", "/etc/passwd", "a/b", "a\\b", "..", "",
                     "w\0", ".hidden", 3, None)
    },
    "the same file for both": (
        lambda f: f.told["images"].update(file="weights.safetensors"), "SHA-256"),
    "a file that is not there": (lambda f: f.told["images"].update(file="x"), "cannot be read"),
}  # fmt: skip


def nest(f, depth):
    inner = [{"kind": "abs"}]
    for _ in range(depth):
        inner = [{"kind": "sum", "branches": [inner]}]
    f.told["network"] = inner + f.told["network"]


@pytest.mark.parametrize("name", STRUCTURE)
def test_inconsistent_declarations_are_refused(tight, tmp_path, name):
    change, wanted = STRUCTURE[name]
    forged = Forgery(tight)
    change(forged)
    assert re.search(wanted, refusal(forged.write(tmp_path / "forged", digests=True)))


# The text of the certificate.
TEXT = {
    "a key twice": ('"version"', '"version": 2, "version"', "'version' stands twice"),
    "claims twice": ('"claims"', '"claims": {}, "claims"', "'claims' stands twice"),
    "NaN": ('"scale": 0.5', '"scale": NaN', "'NaN' is not a finite number"),
    "Infinity": ('"scale": 0.5', '"scale": -Infinity', "'-Infinity' is not a finite number"),
    "a number that overflows": ('"scale": 0.5', '"scale": 1e999', "'1e999' is not a finite"),
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
    "a hole": ({"a": place(), "b": place(offsets=(9, 17))}, 17, "leaves a hole"),
    "bytes of no array": ({"a": place()}, 9, "9 bytes of arrays"),
    "arrays beyond the end": ({"a": place()}, 7, "7 bytes of arrays"),
    "a negative size": ({"a": place(shape=(-2, -1))}, 8, "are not sizes"),
    "a size that is true": ({"a": place(shape=(True, 2))}, 8, "are not sizes"),
    "a size that is no whole number": ({"a": place(shape=(2.0,))}, 8, "are not sizes"),
    "a size that overflows": ({"a": place(shape=(2**47,) * 3 + (0,))}, 8, "8 bytes for"),
    "negative offsets": ({"a": place(offsets=(-8, 0))}, 8, "are not sizes"),
    "offsets reversed": ({"a": place(offsets=(8, 0))}, 8, "-8 bytes for"),
    "three offsets": ({"a": place(offsets=(0, 8, 8))}, 8, "are not sizes"),
    "a shape of other bytes": ({"a": place(shape=(3,))}, 8, "which takes 12"),
    "a dtype that is unknown": ({"a": place(dtype="C64")}, 8, "'C64' is none of"),
    "a dtype that is a list": ({"a": place(dtype=[])}, 8, "is none of"),
    "an array that is a number": ({"a": 3}, 8, "dtype, shape and data_offsets"),
    "a key more": ({"a": place() | {"strides": [1]}}, 8, "dtype, shape and data_offsets"),
    "metadata that is no text": ({"__metadata__": {"a": 1}, "a": place()}, 8, "__metadata__"),
    "a list": ([], 0, "not an object"),
    "a key twice": (b'{"a": 1, "a": 2}', 0, "stands twice"),
    "no JSON": (b"\xff\xff", 0, "not JSON"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_inconsistent_headers_are_refused(tight, tmp_path, name):
    header, count, wanted = HEADERS[name]
    data = with_header(header, bytes(count))
    assert re.search(wanted, weights_refused(tight, tmp_path, data))


def weights_refused(tight, tmp_path, data):
    forged = Forgery(tight)
    folder = forged.write(tmp_path / "forged", digests=True)
    (folder / "weights.safetensors").write_bytes(data)
    forged.told["weights"]["sha256"] = sha256(data)
    (folder / "certificate.json").write_text(json.dumps(forged.told))
    return refusal(folder)


@pytest.mark.parametrize("size", [2**63 - 1, 2**64 - 1, 2**25, 10_000])
def test_huge_header_lengths_are_refused(tight, tmp_path, size):
    data = size.to_bytes(8, "little") + bytes(100)
    assert "cut off" in weights_refused(tight, tmp_path, data)


@pytest.mark.parametrize("name", ["certificate.json", "weights.safetensors", "images.safetensors"])
def test_truncated_files_are_refused(tight, tmp_path, name):
    whole = (tight / name).read_bytes()
    for i, size in enumerate([0, 4, 8, 20, len(whole) // 2, len(whole) - 3]):
        forged = Forgery(tight)
        folder = forged.write(tmp_path / f"{i}", digests=True)
        (folder / name).write_bytes(whole[:size])
        assert re.search("not JSON|SHA-256", refusal(folder))
        if name == "weights.safetensors":
            text = weights_refused(tight, tmp_path / f"{i}", whole[:size])
            assert re.search("cut off|of arrays", text)


def test_corrupt_json_never_strengthens_claims(tight, tmp_path):
    """Most changes are refused; the verifier raises no other exception."""
    rng, whole = np.random.default_rng(0), verify(tight)
    files = (tight / "weights.safetensors", tight / "images.safetensors")
    text, path = (tight / "certificate.json").read_bytes(), tmp_path / "certificate.json"
    accepted = 0
    for _ in range(400):
        changed = bytearray(text)
        changed[rng.integers(len(text))] = rng.choice(list(b'0123456789.-e"{}[],: x\\'))
        path.write_bytes(changed)
        with contextlib.suppress(Refused):
            report = verify(path, *files)
            accepted += 1
            assert report.correct <= whole.correct
            told = json.loads(bytes(changed))["claims"]
            assert np.all(np.asarray(told["radii"]) <= report.radii)
    assert 0 < accepted < 250


def test_corrupt_weights_never_verify_false_claims(tight, tmp_path):
    """All digests are repaired; the verifier raises no exception but `Refused`."""
    rng, whole = np.random.default_rng(1), (tight / "weights.safetensors").read_bytes()
    told = json.loads((tight / "certificate.json").read_text())
    header, refused = int.from_bytes(whole[:8], "little"), 0
    (tmp_path / "images.safetensors").write_bytes((tight / "images.safetensors").read_bytes())
    for i in range(400):
        changed = bytearray(whole)
        changed[rng.integers(8 + header if i % 2 else len(whole))] = rng.integers(256)
        (tmp_path / "weights.safetensors").write_bytes(changed)
        told["weights"]["sha256"] = sha256(changed)
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            told["weights"]["arrays"] = {
                name: {"dtype": dtype, "shape": shape, "sha256": sha256(raw)}
                for name, (dtype, shape, raw) in unpack(bytes(changed)).items()
            }
        (tmp_path / "certificate.json").write_text(json.dumps(told))
        try:
            report = verify(tmp_path)
        except Refused:
            refused += 1
        else:
            # The change hit low bits of a weight: the claims hold for the new network, too.
            assert np.all(np.asarray(told["claims"]["radii"]) <= report.radii)
    assert refused > 200


def test_command_exit_codes_and_output(tight, tmp_path, capsys):
    assert main([str(tight)]) == 0
    printed = capsys.readouterr()
    assert "certified at 0.05" in printed.out
    assert not printed.err
    report = verify(tight)
    for name in ("weights", "images"):
        assert sha256((tight / f"{name}.safetensors").read_bytes()) in printed.out
    low, high, constant = re.findall(r"\d+\.\d{9}", re.sub("pixels claimed.*", "", printed.out))
    assert 0 <= report.least_singular - float(low) < 1e-8
    assert 0 <= float(high) - report.most_singular < 1e-8
    assert 0 <= float(constant) - report.lipschitz < 1e-8
    forged = Forgery(tight)
    forged.told["claims"]["radii"][3] = 1
    folder = forged.write(tmp_path / "forged", digests=True)
    assert main([str(folder / "certificate.json")]) == 1
    printed = capsys.readouterr()
    assert re.fullmatch("refused: claims, image 3: the radius 1.0 .*\n", printed.err)
    assert not printed.out
    files = [f"{tight / name}.safetensors" for name in ("weights", "images")]
    options = ["--weights", files[0], "--images", files[1]]
    assert main([str(tight / "certificate.json"), *options]) == 0
    assert main([str(tight), "--weights", files[1]]) == 1
    assert "weights: the file is not the one" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 1
