"""Keys of chosen clusters exact, all others by landmarks, against the dense form."""

# mypy: disable-error-code="arg-type, call-arg, call-overload, misc"

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn.feature_maps import LandmarkFeatures, PositiveFeatures
from linattn.reference import clustered_attention
from tests import dense_oracle

D, E = 4, 3


def inputs(seed=0, lead=(2,), queries=60, keys=60):
    rng = np.random.default_rng(seed)
    shapes = [(*lead, queries, D), (*lead, keys, D), (*lead, keys, E)]
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    return 1.5 * q, 1.5 * k, v


def fit(q, k, m=12, **options):
    return LandmarkFeatures.fit(q, k, num_features=m, num_probes=30, rng=0, **options)


def attend(q, k, v, phi, c, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "feature_map was fitted to other keys")
        return linattn.linear_attention(q, k, v, phi, exact_clusters=c, **options)


@pytest.mark.parametrize("window", [None, 16])
def test_every_library(xp, window):
    arrays = [x.astype(np.float32) for x in inputs(queries=100, keys=100)]
    phi = fit(*arrays[:2])
    query, key, value = (xp.array(x) for x in arrays)
    if xp.name in {"dask", "jax"}:
        with pytest.raises(TypeError, match="exact_clusters needs arrays whose values can be"):
            attend(query, key, value, phi, 3, exact_window=window)
        return
    out = attend(query, key, value, phi, 3, exact_window=window)
    xp.assert_like(out, value)
    want = clustered_attention(*arrays, phi, exact_clusters=3, exact_window=window)
    assert_allclose(xp.numpy(out), want, rtol=1e-5, atol=1e-5)


def test_the_clusters_that_matter_are_chosen():
    """The error falls with every cluster, far faster than by clusters at random."""
    q, k, v = inputs(queries=300, keys=300)
    phi, exact = fit(q, k, m=30), linattn.softmax_attention(q, k, v)

    def error(out):
        return np.linalg.norm(out - exact) / np.linalg.norm(exact)

    errors = [error(linattn.linear_attention(q, k, v, phi))]
    errors += [error(attend(q, k, v, phi, c)) for c in (2, 5, 10, 20, 30)]
    assert all(later < 0.75 * earlier for earlier, later in pairwise(errors))


@pytest.mark.parametrize("backend", [True, False], ids=["backend", "generic"])
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e3])
def test_logits_of_any_size(size, backend):
    """One scale for what is exact and what is not: neither overflows, neither is lost."""
    q, k, v = inputs()
    q, k, v = size * q, k.astype(np.float32), v.astype(np.float32)
    q = q.astype(np.float32)
    phi = fit(q, k)
    with linattn.config() if backend else linattn.without_backends():
        out = attend(q, k, v, phi, 3)
    doubles = [x.astype(np.float64) for x in (q, k, v)]
    want = clustered_attention(*doubles, phi, exact_clusters=3)
    # Logits of 1e4 are known to 1e-3 in float32.
    assert_allclose(out, want, rtol=0, atol=2e-2 if size > 100 else 2e-4)


