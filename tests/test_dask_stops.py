"""Visible prefixes of Dask arrays: queries and keys in chunks of their own."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import linattn
from tests.dask_arrays import (
    MAPS,
    chunkings,
    close,
    compare,
    lazily,
    one_thread,
    refuse,
    tokens,
)

dask: Any = pytest.importorskip("dask")

__all__ = ["one_thread"]

attend: Any = linattn.linear_attention


def stops_of(data, length, num_keys):
    """Any stops, most of them not at borders of chunks; or as options have them."""
    options: list[dict[str, Any]] = [{"is_causal": "lower_right"}]
    if length == num_keys:
        options.append({"prefix_length": data.draw(st.integers(0, num_keys), "prefix")})
        options.append({"causal_block": data.draw(st.integers(1, 12), "block")})
    stops = st.lists(st.integers(0, num_keys), min_size=length, max_size=length)
    options.append({"key_stop": np.asarray(sorted(data.draw(stops, "stops")), dtype=np.int64)})
    return data.draw(st.sampled_from(options), "visible")


@settings(max_examples=8, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99), masked=st.booleans(), streamed=st.booleans())
def test_stops_in_any_chunks(data, seed, masked, streamed):
    num_keys = data.draw(st.integers(1, 40), "keys")
    length = data.draw(st.sampled_from([num_keys, 7, 30]), "queries")
    rows, keys = data.draw(chunkings(length), "rows"), data.draw(chunkings(num_keys), "of keys")
    options, phi = stops_of(data, length, num_keys), MAPS["positive"]
    _, key, value = tokens(num_keys, seed=seed)
    query, _, _ = tokens(length, seed=seed + 1)
    if masked:
        bias = np.random.default_rng(seed).standard_normal((1, num_keys)).astype(np.float32)
        options |= {"key_bias": bias, "key_mask": bias < 1}
    if streamed:
        options["initial_state"] = attend(*tokens(20, seed=seed + 2), phi, return_state=True)[1]
    chunked = [*lazily((query,), rows), *lazily((key, value), keys)]
    flags: Any = {"return_state": True, "return_log_normalizer": True}
    got = compare((query, key, value), rows, phi, options, chunked=chunked, **flags)
    assert tuple(filter(None, got[0].chunks[-2])) == tuple(filter(None, rows))


@pytest.mark.parametrize(
    "options", [{"prefix_length": 300}, {"causal_block": 25}], ids=["prefix", "blocks"]
)
def test_at_most_eight_tasks_a_block_where_chunks_end_at_stops(options):
    lazy = lazily(tokens(700), 50)
    if hasattr(lazy[0], "expr"):
        pytest.skip("Dask does not optimize arrays as expressions by themselves")
    with dask.config.set(scheduler=refuse):
        (output,) = dask.optimize(attend(*lazy, MAPS["positive"], **options))
    # As they are run: what only gives a block of another array its name is none.
    graph = output.__dask_graph__()
    names = [key for key, task in graph.items() if type(task).__name__ == "Alias"]
    assert len(graph) - len(names) <= 8 * 2 * 700 // 50
    close(output.compute(), attend(*tokens(700), MAPS["positive"], **options))
