"""`Attention.from_multihead` in the place of torch's module: same calls, same numbers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from linattn import feature_maps

pytestmark = pytest.mark.frameworks

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
interop: Any = pytest.importorskip("linattn.interop.torch", reason="torch is not installed")

nn = torch.nn
EMBED, HEADS, BATCH, LENGTH = 8, 2, 3, 6
ELU = feature_maps.EluFeatures()
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(LENGTH) >= torch.tensor([LENGTH, 4, 2])[:, None]


def pick(rng: Any, *values: Any) -> Any:
    return values[rng.integers(len(values))]


def masks(rng: Any, lead: tuple[int, ...], others: int) -> dict[str, Any]:
    """Masks of both arguments in all forms; every query sees a key."""
    form, shape = pick(rng, None, "bool", "float", "heads"), (LENGTH, others)
    mask: Any = None if form is None else torch.rand(shape) < 0.3
    if form in ("float", "heads"):
        count = HEADS * (lead[0] if lead else 1)
        mask = torch.randn((count, *shape) if form == "heads" else shape, dtype=torch.float64)
    padding = torch.zeros(*lead, others, dtype=torch.bool)
    padding[..., -2:] = True
    if form == "bool":
        mask[:, 0] = False
    float_padding = torch.randn(padding.shape, dtype=torch.float64).masked_fill(padding, -np.inf)
    padding = pick(rng, None, padding if form in (None, "bool") else float_padding)
    return {"attn_mask": mask, "key_padding_mask": padding}


@pytest.mark.parametrize("seed", range(60))
def test_a_call_is_that_of_torch(seed):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    first, lead = pick(rng, True, False), pick(rng, (), (BATCH,))
    kind = {"bias": pick(rng, True, False), "batch_first": first, "dtype": torch.float64}
    theirs = nn.MultiheadAttention(EMBED, HEADS, **kind).train(pick(rng, True, False))
    ours = interop.Attention.from_multihead(theirs)
    others = pick(rng, LENGTH, LENGTH + 1)

    def tokens(count: int) -> Any:
        x = torch.randn(*lead, count, EMBED, dtype=torch.float64)
        return x if first or not lead else x.transpose(0, 1)

    query = tokens(LENGTH)
    key, value = (query, query) if others == LENGTH else (tokens(others), tokens(others))
    given = masks(rng, lead, others)
    given |= {n: pick(rng, True, False) for n in ("need_weights", "average_attn_weights")}
    # It says nothing beside a mask, which torch must be given.
    hint = pick(rng, True, False) and (given["attn_mask"] is not None or others == LENGTH)
    wanted = {"attn_mask": CAUSAL} if hint and given["attn_mask"] is None else {}
    with torch.set_grad_enabled(theirs.training):
        output, weights = ours(query, key, value, **given, is_causal=hint)
        want, want_weights = theirs(query, key, value, **given | wanted)
    torch.testing.assert_close(output, want, rtol=0, atol=1e-12)
    assert (weights is None) == (want_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, want_weights, rtol=0, atol=1e-12)


def swapped(model: Any, attention: Any = "softmax") -> Any:
    model = copy.deepcopy(model)
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if type(child) is nn.MultiheadAttention:
                setattr(module, name, interop.Attention.from_multihead(child, attention))
    return model


def stack(first: bool = True, train: bool = False, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout, batch_first=first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=first).train(train)


X = torch.randn(BATCH, LENGTH, EMBED, generator=torch.Generator().manual_seed(0))
FLOAT_CAUSAL = torch.zeros(LENGTH, LENGTH).masked_fill(CAUSAL, -torch.inf)
GIVEN: list[dict[str, Any]] = [
    {},
    {"src_key_padding_mask": PADDING},
    {"mask": FLOAT_CAUSAL, "is_causal": True},
    {"mask": CAUSAL, "src_key_padding_mask": PADDING},
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_stacks_of_torch_take_it(train, first, grad):
    """In all ways to torch's fast path, which packs sequences of unlike lengths."""
    theirs, x = stack(first, train), X if first else X.transpose(0, 1)
    ours = swapped(theirs)
    seen = ~PADDING if first else ~PADDING.T
    with torch.set_grad_enabled(grad):
        for given in GIVEN:
            agree = torch.testing.assert_close
            agree(ours(x, **given)[seen], theirs(x, **given)[seen], rtol=1e-4, atol=1e-5)
        torch.manual_seed(0)
        decoder = nn.TransformerDecoderLayer(EMBED, HEADS, 16, 0.0, batch_first=first).train(train)
        given = {"tgt_mask": CAUSAL, "memory_key_padding_mask": PADDING}
        agree(swapped(decoder)(x, x, **given), decoder(x, x, **given), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_no_fast_path_goes_around_a_map(monkeypatch):
    theirs = stack()
    ours = swapped(theirs, ELU)
    want = ours(X, src_key_padding_mask=PADDING)
    kind, nested = type(ours.layers[0].self_attn), []
    packed = kind._nested

    def counted(*given):
        nested.append(given)
        return packed(*given)

    monkeypatch.setattr(kind, "_nested", counted)
    with torch.no_grad():
        got = ours(X, src_key_padding_mask=PADDING)
    assert len(nested) == 2
    torch.testing.assert_close(got[~PADDING], want[~PADDING])
    assert (got - theirs(X, src_key_padding_mask=PADDING))[~PADDING].abs().max() > 1e-2


STOPS = torch.tensor([[1, 2, 2, 4, 6, 6], [3, 3, 3, 5, 5, 5]])
STOPPED = torch.arange(LENGTH) >= STOPS[..., None]


@pytest.mark.parametrize(
    "mask",
    [None, CAUSAL, FLOAT_CAUSAL, STOPPED[0], STOPPED.repeat(BATCH, 1, 1), STOPPED[1][:, :5]],
    ids=["none", "causal", "float", "stops", "heads", "cross"],
)
def test_a_map_is_the_dense_formula(mask):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64)
    ours, x = interop.Attention.from_multihead(module, ELU), X.double()
    y = x[:, : mask.shape[-1]] if mask is not None else x
    projections = zip((x, y, y), module.in_proj_weight.chunk(3), strict=True)
    q, k, v = ((a @ w.T).unflatten(-1, (HEADS, -1)).transpose(1, 2) for a, w in projections)
    pairs = (nn.functional.elu(q) + 1) @ (nn.functional.elu(k) + 1).mT
    padding = PADDING[:, : y.shape[1]]
    hidden = padding[:, None, None]
    if mask is not None:
        bool_mask = mask if mask.dtype == torch.bool else mask < 0
        hidden = hidden | (bool_mask if mask.ndim == 2 else bool_mask.unflatten(0, (-1, HEADS)))
    pairs = pairs.masked_fill(hidden, 0)
    weights = pairs / pairs.sum(-1, keepdim=True)
    want = module.out_proj((weights @ v).transpose(1, 2).flatten(2))
    got, got_weights = ours(x, y, y, padding, attn_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_weights, weights)
    alone, nothing = ours(x, y, y, padding, need_weights=False, attn_mask=mask)
    torch.testing.assert_close(alone, want)
    assert nothing is None


