import hashlib
from itertools import combinations, pairwise

import pytest
import torch
from blake3 import blake3

from decentral.errors import ConfigError, ManifestMismatch
from decentral.parameters import (
    Fragment,
    ParameterSpec,
    buffers_of,
    combine_digests,
    digest,
    first_non_finite,
    gather,
    gather_buffers,
    in_dtype_of,
    overwrite,
    scatter,
    scatter_buffers,
    schema_of,
    split,
)


class Tiny(torch.nn.Module):
    """Names as a transformer has them: embedding, numbered blocks, norm, head."""

    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.nn.Parameter(torch.randn(7, 3, generator=generator))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(blocks))
        self.norm = torch.nn.Parameter(torch.randn(3, generator=generator))
        self.temperature = torch.nn.Parameter(torch.tensor(0.5))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)


def test_one_fragment_holds_all_trained_parameters_in_order():
    model = Tiny(1)
    (fragment,) = schema_of(model).fragments
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [spec.name for spec in fragment.parameters] == trained
    assert "frozen" not in trained
    assert fragment.numel == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_blocks_are_strided_over_all_fragments_but_the_last():
    fragments = schema_of(Tiny(5), num_fragments=3).fragments
    blocks = [sorted({spec.name.split(".")[1] for spec in f.parameters}) for f in fragments[:2]]
    assert blocks == [["0", "2", "4"], ["1", "3"]]
    assert [spec.name for spec in fragments[2].parameters] == ["embedding", "norm", "temperature"]


def test_fragments_part_the_parameters():
    whole = schema_of(Tiny(5)).fragments[0].parameters
    parts = [spec for fragment in schema_of(Tiny(5), 3).fragments for spec in fragment.parameters]
    assert sorted(parts, key=lambda spec: spec.name) == sorted(whole, key=lambda spec: spec.name)


def test_a_model_of_blocks_only_is_strided_over_all_fragments():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    assert [len(f.parameters) for f in schema_of(model, 2).fragments] == [4, 4]


@pytest.mark.parametrize("fragments", [0, -1, 7, 5000])
def test_a_number_of_fragments_that_leaves_one_empty_is_refused(fragments):
    with pytest.raises(ConfigError, match=f"num_fragments={fragments}"):
        schema_of(Tiny(5), fragments)


def test_a_frozen_model_is_refused():
    with pytest.raises(ConfigError, match="no parameter of the model requires gradients"):
        schema_of(Tiny(2).requires_grad_(False))