@pytest.mark.parametrize("backend", [True, False], ids=["backend", "generic"])
@pytest.mark.parametrize(
    ("dtype", "offset"),
    [("float16", -60), ("float32", -60), ("float32", 300), ("float64", -700)],
)
@pytest.mark.parametrize("window", [None, 1, 16])
def test_one_number_added_to_all_logits_changes_no_output(window, dtype, offset, backend):
    """Where no key is left to the map, nothing else sets the scale of the chosen ones."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 40, n)) for n in (D, D, E))
    size = abs(2 * offset) ** 0.5
    q[..., 0], k[..., 0] = size, size * np.sign(offset)
    q, k, v = (x.astype(dtype).astype(float) for x in (q, k, v))
    phi, mask = fit(q, k, m=8), np.ones(40, bool)
    mask[17:] = False
    for c in (1, 3, 8):
        options = {"key_mask": mask, "exact_window": window}
        want = dense_oracle.evaluate(q, k, v, phi, exact_clusters=c, **options)
        arrays = [x.astype(dtype) for x in (q, k, v)]
        with linattn.config() if backend else linattn.without_backends():
            out, log = attend(*arrays, phi, c, **options, return_log_normalizer=True)
        bound = {"float64": 1e-9, "float32": 2e-3, "float16": 2e-3}[dtype]
        assert_allclose(out, want.output, rtol=bound, atol=bound)
        assert_allclose(log, want.log_normalizer, rtol=bound)


@pytest.mark.parametrize("seed", range(6))
def test_sinks_take_part_in_the_choice(seed):
    """The means of a cluster are those of its unmasked keys, as the docstring says."""
    rng = np.random.default_rng(seed)
    q, k, v = inputs(seed=seed, queries=40, keys=40)
    k[:, :7] += 2 * rng.standard_normal((2, 7, D))
    phi, window = fit(q, k, m=8), int(rng.choice([1, 4]))
    options: dict[str, Any] = {"sinks": 7, "exact_window": window}
    if seed % 2:
        options |= {"key_bias": rng.standard_normal(40), "key_mask": rng.random(40) < 0.8}
    out, state = attend(q, k, v, phi, 2, **options, return_state=True)
    want = dense_oracle.evaluate(q, k, v, phi, exact_clusters=2, **options)
    assert_allclose(out, want.output, rtol=0, atol=1e-11)
    sums, wanted = (s.kvz * np.exp(s.log_scale)[..., None] for s in (state, want.memory))
    assert_allclose(sums, wanted, rtol=1e-10)


@pytest.mark.parametrize("backend", [True, False], ids=["backend", "generic"])
def test_nan_reaches_the_rows_that_use_it(backend):
    q, k, v = inputs(lead=())
    phi = fit(q, k)
    with linattn.config() if backend else linattn.without_backends():
        clean = attend(q, k, v, phi, 3)
        with_nan = q.copy()
        with_nan[7] = np.nan
        out = attend(with_nan, k, v, phi, 3)
        assert_array_equal(out[7], np.nan)
        others = np.arange(60) != 7
        assert_allclose(out[others], clean[others], rtol=1e-12)
        of_key, of_value = k.copy(), v.copy()
        of_key[7], of_value[7] = np.nan, np.nan
        assert_array_equal(attend(q, of_key, v, phi, 3), np.nan)
        assert np.isnan(attend(q, k, of_value, phi, 3)).any()


@pytest.mark.parametrize("window", [None, 4])
def test_state_and_empty_inputs(window):
    q, k, v = inputs()
    phi = fit(q, k)
    _, state = attend(q, k, v, phi, 3, exact_window=window, return_state=True)
    _, want = linattn.linear_attention(q, k, v, phi, exact_window=window, return_state=True)
    sums, wanted = (s.kvz * np.exp(s.log_scale)[..., None] for s in (state, want))
    assert_allclose(sums, wanted, rtol=1e-11)
    assert attend(q[:, :0], k[:, :0], v[:, :0], phi, 3, exact_window=window).shape == (2, 0, E)
    assert attend(q[:0], k[:0], v[:0], fit(q[0], k[0]), 3, exact_window=window).shape == (0, 60, E)
    nobody = np.zeros(60, bool)
    assert_array_equal(attend(q, k, v, phi, 3, exact_window=window, key_mask=nobody), 0)
    if window is None:
        assert_array_equal(attend(q, k[:, :0], v[:, :0], phi, 3), np.zeros((2, 60, E)))


@pytest.mark.frameworks
def test_torch_pulls_gradients_through():
    """What is chosen is constant in the gradient, as landmarks are."""
    torch = pytest.importorskip("torch")
    arrays = inputs(lead=(), queries=30, keys=30)
    phi = fit(*arrays[:2])
    rng = np.random.default_rng(3)
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in arrays)
    cotangent = rng.standard_normal((30, E))
    out = attend(q, k, v, phi, 3, exact_window=4)
    (out * torch.from_numpy(cotangent)).sum().backward()
    for which, tensor in enumerate((q, k, v)):
        direction = rng.standard_normal(arrays[which].shape)
        ends = []
        for step in (1e-6, -1e-6):
            moved = list(arrays)
            moved[which] = arrays[which] + step * direction
            ends.append(np.sum(attend(*moved, phi, 3, exact_window=4) * cotangent))
        assert_allclose(np.sum(tensor.grad.numpy() * direction), (ends[0] - ends[1]) / 2e-6, 1e-5)


def test_numpy_does_what_it_can():
    q, k, v = (x.astype(np.float32) for x in inputs())
    phi, names = fit(q, k), ("assign_block", "choose_block", "clusters_block")
    with linattn.explain() as report:
        attend(q, k, v, phi, 3)
    assert all(report.ran(name) == {"linattn_numpy"} for name in names)
    with linattn.explain() as report:
        attend(1e4 * q, k, v, phi, 3)
    assert report.ran("clusters_block") == {"generic"}
    with linattn.explain() as report:
        attend(q, k, v, phi, 3, key_bias=np.zeros(60, np.float32))
    assert report.ran("clusters_block") == {"generic"}


def corrected(q, k):
    return LandmarkFeatures.fit(q, k, num_features=6, num_probes=20, corrected=True, rng=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exact_clusters": 0}, "exact_clusters must be at least 1, got 0"),
        ({"exact_clusters": True}, "exact_clusters must be a positive integer, got True"),
        ({"exact_clusters": 2.0}, "exact_clusters must be a positive integer, got 2.0"),
        ({"is_causal": True}, "is_causal needs a feature map that has not seen the whole"),
        ({"map": PositiveFeatures(D, 8, rng=0)}, "exact_clusters needs a feature map that assigns"),
        ({"map": linattn.feature_maps.EluFeatures()}, "exact_clusters needs a feature map of the"),
        ({"map": corrected}, "exact_clusters needs a feature map with weights that are not"),
        ({"state": True}, "initial_state must be None under exact_clusters, got a state"),
    ],
)
def test_errors_say_what_is_wrong(change, message):
    q, k, v = inputs()
    options = {"exact_clusters": 3} | change
    phi = options.pop("map", fit(q, k))
    phi = phi(q, k) if phi is corrected else phi
    if options.pop("state", False):
        options["initial_state"] = linattn.init_state(phi, E, batch_shape=(2,), like=k)
    with pytest.raises((TypeError, ValueError), match=message):
        linattn.linear_attention(q, k, v, phi, **options)
