"""Layers beside torch's with the same weights, published models, and layers on JAX arrays."""

# Frameworks without types, options by name.
# mypy: disable-error-code="arg-type, call-arg, call-overload, misc, no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from linattn import layers
from linattn.feature_maps import ActivationFeatures, EluFeatures

pytestmark = pytest.mark.frameworks

DIM, HEADS, LENGTH, MEMORY = 16, 4, 7, 5
CLOSE = {"float64": {"rtol": 1e-12, "atol": 1e-12}, "float32": {"rtol": 1e-5, "atol": 1e-5}}


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def drawn(module, dtype):
    """Set all weights: what torch starts with has biases of 0 and scales of 1."""
    module = module.to(dtype=dtype)
    rng = np.random.default_rng(0)
    for weight in module.parameters():
        weight.data = weight.new_tensor(rng.normal(0, 0.4, weight.shape))
    return module


def state_dict(module):
    return {name: array.detach().numpy() for name, array in module.state_dict().items()}


def inputs(torch, dtype, seed=1):
    """Tokens and a memory that need gradients, masks of both, and a cotangent."""
    rng = np.random.default_rng(seed)
    tokens, memory = (
        torch.tensor(rng.standard_normal((3, n, DIM)), dtype=dtype, requires_grad=True)
        for n in (LENGTH, MEMORY)
    )
    mask, memory_mask = (torch.tensor(rng.random((3, n)) < 0.7) for n in (LENGTH, MEMORY))
    mask[:, 0] = memory_mask[:, 0] = True
    grad = torch.tensor(rng.standard_normal((3, LENGTH, DIM)), dtype=dtype)
    return tokens, memory, mask, memory_mask, grad


def assert_equal(module, wanted, grad, found, arrays, close):
    """Compare outputs, and gradients by the weights and by the inputs."""
    wanted.backward(grad)
    out, pullback = found
    assert_allclose(out, wanted.detach().numpy(), **close)
    assert str(out.dtype) in str(wanted.dtype)
    grads, *by_inputs = pullback(grad.numpy())
    # Sums over 21 rows of products of numbers of size 1.
    loose = {"rtol": 10 * close["rtol"], "atol": 10 * close["atol"]}
    wanted_grads = {name: weight.grad.numpy() for name, weight in module.named_parameters()}
    assert grads.keys() == wanted_grads.keys()
    for name, gradient in grads.items():
        assert_allclose(gradient, wanted_grads[name], err_msg=name, **loose)
    for gradient, array in zip(by_inputs, arrays, strict=True):
        assert_allclose(gradient, array.grad.numpy(), **loose)


def causal_mask(torch):
    """Pairs that do not see each other, as torch has it."""
    return torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), diagonal=1)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
