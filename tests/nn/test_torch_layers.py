"""Every layer computes the same however its tokens come: whole, in pieces, one by one, padded, packed, compiled, split."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest

torch = pytest.importorskip("torch")

from linattn import nn  # noqa: E402
from linattn.errors import OptionError, ShapeError  # noqa: E402
from linattn.nn.expressions import Expressions  # noqa: E402
from nn_cases import CASES, LAYERS, WIDTH  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

T = 19


def layer(case: str, dtype=torch.float64):
    """A layer no part of which is silent: none of its parameters is zero."""
    name, options = CASES[case]
    made = getattr(nn, name)(WIDTH, **options, dtype=dtype)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return made


def tokens(batch=3, dtype=torch.float64):
    return torch.randn(batch, T, WIDTH, dtype=dtype)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", CASES)
def test_reading_in_pieces_and_decoding_equal_the_whole(case):
    made, x, cache = layer(case), tokens(), nn.Cache()
    with torch.no_grad():
        whole = made(x)
        pieces = [made(x[:, :9], cache=cache), made(x[:, 9:14], cache=cache)]
        pieces += [made(x[:, t : t + 1], cache=cache) for t in range(14, T)]
    close(torch.cat(pieces, 1), whole)
    assert cache.lengths.tolist() == [T, T, T]


@pytest.mark.parametrize("case", CASES)
def test_padding_on_either_side_changes_nothing(case):
    made, x, cache = layer(case), tokens(), nn.Cache()
    mask = torch.ones(3, T, dtype=torch.long)
    mask[0, :5] = 0
    mask[1, 11:] = 0
    with torch.no_grad():
        y = made(x, mask=mask, cache=cache)
        close(y[0, 5:], made(x[:1, 5:])[0])
        close(y[1, :11], made(x[1:2, :11])[0])
        close(y[2], made(x[2:])[0])
        assert not y[0, :5].any()
        assert not y[1, 11:].any()
        assert cache.lengths.tolist() == [T - 5, 11, T]
        # the sequences go on from their own ends
        more = torch.randn(3, 1, WIDTH, dtype=torch.float64)
        found = made(more, cache=cache)
        close(found[1], made(torch.cat([x[1:2, :11], more[1:2]], 1))[0, -1:])
        close(found[0], made(torch.cat([x[:1, 5:], more[:1]], 1))[0, -1:])


@pytest.mark.parametrize("case", LAYERS)
def test_packed_sequences_are_those_alone(case):
    made, x = layer(case), tokens(1)
    offsets = torch.tensor([0, 7, 7, 15, T], dtype=torch.int32)
    with torch.no_grad():
        y = made(x, cu_seqlens=offsets)
        for start, end in ((0, 7), (7, 15), (15, T)):
            close(y[:, start:end], made(x[:, start:end]))


@pytest.mark.parametrize("case", LAYERS)
def test_gradients_of_a_layer_used_three_ways_are_the_same(case):
    made, x = layer(case), tokens(2)
    weight = torch.randn_like(x)

    def gradients(y):
        return torch.autograd.grad((y * weight).sum(), list(made.parameters()), allow_unused=True)

    cache = nn.Cache()
    whole = gradients(made(x))
    pieces = gradients(torch.cat([made(x[:, :8], cache=cache), made(x[:, 8:], cache=cache)], 1))
    padded = gradients(made(torch.cat([x.new_zeros(2, 3, WIDTH), x], 1), mask=torch.arange(T + 3).expand(2, -1) >= 3)[:, 3:])
    packed = gradients(made(x.reshape(1, -1, WIDTH), cu_seqlens=torch.tensor([0, T, 2 * T])).reshape(x.shape))
    for others in (pieces, padded, packed):
        for found, expected in zip(others, whole, strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                close(found, expected)


@pytest.mark.parametrize("case", LAYERS)
def test_no_token_sees_the_future(case):
    made, x = layer(case), tokens(1)
    changed = x.clone()
    changed[:, 12:] += 1
    close(made(x)[:, :12], made(changed)[:, :12])


@pytest.mark.parametrize("case", LAYERS)
def test_it_compiles_whole(case):
    torch._dynamo.reset()
    made, x, mask = layer(case), tokens(2), torch.ones(2, T, dtype=torch.long)
    mask[0, :4] = 0
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    close(compiled(x, mask=mask), made(x, mask=mask))


def test_layers_that_keep_constants_compile_in_one_model():
    torch._dynamo.reset()
    names = ("RetNet", "FLASH", "Lightning", "Hedgehog", "RetNet of groups", "Lightning of MiniMax")
    made, x = torch.nn.Sequential(*map(layer, names)), tokens(2)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(x).square().sum(), list(made.parameters())) for f in (compiled, made))
    close(found, expected)


def test_compiled_it_has_the_same_gradients():
    torch._dynamo.reset()
    made, x = layer("GatedDeltaNet"), tokens(2)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(x).square().sum(), list(made.parameters())) for f in (compiled, made))
    close(found, expected)


def test_decoding_compiles_whole():
    torch._dynamo.reset()
    made, x = layer("GatedDeltaNet"), tokens(2)
    compiled, cache = torch.compile(made, fullgraph=True, backend="eager"), nn.Cache()
    with torch.no_grad():
        pieces = [made(x[:, :14], cache=cache)] + [compiled(x[:, t : t + 1], cache=cache) for t in range(14, T)]
        close(torch.cat(pieces, 1), made(x))


@pytest.mark.parametrize("case", LAYERS)
def test_autocast_and_checkpointing(case):
    made = layer(case, torch.float32)
    x = tokens(2, torch.float32).requires_grad_()
    y = made(x)
    again = torch.utils.checkpoint.checkpoint(made, x, use_reentrant=False)
    torch.testing.assert_close(*(torch.autograd.grad(o.sum(), x)[0] for o in (y, again)))
    with torch.autocast("cpu", torch.bfloat16):
        low = made(x)
    assert low.dtype is torch.bfloat16
    assert (low.float() - y).norm() < 0.03 * y.norm()
    low.float().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize("case", LAYERS)
def test_in_bfloat16_what_decays_stays_float32(case):
    made, x = layer(case, torch.bfloat16), tokens(2, torch.bfloat16)
    kept = {name: p.dtype for name, p in made.named_parameters() if p.dtype is not torch.bfloat16}
    assert set(kept) <= {"A_log", "dt_bias", "D"}
    assert set(kept.values()) <= {torch.float32}
    y, cache = made(x), nn.Cache()
    assert y.dtype is torch.bfloat16
    with torch.no_grad():
        pieces = [made(x[:, :9], cache=cache)] + [made(x[:, t : t + 1], cache=cache) for t in range(9, T)]
    assert (torch.cat(pieces, 1) - y).float().norm() < 0.03 * y.float().norm()
    assert cache.layers[0]["length"].dtype is torch.int32


class TestCache:
    def test_reordering_picks_beams(self):
        made, x, cache = layer("GatedDeltaNet"), tokens(), nn.Cache()
        more = torch.randn(4, 1, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            made(x, cache=cache)
            rows = torch.tensor([2, 2, 0, 1])
            close(made(more, cache=cache.reorder(rows)), made(torch.cat([x[rows], more], 1))[:, -1:])

    @pytest.mark.parametrize("case", ["GatedDeltaNet", "FLASH"])
    def test_stored_and_read_again_it_goes_on(self, case):
        made, x, cache = layer(case), tokens(), nn.Cache()
        with torch.no_grad():
            made(x[:, :12], cache=cache)
            file = io.BytesIO()
            torch.save(cache.state_dict(), file)
            file.seek(0)
            read = nn.Cache.from_state_dict(torch.load(file, weights_only=True))
            pickled = pickle.loads(pickle.dumps(cache))
            copied = cache.copy()
            expected = made(x[:, 12:], cache=cache)
            for other in (read, pickled, copied):
                close(made(x[:, 12:], cache=other), expected)

    def test_a_copy_is_left_alone_by_decoding(self):
        made, x, cache = layer("GatedDeltaNet"), tokens(), nn.Cache()
        with torch.no_grad():
            made(x[:, :12], cache=cache)
            kept = cache.copy()
            before = copy.deepcopy(kept.state_dict())
            made(x[:, 12:13], cache=cache)
        assert all((kept.state_dict()[name] == held).all() for name, held in before.items())

    def test_detached_no_gradient_reaches_the_segment_before(self):
        made, x, cache = layer("GatedDeltaNet"), tokens().requires_grad_(), nn.Cache()
        made(x[:, :8], cache=cache)
        made(x[:, 8:], cache=cache.detach()).sum().backward()
        assert not x.grad[:, :8].any()
        assert x.grad[:, 8:].any()

    def test_it_says_what_it_holds(self):
        made, cache = layer("GatedDeltaNet"), nn.Cache()
        assert repr(cache) == "Cache(0 layers, 0 sequences)"
        assert cache.lengths is None
        made(tokens(), cache=cache)
        assert repr(cache.to("meta")) == "Cache(1 layers, 3 sequences)"
        assert all(x.is_meta for x in cache.state_dict().values())

    def test_wrong_names_and_batches_are_refused(self):
        made, cache = layer("GatedDeltaNet"), nn.Cache()
        made(tokens(), cache=cache)
        message = "the cache holds 3 sequences, but this call has 2: reorder(indices) picks rows"
        with pytest.raises(ShapeError, match=f"^{re.escape(message)}$"):
            made(tokens(2), cache=cache)
        with pytest.raises(OptionError, match=r"^Cache: expected names such as '0.recurrent_state', got 'state'$"):
            nn.Cache.from_state_dict({"state": torch.zeros(1)})


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_made_on_no_device_draws_its_parameters_later(case):
    name, options = CASES[case]
    made = getattr(nn, name)(WIDTH, **options, device="meta")
    assert all(p.is_meta for p in made.parameters())
    made.to_empty(device="cpu")
    torch.manual_seed(3)
    made.reset_parameters()
    torch.manual_seed(3)
    expected = getattr(nn, name)(WIDTH, **options)
    assert all((made.state_dict()[key] == x).all() for key, x in expected.state_dict().items())


@pytest.mark.parametrize("case", LAYERS)
def test_layers_can_be_copied_and_pickled_and_tell_what_they_are(case):
    made, x = layer(case), tokens(1)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        close(other(x), made(x))
        assert other.arguments == made.arguments
    _name, options = CASES[case]
    assert made.arguments | {"hidden_size": WIDTH, **options} == made.arguments
    assert f"hidden_size={WIDTH}" in repr(made)


def test_bad_calls_are_refused():
    made, x = layer("GatedDeltaNet"), tokens()
    wrong = {
        "GatedDeltaNet: x must be [B, T, D] = [B, T, 32], got [19, 32]": lambda: made(x[0]),
        "mask must be [B, T] = [3, 19], got [3, 18]": lambda: made(x, mask=torch.ones(3, 18)),
        "GatedDeltaNet: mask and cu_seqlens both say where sequences lie: give one of them": lambda: made(
            x[:1], mask=torch.ones(1, T), cu_seqlens=torch.tensor([0, T])
        ),
        "GatedLinearAttention: hidden_size · expand_k must be a multiple of 5 heads, got 32 · 0.5": lambda: (
            nn.GatedLinearAttention(32, num_heads=5)
        ),
        "GatedDeltaNet: num_v_heads must be a multiple of num_heads = 4, got 6": lambda: nn.GatedDeltaNet(
            32, num_heads=4, num_v_heads=6
        ),
        "DeltaNet: qk_norm must be one of 'l2', 'sum', got 'l1'": lambda: nn.DeltaNet(32, qk_norm="l1"),
        "Mamba2: expand · hidden_size must be a multiple of head_dim = 48, got 64": lambda: nn.Mamba2(32, head_dim=48),
        "HGRN2: give expand_ratio or num_heads": lambda: nn.HGRN2(32, expand_ratio=None),
        "RWKV7: give head_dim or num_heads": lambda: nn.RWKV7(32, head_dim=None),
        "FLASH: causal=False reads the whole sequence at once: call it without a cache": lambda: nn.FLASH(
            32, key_dim=8, causal=False
        )(x.float(), cache=nn.Cache()),
        "this GAU is for sequences up to max_length=16, got 19 tokens: "
        "make it with a larger max_length, or take FLASH": lambda: nn.GAU(32, key_dim=8, max_length=16)(x.float()),
        "RWKV7 with layer_idx=1 mixes in the values of the first layer: pass the dict that layer 0 was called with as shared=, "
        "as LanguageModel does": lambda: nn.RWKV7(32, head_dim=8, layer_idx=1)(x.float()),
    }
    for message, call in wrong.items():
        with pytest.raises((OptionError, ShapeError), match=f"^{re.escape(message)}$"):
            call()
    with pytest.raises(TypeError, match="unexpected keyword argument 'heads'"):
        nn.GatedDeltaNet(32, heads=4)


def test_encoders_see_the_whole_sequence():
    x = tokens(1, torch.float32)
    changed = x.clone()
    changed[:, -1] += 1
    for made in (nn.FLASH(WIDTH, key_dim=8, chunk_size=8, causal=False), nn.Hedgehog(WIDTH, num_heads=2, causal=False)):
        assert (made(x)[0, 0] != made(changed)[0, 0]).any()


@pytest.mark.parametrize(
    "make", [lambda: nn.LinearAttention(WIDTH, num_heads=2, feature_map="hedgehog"), lambda: nn.Hedgehog(WIDTH, num_heads=2)]
)
def test_hedgehog_s_gradients_are_finite_however_long_tokens_are(make):
    """Whose products of features vanish, or leave float32, without a bound."""
    x = (1000 * tokens(50, torch.float32)).requires_grad_()
    layer = make()
    found = layer(x)
    y = found[0] if isinstance(found, tuple) else found
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()))


def test_hedgehog_distilled_from_softmax_comes_closer_to_it():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (torch.nn.Linear(WIDTH, WIDTH, False) for _ in range(4))

        def forward(self, x):
            q, k, v = (y(x).unflatten(-1, (2, -1)).transpose(1, 2) for y in (self.q_proj, self.k_proj, self.v_proj))
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o_proj(o.transpose(1, 2).flatten(2))

    attention, x = Attention(), tokens(4, torch.float32)
    with torch.no_grad():
        attention.q_proj.weight *= 3
        attention.k_proj.weight *= 3
    target = attention(x).detach()
    student = nn.Hedgehog.from_attention(attention, num_heads=2, rotary=False)
    assert student.q_proj is attention.q_proj
    before = (student(x) - target).square().mean().item()
    optimiser = torch.optim.Adam([student.W], lr=0.02)
    for _ in range(60):
        optimiser.zero_grad()
        student.distillation_loss(x).backward()
        optimiser.step()
    assert all(p.grad is None for name, p in student.named_parameters() if name != "W")
    assert (student(x) - target).square().mean().item() < 0.6 * before


class FromHost(TorchDispatchMode):
    """Counts the arrays that are made of Python's numbers."""

    made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.made += function is torch.ops.aten.lift_fresh.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