def test_a_mapping_and_pairs_do_as_well_as_a_module():
    model = Tiny(2)
    assert schema_of(dict(model.named_parameters())) == schema_of(model) == schema_of(model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gather_and_scatter_are_inverse(dtype):
    source, target = Tiny(3).to(dtype), Tiny(3).to(dtype)
    for fragment in schema_of(source, 2).fragments:
        flat = gather(dict(source.named_parameters()), fragment)
        assert (flat.shape, flat.dtype, flat.requires_grad) == ((fragment.numel,), torch.float32, False)
        scatter(flat, fragment, dict(target.named_parameters()))
    for (name, one), (_, two) in zip(source.named_parameters(), target.named_parameters(), strict=True):
        assert torch.equal(one, two), name
        assert (two.dtype, two.grad) == (dtype, None)


def test_gathering_copies():
    model = Tiny(1)
    (fragment,) = schema_of(model).fragments
    gather(dict(model.named_parameters()), fragment).fill_(7.0)
    assert not (model.norm == 7).any()


def test_a_transposed_parameter_is_gathered_in_its_own_order():
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    (fragment,) = schema_of({"w": weight}).fragments
    assert gather({"w": weight}, fragment).tolist() == weight.flatten().tolist()


@pytest.mark.parametrize("change", [lambda p: p.pop("norm"), lambda p: p.update(norm=torch.zeros(4))])
def test_a_model_that_does_not_fit_is_refused_and_left_alone(change):
    model = Tiny(2)
    (fragment,) = schema_of(model).fragments
    before = gather(dict(model.named_parameters()), fragment)
    parameters = dict(model.named_parameters())
    change(parameters)
    with pytest.raises(ManifestMismatch, match="norm"):
        scatter(torch.zeros(fragment.numel), fragment, parameters)
    assert torch.equal(gather(dict(model.named_parameters()), fragment), before)


def test_splitting_gives_views_in_the_parameters_shapes():
    flat = torch.arange(7.0)
    scalar, matrix = split(flat, [(), (2, 3)])
    assert (scalar.shape, matrix.shape) == ((), (2, 3))
    matrix[1, 2] = 70
    assert flat[-1] == 70


@pytest.mark.parametrize("numel", [0, 6, 8])
def test_splitting_another_length_is_refused(numel):
    with pytest.raises(ConfigError, match=r"shape \(7,\) is wanted"):
        split(torch.zeros(numel), [(), (2, 3)])


def test_a_digest_names_every_bit():
    """The digest is in every frame: these bytes may not change."""
    little_endian = bytes.fromhex("0000803f 000000c0")
    assert digest(torch.tensor([1.0, -2.0])) == blake3(little_endian).digest()
    assert (
        digest(torch.zeros(0)).hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    )  # published
    assert digest(torch.zeros(3)) != digest(-torch.zeros(3))
    assert digest(torch.tensor([1.0, 1.0000001])) != digest(torch.tensor([1.0, 1.0]))
    assert len(digest(torch.zeros(0))) == 32
    assert digest(torch.arange(6.0)[::2]) == digest(torch.tensor([0.0, 2.0, 4.0]))


def test_the_combined_digest_depends_on_the_order():
    one, two = digest(torch.zeros(1)), digest(torch.ones(1))
    assert combine_digests([one, two]) != combine_digests([two, one])
    with pytest.raises(ConfigError, match="32 bytes"):
        combine_digests([one, b"short"])


def test_a_scalar_has_one_element():
    assert ParameterSpec("t", ()).numel == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_first_parameter_that_is_not_finite_is_named(bad):
    names = {"first": (3,), "second.weight": (2, 2), "third": ()}
    (fragment,) = schema_of({name: torch.zeros(shape, requires_grad=True) for name, shape in names.items()}).fragments
    flat = torch.zeros(8)
    assert first_non_finite(flat, fragment) is None
    flat[7] = flat[5] = bad
    assert first_non_finite(flat, fragment) == "second.weight"
    assert first_non_finite(torch.zeros(0), Fragment(0, ())) is None


class Watched(torch.nn.Module):
    """Buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("table", torch.tensor([2**53 - 1, 3]))
        self.register_buffer("cache", torch.zeros(9), persistent=False)
        self.register_buffer("nothing", None)


def test_a_models_buffers_are_those_that_its_state_dict_holds():
    model = Watched()
    found = [(spec.name, spec.shape, spec.kind) for spec in schema_of(model).buffers]
    assert found == [
        ("mask", (2,), "integer"),
        ("table", (2,), "integer"),
        ("norm.running_mean", (2,), "float"),
        ("norm.running_var", (2,), "float"),
        ("norm.num_batches_tracked", (), "integer"),
    ]


def test_buffers_come_back_in_their_own_dtypes_and_what_no_float32_holds_stays():
    source, target = Watched(), Watched()
    source.norm.running_mean.fill_(0.5)
    source.norm.num_batches_tracked.fill_(7)
    specs = schema_of(source).buffers
    scatter_buffers(gather_buffers(buffers_of(source), specs), specs, buffers_of(target))
    for name, buffer in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], buffer), name


@pytest.mark.parametrize(
    ("like", "value", "wanted"),
    [
        (torch.tensor(5, dtype=torch.int8), 300.0, 127),
        (torch.tensor(5, dtype=torch.uint8), -3.0, 0),
        (torch.tensor(5), 1e30, 2**53),
        (torch.tensor(5), 2.6, 3),
        (torch.tensor(False), 0.7, True),
        (torch.tensor(1.0, dtype=torch.float64), 0.5, 0.5),
    ],
)
def test_whole_numbers_are_rounded_and_stay_in_their_range(like, value, wanted):
    found = in_dtype_of(like, torch.tensor(value))
    assert (found.dtype, found.item()) == (like.dtype, wanted)


@pytest.mark.parametrize("trained", [True, False])
def test_complex_parameters_and_buffers_are_refused(trained):
    model = Tiny(1)
    model.phase = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64), requires_grad=trained)
    with pytest.raises(ConfigError, match=r"phase is torch\.complex64.*its imaginary part would be lost"):
        schema_of(model)
    model = Tiny(1)
    model.register_buffer("twist", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ConfigError, match=r"twist is torch\.complex128"):
        schema_of(model)


def test_sparse_buffers_are_refused_and_one_that_the_script_makes_anew_is_left_alone():
    adjacency = torch.eye(3).to_sparse()
    model = Tiny(1)
    model.register_buffer("adjacency", adjacency)
    with pytest.raises(ConfigError, match=r"adjacency is torch\.sparse_coo.*persistent=False"):
        schema_of(model)
    model = Tiny(1)
    model.register_buffer("adjacency", adjacency, persistent=False)
    assert "adjacency" not in {spec.name for spec in schema_of(model).buffers}


@pytest.mark.parametrize(("name", "shape"), [("x" * 513, (2,)), ("deep", (1,) * 17)])
def test_what_a_newcomer_would_not_read_is_refused_where_the_run_is_founded(name, shape):
    model = Tiny(1)
    model.register_buffer(name, torch.zeros(shape))
    with pytest.raises(ConfigError, match=f"{name[:80]} has {len(shape)} dimensions and a name of {len(name)} char"):
        schema_of(model)


def test_a_buffer_that_expand_made_is_written_like_any_other():
    buffer = torch.arange(2.0)[None, :, None].expand(3, 2, 4)
    overwrite(buffer, torch.full((3, 2, 4), 5.0))
    assert torch.equal(buffer, torch.full((3, 2, 4), 5.0))


def test_what_is_frozen_is_named_with_its_bytes():
    (spec,) = schema_of(Tiny(1)).frozen
    bits = hashlib.blake2b(bytes.fromhex("0000803f") * 2, digest_size=16).hexdigest()
    assert (spec.name, spec.shape, spec.dtype, spec.digest) == ("frozen", (2,), "float32", bits)
    other = Tiny(1)
    with torch.no_grad():
        other.frozen[1] = 1.0000001
    assert schema_of(other).digest != schema_of(Tiny(1)).digest


def test_a_part_that_is_compiled_has_the_names_of_one_that_is_not():
    model = Tiny(2)
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    assert schema_of(model) == schema_of(torch.compile(Tiny(2), backend="eager")) == schema_of(Tiny(2))


def stages_of(model: torch.nn.Module, count: int) -> list[list[str]]:
    return [list(fragment.names) for fragment in schema_of(model, count, layout="stages").fragments]


def test_stages_are_neighbours_in_the_models_order():
    every = [spec.name for spec in schema_of(Tiny(5)).fragments[0].parameters]
    for count in range(1, 6):
        stages = stages_of(Tiny(5), count)
        assert len(stages) == count
        assert all(stages)
        assert [name for stage in stages for name in stage] == every


def test_the_largest_stage_is_as_small_as_it_can_be():
    sizes = [5, 1, 1, 1, 9, 2, 2, 1, 1, 7]
    blocks = {f"layers.{place}.w": torch.zeros(size, requires_grad=True) for place, size in enumerate(sizes)}
    for count in range(1, len(sizes) + 1):
        largest = max(fragment.numel for fragment in schema_of(blocks, count, layout="stages").fragments)
        cuts = combinations(range(1, len(sizes)), count - 1)
        assert largest == min(max(map(sum, _cut(sizes, cut))) for cut in cuts)


def _cut(sizes: list[int], at: tuple[int, ...]) -> list[list[int]]:
    return [sizes[begin:end] for begin, end in pairwise((0, *at, len(sizes)))]


def test_blocks_are_not_cut_and_an_embedding_counts_as_what_it_is():
    names = {"embed": 40, "layers.0.a": 10, "layers.0.b": 10, "layers.1.a": 10, "layers.1.b": 10, "head": 20}
    model = {name: torch.zeros(size, requires_grad=True) for name, size in names.items()}
    assert stages_of(model, 2) == [["embed", "layers.0.a", "layers.0.b"], ["layers.1.a", "layers.1.b", "head"]]
    assert stages_of(model, 3) == [["embed"], ["layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b"], ["head"]]


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ConfigError, match="num_fragments=3"):
        schema_of(
            {"embed": torch.zeros(4, requires_grad=True), "layers.0.w": torch.zeros(4, requires_grad=True)},
            3,
            layout="stages",
        )
