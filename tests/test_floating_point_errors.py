"""Under `np.errstate(all="raise")` nothing raises."""

from __future__ import annotations

import numpy as np

import linattn
from tests.attentions import HEADS, MAPS, every_attention, every_map, state_of, tokens


@every_attention
def test_attention_under_errstate_raise(attend):
    query, key, value = tokens(length=140)
    mask = np.arange(140) > 3
    big = [30 * query, 30 * key, value]
    featureless = [-np.abs(query), -np.abs(key), value]
    with np.errstate(all="raise"):
        for arrays in ((query, key, value), big, featureless, [a * np.float32(1e-30) for a in big]):
            attend(*arrays)
            attend(*arrays, key_mask=mask)
            attend(*arrays, key_mask=np.zeros_like(mask))
        assert np.geterr()["over"] == "raise"


@every_map
def test_states_and_maps_under_errstate_raise(feature_map):
    query, key, value = tokens()
    query, key = 30 * query, 30 * key
    with np.errstate(all="raise"):
        empty = state_of(feature_map, like=key, batch_shape=(HEADS,))
        state = linattn.update_state(empty, key, value, feature_map)
        linattn.read_state(query, state, feature_map)
        linattn.read_state(query, empty, feature_map)
        linattn.merge_states(state, empty)
        linattn.merge_states(empty, empty)
        linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], empty, feature_map)
        decoder = linattn.Decoder(feature_map, state)
        decoder.step(query[:, 0], key[:, 0], value[:, 0])
        feature_map.query_features(query)
        feature_map.key_features(key)
        feature_map.estimate(query, key)
        feature_map.kernel(query, key)
        if feature_map is not MAPS["activation"]:
            feature_map.variance(query, key)
