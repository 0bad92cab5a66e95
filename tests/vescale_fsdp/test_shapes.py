"""Shapes are the same wherever they are read, and malformed input says which file, which entry, and why."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vescale_fsdp.shapes import ModelShapes, ShapeError, from_module, group_by_block, read_shapes, to_json
from vescale_fsdp.spec import ParamSpec

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(4, 8, bias=False)
        self.norm = nn.LayerNorm(4)


class Tiny(nn.Module):
    """Embedding, three equal blocks, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


TINY_BLOCK = (("norm.bias", (4,)), ("norm.weight", (4,)), ("w1.weight", (8, 4)))


def write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def tiny_json(**changes: object) -> dict[str, Any]:
    params = [["layers.0.w1", [8, 4]], ["layers.0.norm", [4]]]
    return {"version": 1, "groups": [{"count": 3, "params": params}], **changes}


def names(shapes: ModelShapes) -> list[tuple[str, int]]:
    return [(group.name, group.count) for group in shapes.groups]


def relative(shapes: ModelShapes, at: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    group = shapes.groups[at]
    return tuple(sorted((spec.fqn.removeprefix(group.prefixes[0] + "."), spec.shape) for spec in group.specs))


def test_a_module_is_grouped_by_its_repeated_blocks_and_tied_weights_count_once() -> None:
    shapes = from_module(Tiny())
    assert names(shapes) == [("root", 1), ("layers.0-2", 3)]
    assert relative(shapes, 1) == TINY_BLOCK
    assert shapes.numel == 40 + 3 * (32 + 8)


def test_a_factory_is_built_on_the_meta_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "huge_model.py").write_text(
        "from torch import nn\nclass zoo:\n    def build():\n        return nn.Linear(10**6, 10**6, bias=False)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert read_shapes("huge_model:zoo.build").numel == 10**12  # 4 TB if it were not


def test_a_safetensors_file_gives_the_shapes_and_dtypes_of_the_state_dict(tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    tensors = {name: value for name, value in Tiny().bfloat16().state_dict().items() if name != "head.weight"}
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    shapes = read_shapes(str(tmp_path))
    assert relative(shapes, 1) == TINY_BLOCK
    assert {spec.dtype for spec in shapes.specs} == {"bfloat16"}


def test_an_index_gathers_the_headers_of_its_files_and_sorts_layer_10_after_layer_2(tmp_path: Path) -> None:
    for shard in range(2):
        layers = {f"layers.{at}.w": ("F32", [2, 3]) for at in range(11) if at % 2 == shard}
        write_safetensors(tmp_path / f"{shard}.safetensors", layers)
    weight_map = {f"layers.{at}.w": f"{at % 2}.safetensors" for at in sorted(range(11), key=str)}
    index = write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    assert names(read_shapes(str(index))) == [("layers.0-10", 11)]


@pytest.mark.parametrize("file", sorted(MODELS.glob("*.json")), ids=lambda file: file.stem)
def test_the_models_of_the_benchmarks_come_back_as_they_were_written(file: Path) -> None:
    assert to_json(read_shapes(str(file))) == file.read_text()


def test_copies_are_numbered_on_and_leave_out_the_numbers_that_other_groups_start_with(tmp_path: Path) -> None:
    groups = [
        {"count": 3, "params": [["layers.0.dense", [4]]]},
        {"count": 2, "params": [["layers.1.moe", [6]]]},
    ]
    shapes = read_shapes(str(write_json(tmp_path / "m.json", {"version": 1, "groups": groups})))
    assert [group.prefixes for group in shapes.groups] == [
        ("layers.0", "layers.2", "layers.3"),
        ("layers.1", "layers.4"),
    ]


def test_groups_that_start_with_one_block_share_its_numbers(tmp_path: Path) -> None:
    groups = [{"count": 3, "params": [["layers.0.attn.w", [4]]]}, {"count": 3, "params": [["layers.0.mlp.w", [6]]]}]
    shapes = read_shapes(str(write_json(tmp_path / "m.json", {"version": 1, "groups": groups})))
    assert [group.prefixes for group in shapes.groups] == [("layers.0", "layers.1", "layers.2")] * 2


def test_blocks_of_two_kinds_in_turn_come_back_as_they_were(tmp_path: Path) -> None:
    specs = [ParamSpec(f"layers.{at}.w", (1 + at % 2,), "bfloat16") for at in range(6)]
    specs += [ParamSpec(f"layers.{at}.w", (1,), "bfloat16") for at in (7, 8)]
    shapes = ModelShapes("m", "m", group_by_block(specs))
    (tmp_path / "m.json").write_text(to_json(shapes))
    again = read_shapes(str(tmp_path / "m.json"))
    assert again.groups == shapes.groups
    assert [group.name for group in again.groups] == [
        "layers.0, layers.2, layers.4, layers.7-8",
        "layers.1, layers.3, layers.5",
    ]


def test_every_copy_has_its_own_names() -> None:
    shapes = from_module(Tiny())
    assert [spec.fqn for spec in shapes.specs] == [name for name, _ in Tiny().named_parameters()]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["none"], ["root"]),
        (["a.*"], ["a.0", "a.1", "root"]),
        (["b.*.c", "a"], ["a", "b.0.c", "root"]),
    ],
)
def test_patterns_choose_the_groups(patterns: list[str], expected: list[str]) -> None:
    fqns = ("a.0.w", "a.1.w", "b.0.c.w", "norm")
    groups = group_by_block([ParamSpec(fqn, (at + 1,)) for at, fqn in enumerate(fqns)], patterns)
    assert sorted(group.name for group in groups) == expected


