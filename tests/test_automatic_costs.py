"""attention(): what it spends on a search, and that useless work is little."""

# mypy: disable-error-code="arg-type, call-arg, misc"

import warnings

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less

import linattn
from linattn import automatic
from linattn._driver.problem import exact_problem
from linattn.automatic import _call, _costs, _curves, _heads, _report, _tokens
from tests.attentions import full_and_causal
from tests.test_automatic import (
    clustered,
    error,
    found_with,
    one_hard_head,
    search_early,
    unstructured,
)


@pytest.fixture
def eager(monkeypatch):
    search_early(monkeypatch)


def test_narrow_heads_are_dearer_to_select_for():
    """Time of selection and gathers over that of exact pairs falls with the width."""
    work = _costs.Work(chosen=1.0)
    costs = []
    for d, e in ((4, 1), (16, 16), (64, 64)):
        q, v = np.zeros((1, 8, d)), np.zeros((1, 8, e))
        costs.append(_costs.cost_of(work, exact_problem(q, q, v, scale=None, is_causal=False)))
    assert costs[0] > 1.3 * costs[1] > 1.7 * costs[2]


def drawn_case(seed):
    """Inputs of a drawn kind, heads, length and widths: some near clusters, some like none."""
    rng = np.random.default_rng(seed)
    heads, length = int(rng.integers(1, 4)), int(rng.integers(2500, 4500))
    d, e = (int(2 ** rng.uniform(1, 7)) for _ in range(2))
    centres = rng.standard_normal((heads, 30, d))
    which = rng.integers(30, size=length)
    spread = rng.uniform(0.1, 1.5, (heads, 1, 1))
    key = centres[:, which] + spread * rng.standard_normal((heads, length, d))
    query = rng.uniform(0.5, 3) * (centres[:, which] + rng.standard_normal((heads, length, d)))
    value = rng.standard_normal((heads, length, e)) + rng.uniform(0, 3)
    return [x.astype(np.float32) for x in (query, key, value)]


@pytest.mark.parametrize("seed", range(5))
def test_useless_work_costs_at_most_a_tenth(monkeypatch, seed):
    """Counted as times, whatever fails: here all judgements do, or each second one."""
    arrays, found = drawn_case(seed), []
    judge, report_of = _call.Call._judged, _report.make_report

    def judged(self, number, *args):
        if seed % 2 or number % 2:
            self._given = self._given._replace(tolerance=1e-9)
        of_head = judge(self, number, *args)
        self._given = self._given._replace(tolerance=0.3)
        return of_head

    def make_report(problem, heads):
        found.append(_costs.cost_of(_costs.Work().plus(*(head.work for head in heads)), problem))
        return report_of(problem, heads)

    monkeypatch.setattr(_call.Call, "_judged", judged)
    monkeypatch.setattr(automatic, "make_report", make_report)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tolerance=")
        output, _ = linattn.attention(*arrays, tolerance=0.3, rng=0, return_report=True)
    exact = linattn.softmax_attention(*arrays)
    assert found[0] <= 1.1 * exact.shape[0] * exact.shape[1] ** 2
    assert_array_less(error(output, exact), 0.3)


def test_a_head_is_not_judged_where_that_may_cost_too_much(monkeypatch):
    """One head, whose trial has taken most of what may be in vain."""
    query, key, value = clustered(5600, heads=1, dim=32, dtype=np.float32)
    judged = []
    monkeypatch.setattr(_call.Call, "_judged", lambda *args: judged.append(args))
    with pytest.warns(UserWarning, match="takes exact attention, in quadratic"):
        linattn.attention(query, key, value - value.mean(), tolerance=0.06, rng=0)
    assert not judged


def test_heads_are_not_tried_once_many_trials_were_in_vain(monkeypatch):
    """Together they cost a call no more than a tenth of exact attention."""
    arrays = [np.repeat(x[:1], 12, axis=0) for x in unstructured(4200, (1,))]
    fitted = found_with(monkeypatch)
    with pytest.warns(UserWarning, match="takes exact attention, in quadratic"):
        _, report = linattn.attention(*arrays, rng=0, return_report=True)
    assert 6 < len(fitted) < 12
    assert 1 < report.cost < 1.1
    assert_array_equal(report.head_pairs[-1], 4200**2)


def test_a_search_in_vain_is_not_made():
    """Where the first fit alone would take a large part of exact attention's time."""
    arrays = one_hard_head(2500)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output, report = linattn.attention(*arrays, rng=0, return_report=True)
    assert report.head_methods.tolist() == ["exact", "exact"]
    assert report.cost == 1
    assert_array_equal(report.head_pairs, 2500**2)
    assert_array_equal(output, linattn.softmax_attention(*arrays))


