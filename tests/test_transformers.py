"""Models of transformers on attention of linattn: small, random, made from configurations."""

# Models without types.
# mypy: disable-error-code="arg-type, misc, name-defined, no-untyped-call, type-arg"

from __future__ import annotations

import doctest
import itertools
import sys

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from linattn.feature_maps import EluFeatures, PositiveFeatures

pytestmark = pytest.mark.frameworks

torch = pytest.importorskip("torch", reason="torch is not installed")
tf = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import masking_utils  # noqa: E402

from linattn.interop.transformers import StateCache, register  # noqa: E402
from tests import tiny_models  # noqa: E402

TOKENS, NEW = 97, 20
SIZES = {
    **dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4),
    **dict(vocab_size=TOKENS, max_position_embeddings=64),
}
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
GROUPED = {**SIZES, **IDS, "num_key_value_heads": 2}
T5 = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0, vocab_size=TOKENS)
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=TOKENS)
VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)


def paligemma():
    vision = tf.SiglipVisionConfig(**VISION, image_size=8, patch_size=4, projection_dim=32)
    text = tf.GemmaConfig(**GROUPED, head_dim=8)
    sizes = dict(projection_dim=32, hidden_size=32, image_token_index=96, vocab_size=TOKENS)
    config = tf.PaliGemmaConfig(vision_config=vision, text_config=text, pad_token_id=0, **sizes)
    return tf.PaliGemmaForConditionalGeneration(config)


def gpt_oss(**more):
    config = tf.GptOssConfig(
        **GROUPED,
        **dict(head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=6),
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        **more,
    )
    return tf.GptOssForCausalLM(config)


def t5():
    config = tf.T5Config(
        **T5,
        **dict(relative_attention_num_buckets=8, relative_attention_max_distance=12),
        **dict(pad_token_id=0, decoder_start_token_id=0, eos_token_id=None),
    )
    return tf.T5ForConditionalGeneration(config)


def gemma3():
    layers = ["sliding_attention", "full_attention"]
    more = dict(head_dim=8, sliding_window=5, layer_types=layers, query_pre_attn_scalar=16)
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**GROUPED, **more))


def bert():
    no_dropout = dict(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    return tf.BertModel(tf.BertConfig(**SIZES, **no_dropout))


MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, **IDS)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=6)),
    "gpt_oss": gpt_oss,
    "gemma3": gemma3,
    "bert": bert,
    "t5": t5,
    "paligemma": paligemma,
}