@pytest.mark.parametrize(
    "options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 4}, {"vdim": 4}]
)
def test_another_kind_of_module_is_refused_by_name(options):
    with pytest.raises(NotImplementedError, match=f"module must have no .*{next(iter(options))}"):
        interop.Attention.from_multihead(nn.MultiheadAttention(EMBED, HEADS, **options))


def test_what_it_cannot_do_is_refused_by_name():
    make = interop.Attention.from_multihead
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.MultiheadAttention, got Linear"):
        make(nn.Linear(2, 2))
    dropping = stack(train=True, dropout=0.1)
    with pytest.raises(NotImplementedError, match="module must have no dropout"):
        swapped(dropping, ELU)
    ours = swapped(dropping.eval(), ELU)
    ours(X)
    with pytest.raises(NotImplementedError, match="module must have no dropout"):
        ours.train()(X)
    exact = swapped(dropping).train()
    assert not torch.equal(exact(X), exact(X))
    module = make(nn.MultiheadAttention(EMBED, HEADS, batch_first=True), ELU)
    for mask in (torch.randn(LENGTH, LENGTH), torch.eye(LENGTH) > 0, CAUSAL | ~CAUSAL.triu(-2)):
        with pytest.raises(NotImplementedError, match="attn_mask must show each query"):
            module(X, X, X, attn_mask=mask)
    for given in ((X, X[:1], X[:1]), (X, X[0], X[0]), (X, X, X[:, :2]), (X, X, X, PADDING[:1])):
        with pytest.raises(ValueError, match="must have shape"):
            module(*given)


def test_weights_go_in_and_out_and_queries_without_keys_are_zero():
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    ours = interop.Attention.from_multihead(theirs)
    other = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    ours.load_state_dict(other.state_dict())
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(theirs(X, X, X)[0], other(X, X, X)[0])
    for given in ({"attn_mask": ~(CAUSAL & ~CAUSAL)}, {"key_padding_mask": ~PADDING | PADDING}):
        output, weights = ours(X, X, X, **given)
        assert weights.abs().max() == 0
        torch.testing.assert_close(output, ours.out_proj.bias.expand_as(X))