def test_only_heads_that_may_be_near_are_judged(eager, monkeypatch):
    """By as many fresh rows as the tolerance needs."""
    hard = unstructured(2500, (3,))
    easy = [x[:1] for x in one_hard_head(2500)]
    used, error_curve = [], _curves.error_curve

    def curve(head, *args):
        used.append(head.rows.places)
        return error_curve(head, *args)

    monkeypatch.setattr(_call, "error_curve", curve)
    arrays = [np.concatenate([x, y, x[:1]]) for x, y in zip(hard, easy, strict=True)]
    with pytest.warns(UserWarning, match="takes exact attention for 4 of 5 heads"):
        output, report = linattn.attention(*arrays, rng=0, return_report=True)
    assert [len(rows) for rows in used if len(rows) != 64] == [len(used[4])]
    assert 400 < len(used[4]) < 1200
    assert len(set(used[4]) & set(used[3])) < 40
    assert report.head_methods.tolist() == ["exact"] * 3 + ["landmarks", "exact"]
    exact = linattn.softmax_attention(*(x[3:4] for x in arrays))
    assert error(output[3:4], exact) <= 0.1


@pytest.mark.parametrize("heads", [1, 12])
@pytest.mark.parametrize(("tolerance", "length"), [(0.1, 8000), (0.05, 15000), (0.02, 30000)])
def test_causal_attention_is_not_tried_where_it_cannot_gain(heads, tolerance, length):
    """Measured 1.1 to 3 times as long as exact attention when it was; ten times as far it gains."""
    tried = []
    for n in (length, 10 * length):
        tokens = np.broadcast_to(np.zeros((1, 1, 32), np.float32), (heads, n, 32))
        problem = exact_problem(*[tokens] * 3, scale=None, is_causal=True)
        given = _heads.Given(problem, None, 1.0, tolerance, np.random.default_rng(0))
        tried.append(_call.Call(given).is_worth_a_search())
    assert tried == [False, True]


@pytest.mark.parametrize("count", [64, 700, 1900])
@pytest.mark.parametrize("masked", [False, True])
def test_causal_rows_compute_the_pairs_that_are_counted(count, masked):
    """With gaps between them: each row the keys up to the last row of its block."""
    rng, length, read = np.random.default_rng(0), 6000, []

    class Keys(np.ndarray):
        def __getitem__(self, keys):
            read.append(keys.stop)
            return np.asarray(super().__getitem__(keys))

    query, key, value = rng.standard_normal((3, length, 4))
    places = np.sort(rng.choice(length, count, replace=False))
    positions = np.flatnonzero(rng.random(length) < (0.8 if masked else 2))
    ones = np.ones((len(positions), 1))
    rows = _tokens.Rows(places, None), np.ones(count, bool), query[places]
    head = _tokens.Head(
        *rows, positions, key[positions].view(Keys), np.hstack([value[positions], ones])
    )
    outputs = _tokens.causal_rows(head, 0.5)
    sizes = np.diff([*range(0, count, _costs.ROWS), count])
    pairs = float(np.dot(sizes, read))
    counted = _costs.causal_rows_work(count, len(positions)).pairs
    assert abs(pairs - counted) < 0.1 * counted
    mask = np.isin(np.arange(length), positions)
    exact = linattn.softmax_attention(query, key, value, is_causal=True, scale=0.5, key_mask=mask)
    assert_allclose(outputs[:, :-1], exact[places], rtol=1e-9, atol=1e-12)


@full_and_causal
@pytest.mark.parametrize("near", [False, True])
def test_rows_that_judged_a_head_are_kept(eager, monkeypatch, is_causal, near):
    """Whether it is near or not. If not, all others are computed exactly, and no row twice."""
    length = 6000 if is_causal else 2500
    arrays = clustered(length)
    exact, judge = _heads.Given.exact, _call.Call._judged
    rows, kept = [], {}

    def of_rows(self, some=None, **options):
        if some is not None and not options:
            rows.append(len(np.arange(length)[some]))
        return exact(self, some, **options)

    def judged(self, number, choices, *args):
        if not near:
            limit = self._given.tolerance
            self._given = self._given._replace(tolerance=1e-9)
        found = judge(self, number, choices, *args)
        if not near:
            self._given = self._given._replace(tolerance=limit)
        kept[number] = found.places
        return found

    monkeypatch.setattr(_call.Call, "_judged", judged)
    monkeypatch.setattr(_heads.Given, "exact", of_rows)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tolerance=")
        output, report = linattn.attention(*arrays, is_causal=is_causal, rng=0, return_report=True)
    assert_array_equal(report.head_methods, "landmarks" if near else "exact")
    if not near:
        assert rows == [length - len(kept[0]), length - len(kept[1])]
    whole = linattn.softmax_attention(*arrays, is_causal=is_causal)
    for head in range(2):
        if near and is_causal:
            # Which rows judge depends on later tokens, so that no output may tell.
            assert not len(kept[head])
            continue
        assert len(kept[head]) > 60
        some = kept[head] if near else slice(None)
        assert_allclose(output[head, some], whole[head, some], rtol=1e-9)


@full_and_causal
def test_a_head_is_judged_once(eager, monkeypatch, is_causal):
    """So that nothing shares the probability to fail; trials judge nothing."""
    judged, judge = [], _call.Call._judged

    def of_rows(self, number, *args):
        found = judge(self, number, *args)
        judged.append((number, found.record.error, found.record.bound))
        return found

    monkeypatch.setattr(_call.Call, "_judged", of_rows)
    arrays = clustered(6000 if is_causal else 2500)
    _, report = linattn.attention(*arrays, is_causal=is_causal, rng=0, return_report=True)
    assert_array_equal(judged, np.stack([[0, 1], report.error, report.bound], axis=-1))