def test_multi_head_attention_is_torchs(torch, dtype, bias, kind):
    of = getattr(torch, dtype)
    module = drawn(torch.nn.MultiheadAttention(DIM, HEADS, bias=bias, batch_first=True), of)
    tokens, memory, mask, memory_mask, grad = inputs(torch, of)
    keys, seen = (memory, memory_mask) if kind == "cross" else (tokens, mask)
    pairs = causal_mask(torch) if kind == "causal" else None
    wanted, _ = module(tokens, keys, keys, key_padding_mask=~seen, attn_mask=pairs)
    arrays = [tokens, memory] if kind == "cross" else [tokens]
    found = layers.multi_head_attention_vjp(
        state_dict(module),
        *(array.detach().numpy() for array in arrays),
        num_heads=HEADS,
        is_causal=kind == "causal",
        key_mask=seen.numpy(),
    )
    assert_equal(module, wanted, grad, found, arrays, CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_is_torchs(torch, dtype, norm_first, activation):
    of = getattr(torch, dtype)
    kind = {"activation": activation, "norm_first": norm_first}
    layer = torch.nn.TransformerEncoderLayer(DIM, HEADS, 32, 0.0, batch_first=True, **kind)
    final = torch.nn.LayerNorm(DIM) if norm_first else None
    stack = torch.nn.TransformerEncoder(layer, 2, norm=final, enable_nested_tensor=False)
    module = drawn(stack, of)
    tokens, _, mask, _, grad = inputs(torch, of)
    wanted = module(tokens, src_key_padding_mask=~mask)
    found = layers.encoder_vjp(
        state_dict(module), tokens.detach().numpy(), num_heads=HEADS, key_mask=mask.numpy(), **kind
    )
    assert_equal(module, wanted, grad, found, [tokens], CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_decoder_layer_is_torchs(torch, dtype, norm_first, activation):
    of = getattr(torch, dtype)
    kind = {"activation": activation, "norm_first": norm_first}
    layer = torch.nn.TransformerDecoderLayer(DIM, HEADS, 32, 0.0, batch_first=True, **kind)
    module = drawn(layer, of)
    tokens, memory, mask, memory_mask, grad = inputs(torch, of)
    wanted = module(
        tokens,
        memory,
        tgt_mask=causal_mask(torch),
        tgt_key_padding_mask=~mask,
        memory_key_padding_mask=~memory_mask,
    )
    found = layers.decoder_layer_vjp(
        state_dict(module),
        tokens.detach().numpy(),
        memory.detach().numpy(),
        num_heads=HEADS,
        key_mask=mask.numpy(),
        memory_mask=memory_mask.numpy(),
        **kind,
    )
    assert_equal(module, wanted, grad, found, [tokens, memory], CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("layer", ["linear", "layer_norm", "rms_norm"])
def test_layers_of_tokens_are_torchs(torch, layer, dtype):
    of = getattr(torch, dtype)
    tokens, *_, grad = inputs(torch, of)
    made: Any
    if layer == "linear":
        module, made = torch.nn.Linear(DIM, DIM), layers.linear_vjp
    elif layer == "layer_norm":
        module, made = torch.nn.LayerNorm(DIM), layers.layer_norm_vjp
    else:
        module, made = torch.nn.RMSNorm(DIM, eps=1e-6), layers.rms_norm_vjp
    module = drawn(module, of)
    found = made(state_dict(module), tokens.detach().numpy())
    assert_equal(module, module(tokens), grad, found, [tokens], CLOSE[dtype])


def test_embedding_is_torchs(torch):
    module = drawn(torch.nn.Embedding(9, DIM), torch.float64)
    tokens = torch.tensor(np.random.default_rng(2).integers(0, 9, (3, LENGTH)))
    *_, grad = inputs(torch, torch.float64)
    found = layers.embedding_vjp(state_dict(module), tokens.numpy())
    assert_equal(module, module(tokens), grad, found, [], CLOSE["float64"])


def test_torchs_autograd_goes_through_the_layers(torch):
    """Arrays of torch stay on its tape; the pullback gives the same gradients."""
    kind = {"num_heads": HEADS, "attention": layers.LinearAttention(EluFeatures())}
    drawn_params = layers.init_decoder(np.random.default_rng(0), 1, DIM, HEADS, dtype=np.float64)
    params = {n: torch.tensor(p, requires_grad=True) for n, p in drawn_params.items()}
    tokens, *_, grad = inputs(torch, torch.float64)
    layers.decoder(params, tokens, **kind).backward(grad)
    plain = {name: array.detach() for name, array in params.items()}
    grads, by_tokens = layers.decoder_vjp(plain, tokens.detach(), **kind)[1](grad)
    for name, gradient in grads.items():
        assert_allclose(gradient, params[name].grad, rtol=1e-11, atol=1e-11, err_msg=name)
    assert_allclose(by_tokens, tokens.grad, rtol=1e-11, atol=1e-11)


# Published models --------------------------------------------------------------------------------


def normalized_sum(query, key, value, eps):
    """Linear attention of features as both models publish it: ``phi(Q) (phi(K)^T V) / (. + eps)``.

    Rows (batch, length, heads, dim), as in idiap/fast-transformers, from which both are derived.
    """
    key_value = np_einsum("nshd,nshe->nhde", key, value)
    inverse = 1 / (np_einsum("nlhd,nhd->nlh", query, key.sum(1)) + eps)
    return np_einsum("nlhd,nhde,nlh->nlhe", query, key_value, inverse)


def np_einsum(subscripts, *operands):
    return pytest.importorskip("torch", reason="torch is not installed").einsum(
        subscripts, *operands
    )


def molformer(torch, weights, omega, x, mask, eps):
    """MoLFormer: rotary before the map, ReLU features, post-norm, GELU.

    Ross et al., "Large-Scale Chemical Language Representations Capture Molecular Structure and
    Properties" (2022), section 3 and the code IBM/molformer (rotate_attention, 4 of its lines being
    `rotate_half`), whose encoder layer and `GeneralizedRandomFeatures`, relu(x omega), are those of
    fast-transformers.
    """
    functional = torch.nn.functional
    batch, length, width = x.shape
    dim = width // HEADS
    frequencies = 1 / 10_000 ** (torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    angles = torch.arange(length, dtype=x.dtype)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)[None, :, None, :]

    def rotate(t):
        half = torch.cat([-t[..., dim // 2 :], t[..., : dim // 2]], -1)
        return t * angles.cos() + half * angles.sin()

    for i in range(2):
        w = {n.removeprefix(f"layers.{i}."): a for n, a in weights.items() if f"layers.{i}." in n}
        query, key, value = (
            functional.linear(x, a, b).view(batch, length, HEADS, dim)
            for a, b in zip(
                w["self_attn.in_proj_weight"].chunk(3),
                w["self_attn.in_proj_bias"].chunk(3),
                strict=True,
            )
        )
        query, key = (torch.relu(rotate(t) @ omega.T) for t in (query, key))
        key = key * mask[:, :, None, None]
        out = normalized_sum(query, key, value, eps).reshape(batch, length, width)
        out = functional.linear(out, w["self_attn.out_proj.weight"], w["self_attn.out_proj.bias"])
        x = functional.layer_norm(x + out, (width,), w["norm1.weight"], w["norm1.bias"])
        y = functional.gelu(functional.linear(x, w["linear1.weight"], w["linear1.bias"]))
        y = functional.linear(y, w["linear2.weight"], w["linear2.bias"])
        x = functional.layer_norm(x + y, (width,), w["norm2.weight"], w["norm2.bias"])
    return functional.layer_norm(x, (width,), weights["norm.weight"], weights["norm.bias"])


def test_molformer(torch):
    """The model adds eps = 1e-6 to denominators; linattn adds nothing: equal at eps = 0."""
    params = layers.init_encoder(
        np.random.default_rng(0), 2, DIM, HEADS, hidden_dim=DIM, final_norm=True, dtype=np.float64
    )
    phi = ActivationFeatures(DIM // HEADS, 12, activation="relu", epsilon=0.0, rng=0)
    tokens, _, mask, *_ = inputs(torch, torch.float64)
    weights = {name: torch.tensor(array) for name, array in params.items()}
    omega = torch.tensor(np.array(phi.projection))
    out = layers.encoder(
        params,
        tokens.detach().numpy(),
        num_heads=HEADS,
        attention=layers.LinearAttention(phi),
        positions=layers.Rotary(),
        activation="gelu",
        key_mask=mask.numpy(),
    )
    for eps, close in ((0.0, 1e-11), (1e-6, 1e-4)):
        wanted = molformer(torch, weights, omega, tokens.detach(), mask, eps)
        assert_allclose(out, wanted, rtol=close, atol=close)


def loftr_layer(torch, w, x, source, source_mask, eps):
    """A layer of LoFTR: elu + 1, the message normalized and joined to the tokens.

    Sun et al., "LoFTR: Detector-Free Local Feature Matching with Transformers" (2021), section 3.3
    and figure 3 (zju3dv/LoFTR, `LoFTREncoderLayer`). Values are divided by their number, and the
    output multiplied by it, against overflow in float16: it cancels.
    """
    functional = torch.nn.functional
    batch, _, width = x.shape
    query, key, value = (
        (t @ w[name].T).view(batch, -1, HEADS, width // HEADS)
        for t, name in ((x, "q_proj"), (source, "k_proj"), (source, "v_proj"))
    )
    query, key = (functional.elu(t) + 1 for t in (query, key))
    key, value = (t * source_mask[:, :, None, None] for t in (key, value))
    number = value.shape[1]
    message = normalized_sum(query, key, value / number, eps) * number
    message = message.reshape(batch, -1, width) @ w["merge"].T
    message = functional.layer_norm(message, (width,), w["norm1.weight"], w["norm1.bias"])
    inner = torch.relu(torch.cat([x, message], -1) @ w["mlp.0"].T)
    return x + functional.layer_norm(
        inner @ w["mlp.2"].T, (width,), w["norm2.weight"], w["norm2.bias"]
    )


def our_loftr_layer(w, x, source, source_mask):
    """The same of layers: it is no `encoder_layer`, and need not be."""
    heads = {
        "in_proj_weight": np.concatenate([w["q_proj"], w["k_proj"], w["v_proj"]]),
        "out_proj.weight": w["merge"],
    }
    message = layers.multi_head_attention(
        heads,
        x,
        source,
        num_heads=HEADS,
        attention=layers.LinearAttention(EluFeatures()),
        key_mask=source_mask,
    )
    norms = [{"weight": w[f"norm{i}.weight"], "bias": w[f"norm{i}.bias"]} for i in (1, 2)]
    both = np.concatenate([x, layers.layer_norm(norms[0], message)], axis=-1)
    mlp = {"linear1.weight": w["mlp.0"], "linear2.weight": w["mlp.2"]}
    return x + layers.layer_norm(norms[1], layers.feed_forward(mlp, both))


def test_loftr(torch):
    """Two images attend to themselves, then to each other; eps as in `test_molformer`."""
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "merge"), (DIM, DIM))
    shapes |= {"mlp.0": (2 * DIM, 2 * DIM), "mlp.2": (DIM, 2 * DIM)}
    shapes |= {f"norm{i}.{part}": (DIM,) for i in (1, 2) for part in ("weight", "bias")}
    both = [{n: rng.normal(0, 0.4, shape) for n, shape in shapes.items()} for _ in range(2)]
    left, right, mask, right_mask, _ = inputs(torch, torch.float64)

    def match(layer, weights, one, two, masks):
        one = layer(weights[0], one, one, masks[0])
        two = layer(weights[0], two, two, masks[1])
        one = layer(weights[1], one, two, masks[1])
        return one, layer(weights[1], two, one, masks[0])

    images, masks = [left.detach(), right.detach()], [mask, right_mask]
    found = match(our_loftr_layer, both, *(a.numpy() for a in images), [m.numpy() for m in masks])
    there = [{name: torch.tensor(array) for name, array in w.items()} for w in both]
    for eps, close in ((0.0, 1e-12), (1e-6, 1e-5)):

        def layer(*arguments, eps=eps):
            return loftr_layer(torch, *arguments, eps)

        for out, wanted in zip(found, match(layer, there, *images, masks), strict=True):
            assert_allclose(out, wanted, rtol=close, atol=close)


# JAX ---------------------------------------------------------------------------------------------


def test_layers_take_arrays_of_jax():
    """One compiled function, float64: output and gradients. float32: the output."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    jax.config.update("jax_enable_x64", True)
    kind = {"num_heads": 2, "attention": layers.LinearAttention(EluFeatures())}
    kind |= {"positions": layers.Rotary(), "activation": "gelu", "norm_first": True}
    rng = np.random.default_rng(0)
    params = layers.init_encoder_layer(rng, 8, 2, dtype=np.float64)
    tokens, grad = rng.standard_normal((2, 2, 6, 8))

    @jax.jit
    def run(params, tokens, grad):
        out, pullback = layers.encoder_layer_vjp(params, tokens, **kind)
        return out, *pullback(grad)

    here = {name: jax.numpy.asarray(array) for name, array in params.items()}
    out, grads, by_tokens = run(here, jax.numpy.asarray(tokens), jax.numpy.asarray(grad))
    wanted, pullback = layers.encoder_layer_vjp(params, tokens, **kind)
    wanted_grads, wanted_by_tokens = pullback(grad)
    assert_allclose(out, wanted, **CLOSE["float64"])
    assert_allclose(by_tokens, wanted_by_tokens, **CLOSE["float64"])
    for name, gradient in wanted_grads.items():
        assert_allclose(grads[name], gradient, err_msg=name, **CLOSE["float64"])
    narrow = {name: jax.numpy.asarray(array, dtype="float32") for name, array in params.items()}
    out = jax.jit(lambda p, x: layers.encoder_layer(p, x, **kind))(
        narrow, jax.numpy.asarray(tokens, dtype="float32")
    )
    assert out.dtype == "float32"
    assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
