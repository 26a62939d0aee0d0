"""Feature maps of layers: those that depend on positions get them, and their parameters are the layer's."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import io
import pickle
import re
from typing import Any, ClassVar

import linattn
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from linattn import feature_maps, nn  # noqa: E402
from linattn.errors import OptionError, ShapeError  # noqa: E402
from linattn.feature_maps import Cosformer, FeatureMap, Hedgehog, Rebased, T2r  # noqa: E402
from nn_cases import WIDTH  # noqa: E402

T = 19
PLACED = {
    "LinearAttention": {"num_heads": 2},
    "features that sum to one": {"num_heads": 2, "norm_q": True, "norm_k": True},
    "not normalised": {"num_heads": 4, "num_kv_heads": 2, "normalize": False},
    "RetNet": {"num_heads": 2},
    "GatedLinearAttention": {"num_heads": 2, "use_short_conv": True},
}


@dataclasses.dataclass(frozen=True, eq=False)
class Turned(FeatureMap):
    """Rotary positions as a map of one's own, which keeps the width."""

    positional: ClassVar[bool] = True

    positions: Any = None

    def at(self, positions):
        return Turned(positions)

    def __call__(self, x):
        return linattn.rotary(x, positions=self.positions if len(self.positions) == len(x) else self.positions[0])


def placed(case, phi=None):
    """A layer whose map depends on positions; GLA has a decay for every feature, and takes no wider ones."""
    kind = getattr(nn, case, nn.LinearAttention)
    phi = (Turned() if case == "GatedLinearAttention" else Cosformer(32)) if phi is None else phi
    return kind(WIDTH, **PLACED[case], feature_map=phi, dtype=torch.float64)