def made(name):
    """Make a model whose weights are all drawn: biases and sinks begin as 0."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return model


def inputs(name):
    """Two sequences, one of them padded on the side where the model has its padding."""
    rng = np.random.default_rng(0)
    ids = torch.tensor(rng.integers(2, 96, (2, 15)))
    mask = torch.ones_like(ids)
    mask[0, slice(-4, None) if name in ("bert", "t5") else slice(4)] = 0
    given = {"input_ids": ids * mask, "attention_mask": mask}
    if name == "paligemma":
        ids[0, 5:9] = ids[1, :4] = 96
        given["input_ids"] = ids * mask
        given["pixel_values"] = torch.tensor(rng.standard_normal((2, 3, 8, 8)), dtype=torch.float32)
        given["token_type_ids"] = (torch.arange(15) > 10).long().expand(2, -1)
    return given


def outputs(model, given, decoder=None):
    """Logits of tokens that are no padding, and gradients by the parameters."""
    model.zero_grad()
    out = model(**given, **({} if decoder is None else {"decoder_input_ids": decoder}))[0]
    if decoder is None:
        out = out * given["attention_mask"][..., None]
    (out * torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)).sum().backward()
    weights = model.named_parameters()
    return out.detach(), {n: w.grad.clone() for n, w in weights if w.grad is not None}


GREEDY = dict(do_sample=False, eos_token_id=None, pad_token_id=0)


def generated(model, given, **options):
    return model.generate(**given, max_new_tokens=NEW, do_sample=False, **options)


@pytest.mark.parametrize("name", MODELS)
def test_logits_gradients_and_tokens_are_those_of_eager(name):
    model, given = made(name), inputs(name)
    decoder = given["input_ids"][:, :9] if name == "t5" else None
    assert model.config._attn_implementation != register()
    model.set_attn_implementation("eager")
    wanted, wanted_gradients = outputs(model, given, decoder)
    tokens = None if name == "bert" else generated(model, given)
    model.set_attn_implementation("linattn")
    found, gradients = outputs(model, given, decoder)
    assert_allclose(found, wanted, rtol=0, atol=2e-5)
    assert gradients.keys() == wanted_gradients.keys()
    # Of some weights, such as a bias of keys, the gradient is 0 but for rounding.
    largest = max(float(gradient.abs().max()) for gradient in wanted_gradients.values())
    for weight, gradient in gradients.items():
        close = {"rtol": 0, "atol": 2e-6 * largest, "err_msg": weight}
        assert_allclose(gradient, wanted_gradients[weight], **close)
    if tokens is not None:
        assert_array_equal(generated(model, given), tokens)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences_do_not_see_each_other(name):
    model, ids = made(name), inputs(name)["input_ids"]
    lengths = ([5, 10], [9, 2, 4])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    register()
    model.set_attn_implementation("linattn")
    found = model(ids, position_ids=positions, use_cache=False).logits.detach()
    for i, row in enumerate(lengths):
        parts = [model(part[None]).logits[0].detach() for part in ids[i].split(row)]
        assert_allclose(found[i], torch.cat(parts), atol=2e-6)


def test_a_mask_of_pairs_of_the_user():
    model, given = made("llama"), inputs("llama")
    ids, keys = given["input_ids"], given["attention_mask"].bool()
    i = torch.arange(15)
    causal = i[:, None] >= i
    masks = {
        "causal": (causal & keys[:, None])[:, None],
        "prefix": (causal | (i < 6)).expand(2, 1, -1, -1),
        "right": (causal & keys.flip(1)[:, None])[:, None],
    }
    register()
    for name, mask in masks.items():
        seen = mask[:, 0].any(-1)[..., None]
        additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        model.set_attn_implementation("eager")
        wanted = (model(ids, attention_mask=additive).logits * seen).detach()
        model.set_attn_implementation("linattn")
        for given_mask in (mask, additive):
            found = (model(ids, attention_mask=given_mask).logits * seen).detach()
            assert_allclose(found, wanted, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "t5"])
def test_the_rest_of_a_prompt_goes_on_after_a_cache(name):
    model, given = made(name), inputs(name)
    ids, mask = given["input_ids"], given["attention_mask"]
    register()
    rests = {}
    for attention in ("eager", "linattn"):
        model.set_attn_implementation(attention)
        if name == "t5":
            memory = {"encoder_outputs": model.get_encoder()(ids)}
            cache = model(decoder_input_ids=ids[:, :9], use_cache=True, **memory).cache
            rest = model(decoder_input_ids=ids[:, 9:], cache=cache, **memory).logits
        else:
            cache = model(ids[:, :9], attention_mask=mask[:, :9], use_cache=True).cache
            rest = model(ids[:, 9:], attention_mask=mask, cache=cache).logits
        rests[attention] = rest.detach()
    assert_allclose(rests["linattn"], rests["eager"], atol=2e-5)


def test_a_static_cache_of_empty_places():
    model, given = made("mistral"), inputs("mistral")
    options = {"cache_implementation": "static", "disable_compile": True}
    tokens = [
        generated(model, given, **options)
        for attention in ("eager", register())
        if model.set_attn_implementation(attention) is None
    ]
    assert_array_equal(*tokens)


def test_docstring_examples_run():
    assert doctest.testmod(sys.modules[register.__module__]).failed == 0


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Entries of the largest storage that an operation returns."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for array in out if isinstance(out, tuple | list) else [out]:
            if isinstance(array, torch.Tensor):
                self.size = max(self.size, array.untyped_storage().nbytes() // array.itemsize)
        return out


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_no_array_has_an_entry_for_each_pair_of_tokens(name):
    length = 2048
    config = {**GROUPED, "max_position_embeddings": length, "num_hidden_layers": 1}
    more = {"sliding_window": 100} if name == "mistral" else {}
    kind = tf.MistralModel if name == "mistral" else tf.LlamaModel
    model = kind(kind.config_class(**config, **more))
    ids = torch.ones((1, length), dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[:, :7] = 0
    sizes = {}
    for attention in ("eager", register()):
        model.set_attn_implementation(attention)
        with Largest() as largest, torch.no_grad():
            model(ids, attention_mask=mask)
        sizes[attention] = largest.size
    assert sizes["eager"] >= length**2 > sizes["linattn"]


def test_what_is_not_served_says_so_by_name():
    register()
    given = inputs("llama")
    config = tf.Gemma2Config(**GROUPED, head_dim=8, sliding_window=5)
    with pytest.raises(NotImplementedError, match="softcap of logits"):
        tf.Gemma2ForCausalLM._from_config(config, attn_implementation="linattn")(**given)
    model = made("llama")
    model.set_attn_implementation("linattn")
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model(**given, output_attentions=True)
    gap = torch.ones(15, 15, dtype=torch.bool).tril()
    gap[9, 4] = False
    with pytest.raises(NotImplementedError, match="masks of this pattern"):
        model(given["input_ids"], attention_mask=gap.expand(2, 1, -1, -1))
    with pytest.raises(NotImplementedError, match="masks that hide all"):
        model(given["input_ids"], attention_mask=torch.zeros(2, 1, 15, 15, dtype=torch.bool))
    config = tf.LlamaConfig(**GROUPED, attention_dropout=0.1)
    model = tf.LlamaForCausalLM._from_config(config, attn_implementation="linattn").train()
    with pytest.raises(NotImplementedError, match="dropout of attention weights"):
        model(**given)
    with pytest.raises(TypeError, match="feature_map must be one of"):
        register("elu")


# Families ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "outcome"),
    [
        ("qwen2_moe", "equal"),  # Makes a mask for a window of 0, which no layer uses.
        ("llama4_text", "equal"),  # Chunks, several tokens after a cache.
        ("deepseek_v32", "refused"),  # Computes with its mask to choose keys.
    ],
)
def test_families_are_equal_to_eager_or_refused(family, outcome):
    """``python -m tests.tiny_models`` does all families."""
    kinds = next(kinds for kinds in tiny_models.KINDS.values() if family in kinds)
    case = tiny_models.compare(family, register(), kinds[family])
    assert case.outcome == outcome, case


def test_a_tensor_by_an_unknown_name_is_refused():
    register()
    arrays = torch.randn(3, 1, 2, 7, 4)
    mask = masked(masking_utils.causal_mask_function, "linattn", 1, 7, 7)
    for name in ("indices", "block_indices", "sinks"):
        with pytest.raises(NotImplementedError, match=f"no keyword {name}=.* tensor of shape"):
            attended("linattn", arrays, mask, **{name: torch.arange(7)})
    attended("linattn", arrays, mask, position_ids=torch.arange(7)[None], use_cache=True)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q= without position_ids="):
        attended("linattn", arrays, mask, cu_seq_lens_q=torch.tensor([0, 3, 7]))


def test_a_mask_cannot_be_computed_with():
    register()
    mask = masked(masking_utils.causal_mask_function, "linattn", 1, 7, 7)
    scores = torch.zeros(1, 2, 7, 7)
    assert mask.shape == (1, 1, 7, 7)
    for compute in (
        lambda: mask[:, 0],
        lambda: ~mask,
        lambda: mask == 0,
        lambda: 1 - mask,
        lambda: mask & (scores > 0),
        lambda: scores + mask,
        lambda: scores.masked_fill(mask, 0),
        lambda: scores.masked_fill_(mask, 0),
        lambda: torch.where(mask, scores, 0),
        lambda: scores @ mask,
        lambda: mask.float(),
        lambda: mask.expand(2, -1, -1, -1),
        lambda: torch.nn.functional.scaled_dot_product_attention(*[scores] * 3, mask),
    ):
        with pytest.raises(NotImplementedError, match="mask of pairs that a model can compute"):
            compute()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("causal", masking_utils.causal_mask_function),
        ("full", masking_utils.bidirectional_mask_function),
        ("window", masking_utils.sliding_window_causal_mask_function(4)),
        ("both sides", masking_utils.sliding_window_bidirectional_mask_function(3)),
        ("one side", lambda b, h, q, k: (q - k <= 2) & (k <= q)),
        ("equal", lambda b, h, q, k: (q == k) | (k == 0) & (k <= q)),
        ("nothing", masking_utils.sliding_window_causal_mask_function(0)),
    ],
)
def test_masks_by_symbols_are_those_by_rows(name, function):
    """Each length, number of keys and offset, beside attention with the mask of sdpa."""
    register()
    torch.manual_seed(0)
    for length, keys, offset in itertools.product((1, 2, 5, 9), (1, 5, 9), (0, 2, 4, 8)):
        arrays = [torch.randn(1, 2, n, 4) for n in (length, keys, keys)]
        rows, mask = (
            masked(
                function, attention, 1, length, keys, q_offset=offset, allow_is_causal_skip=False
            )
            for attention in ("sdpa", "linattn")
        )
        try:
            found = attended("linattn", arrays, mask)
        except NotImplementedError:
            assert name in ("equal", "nothing", "both sides") or offset + length > keys
            continue
        seen = rows[0, 0].any(-1)
        wanted = torch.nn.functional.scaled_dot_product_attention(*arrays, rows).transpose(1, 2)
        assert_allclose(found[:, seen], wanted[:, seen], atol=1e-5, err_msg=f"{length} {keys}")


def test_a_model_with_a_window_compiles_whole():
    model, given = made("mistral"), inputs("mistral")
    model.set_attn_implementation("eager")
    seen = given["attention_mask"][..., None]
    wanted = (model(**given, use_cache=False).logits * seen).detach()
    model.set_attn_implementation(register())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = (compiled(**given, use_cache=False).logits * seen).detach()
    assert_allclose(found, wanted, atol=2e-5)


# Linear attention --------------------------------------------------------------------------------


@pytest.mark.parametrize("phi", [EluFeatures(), PositiveFeatures(8, num_features=16, rng=0)])
def test_linear_attention_generates_from_states(phi):
    """The same tokens as from all keys and values, with left padding; so do beams."""
    model, given = made("llama"), inputs("llama")
    model.set_attn_implementation(register(phi))
    tokens = generated(model, given)
    cache = StateCache()
    assert_array_equal(generated(model, given, cache=cache), tokens)
    state = cache.layers[0].state
    assert state.length == cache.get_seq_length() == 15 + NEW - 1
    assert tuple(state.kvz.shape) == (2, 2, 1, state.kvz.shape[-2], 9)
    beams = generated(model, given, num_beams=3)
    assert_array_equal(generated(model, given, num_beams=3, cache=StateCache()), beams)
    assert (beams != tokens).any()
    # The second half of a prompt goes on after the first.
    cache, ids = StateCache(), given["input_ids"][1:]
    wanted = model(ids).logits.detach()
    model(ids[:, :6], cache=cache)
    assert_allclose(model(ids[:, 6:], cache=cache).logits.detach(), wanted[:, 6:], atol=2e-5)
    cache.reset()
    assert_allclose(model(ids, cache=cache).logits.detach(), wanted, atol=2e-5)
    # Sequences are put in order, repeated and chosen as in a cache of keys and values.
    for change, argument in (
        ("reorder_cache", torch.tensor([1, 0])),
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", torch.tensor([1, 1, 0])),
    ):
        after: list[torch.Tensor] = []
        for cache in (StateCache(), tf.DynamicCache()):
            model(given["input_ids"], cache=cache)
            getattr(cache, change)(argument)
            count = cache.layers[0].state.kvz.shape[0] if not after else len(after[0])
            after.append(model(torch.full((count, 1), 5), cache=cache).logits.detach())
        assert_allclose(after[0], after[1], atol=2e-5)


def test_a_llama_on_linear_attention_trains_under_autocast():
    torch.manual_seed(0)
    name = register(EluFeatures())
    model = tf.LlamaForCausalLM._from_config(tf.LlamaConfig(**GROUPED), attn_implementation=name)
    ids = torch.tensor(np.random.default_rng(0).integers(2, 97, (4, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    losses = []
    for _ in range(100):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 4
    assert losses[-1] < 0.1
    model.eval()
    found = generated(model, {"input_ids": ids[:, :8]}, cache=StateCache())[:, :16]
    assert (found == ids).float().mean() > 0.9


def test_linear_attention_refuses_what_it_would_compute_otherwise():
    register()
    name = register(EluFeatures())
    model, given = made("t5"), inputs("t5")
    model.set_attn_implementation(name)
    with pytest.raises(NotImplementedError, match="position_bias"):
        model(**given, decoder_input_ids=given["input_ids"])
    with pytest.raises(TypeError, match=r"feature_map must be given with .*sinks"):
        register(sinks=1)
    model, given = made("llama"), inputs("llama")
    model.set_attn_implementation("linattn")
    with pytest.raises(NotImplementedError, match="StateCache for exact attention"):
        generated(model, given, cache=StateCache())
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="must be read by linear attention"):
        generated(model, given, cache=StateCache())
    cache = StateCache()
    model.set_attn_implementation(name)
    model(**given, cache=cache)
    with pytest.raises(NotImplementedError, match="take tokens out of"):
        cache.crop(-1)
    model.config.is_causal = False
    with pytest.raises(NotImplementedError, match="StateCache where attention is not causal"):
        model(**given, cache=StateCache())
    model = made("mistral")
    model.set_attn_implementation(name)
    with pytest.raises(NotImplementedError, match=r"use StateCache\(model.config\)"):
        model(**given, cache=StateCache())
    model = tiny_models.made("diffllama")
    model.set_attn_implementation(name)
    with pytest.raises(NotImplementedError, match="attends twice to the keys of one update"):
        model(**given, cache=StateCache())
    model = tiny_models.made("qwen3_next")
    model.set_attn_implementation(name)
    with pytest.raises(ValueError, match=r"use StateCache\(model.config\)"):
        model(**given, cache=StateCache())


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "kimi_linear", "falcon_h1", "gpt_oss"])
def test_states_of_hybrid_models(family):
    """Other layers keep their own states, or the keys of a window; Kimi expands keys afterwards."""
    model, given = tiny_models.made(family), inputs("llama")
    model.set_attn_implementation(register(EluFeatures()))
    cache = StateCache(model.config)
    tokens = model.generate(**given, **GREEDY, max_new_tokens=8)
    assert_array_equal(model.generate(**given, **GREEDY, max_new_tokens=8, cache=cache), tokens)
    states = [layer.state for layer in cache.layers if hasattr(layer, "attended")]
    assert states
    assert {state.length for state in states} == {15 + 7}
    beams = model.generate(**given, **GREEDY, max_new_tokens=4, num_beams=2)
    cache = StateCache(model.config)
    found = model.generate(**given, **GREEDY, max_new_tokens=4, num_beams=2, cache=cache)
    assert_array_equal(found, beams)


def test_states_of_an_encoder_decoder():
    model, given = tiny_models.made("bart", tf.BartForConditionalGeneration), inputs("bert")
    model.set_attn_implementation(register(EluFeatures()))
    tokens = model.generate(**given, **GREEDY, max_new_tokens=8)
    cache = tf.EncoderDecoderCache(StateCache(), tf.DynamicCache())
    assert_array_equal(model.generate(**given, **GREEDY, max_new_tokens=8, cache=cache), tokens)
    with pytest.raises(NotImplementedError, match="EncoderDecoderCache"):
        model(**given, decoder_input_ids=given["input_ids"], cache=StateCache())


class Layer(torch.nn.Module):
    """What attention is told of its layer."""

    is_causal = True


def attended(name, arrays, mask, **given):
    query, key, value = arrays
    given = {"scaling": query.shape[-1] ** -0.5} | given
    return tf.AttentionInterface()[name](Layer(), query, key, value, mask, **given)[0]


def masked(function, name, batch, length, keys, **given):
    sizes = dict(batch_size=batch, q_length=length, kv_length=keys, mask_function=function)
    return tf.AttentionMaskInterface()[name](**sizes, device="cpu", **given)


def test_linear_attention_beside_sinks_and_windows():
    """Beside the dense formula: a window is exact, a sink is a key of value 0.

    The model has a scale of its own, and values another dim than keys.
    """
    rng = np.random.default_rng(0)
    length, heads, scale = 40, 4, 0.5
    sizes = (heads, length, 8), (2, length, 8), (2, length, 5)
    arrays = [torch.tensor(rng.standard_normal((2, *size))) for size in sizes]
    query, key, value = (x.numpy() for x in arrays)
    key, value = (np.repeat(x, 2, 1) for x in (key, value))
    sinks = rng.standard_normal(heads)
    phi = PositiveFeatures(8, num_features=32, rng=0)
    logits = np.einsum("bhid,bhjd->bhij", query, key) * scale
    far = phi.estimate(query * scale * 8**0.5, key)
    i, j = np.arange(length)[:, None], np.arange(length)
    near = (i // 6 == j // 6) | (i // 6 == j // 6 + 1) | (j < 2)
    causal, window = masking_utils.causal_mask_function, 5
    sliding = masking_utils.sliding_window_causal_mask_function(window)
    full, exact = register(phi), register(phi, name="near", exact_window=6, sinks=2)
    for name, function, weights in (
        (full, causal, far * (j <= i)),
        (exact, causal, np.where(near, np.exp(logits), far) * (j <= i)),
        (full, sliding, np.exp(logits) * ((j <= i) & (i - j < window))),
    ):
        for extra in (0, np.exp(sinks)[:, None, None]):
            out = weights @ value / (weights.sum(-1, keepdims=True) + extra)
            given = {} if np.ndim(extra) == 0 else {"s_aux": torch.tensor(sinks)}
            given["scaling"] = scale
            mask = masked(function, name, 2, length, length)
            found = attended(name, arrays, mask, **given)
            assert_allclose(found, out.swapaxes(1, 2), rtol=1e-9, atol=1e-9)
            # One token at a time, as after a cache of keys.
            last = [arrays[0][..., -1:, :], *arrays[1:]]
            mask = masked(function, name, 2, 1, length, q_offset=length - 1)
            found = attended(name, last, mask, **given, sliding_window=5 if name == full else None)
            if function is causal and name == full:
                continue  # As a layer with a window would be.
            assert_allclose(found[:, 0], out[..., -1, :], rtol=1e-9, atol=1e-9)


def test_the_gradient_of_a_normalizer_is_0_where_a_query_sees_nothing():
    """It was NaN: models with sinks could not train on padded batches."""
    import linattn

    query, key, value = (torch.randn(2, 5, 4, requires_grad=True) for _ in range(3))
    mask = torch.arange(5) > 1
    out, total = linattn.softmax_attention(
        query, key, value, is_causal=True, key_mask=mask, return_log_normalizer=True
    )
    assert_array_equal(total[:, :2].detach(), -np.inf)
    (out * torch.sigmoid(total)[..., None]).sum().backward()
    for array in (query, key, value):
        assert_array_equal(torch.isfinite(array.grad), True)
    assert_array_equal(query.grad[:, :2], 0)
