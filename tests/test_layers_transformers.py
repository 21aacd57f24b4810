"""Published families of models: options of layers beside small random models of transformers."""

# Models without types, options by name.
# mypy: disable-error-code="arg-type, no-untyped-call, type-arg"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from linattn import layers

pytestmark = pytest.mark.frameworks

torch = pytest.importorskip("torch", reason="torch is not installed")
tf = pytest.importorskip("transformers", reason="transformers is not installed")

HEADS, DIM, WIDTH = 4, 8, 32
SIZES = {
    **dict(hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS),
    **dict(vocab_size=97, max_position_embeddings=64),
    **dict(pad_token_id=0, bos_token_id=1, eos_token_id=None, tie_word_embeddings=False),
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA: dict[str, Any] = dict(activation="swiglu", norm="rms_norm", norm_first=True, eps=1e-6)
LLAMA |= dict(num_heads=HEADS, positions=layers.Rotary())

# What each part of a layer is called in Llama, and in most models after it.
NAMES = {
    "self_attn.in_proj_weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "self_attn.out_proj.weight": ["self_attn.o_proj.weight"],
    "linear1.weight": ["mlp.gate_proj.weight"],
    "linear2.weight": ["mlp.down_proj.weight"],
    "linear3.weight": ["mlp.up_proj.weight"],
}
NORMS = {"norm1.weight": ["input_layernorm.weight"]}
NORMS_2 = {**NORMS, "norm2.weight": ["post_attention_layernorm.weight"]}
QK = {f"self_attn.{x}_norm.weight": [f"self_attn.{x}_norm.weight"] for x in "qk"}
ENDS = {
    "embedding.weight": ["model.embed_tokens.weight"],
    "norm.weight": ["model.norm.weight"],
    "head.weight": ["lm_head.weight"],
}


def joined(arrays, names, ends=ENDS, layer="model.layers.{}."):
    """Return arrays under our names: those of a layer by ``names``, and of the ends."""
    mapping = dict(ends)
    for i in range(2):
        for name, sources in names.items():
            mapping[f"layers.{i}.{name}"] = [layer.format(i) + source for source in sources]
    return {
        name: np.concatenate([arrays[source] for source in sources])
        for name, sources in mapping.items()
    }


def numbers(tensors):
    return {name: tensor.detach().numpy() for name, tensor in tensors}


def llama(kind=None, config=None, names=None, **more):
    return lambda: (kind or tf.LlamaForCausalLM)((config or tf.LlamaConfig)(**GROUPED, **more))


def gemma3():
    rope = {"sliding_attention": ROPE, "full_attention": ROPE | {"rope_theta": 1_000_000.0}}
    places = ["sliding_attention", "full_attention"]
    more = dict(head_dim=DIM, sliding_window=4, layer_types=places, query_pre_attn_scalar=16)
    config = tf.Gemma3TextConfig(**GROUPED, **more, rope_parameters=rope)
    return tf.Gemma3ForCausalLM(config)


def heads_apart(array):
    """GPT-NeoX has the rows of a head side by side: query, key and value of the first head..."""
    apart = array.reshape(HEADS, 3, DIM, *array.shape[1:])
    return np.moveaxis(apart, 1, 0).reshape(array.shape)


def neox_params(arrays):
    parts = {
        "self_attn.in_proj_": "attention.query_key_value.",
        "self_attn.out_proj.": "attention.dense.",
    }
    parts |= {"linear1.": "mlp.dense_h_to_4h.", "linear2.": "mlp.dense_4h_to_h."}
    parts |= {"norm1.": "input_layernorm.", "norm2.": "post_attention_layernorm."}
    names = {a + kind: [b + kind] for a, b in parts.items() for kind in ("weight", "bias")}
    ends = {"embedding.weight": ["gpt_neox.embed_in.weight"], "head.weight": ["lm_head.weight"]}
    ends |= {f"norm.{kind}": [f"gpt_neox.final_layer_norm.{kind}"] for kind in ("weight", "bias")}
    found = joined(arrays, names, ends, "gpt_neox.layers.{}.")
    return {n: heads_apart(a) if "in_proj" in n else a for n, a in found.items()}


def phi_params(arrays):
    parts = {"self_attn.out_proj.": "self_attn.dense.", "norm1.": "input_layernorm."}
    parts |= {"linear1.": "mlp.fc1.", "linear2.": "mlp.fc2."}
    names = {a + kind: [b + kind] for a, b in parts.items() for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        names[f"self_attn.in_proj_{kind}"] = [f"self_attn.{x}_proj.{kind}" for x in "qkv"]
    ends = {"embedding.weight": ["model.embed_tokens.weight"]}
    for kind in ("weight", "bias"):
        ends[f"norm.{kind}"] = [f"model.final_layernorm.{kind}"]
        ends[f"head.{kind}"] = [f"lm_head.{kind}"]
    return joined(arrays, names, ends)


def gpt2_params(arrays):
    """GPT-2 has its weights the other way round."""
    parts = {"self_attn.in_proj_": "attn.c_attn.", "self_attn.out_proj.": "attn.c_proj."}
    parts |= {"linear1.": "mlp.c_fc.", "linear2.": "mlp.c_proj."}
    parts |= {"norm1.": "ln_1.", "norm2.": "ln_2."}
    names = {a + kind: [b + kind] for a, b in parts.items() for kind in ("weight", "bias")}
    ends = {"embedding.weight": ["transformer.wte.weight"], "head.weight": ["lm_head.weight"]}
    ends["embedding.position.weight"] = ["transformer.wpe.weight"]
    ends |= {f"norm.{kind}": [f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    found = joined(arrays, names, ends, "transformer.h.{}.")
    turned = ("proj_weight", "proj.weight", "linear1.weight", "linear2.weight")
    return {n: a.T if n.endswith(turned) else a for n, a in found.items()}


def gemma3_params(arrays, shift=1.0):
    """Norms of Gemma multiply by 1 + weight."""
    names = {**NAMES, **QK, **NORMS, "norm1_output.weight": ["post_attention_layernorm.weight"]}
    for name, place in (("norm2", "pre"), ("norm2_output", "post")):
        names[f"{name}.weight"] = [f"{place}_feedforward_layernorm.weight"]
    return {n: a + shift * ("norm" in n) for n, a in joined(arrays, names).items()}


def olmo2_params(arrays):
    names = {**NAMES, **QK, "norm1.weight": ["post_attention_layernorm.weight"]}
    return joined(arrays, {**names, "norm2.weight": ["post_feedforward_layernorm.weight"]})


def scaled(name, **more):
    """Rope of a longer input: frequencies of single pairs change."""
    rope = ROPE | {"rope_type": name, "factor": 4.0, "original_max_position_embeddings": 16, **more}
    return llama(rope_parameters=rope)


def by_frequencies(model):
    rope = model.model.rotary_emb
    scale = rope.attention_scaling**2 / DIM**0.5
    positions = layers.Rotary(frequencies=rope.inv_freq.tolist())
    return {"positions": positions, "attention": layers.SoftmaxAttention(scale=scale)}


SHORT = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "llama": (llama(), lambda a: joined(a, NAMES | NORMS_2), {}),
    "llama 3": (scaled("llama3", **SHORT), lambda a: joined(a, NAMES | NORMS_2), by_frequencies),
    "yarn": (scaled("yarn"), lambda a: joined(a, NAMES | NORMS_2), by_frequencies),
    "qwen 3": (
        lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED, head_dim=DIM)),
        lambda a: joined(a, NAMES | NORMS_2 | QK),
        {},
    ),
    "gemma 3": (
        gemma3,
        gemma3_params,
        {
            "activation": "geglu_tanh",
            "norm_output": True,
            "embedding_scale": WIDTH**0.5,
            "positions": [layers.Rotary(), layers.Rotary(1_000_000)],
            "attention": [layers.SoftmaxAttention(1 / 4, w) for w in (3, None)],
        },
    ),
    "olmo 2": (
        lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**GROUPED)),
        olmo2_params,
        {"norm_first": False, "norm_output": True, "eps": 1e-5},
    ),
    "gpt-neox": (
        lambda: tf.GPTNeoXForCausalLM(
            tf.GPTNeoXConfig(**SIZES, rope_parameters=ROPE | {"partial_rotary_factor": 0.5})
        ),
        neox_params,
        {"activation": "gelu", "norm": "layer_norm", "parallel": True, "eps": 1e-5}
        | {"positions": layers.Rotary(dim=DIM // 2)},
    ),
    "phi": (
        lambda: tf.PhiForCausalLM(
            tf.PhiConfig(**SIZES, rope_parameters=ROPE | {"partial_rotary_factor": 0.5})
        ),
        phi_params,
        {"activation": "gelu_tanh", "norm": "layer_norm", "parallel": True, "eps": 1e-5}
        | {"positions": layers.Rotary(dim=DIM // 2)},
    ),
    "gpt-2": (
        lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(**SIZES, n_embd=WIDTH, n_head=HEADS, n_layer=2, n_positions=64)
        ),
        gpt2_params,
        {"activation": "gelu_tanh", "norm": "layer_norm", "positions": None, "eps": 1e-5},
    ),
    "cohere": (
        lambda: tf.CohereForCausalLM(
            tf.CohereConfig(**GROUPED, logit_scale=1.0, rope_parameters=ROPE)
        ),
        lambda a: joined(a, NAMES | NORMS),
        {"norm": "layer_norm", "parallel": True, "eps": 1e-5}
        | {"positions": layers.Rotary(interleaved=True)},
    ),
}


def made(family):
    """A model whose weights are all drawn, and its options."""
    torch.manual_seed(0)
    make, convert, options = FAMILIES[family]
    model = make().eval()
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return model, convert, LLAMA | (options(model) if callable(options) else options)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(family):
    model, convert, options = made(family)
    ids = np.random.default_rng(0).integers(2, 97, (2, 13))
    wanted = model(torch.tensor(ids)).logits
    params = convert(numbers(model.named_parameters()))
    out, pullback = layers.language_model_vjp(params, ids, **options)
    assert_allclose(out, wanted.detach(), rtol=0, atol=1e-5)
    grad = np.sin(np.arange(out.size, dtype=np.float32)).reshape(out.shape)
    wanted.backward(torch.tensor(grad))
    of_weights = numbers((name, weight.grad) for name, weight in model.named_parameters())
    wanted_grads = convert(of_weights, 0) if family == "gemma 3" else convert(of_weights)
    (grads,) = pullback(grad)
    assert grads.keys() == wanted_grads.keys()
    largest = max(np.abs(gradient).max() for gradient in wanted_grads.values())
    for name, gradient in grads.items():
        close = {"rtol": 0, "atol": 3e-6 * largest, "err_msg": name}
        assert_allclose(gradient, wanted_grads[name], **close)


@pytest.mark.parametrize("family", ["gpt-2", "gemma 3", "phi"])
def test_text_after_prompts_of_unlike_lengths(family):
    model, convert, options = made(family)
    ids = np.random.default_rng(0).integers(2, 97, (3, 9))
    mask = np.arange(9) >= np.array([[4], [0], [7]])
    given = {"input_ids": torch.tensor(ids * mask), "attention_mask": torch.tensor(mask).long()}
    wanted = model.generate(**given, max_new_tokens=20, do_sample=False)[:, 9:]
    params = convert(numbers(model.named_parameters()))
    assert_array_equal(layers.generate(params, ids * mask, 20, key_mask=mask, **options), wanted)


@pytest.mark.parametrize("name", ["quick_gelu", "silu", "gelu", "gelu_tanh"])
def test_activations_are_those_of_transformers(name):
    function = tf.activations.ACT2FN["gelu_pytorch_tanh" if name == "gelu_tanh" else name]
    x = torch.linspace(-9, 9, 64, dtype=torch.float64)[:, None].requires_grad_()
    params = {"linear1.weight": np.ones((1, 1)), "linear2.weight": np.ones((1, 1))}
    out, pullback = layers.feed_forward_vjp(params, x.detach().numpy(), activation=name)
    wanted = function(x)
    wanted.sum().backward()
    assert_allclose(out, wanted.detach(), rtol=1e-12, atol=1e-14)
    assert_allclose(pullback(np.ones((64, 1)))[1], x.grad, rtol=1e-12, atol=1e-14)