def tokens(batch=3):
    return torch.randn(batch, T, WIDTH, dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", PLACED)
class TestPositions:
    def test_in_pieces_and_token_by_token(self, case):
        made, x, cache = placed(case), tokens(), nn.Cache()
        with torch.no_grad():
            pieces = [made(x[:, :9], cache=cache), made(x[:, 9:9], cache=cache), made(x[:, 9:14], cache=cache)]
            pieces += [made(x[:, t : t + 1], cache=cache) for t in range(14, T)]
        close(torch.cat(pieces, 1), made(x))

    def test_after_padding_each_sequence_goes_on_from_its_own_end(self, case):
        made, x, cache = placed(case), tokens(), nn.Cache()
        mask = torch.ones(3, T, dtype=torch.long)
        mask[0, :5] = 0
        mask[1, 11:] = 0
        read = [x[0, 5:], x[1, :11], x[2]]
        with torch.no_grad():
            made(x, mask=mask, cache=cache)
            for more in (torch.randn(3, 1, WIDTH).double(), torch.randn(3, 4, WIDTH).double()):
                found = made(more, cache=cache)
                read = [torch.cat([before, new]) for before, new in zip(read, more, strict=True)]
                for row, whole in enumerate(read):
                    close(found[row], made(whole[None])[0, -more.shape[1] :])

    def test_packed_sequences_go_on_too(self, case):
        made, x, cache = placed(case), tokens(1), nn.Cache()
        offsets = torch.tensor([0, 7, 7, T])
        y, z = tokens(1), tokens(3)[:, :2]
        with torch.no_grad():
            made(x, cu_seqlens=offsets, cache=cache)
            found = made(y, cu_seqlens=torch.tensor([0, 3, 8, T]), cache=cache)
            last = made(z, cache=cache)
            for row, (old, new) in enumerate(
                ((slice(0, 7), slice(0, 3)), (slice(7, 7), slice(3, 8)), (slice(7, T), slice(8, T)))
            ):
                whole = made(torch.cat([x[:, old], y[:, new], z[row : row + 1]], 1))
                close(found[:, new], whole[:, old.stop - old.start : -2])
                close(last[row], whole[0, -2:])

    def test_reordered_copied_and_stored(self, case):
        made, x, cache = placed(case), tokens(), nn.Cache()
        mask = torch.ones(3, T, dtype=torch.long)
        mask[1, 11:] = 0
        rows, more = torch.tensor([1, 2, 1]), torch.randn(3, 1, WIDTH).double()
        with torch.no_grad():
            made(x, mask=mask, cache=cache)
            file = io.BytesIO()
            torch.save(cache.reorder(rows).state_dict(), file)
            file.seek(0)
            for held in (cache.copy(), nn.Cache.from_state_dict(torch.load(file, weights_only=True)), cache):
                found = made(more, cache=held)
                close(found[0], made(torch.cat([x[1:2, :11], more[:1]], 1))[0, -1:])
                close(found[1], made(torch.cat([x[2:], more[1:2]], 1))[0, -1:])

    def test_gradients_over_segments(self, case):
        made, x, cache = placed(case), tokens(2), nn.Cache()
        weight = torch.randn_like(x)
        whole = torch.autograd.grad((made(x) * weight).sum(), list(made.parameters()))
        pieces = torch.cat([made(x[:, :8], cache=cache), made(x[:, 8:], cache=cache)], 1)
        close(torch.autograd.grad((pieces * weight).sum(), list(made.parameters())), whole)

    def test_compiled(self, case):
        torch._dynamo.reset()
        made, x, cache = placed(case), tokens(2), nn.Cache()
        compiled = torch.compile(made, fullgraph=True, backend="eager")
        with torch.no_grad():
            pieces = [made(x[:, :16], cache=cache)] + [compiled(x[:, t : t + 1], cache=cache) for t in range(16, T)]
            close(torch.cat(pieces, 1), made(x))

    def test_a_map_of_ones_own_gets_them(self, case):
        seen: list[Any] = []

        class Ones(FeatureMap):
            positional: ClassVar[bool] = True

            def at(self, positions):
                seen.append(positions)
                return self

            def __call__(self, x):
                return x.exp()

        made, x, cache = placed(case, Ones()), tokens(2), nn.Cache()
        made(x[:, :9], cache=cache)
        made(x[:, 9:12], cache=cache)
        made(x[:1, :5], cu_seqlens=torch.tensor([0, 2, 5]))
        assert [y.tolist() for y in seen] == [[list(range(9))], [[9, 10, 11]] * 2, [[0, 1, 0, 1, 2]]]


def test_positions_count_from_the_start_that_a_map_has():
    x, here = torch.randn(2, 5, 3, 4), torch.tensor([[7, 8, 9, 10, 11], [2, 3, 4, 5, 6]])
    expected = torch.cat([Cosformer(16, start=n)(x[i : i + 1]) for i, n in enumerate((10, 5))])
    torch.testing.assert_close(Cosformer(16, start=3).at(here)(x), expected)
    torch.testing.assert_close(Cosformer(16, start=3).at(here[:1])(x[0]), Cosformer(16, start=10)(x[0]))


@pytest.mark.parametrize(
    ("positions", "shape", "message"),
    [
        ((3, 5), (2, 5, 3, 4), "cosformer: positions must be [B, T] = [2, 5], got [3, 5]"),
        ((2, 4), (2, 5, 3, 4), "cosformer: positions must be [B, T] = [2, 5], got [2, 4]"),
        ((5,), (2, 5, 3, 4), "cosformer: positions must be [B, T] = [2, 5], got [5]"),
        ((2, 5), (5, 3, 4), "cosformer: positions must be [B, T] = [1, 5], got [2, 5]"),
    ],
)
def test_positions_that_do_not_fit_are_refused(positions, shape, message):
    with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
        Cosformer(16, positions=torch.zeros(positions, dtype=torch.int32))(torch.randn(shape))


class Own:
    """Another framework: how a layer is made, and how an array."""

    def __init__(self, name):
        pytest.importorskip("mlx.core" if name == "mlx" else name)
        self.name, self.nn = name, importlib.import_module(f"linattn.nn.{name}")
        self.array: Any = importlib.import_module("mlx.core" if name == "mlx" else "jax.numpy").array

    def make(self, kind, *args, **options):
        if self.name == "flax":
            options["rngs"] = importlib.import_module("flax.nnx").Rngs(0)
        elif self.name == "equinox":
            options["key"] = importlib.import_module("jax").random.key(0)
        return getattr(self.nn, kind)(*args, **options)


@pytest.fixture(scope="module", params=["flax", "equinox", "mlx"])
def own(request):
    return Own(request.param)


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_positions_in_other_frameworks(own):
    made = own.make("LinearAttention", WIDTH, num_heads=2, feature_map=Cosformer(32))
    x, cache = drawn(2, T, WIDTH), own.nn.Cache()
    pieces = [np.asarray(made(own.array(y), cache=cache)) for y in (x[:, :9], x[:, 9:18], x[:, 18:])]
    np.testing.assert_allclose(np.concatenate(pieces, 1), np.asarray(made(own.array(x))), rtol=2e-4, atol=2e-5)


# -- parameters --------------------------------------------------------------------------------------------------------

H, K = 2, 16


def given(kind, dtype=torch.float64):
    """A map as an object that holds parameters, none of which is trivial."""
    initial = {name: torch.from_numpy(x).to(dtype) for name, x in kind.init(H, K).items()}
    return kind(**{name: torch.nn.Parameter(x + 0.1 * torch.randn_like(x)) for name, x in initial.items()})


def names_of(kind):
    return {f"feature_map.{name}" for name in kind.init(H, K)}


@pytest.mark.parametrize("layer", ["LinearAttention", "RetNet"])
@pytest.mark.parametrize("kind", [Hedgehog, T2r, Rebased])
class TestParameters:
    def test_they_are_the_layer_s(self, layer, kind):
        phi = given(kind)
        made = getattr(nn, layer)(WIDTH, num_heads=H, feature_map=phi, dtype=torch.float64)
        plain = getattr(nn, layer)(WIDTH, num_heads=H, dtype=torch.float64)
        assert set(made.state_dict()) - set(plain.state_dict()) == names_of(kind)
        held = dict(made.named_parameters())
        assert all((held[f"feature_map.{name}"] == getattr(phi, name)).all() for name in kind.init(H, K))
        made(tokens()).square().sum().backward()
        assert all(held[name].grad is not None and held[name].grad.any() for name in names_of(kind))

    def test_they_are_moved_stored_and_read_by_the_next_call(self, layer, kind):
        made, other = (getattr(nn, layer)(WIDTH, num_heads=H, feature_map=given(kind, torch.float32)) for _ in range(2))
        x = tokens()
        other.load_state_dict(made.state_dict())
        close(other.double()(x), made.double()(x))
        again = given(kind, torch.float32)
        drawn_anew = getattr(nn, layer)(WIDTH, num_heads=H, feature_map=again)
        with torch.no_grad():
            for p in drawn_anew.feature_map.parameters():
                p.fill_(7.0)
        drawn_anew.reset_parameters()
        assert all((getattr(drawn_anew.feature_map, name) == getattr(again, name)).all() for name in kind.init(H, K))
        for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            close(copied(x), made(x))
            with torch.no_grad():
                for p in copied.feature_map.parameters():
                    p.mul_(0.5).add_(0.2)
            assert (copied(x) - made(x)).abs().max() > 1e-4
        assert all(x.is_meta for x in made.to("meta").state_dict().values())

    def test_in_pieces_and_compiled(self, layer, kind):
        torch._dynamo.reset()
        made, x, cache = (
            getattr(nn, layer)(WIDTH, num_heads=H, feature_map=given(kind), dtype=torch.float64),
            tokens(),
            nn.Cache(),
        )
        with torch.no_grad():
            pieces = [made(x[:, :9], cache=cache)] + [made(x[:, t : t + 1], cache=cache) for t in range(9, T)]
        close(torch.cat(pieces, 1), made(x))
        close(torch.compile(made, fullgraph=True, backend="eager")(x), made(x))

    def test_arrays_that_are_none_yet_become_some(self, layer, kind):
        options = {"num_heads": H, "feature_map": kind(**kind.init(H, K)), "dtype": torch.float64}
        made, second = (getattr(nn, layer)(WIDTH, **options) for _ in range(2))
        held = {name: p for name, p in made.named_parameters() if name in names_of(kind)}
        assert set(held) == names_of(kind)
        assert all(p.dtype is torch.float64 and p.requires_grad for p in held.values())
        assert not {id(p) for p in made.parameters()} & {id(p) for p in second.parameters()}

    def test_on_no_device_they_come_later(self, layer, kind):
        phi = given(kind, torch.float32)
        made = getattr(nn, layer)(WIDTH, num_heads=H, feature_map=phi, device="meta")
        assert all(p.is_meta for p in made.parameters())
        made.to_empty(device="cpu").reset_parameters()
        assert all((made.state_dict()[f"feature_map.{name}"] == getattr(phi, name)).all() for name in kind.init(H, K))


@pytest.mark.parametrize("name", ["hedgehog", "t2r", "rebased"])
def test_names_of_maps_that_learn_make_their_parameters(name):
    made = nn.LinearAttention(WIDTH, num_heads=H, feature_map=name)
    of = {key.split(".")[0] for key in made.state_dict() if "map" in key}
    assert of == {"feature_map_q", "feature_map_k"}
    made(tokens().float()).square().sum().backward()
    assert all(p.grad is not None for p in made.parameters())
    with pytest.raises(OptionError, match=f"feature map '{name}' needs"):
        nn.RetNet(WIDTH, num_heads=H, feature_map=name)


def test_a_map_without_values_has_parameters_without_values():
    phi = Rebased(*(torch.nn.Parameter(torch.empty(H, K, device="meta"), requires_grad=learns) for learns in (True, False)))
    for device in ("meta", "cpu"):
        made = nn.LinearAttention(WIDTH, num_heads=H, feature_map=phi, device=device)
        held = made.feature_map.gamma, made.feature_map.beta
        assert [(p.device.type, p.requires_grad) for p in held] == [(device, True), (device, False)]


def test_rebased_has_parameters_of_queries_and_of_keys():
    made, tied = (
        nn.LinearAttention(WIDTH, num_heads=H, feature_map="rebased", tie_feature_map_qk=tie) for tie in (False, True)
    )
    assert {key: tuple(x.shape) for key, x in made.state_dict().items() if "map" in key} == {
        f"feature_map_{x}.{name}": (H, K) for x in "qk" for name in ("gamma", "beta")
    }
    assert sum(p.numel() for p in made.parameters()) - sum(p.numel() for p in tied.parameters()) == 2 * H * K
    x = tokens().float()
    same = nn.LinearAttention(WIDTH, num_heads=H, feature_map=Rebased(**Rebased.init(H, K)))
    same.load_state_dict(
        {name: y for name, y in tied.state_dict().items() if "map" not in name}
        | {name: getattr(tied.feature_map_q, name.split(".")[1]) for name in names_of(Rebased)}
    )
    torch.testing.assert_close(tied(x), same(x))


def test_a_map_of_one_s_own_has_its_parameters_registered():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Scaled(FeatureMap):
        axes: ClassVar[dict[str, str]] = {"fixed": "K"}

        scale: Any
        fixed: Any
        power: int = 2

        def __call__(self, x):
            return (x * self.scale).abs() ** self.power * self.fixed

    made = nn.LinearAttention(WIDTH, num_heads=H, feature_map=Scaled(torch.nn.Parameter(torch.ones(K)), torch.ones(K)))
    assert [key for key in made.state_dict() if "map" in key] == ["feature_map.scale"]
    made(tokens().float()).sum().backward()
    assert made.feature_map.scale.grad is not None
    assert isinstance(nn.LinearAttention(WIDTH, feature_map=feature_maps.Exp(t=np.float32(2))).feature_map, feature_maps.Exp)


@pytest.mark.parametrize("name", ["value", "map", "training"])
def test_a_name_that_modules_have_is_refused(name):
    kind = dataclasses.make_dataclass("Mine", [(name, Any)], bases=(FeatureMap,), frozen=True, eq=False)
    with pytest.raises(OptionError, match=TAKEN.format(name)):
        nn.LinearAttention(WIDTH, num_heads=H, feature_map=kind(torch.ones(K)))


TAKEN = "^Mine: a layer has its arrays as parameters, and modules have something else called {}: give the field another name$"


def test_a_name_that_modules_have_is_refused_in_other_frameworks(own):
    kind = dataclasses.make_dataclass("Mine", [("value", Any)], bases=(FeatureMap,), frozen=True, eq=False)
    with pytest.raises(OptionError, match=TAKEN.format("value")):
        own.make("LinearAttention", WIDTH, num_heads=H, feature_map=kind(np.ones(K, np.float32)))


def test_parameters_in_other_frameworks(own):
    phi = Rebased(**Rebased.init(H, K))
    for feature_map, tie, places in (
        (phi, False, ("feature_map",)),
        ("rebased", False, ("feature_map_q", "feature_map_k")),
        ("rebased", True, ("feature_map_q",)),
    ):
        options = {"num_heads": H, "feature_map": feature_map, "tie_feature_map_qk": tie}
        reference = nn.LinearAttention(WIDTH, **options)
        with torch.no_grad():
            for p in reference.parameters():
                p.add_(0.1 * torch.randn_like(p))
        weights = {name: p.detach().numpy() for name, p in reference.state_dict().items()}
        assert {name for name in weights if "map" in name} == {f"{place}.{x}" for place in places for x in ("gamma", "beta")}
        made = own.nn.load_state_dict(own.make("LinearAttention", WIDTH, **options), weights)
        x = drawn(2, T, WIDTH)
        expected = reference(torch.from_numpy(x)).detach()
        np.testing.assert_allclose(np.asarray(made(own.array(x))), expected, rtol=2e-4, atol=2e-5)
        assert set(own.nn.state_dict(made)) == set(weights)
