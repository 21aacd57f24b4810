"""The short convolution, the gated norm, and blocks of hybrid models made of them without torch."""

# Star arguments.
# mypy: disable-error-code="arg-type, no-untyped-call, no-untyped-def"

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from linattn import layers
from linattn.testing import assert_gradient

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

BLOCKS = {
    "gated_delta_net": (
        ("qwen3_next", "Qwen3NextConfig", "Qwen3NextGatedDeltaNet"),
        {
            **{"hidden_size": 12, "linear_num_value_heads": 6, "linear_num_key_heads": 2},
            **{"linear_key_head_dim": 5, "linear_value_head_dim": 4},
            **{"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
        },
        {"key_heads": 2, "value_heads": 6},
    ),
    "kimi_delta_attention": (
        ("kimi_linear", "KimiLinearConfig", "KimiLinearDeltaAttention"),
        {
            **{"hidden_size": 12, "linear_num_heads": 3, "linear_head_dim": 4},
            **{"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
            "rms_norm_eps": 1e-6,
        },
        {"num_heads": 3},
    ),
    "mamba2": (
        ("mamba2", "Mamba2Config", "Mamba2Mixer"),
        {
            **{"hidden_size": 12, "num_heads": 6, "head_dim": 4, "expand": 2, "state_size": 5},
            **{"n_groups": 2, "num_hidden_layers": 1, "chunk_size": 8},
        },
        {"num_groups": 2},
    ),
}
"""Function of examples/hybrid_blocks.py: the module of transformers, its config, its options."""

COMPARE = """
import sys
import numpy as np
import hybrid_blocks

given = dict(np.load(sys.argv[1]))
x, whole, tokens = (given.pop(name) for name in ("x", "whole", "tokens"))
block = getattr(hybrid_blocks, sys.argv[2])
options = eval(sys.argv[3])
output, _ = block(given, x, **options)
state, outputs = None, []
for t in range(x.shape[1]):
    token, state = block(given, x[:, t : t + 1], state, **options)
    outputs.append(token)
first, middle = block(given, x[:, :7], **options)
rest, _ = block(given, x[:, 7:], middle, **options)
for ours in (output, np.concatenate(outputs, axis=1), np.concatenate([first, rest], axis=1)):
    for theirs in (whole, tokens):
        assert np.abs(theirs).max() > 1e-3
        assert np.abs(ours - theirs).max() <= 1e-5, np.abs(ours - theirs).max()
assert not {"torch", "transformers"} & set(sys.modules)
"""


@pytest.mark.frameworks
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_transformers_without_torch(name, tmp_path):
    """Whole, 20 tokens one at a time, and in two parts; torch writes weights and wanted outputs."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    (module, config_name, class_name), sizes, options = BLOCKS[name]
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config = getattr(transformers, config_name)(**sizes)
    torch.manual_seed(0)
    block = getattr(models, class_name)(config, layer_idx=0).eval()
    with torch.no_grad():
        for weight in block.parameters():
            weight.copy_(torch.randn_like(weight) * 0.5)
        x = torch.randn(2, 20, config.hidden_size)
        cache = transformers.DynamicCache(config=config)
        whole = block(x)
        tokens = torch.cat([block(x[:, t : t + 1], cache) for t in range(20)], dim=1)
    arrays = {n: weight.numpy() for n, weight in block.state_dict().items()}
    np.savez(tmp_path / "block.npz", **arrays, x=x, whole=whole, tokens=tokens)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])}
    command = [sys.executable, "-c", COMPARE, str(tmp_path / "block.npz"), name, repr(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_the_convolution_is_the_sum_over_its_kernel(xp, activation):
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(s) for s in ((2, 9, 6), (6, 1, 4), (6,)))
    padded = np.concatenate([np.zeros((2, 3, 6)), x], axis=1)
    want = np.stack([np.einsum("bkc,ck->bc", padded[:, t : t + 4], weight[:, 0]) for t in range(9)])
    want = np.swapaxes(want, 0, 1) + bias
    if activation is not None:
        matrix = np.eye(6)
        params = {"linear1.weight": matrix, "linear2.weight": matrix}
        want = layers.feed_forward(params, want, activation=activation)
    arrays = {"weight": xp.array(weight, "float32"), "bias": xp.array(bias, "float32")}
    given = xp.array(x, "float32")
    got = layers.causal_convolution(arrays, given, activation=activation)
    xp.assert_like(got, given)
    np.testing.assert_allclose(xp.numpy(got), want, rtol=1e-5, atol=1e-5)


def test_the_convolution_goes_on_after_its_state():
    """Parts of any lengths, shorter than the kernel too, give the whole."""
    rng = np.random.default_rng(1)
    params = {"weight": rng.standard_normal((3, 1, 4))}
    x = rng.standard_normal((2, 12, 3))
    whole, last = layers.causal_convolution(params, x, return_state=True)
    outputs, state = [], None
    for start, stop in ((0, 1), (1, 3), (3, 3), (3, 10), (10, 12)):
        part, state = layers.causal_convolution(
            params, x[:, start:stop], state=state, return_state=True
        )
        outputs.append(part)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, rtol=1e-12)
    np.testing.assert_array_equal(state, last)
    np.testing.assert_array_equal(state, x[:, -3:])


def test_values_and_gradients_around_a_recurrence():
    rng = np.random.default_rng(2)
    weight, bias, x = (rng.standard_normal(s) for s in ((4, 1, 3), (4,), (2, 5, 4)))

    def convolve(weight, bias, x):
        params = {"weight": weight, "bias": bias}
        out, pullback = layers.causal_convolution_vjp(params, x, activation="silu")

        def pull(grad):
            grads, grad_x = pullback(grad)
            return grads["weight"], grads["bias"], grad_x

        return out, pull

    assert_gradient(lambda *a: convolve(*a)[0], convolve, weight, bias, x)
    gate, scale = rng.standard_normal((2, 5, 4)), rng.standard_normal(4)
    sigmoid = 1 / (1 + np.exp(-gate))
    for activation, factor in (("silu", gate * sigmoid), ("sigmoid", sigmoid)):
        for gate_first in (False, True):
            options = {"activation": activation, "gate_first": gate_first}

            def norm(weight, x, gate, given=options):
                more = {"num_groups": 2, "eps": 0.5, **given}
                out, pullback = layers.gated_rms_norm_vjp({"weight": weight}, x, gate, **more)

                def pull(grad):
                    grads, *others = pullback(grad)
                    return (grads["weight"], *others)

                return out, pull

            assert_gradient(lambda *a, vjp=norm: vjp(*a)[0], norm, scale, x, gate)
            groups = (x * factor if gate_first else x).reshape(2, 5, 2, 2)
            normal = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + 0.5)
            want = scale * normal.reshape(x.shape) * (1 if gate_first else factor)
            np.testing.assert_allclose(norm(scale, x, gate)[0], want, rtol=1e-12)


def test_the_gated_norm_in_narrow_dtypes_is_rounded_once(xp):
    rng = np.random.default_rng(3)
    x, gate = rng.standard_normal((2, 3, 8)).astype(np.float16)
    weight = rng.standard_normal(8).astype(np.float16)
    wide = [array.astype(np.float64) for array in (weight, x, gate)]
    want = layers.gated_rms_norm({"weight": wide[0]}, *wide[1:])
    arrays = [xp.array(array, "float16") for array in (weight, x, gate)]
    got = layers.gated_rms_norm({"weight": arrays[0]}, *arrays[1:])
    np.testing.assert_allclose(xp.numpy(got), want, rtol=1e-3, atol=1e-3)


X, KERNEL = np.ones((2, 5, 4)), {"weight": np.ones((4, 1, 3))}
NORM = {"weight": np.ones(4)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layers.causal_convolution(KERNEL, np.swapaxes(X, 1, 2)), "swap the last two"),
        (lambda: layers.causal_convolution({"weight": np.ones((4, 3))}, X), r"\(4, 1, k\)"),
        (lambda: layers.causal_convolution(KERNEL, X, state=X), "state must have the shape"),
        (lambda: layers.causal_convolution(KERNEL, X, activation="swiglu"), "activation must be"),
        (lambda: layers.causal_convolution({}, X), "params must have 'weight'"),
        (lambda: layers.gated_rms_norm(NORM, X, X[:1]), "gate must have the shape of x"),
        (lambda: layers.gated_rms_norm(NORM, X, X, num_groups=3), "must divide the last axis"),
        (lambda: layers.gated_rms_norm(NORM, X, X, activation="relu"), "silu or sigmoid"),
    ],
)
def test_mistakes_are_said(call, message):
    with pytest.raises(ValueError, match=message):
        call()
