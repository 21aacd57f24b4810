"""The names, signatures and docstrings that users rely on."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from types import ModuleType

import pytest

import linattn
import linattn_numpy

# Words in a fixed order: a reader of this table sees the whole interface, and so does a review.
SIGNATURES = {
    "linear_attention": (
        "(query, key, value, feature_map, *, is_causal=False, key_mask=None, key_bias=None, "
        "key_lengths=None, key_stop=None, prefix_length=None, causal_block=None, cu_seqlens=None, "
        "log_decay=None, normalize=True, initial_state=None, return_state=False, "
        "return_log_normalizer=False, return_states_every=None, chunk_size=None, "
        "exact_window=None, exact_clusters=None, "
        "sinks=None, window_bias=None, far_bias=None)"
    ),
    "softmax_attention": (
        "(query, key, value, *, scale=None, is_causal=False, key_mask=None, key_bias=None, "
        "key_lengths=None, key_stop=None, prefix_length=None, causal_block=None, cu_seqlens=None, "
        "local_window_size=None, sinks=None, window_bias=None, far_bias=None, "
        "return_log_normalizer=False)"
    ),
    "linear_attention_vjp": (
        "(query, key, value, feature_map, *, is_causal=False, key_mask=None, key_bias=None, "
        "key_lengths=None, key_stop=None, prefix_length=None, causal_block=None, cu_seqlens=None, "
        "log_decay=None, normalize=True, initial_state=None, return_state=False, chunk_size=None, "
        "exact_window=None, sinks=None, window_bias=None, far_bias=None)"
    ),
    "softmax_attention_vjp": (
        "(query, key, value, *, scale=None, is_causal=False, key_mask=None, key_bias=None, "
        "key_lengths=None, key_stop=None, prefix_length=None, causal_block=None, cu_seqlens=None, "
        "local_window_size=None, sinks=None, window_bias=None, far_bias=None)"
    ),
    "attention": (
        "(query, key, value, *, is_causal=False, key_mask=None, key_bias=None, scale=None, "
        "tolerance=0.1, rng=None, return_report=False)"
    ),
    "AttentionReport": (
        "(method, num_features, exact_window, error, cost, bound, head_methods, head_features, "
        "head_clusters, head_pairs, head_windows)"
    ),
    "CoresetAttention": "(num_entries=64, *, block_size=32, scale=None, rng=None)",
    "CoresetAttention.extend": "(self, query, key, value, *, key_mask=None, key_bias=None)",
    "CoresetAttention.step": "(self, query, key, value, *, key_bias=None)",
    "CoresetAttention.save": "(self, path)",
    "CoresetAttention.load": "(path, like=None)",
    "linear_recurrence": (
        "(query, key, value, *, update_rule, log_decay=None, beta=None, erase_key=None, "
        "read_key=None, key_mask=None, key_lengths=None, scale=None, initial_state=None, "
        "return_state=False, return_states_every=None, chunk_size=None, cu_seqlens=None)"
    ),
    "linear_recurrence_vjp": (
        "(query, key, value, *, update_rule, log_decay=None, beta=None, erase_key=None, "
        "read_key=None, key_mask=None, key_lengths=None, scale=None, initial_state=None, "
        "return_state=False, return_states_every=None, chunk_size=None, cu_seqlens=None)"
    ),
    "recurrence_step": (
        "(query, key, value, state, *, update_rule, log_decay=None, beta=None, erase_key=None, "
        "read_key=None, key_mask=None, scale=None)"
    ),
    "State": "(kvz, log_scale, length, fingerprint=None, log_decay=None, num_sequences=None)",
    "init_state": "(feature_map, value_dim, *, batch_shape=(), like)",
    "update_state": (
        "(state, key, value, feature_map, *, key_mask=None, key_bias=None, key_lengths=None, "
        "log_decay=None)"
    ),
    "read_state": "(query, state, feature_map)",
    "merge_states": "(first, second)",
    "merge_outputs": "(parts)",
    "decode_step": "(query, key, value, state, feature_map, *, key_bias=None, log_decay=None)",
    "Decoder": "(feature_map, state)",
    "Decoder.copy": "(self)",
    "Decoder.step": "(self, query, key, value, *, key_bias=None, log_decay=None)",
    "save_state": "(path, state, feature_map=None)",
    "load_state": "(path, feature_map=None, like=None)",
    "stream.attend": (
        "(query, key, value, out, feature_map, *, is_causal=False, block_size=65536, "
        "checkpoint=None, checkpoint_seconds=60.0, progress=None, key_mask=None, key_bias=None, "
        "log_decay=None, initial_state=None, exact_window=None)"
    ),
    "config": "(num_threads=None, precision=None)",
    "without_backends": "()",
    "registered_backends": "()",
    "sampling.gaussian": "(num, dim, rng=None, *, batch_shape=())",
    "sampling.orthogonal": "(num, dim, rng=None, *, batch_shape=())",
    "sampling.simplex": "(num, dim, rng=None, *, batch_shape=())",
    "sampling.stratified": "(num, dim, rng=None, *, batch_shape=())",
    "sampling.quantile": "(num, dim, rng=None, *, batch_shape=())",
    "sampling.fixed_norm": "(num, dim, rng=None, *, batch_shape=())",
    "sampling.sobol": "(num, dim, rng=None, *, batch_shape=())",
    "sampling.halton": "(num, dim, rng=None, *, batch_shape=())",
    "positions.rotary": (
        "(x, positions=None, *, base=10000, frequencies=None, interleaved=False, dim=None)"
    ),
    "positions.alibi_slopes": "(heads)",
    "positions.sinusoidal": "(length, dim)",
    "layers.linear": "(params, x)",
    "layers.layer_norm": "(params, x, *, eps=1e-05)",
    "layers.rms_norm": "(params, x, *, eps=1e-06)",
    "layers.causal_convolution": (
        "(params, x, *, activation=None, state=None, return_state=False)"
    ),
    "layers.gated_rms_norm": (
        "(params, x, gate, *, activation='silu', gate_first=False, num_groups=1, eps=1e-06)"
    ),
    "layers.feed_forward": "(params, x, *, activation='relu')",
    "layers.embedding": "(params, tokens, *, positions=None, start=0, scale=1.0)",
    "layers.multi_head_attention": (
        "(params, x, memory=None, *, num_heads, attention=SoftmaxAttention(scale=None, "
        "window=None), positions=None, is_causal=False, key_mask=None, eps=1e-06, "
        "initial_state=None, return_state=False)"
    ),
    "layers.encoder_layer": "(params, x, *, is_causal=False, key_mask=None, **options)",
    "layers.encoder": "(params, x, *, is_causal=False, key_mask=None, **options)",
    "layers.decoder_layer": (
        "(params, x, memory=None, *, is_causal=True, key_mask=None, memory_mask=None, "
        "initial_state=None, return_state=False, **options)"
    ),
    "layers.decoder": (
        "(params, x, memory=None, *, is_causal=True, key_mask=None, memory_mask=None, "
        "initial_state=None, return_state=False, **options)"
    ),
    "layers.language_model": (
        "(params, tokens, memory=None, *, key_mask=None, memory_mask=None, initial_state=None, "
        "return_state=False, **options)"
    ),
    "layers.generate": (
        "(params, tokens, num_tokens, memory=None, *, temperature=0.0, top_k=None, top_p=None, "
        "stop=None, rng=None, key_mask=None, memory_mask=None, **options)"
    ),
    "layers.load_safetensors": "(path, mapping=None)",
    "layers.save_safetensors": "(path, params)",
    "layers.LinearAttention": "(feature_map, log_decay=None, exact_window=None)",
    "layers.SoftmaxAttention": "(scale=None, window=None)",
    "reference.kernel_attention": (
        "(query, key, value, kernel, *, is_causal=False, key_mask=None, visible=None, bias=None)"
    ),
    "reference.softmax_attention": (
        "(query, key, value, *, scale=None, is_causal=False, key_mask=None, visible=None, "
        "bias=None)"
    ),
    "reference.recurrence": (
        "(query, key, value, *, update_rule, log_decay=None, beta=None, erase_key=None, "
        "read_key=None, scale=None, initial_state=None)"
    ),
    "datasets.pretrained_long_qkv": "(dtype=<class 'numpy.float32'>)",
    "datasets.pretrained_qkv": "(dtype=<class 'numpy.float32'>)",
    "diagnostics.relative_variance": (
        "(query, key, feature_map, *, is_causal=False, key_mask=None, num_samples=128)"
    ),
    "diagnostics.recommend_num_features": (
        "(query, key, feature_map, *, tolerance, coverage=0.9, is_causal=False, key_mask=None, "
        "length=None, value_dim=None, num_samples=128)"
    ),
    "diagnostics.crossover_length": (
        "(dim, value_dim, num_features, *, is_causal=False, chunk_size=128, exact_rate=1.0, "
        "linear_rate=1.0)"
    ),
    "diagnostics.attention_weights": (
        "(query, key, feature_map=None, *, rows, is_causal=False, key_mask=None, scale=None)"
    ),
    "diagnostics.output_error": "(query, state, feature_map, *, block_size=None)",
    "diagnostics.effective_features": "(query, state, feature_map)",
    "diagnostics.denominators": "(query, key, feature_map, *, is_causal=False, key_mask=None)",
    "diagnostics.attended_norms": (
        "(query, key, *, scale=None, is_causal=False, key_mask=None, num_samples=128)"
    ),
    "diagnostics.held_out_error": (
        "(output, *, query, key, value, is_causal=False, key_mask=None, key_bias=None, scale=None, "
        "num_rows=64, rows=None, probability=0.95, rng=None)"
    ),
    "diagnostics.held_out_rows": "(length, num_rows, rng=None, exclude=None)",
    "diagnostics.AttendedNorms": "(percentiles, logit_range, num_features)",
    "diagnostics.HeldOutError": "(relative, mean_square, rows, bound)",
    "diagnostics.RelativeVariance": "(mean, median, percentiles, bias, verdict)",
    "diagnostics.Recommendation": "(num_features, per_head, hopeless, verdict)",
    "diagnostics.OutputError": (
        "(output, variance, jackknife, bias, denominator_variance, effective_features, "
        "num_blocks, verdict)"
    ),
    "diagnostics.OutputError.interval": "(self, level=0.95)",
    "diagnostics.Denominators": "(negative, zero, verdict)",
    "baselines.aft_full": "(query, key, value, *, position_bias, is_causal=False)",
    "baselines.aft_local": "(query, key, value, *, position_bias, window_size, is_causal=False)",
    "baselines.aft_simple": "(query, key, value, *, is_causal=False)",
    "baselines.bigbird": (
        "(query, key, value, *, block_size, num_global=2, num_random=3, is_causal=False, "
        "rng=None, scale=None)"
    ),
    "baselines.clustered": (
        "(query, key, value, *, num_clusters, num_bits=63, num_steps=10, is_causal=False, "
        "rng=None, scale=None)"
    ),
    "baselines.compressive": (
        "(query, key, value, *, block_size, memory_size, compressed_size, rate=2, "
        "is_causal=True, scale=None)"
    ),
    "baselines.dense_synthesizer": (
        "(query, value, *, hidden_weight, hidden_bias, weight, bias, is_causal=False)"
    ),
    "baselines.external": "(query, *, key_memory, value_memory, is_causal=False)",
    "baselines.factorized_dense_synthesizer": (
        "(query, value, *, first_weight, second_weight, is_causal=False)"
    ),
    "baselines.factorized_random_synthesizer": "(value, *, left, right, is_causal=False)",
    "baselines.fixed": "(query, key, value, *, stride, num_summary=1, is_causal=True, scale=None)",
    "baselines.improved_clustered": (
        "(query, key, value, *, num_clusters, num_keys=32, num_bits=63, num_steps=10, "
        "is_causal=False, rng=None, scale=None)"
    ),
    "baselines.linformer": (
        "(query, key, value, *, num_landmarks=None, projection='mean', value_projection=None, "
        "is_causal=False, rng=None, scale=None)"
    ),
    "baselines.local_window": "(query, key, value, *, window_size, is_causal=False, scale=None)",
    "baselines.longformer": (
        "(query, key, value, *, window_size, num_global=1, is_causal=False, scale=None)"
    ),
    "baselines.nystromformer": (
        "(query, key, value, *, num_landmarks, num_iterations=6, is_causal=False, scale=None)"
    ),
    "baselines.random_synthesizer": "(value, *, logits, is_causal=False)",
    "baselines.reformer": (
        "(query, key, value, *, num_buckets, num_rounds=4, chunk_size=None, is_causal=False, "
        "rng=None, scale=None)"
    ),
    "baselines.routing": (
        "(query, key, value, *, num_clusters, cluster_size=None, num_steps=10, "
        "is_causal=False, rng=None, scale=None)"
    ),
    "baselines.strided": "(query, key, value, *, stride, is_causal=True, scale=None)",
    "baselines.thinformer": (
        "(query, key, value, *, oversampling=2, is_causal=False, rng=None, scale=None)"
    ),
    "baselines.top_k": "(query, key, value, *, num_keys, is_causal=False, scale=None)",
    "baselines.truncated_svd": "(query, key, value, *, rank, is_causal=False, scale=None)",
    "baselines.wildcat": (
        "(query, key, value, *, num_keys, temperature=None, is_causal=False, rng=None, scale=None)"
    ),
    "kernels.log_sum_exp": (
        "(query, key, *, scale=None, bandwidth=None, weights=None, key_mask=None)"
    ),
    "kernels.kernel_density": "(dataset, bw_method=None, weights=None, *, layout='rows')",
    "kernels.kernel_density.resample": "(self, size=None, rng=None)",
    "kernels.kernel_density.integrate_gaussian": "(self, mean, cov)",
    "kernels.local_regression": (
        "(query, x, y, *, bandwidth, degree=1, weights=None, key_mask=None, ridge=0.001)"
    ),
    "kernels.mean_shift": (
        "(points, data, *, bandwidth, weights=None, key_mask=None, max_iterations=300, "
        "tolerance=0.001)"
    ),
    "kernels.mmd": "(x, y, *, bandwidth, x_weights=None, y_weights=None, unbiased=False)",
    "kernels.sinkhorn": "(x, y, *, reg, a=None, b=None, max_iterations=1000, tolerance=1e-09)",
    "sklearn.KernelDensity": "(bandwidth=1.0, *, loo_samples=1000, random_state=None)",
    "sklearn.KernelDensity.sample": "(self, n_samples=1, random_state=None)",
    "sklearn.KernelRegressor": (
        "(bandwidth='loo', *, degree=0, method='auto', num_landmarks=256, tolerance=0.05, "
        "loo_samples=1000, ridge=0.001, random_state=None)"
    ),
    "sklearn.KernelClassifier": (
        "(bandwidth='loo', *, method='auto', num_landmarks=256, tolerance=0.05, loo_samples=1000, "
        "random_state=None)"
    ),
    "sklearn.KernelRegressor.partial_fit": "(self, X, y, sample_weight=None)",
    "sklearn.KernelClassifier.partial_fit": "(self, X, y, classes=None, sample_weight=None)",
    "sklearn.RandomFeatures": (
        "(kernel='gaussian', *, num_features=100, bandwidth='scale', sampler='orthogonal', "
        "compute_variance=False, random_state=None)"
    ),
    "feature_maps.PositiveFeatures": (
        "(dim, num_features=None, *, scale=None, sampler='orthogonal', rng=None)"
    ),
    "feature_maps.HyperbolicFeatures": (
        "(dim, num_features=None, *, scale=None, sampler='orthogonal', rng=None)"
    ),
    "feature_maps.GeneralizedExponentialFeatures": (
        "(dim, num_features=None, *, A=0.0, antithetic=True, scale=None, sampler='orthogonal', "
        "rng=None)"
    ),
    "feature_maps.DenseExponentialFeatures": (
        "(dim, num_features=None, *, A, transform, antithetic=True, scale=None, "
        "sampler='orthogonal', rng=None)"
    ),
    "feature_maps.LandmarkFeatures.fit": (
        "(query, key, *, num_features=64, num_probes=128, key_mask=None, key_bias=None, "
        "query_mask=None, corrected=False, scale=None, lloyd_steps=3, rng=None)"
    ),
    "feature_maps.LandmarkFeatures.sample": (
        "(query, key, *, num_features=64, key_mask=None, key_bias=None, query_mask=None, "
        "scale=None, rng=None)"
    ),
    "feature_maps.TrigonometricFeatures": (
        "(dim, num_features=None, *, scale=None, sampler='orthogonal', rng=None)"
    ),
    "feature_maps.Reparametrized": (
        "(feature_map, query_shift=None, key_shift=None, transform=None)"
    ),
    "feature_maps.RotatedFeatures": "(feature_map, *, base=10000)",
    "feature_maps.RandomFourierFeatures": (
        "(dim, num_features=None, *, kernel='gaussian', bandwidth=1.0, normalize=False, "
        "sampler='orthogonal', rng=None)"
    ),
    "feature_maps.ActivationFeatures": (
        "(dim=None, num_features=None, *, activation='relu', epsilon=0.001, scale=1.0, "
        "sampler='orthogonal', rng=None)"
    ),
    "feature_maps.EluFeatures": "(dim=None, *, scale=1.0)",
    "feature_maps.ReluFeatures": "(dim=None, *, scale=1.0)",
    "feature_maps.SoftmaxFeatures": "(dim=None, *, scale=1.0)",
    "feature_maps.TaylorFeatures": "(dim, order=2, *, scale=None)",
    "feature_maps.PolynomialFeatures": "(dim, degree=2, c=1.0, *, scale=1.0)",
    "feature_maps.CosformerFeatures": "(dim, *, max_length, scale=1.0)",
    "feature_maps.HedgehogFeatures": "(weights, *, bias=None, key_weights=None, key_bias=None)",
}

MAP_METHODS = {
    "query_features": "(self, x)",
    "key_features": "(self, x)",
    "kernel": "(self, x, y)",
    "estimate": "(self, x, y)",
    "variance": "(self, x, y)",
}
RANDOM_METHODS = {"redraw": "(self, rng=None)"}
RANDOM_MAPS = [
    "PositiveFeatures",
    "HyperbolicFeatures",
    "TrigonometricFeatures",
    "ActivationFeatures",
]
DETERMINISTIC_MAPS = ["EluFeatures", "ReluFeatures"]


def is_public(name: str) -> bool:
    # The command's interface is its command line: the modules behind `main` are its own affair.
    # Those of frameworks are in test_interop.py, with what they need.
    return not name.startswith(("linattn.cli.", "linattn.interop.")) and "._" not in name


def public_modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.walk_packages(linattn.__path__, "linattn.")]
    submodules = [importlib.import_module(name) for name in names if is_public(name)]
    return [linattn, linattn_numpy, *submodules]


def resolve(path: str) -> object:
    found: object = linattn
    for name in path.split("."):
        found = getattr(found, name)
    return found


def signature(function: object) -> str:
    bare = inspect.signature(function)  # type: ignore[arg-type]
    parameters = [p.replace(annotation=p.empty) for p in bare.parameters.values()]
    return str(bare.replace(parameters=parameters, return_annotation=bare.empty))


def written_docstring(thing: object) -> str:
    """Return the docstring that somebody wrote: not inherited, not made by a decorator."""
    text = vars(thing).get("__doc__") if isinstance(thing, type) else inspect.getdoc(thing)
    made = isinstance(thing, type) and (text or "").startswith(f"{thing.__name__}(")
    return "" if made else text or ""


@pytest.fixture(params=public_modules(), ids=lambda module: module.__name__)
def module(request: pytest.FixtureRequest) -> ModuleType:
    found: ModuleType = request.param
    return found


def test_public_modules_are_the_designed_ones():
    names = {module.__name__ for module in public_modules()}
    assert names >= {
        "linattn",
        "linattn.baselines",
        "linattn.functional",
        "linattn.cli",
        "linattn.datasets",
        "linattn.diagnostics",
        "linattn.diagnostics.costs",
        "linattn.diagnostics.outputs",
        "linattn.diagnostics.variance",
        "linattn.diagnostics.weights",
        "linattn.feature_maps",
        "linattn.feature_maps.elementwise",
        "linattn.feature_maps.exponential",
        "linattn.feature_maps.trigonometric",
        "linattn.kernels",
        "linattn.layers",
        "linattn.positions",
        "linattn.reference",
        "linattn.sampling",
        "linattn.sklearn",
        "linattn.state",
        "linattn.stream",
        "linattn.typing",
    }


def test_all_names_exist_once(module):
    names = module.__all__
    assert [name for name in names if not hasattr(module, name)] == []
    assert len(names) == len(set(names))


def test_all_holds_what_the_module_defines_in_public(module):
    defined = {
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__module__ == module.__name__
    }
    assert defined - set(module.__all__) == set()


def test_public_names_are_documented(module):
    assert written_docstring(module)
    things = {name: getattr(module, name) for name in module.__all__}
    documentable = {
        name: thing
        for name, thing in things.items()
        if inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing)
    }
    assert [name for name, thing in documentable.items() if not written_docstring(thing)] == []


def test_public_methods_are_documented(module):
    undocumented = [
        f"{owner.__name__}.{name}"
        for owner in (getattr(module, name) for name in module.__all__)
        if inspect.isclass(owner) and owner.__module__ == module.__name__
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, property))
        and not inspect.getdoc(member)
    ]
    assert undocumented == []


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature_is_the_designed_one(path):
    assert signature(resolve(path)) == SIGNATURES[path]


@pytest.mark.parametrize("path", SIGNATURES)
def test_designed_name_is_exported(path):
    parent, _, name = f"linattn.{path}".rpartition(".")
    owner = linattn if parent == "linattn" else resolve(parent.removeprefix("linattn."))
    assert name in (owner.__all__ if inspect.ismodule(owner) else vars(owner))


def test_top_level_exports_its_modules_and_version():
    wanted = {"datasets", "diagnostics", "feature_maps", "reference", "sampling", "__version__"}
    assert wanted - set(linattn.__all__) == set()


def test_version_is_three_numbers():
    assert re.fullmatch(r"\d+\.\d+\.\d+", linattn.__version__)


@pytest.mark.parametrize("name", RANDOM_MAPS)
def test_random_map_has_the_designed_members(name):
    check_members(name, getattr(linattn.feature_maps, name)(4, rng=0), MAP_METHODS | RANDOM_METHODS)


@pytest.mark.parametrize("name", DETERMINISTIC_MAPS)
def test_deterministic_map_has_the_designed_members(name):
    check_members(name, getattr(linattn.feature_maps, name)(), MAP_METHODS)


def check_members(name, feature_map, methods):
    assert name in linattn.feature_maps.__all__
    assert {name: signature(getattr(type(feature_map), name)) for name in methods} == methods
    attributes = ["dim", "num_features", "scale", "positive", "unbiased", "causal"]
    assert [name for name in attributes if not hasattr(feature_map, name)] == []


@pytest.mark.parametrize("name", RANDOM_MAPS)
def test_random_map_comes_back_from_its_projection(name):
    cls = getattr(linattn.feature_maps, name)
    first, *others = inspect.signature(cls.from_projection).parameters.values()
    assert first.name == "projection"
    assert {parameter.kind for parameter in others} <= {inspect.Parameter.KEYWORD_ONLY}
    feature_map = cls(4, rng=0)
    assert cls.from_projection(feature_map.projection) == feature_map
    assert cls.from_projection(feature_map.projection + 1) != feature_map


def test_samplers_are_found_by_name():
    samplers = linattn.sampling.SAMPLERS
    assert samplers["gaussian"] is linattn.sampling.gaussian
    assert samplers["orthogonal"] is linattn.sampling.orthogonal


def test_state_fields_keep_their_order():
    names = ("kvz", "log_scale", "length", "fingerprint", "log_decay", "num_sequences")
    assert linattn.State._fields == (*names,)
    assert linattn.State(None, None, 0) == (None, None, 0, None, None, None)
    assert isinstance(linattn.State.kv, property)
    assert isinstance(linattn.State.z, property)