def test_a_second_call_makes_no_array_on_the_host(case):
    """A graph that is being recorded on a GPU cannot take one, and every copy of one waits for the GPU."""
    made, x = layer(case, torch.float32), tokens(dtype=torch.float32)
    with torch.no_grad():
        made(x)
        with FromHost() as watched:
            made(x)
    assert watched.made == 0


@pytest.mark.parametrize("packed", [False, True])
def test_what_mixes_tokens_with_those_before_is_a_convolution(packed, monkeypatch):
    """RWKV-7 says so where that is faster: the same results, gradients and states as of sums and products."""
    made, x = layer("RWKV7"), tokens(1).requires_grad_()

    def run(convolves):
        monkeypatch.setattr(type(made).functions, "convolves", staticmethod(lambda x: convolves))
        cache, results = nn.Cache(), []
        for begin, middle, end in ((0, 4, 9), (9, 12, 13), (13, 14, 15)):
            offsets = torch.tensor([0, middle - begin, end - begin]) if packed else None
            results.append(made(x[:, begin:end], cache=cache, cu_seqlens=offsets))
        grads = torch.autograd.grad(sum(y.square().sum() for y in results), [x, *made.parameters()])
        return results, cache.layers[made.layer_idx], grads

    torch.testing.assert_close(run(True), run(False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [None, torch.float32, torch.bfloat16, torch.float64])
def test_pytorchs_own_functions_compute_what_the_others_do(dtype, weights):
    """To the rounding of their results, which in 16 bits the others round on their way as well."""
    x, y, z = torch.randn(3, 2, 5, 4, 8).to(dtype)
    pair = (None, None) if weights is None else torch.randn(2, 32).to(weights)
    for name, given in dict(multiply_add=(x, y, z), unit=(x, 1e-24), group_norm=(3 * x + 1, *pair, 1e-5)).items():
        found = getattr(nn.RWKV7.functions, name)(*given)
        wanted = getattr(Expressions, name)(*(a.double() if isinstance(a, torch.Tensor) else a for a in given))
        assert found.dtype == dtype
        few = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), wanted, rtol=few, atol=few)


