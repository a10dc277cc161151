"""Files of torch.save: tensors are read exactly, and nothing is executed."""

from __future__ import annotations

import io
import pickle
import tarfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from gradcombine import GradCombineError
from gradcombine.verify.diff.comparing import diff
from gradcombine.verify.diff.dumps import open_dump
from tests.verify.diff.test_command import run


def saved(path: Path, content: Any, name: str = "dump.pt", **options: Any) -> Path:
    torch.save(content, path / name, **options)
    return path / name


def read(path: Path) -> dict[str, np.ndarray]:
    return {name: each.whole() for name, each in open_dump(path).items()}


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        *((getattr(torch, x), np.dtype(x)) for x in ("float32", "float64", "float16", "int64", "uint8", "bool")),
        *((getattr(torch, x), np.dtype(x)) for x in ("complex64", "uint16", "uint64")),
        *((getattr(torch, x), np.dtype(getattr(ml_dtypes, x))) for x in ("bfloat16", "float8_e4m3fn", "float8_e5m2")),
        *((getattr(torch, x), np.dtype(getattr(ml_dtypes, x))) for x in ("float8_e4m3fnuz", "float8_e8m0fnu")),
    ],
)
def test_every_dtype_is_read_to_the_bit(tmp_path: Path, dtype: Any, expected: np.dtype) -> None:
    bits = np.random.default_rng(0).integers(0, 2, (3, 4 * expected.itemsize)).astype(np.uint8)
    tensor = torch.from_numpy(bits).view(dtype)
    found = read(saved(tmp_path, {"x": tensor, "one": tensor[1, 2].clone()}))
    assert (found["x"].dtype, found["x"].shape, found["one"].shape) == (expected, (3, 4), ())
    assert found["x"].tobytes() == bits.tobytes()
    assert found["one"].tobytes() == found["x"][1, 2].tobytes()


def test_views_are_read_as_they_are(tmp_path: Path) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    views = {"turned": x.T, "strided": x[:, ::2], "repeated": x[0].expand(5, 4), "empty": x[:0]}
    conjugate, negative = torch.tensor([1 + 2j, 3 - 4j]).conj(), torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    found = read(saved(tmp_path, views | {"conjugate": conjugate, "negative": negative}))
    expected = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(found["turned"], expected.T)
    np.testing.assert_array_equal(found["strided"], expected[:, ::2])
    np.testing.assert_array_equal(found["repeated"], np.tile(expected[0], (5, 1)))
    np.testing.assert_array_equal(found["negative"], np.float32([-2, 4]))
    np.testing.assert_array_equal(found["conjugate"], np.complex64([1 - 2j, 3 + 4j]))
    assert found["empty"].shape == (0, 4)


def test_a_checkpoint_with_its_optimizer_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    content = {"epoch": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "name": "run", "rng": None}
    dump = open_dump(saved(tmp_path, content))
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(dump[f"model/{name}"].whole(), tensor.numpy())
    momentum = optimizer.state[model[0].weight]["exp_avg"]
    np.testing.assert_array_equal(dump["optimizer/state/0/exp_avg"].whole(), momentum.numpy())
    assert dump["epoch"].whole() == 3
    assert dump["optimizer/param_groups/0/betas/1"].whole() == 0.999
    assert [name for name, each in dump.items() if each.unread] == ["name"]
    assert "rng" not in dump


def test_tied_tensors_are_two_leaves(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    found = read(saved(tmp_path, model.state_dict()))
    assert list(found) == ["embed.weight", "head.weight"]
    np.testing.assert_array_equal(found["embed.weight"], found["head.weight"])


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.bin", "w.ckpt"])
def test_its_usual_names_are_known(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, {"w": torch.ones(3)}, name)
    np.savez(tmp_path / "w.npz", w=np.ones(3, np.float32))
    assert run(path, tmp_path / "w.npz")[0] == 0


def test_files_before_1_6_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(3)}, _use_new_zipfile_serialization=False)
    np.testing.assert_array_equal(read(path)["w"], np.ones(3))


def test_keys_that_could_be_one_another_are_told_apart(tmp_path: Path) -> None:
    found = read(saved(tmp_path, {"a": {1: torch.ones(1), "1": torch.zeros(1)}, "b": [torch.ones(2)]}))
    assert list(found) == ["['a'][1]", "['a']['1']", "b/0"]
    assert list(read(saved(tmp_path, torch.ones(2)))) == ["value"]