def test_a_container_whose_entries_differ_is_no_list_of_blocks() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))
    assert names(from_module(model)) == [("root", 1)]


def test_one_group_holds_one_dtype() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, dtype=torch.bfloat16))
    shapes = ModelShapes("m", "m", from_module(model).groups).split_dtypes()
    assert [{spec.dtype for spec in group.specs} for group in shapes.groups] == [{"float32"}, {"bfloat16"}]


BAD_JSON: list[tuple[str, object, str]] = [
    ("no version", {"groups": []}, "version: expected 1, got nothing"),
    ("other version", tiny_json(version=2), "version: expected 1, got 2"),
    ("boolean version", tiny_json(version=True), "version: expected 1, got True"),
    ("a list", [], r"expected a JSON object, got \[\]"),
    ("no groups", {"version": 1}, "groups: expected a list of {count, params}, got nothing"),
    ("empty groups", tiny_json(groups=[]), "groups: expected a list"),
    ("group is text", tiny_json(groups=["x"]), r"groups\[0\]: expected {count, params}, got 'x'"),
    ("no params", tiny_json(groups=[{"count": 1}]), r"groups\[0\].params: expected a list"),
    ("count 0", tiny_json(groups=[{"count": 0, "params": [["w", [1]]]}]), r"groups\[0\].count: .* got 0"),
    (
        "endless count",
        tiny_json(groups=[{"count": 10**12, "params": [["w", [1]]]}]),
        r"groups\[0\].count: .* to 100000",
    ),
    ("step 0", tiny_json(groups=[{"step": 0, "params": [["w", [1]]]}]), r"groups\[0\].step: .* got 0"),
    ("no shape", tiny_json(groups=[{"params": [["w"]]}]), r"params\[0\]: expected \[fqn, shape\], got \['w'\]"),
    ("no name", tiny_json(groups=[{"params": [["", [1]]]}]), r"params\[0\]: expected the parameter's name"),
    ("negative", tiny_json(groups=[{"params": [["w", [4, -1]]]}]), r"\(w\): shape: .* >= 0, got \[4, -1\]"),
    ("fraction", tiny_json(groups=[{"params": [["w", [1.5]]]}]), r"\(w\): shape: .* got \[1.5\]"),
    ("twice", tiny_json(groups=[{"params": [["w", [1]], ["w", [2]]]}]), "w comes twice"),
    ("total", tiny_json(parameters=7), "parameters: expected 108, .* got 7"),
    ("weight_map", {"weight_map": {"w": 3}}, "weight_map: expected {fqn: file}"),
    ("missing shard", {"weight_map": {"w": "a.safetensors"}}, r"weight_map\['w'\]: no file a.safetensors"),
]