def test_rows_of_zeros_have_no_length_and_no_gradient():
    x = torch.zeros(1, 2, 1, 4, requires_grad=True)
    nn.RWKV7.functions.unit(x, 1e-24).sum().backward()
    assert torch.equal(nn.RWKV7.functions.unit(x, 1e-24), torch.zeros_like(x))
    assert x.grad.isfinite().all()


def test_what_all_chunks_give_a_token_of_flash_does_not_grow_with_the_text():
    """Where it is not causal, with a scale of one over its length: the same text twice gives the same sum."""
    torch.manual_seed(0)
    sums = []
    for times in (1, 2):
        torch.manual_seed(1)
        layer = nn.FLASH(16, key_dim=8, chunk_size=4, causal=False, quadratic=False, lin_scale=1 / (12 * times))
        layer.rotated = lambda y, positions: y  # a second coming is the same to it
        torch.manual_seed(2)
        sums.append(layer(torch.randn(1, 12, 16).repeat(1, times, 1))[:, :12])
    torch.testing.assert_close(*sums)
    assert nn.FLASH(16, chunk_size=4).lin_scale == 1 / 4
    assert nn.FLASH(16, chunk_size=4, lin_scale=0.0).lin_scale == 0
    assert nn.FLASH(16, chunk_size=4, linear=False, lin_scale=0.5).lin_scale == 0