def test_what_holds_no_numbers_is_named(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated, complex32 is experimental
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        half = torch.ones(3, dtype=torch.complex32)
    path = saved(
        tmp_path,
        {
            "w": torch.ones(3),
            "quantized": quantized,
            "sparse": torch.eye(3).to_sparse(),
            "meta": torch.empty(3, device="meta"),
            "half": half,
            "endless": torch.ones(3).expand(10**9, 3),
            "text": "a",
        },
    )
    reasons = {name: each.unread for name, each in open_dump(path).items()}
    assert reasons.pop("w") == ""
    for name, reason in {
        "quantized": "quantized tensor, qint8",
        "sparse": "layout torch.sparse_coo",
        "meta": "no numbers",
        "half": "complex32",
        "endless": "3000000000 elements of 12 bytes",
        "text": "type str",
    }.items():
        assert reason in reasons.pop(name)
    assert not reasons
    assert run(path, path)[0] == 1


CALLED: list[str] = []


class Call:
    """An object whose pickle calls a function when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return CALLED.append, ("executed",)


def tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            member = tarfile.TarInfo(name)
            member.size = 2
            archive.addfile(member, io.BytesIO(b"ab"))


def script(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


def nested(path: Path) -> None:
    content: list[Any] = [torch.ones(1)]
    content.append(content)
    torch.save(content, path)


def foreign(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "x")


def numberless(path: Path) -> None:
    content: list[Any] = []
    for _ in range(40):
        content = [content, content]
    torch.save(content, path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: torch.save({"w": torch.ones(2), "x": Call()}, path), "a pickle that names"),
        (lambda path: torch.save(Call(), path, _use_new_zipfile_serialization=False), "a pickle that names"),
        (lambda path: path.write_bytes(pickle.dumps(Call(), 2)), "a different pickle|a pickle that names"),
        (lambda path: torch.save(torch.nn.Linear(2, 2), path), "a pickle that names torch.nn.modules.linear.Linear"),
        (lambda path: torch.save({"loss": np.float64(1)}, path), "a pickle that names numpy.*scalar"),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "a different pickle, or no pickle"),
        (lambda path: path.write_text("hello, this is no pickle"), "a different pickle, or no pickle"),
        (lambda path: path.write_bytes(b""), "to be a complete torch.save file"),
        (tar, "a tar file of PyTorch before 0.2"),
        (foreign, "RuntimeError: file in archive is not in a subdirectory: hello.txt"),
        (script, "a TorchScript archive"),
        (nested, "a tree that contains itself"),
        (numberless, "1000 of them"),
    ],
)
def test_what_is_no_weights_is_refused_and_not_executed(
    tmp_path: Path, write: Callable[[Path], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradcombine.verify.diff.pytorch._MOST_OBJECTS", 1000)
    write(tmp_path / "x.pt")
    CALLED.clear()
    with pytest.raises(GradCombineError, match=message) as caught:
        open_dump(tmp_path / "x.pt")
    assert not CALLED
    assert "weights_only" not in str(caught.value)  # torch's message suggests loading the file anyway
    assert "\n" not in str(caught.value)


def test_damage_is_refused_or_a_difference(tmp_path: Path) -> None:
    """A truncated file always raises; a flipped bit gives a GradCombineError, a difference, or no change."""
    path = saved(tmp_path, {"w": torch.arange(40.0), "b": torch.ones(3)})
    content, good = path.read_bytes(), open_dump(path)
    rng = np.random.default_rng(0)
    (tmp_path / "bad").mkdir()
    bad = tmp_path / "bad" / "dump.pt"
    for length in rng.integers(0, len(content), 60):
        bad.write_bytes(content[:length])
        with pytest.raises(GradCombineError, match="diff: "):
            open_dump(bad)
    outcomes: Counter[str] = Counter()
    for bit in rng.integers(0, 8 * len(content), 150):
        corrupted = bytearray(content)
        corrupted[bit // 8] ^= 1 << (bit % 8)
        bad.unlink()
        bad.write_bytes(corrupted)
        try:
            outcomes[str(diff(good, open_dump(bad)).passes)] += 1
        except GradCombineError:
            outcomes["refused"] += 1
    assert min(outcomes["refused"], outcomes["False"]) > 5  # the other flips are in padding and dates