@pytest.mark.parametrize(("value", "message"), [case[1:] for case in BAD_JSON], ids=[case[0] for case in BAD_JSON])
def test_malformed_json_names_the_file_and_the_entry(tmp_path: Path, value: object, message: str) -> None:
    file = write_json(tmp_path / "model.json", value)
    with pytest.raises(ShapeError, match=message) as caught:
        read_shapes(str(file))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("text", ["{", "", '{"version": 1, "version": 1}', "[" * 100_000])
def test_text_that_is_not_json_or_has_a_key_twice_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ShapeError, match=r"model\.json: not JSON"):
        read_shapes(str(tmp_path / "model.json"))


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A file of zeros in the published format."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + torch.Size(shape).numel() * 4
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def entry(**changes: object) -> bytes:
    text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


BAD_SAFETENSORS: list[tuple[str, bytes, str]] = [
    ("empty", b"", "header: truncated"),
    ("cut in the header", entry()[:20], "header: truncated; it needs"),
    ("cut in the data", entry()[:-1], "w: truncated; the tensor ends at byte 8 of the data, the file has 7"),
    ("not JSON", struct.pack("<Q", 4) + b"abcd", "header: not a safetensors file"),
    ("a list", struct.pack("<Q", 2) + b"[]", r"header: expected {name: entry}, got \[\]"),
    ("no entry", struct.pack("<Q", 8) + b'{"w": 1}', "w: no dtype or shape or data_offsets, got 1"),
    ("no name", struct.pack("<Q", 8) + b'{"": {}}', "expected the tensor's name"),
    ("unknown dtype", entry(dtype="F31"), "w: dtype: unknown 'F31'"),
    ("dtype is a list", entry(dtype=[]), r"w: dtype: unknown \[\]"),
    ("negative", entry(shape=[-2]), r"w: shape: .* got \[-2\]"),
    ("wrong size", entry(shape=[3]), "w: data_offsets: .* are 12 bytes, got 0 to 8"),
    ("no offsets", entry(data_offsets=None), "w: data_offsets: expected .begin, end., got nothing"),
    ("no tensors", struct.pack("<Q", 2) + b"{}", "no parameters found"),
]


@pytest.mark.parametrize(
    ("data", "message"), [case[1:] for case in BAD_SAFETENSORS], ids=[case[0] for case in BAD_SAFETENSORS]
)
def test_malformed_safetensors_name_the_file_and_the_entry(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(ShapeError, match=message) as caught:
        read_shapes(str(file))
    assert str(file) in str(caught.value)


def not_a_module() -> int:
    return 3


def raises() -> nn.Module:
    raise RuntimeError("no weights today")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no_such_module_here:make", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("torch.nn:NoSuchThing", "AttributeError: .* 'NoSuchThing'"),
        ("torch.nn:Linear", "TypeError: .* missing 2 required positional arguments"),
        ("builtins:dict", "the factory returned dict, expected a torch.nn.Module"),
        ("torch.nn:ReLU", "torch.nn:ReLU: no parameters found"),
        ("no/such/file.txt", "no/such/file.txt: no such file. Expected a model's JSON"),
        ("no/such/file.json", "no/such/file.json: no such file"),
        ("no/such.safetensors", "no/such.safetensors: no such file"),
    ],
)
def test_a_source_that_is_no_model_says_why(source: str, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        read_shapes(source)


def test_a_folder_without_a_checkpoint_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"holds neither model\.safetensors\.index\.json nor model\.safetensors"):
        read_shapes(str(tmp_path))


def test_an_index_that_promises_a_tensor_its_file_lacks_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"v": ("F32", [2])})
    index = write_json(tmp_path / "index.json", {"weight_map": {"w": "a.safetensors"}})
    with pytest.raises(ShapeError, match=r"weight_map\['w'\]: a.safetensors holds no such tensor"):
        read_shapes(str(index))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown dtype 'floot'"):
        read_shapes(str(MODELS / "llama3-8b.json"), dtype="floot")
