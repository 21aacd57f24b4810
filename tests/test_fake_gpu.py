"""Every public function with the CuPy that people install, on the fake GPU of `tests/fake_gpu`.

Results agree with those of the same calls on NumPy arrays, and the interpreter of PTX finds no race
and no value that nobody wrote; devices, streams, waits and memory are those that were meant.
"""

# Inputs are unpacked, and mypy does not know how many there are.
# mypy: disable-error-code="arg-type, call-arg, call-overload, misc, operator"

from __future__ import annotations

import copy
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linattn
import linattn_cupy
from linattn import _arrays, diagnostics
from linattn.feature_maps import (
    CalibratedFeatures,
    CosformerFeatures,
    DenseExponentialFeatures,
    EluFeatures,
    GeneralizedExponentialFeatures,
    LandmarkFeatures,
    PositiveFeatures,
)
from linattn.typing import State
from tests import test_fuzz_options
from tests.attentions import DIM as DIM_OF_MAPS
from tests.every_map import EVERY
from tests.fake_gpu.device import BF16, cupy
from tests.fake_gpu.log import uncomputed

pytestmark = pytest.mark.fake_gpu


DTYPES = {
    "float16": np.float16,
    "bfloat16": BF16,
    "float32": np.float32,
    "float64": np.float64,
}
HALVES = ["float16", "bfloat16"]

# Dims and features of test_cupy_backend.py: kernels of other sizes would be compiled besides.
LEAD, LENGTH, DIM, VALUE_DIM = (1, 2), 70, 16, 24
FAVOR = PositiveFeatures(DIM, num_features=40, rng=0)
ELU = EluFeatures()


@dataclass
class Inputs:
    """Arguments of the calls below, made by ``make`` from NumPy's."""

    make: Callable[[Any], Any]
    dtype: str

    def array(self, *shape: int, scale: float = 0.5) -> Any:
        rng = np.random.default_rng(len(shape))
        return self.make((scale * rng.standard_normal(shape)).astype(DTYPES[self.dtype]))

    @property
    def qkv(self) -> tuple[Any, Any, Any]:
        return self.array(*LEAD, LENGTH, DIM), *self.kv

    @property
    def kv(self) -> tuple[Any, Any]:
        return self.array(*LEAD, LENGTH, DIM), self.array(*LEAD, LENGTH, VALUE_DIM)

    @property
    def token(self) -> tuple[Any, Any, Any]:
        return self.array(*LEAD, DIM), self.array(*LEAD, DIM), self.array(*LEAD, VALUE_DIM)

    @property
    def mask(self) -> Any:
        return self.make(np.arange(LENGTH) < 50)

    def state(self, phi: Any = FAVOR) -> Any:
        return linattn.linear_attention(*self.qkv, phi, return_state=True)[1]


CALLS: dict[str, Callable[[Inputs], Any]] = {}


def call(function: Callable[[Inputs], Any]) -> Callable[[Inputs], Any]:
    CALLS[function.__name__] = function
    return function


def attend(name: str, phi: Any = FAVOR, **options: Any) -> None:
    """Add a call of linear attention; options that are strings name what `Inputs` has."""

    def work(x: Inputs) -> Any:
        made = {k: getattr(x, v) if isinstance(v, str) else v for k, v in options.items()}
        return linattn.linear_attention(*x.qkv, phi, **made)

    CALLS[f"linear_attention {name}"] = work


attend("full")
attend("causal", is_causal=True)
attend("full, mask, state, norm", key_mask="mask", return_state=True, return_log_normalizer=True)
attend(
    "causal, mask, state, norm",
    is_causal=True,
    key_mask="mask",
    return_state=True,
    return_log_normalizer=True,
)
attend("full, elu", ELU)
attend("causal, elu", ELU, is_causal=True, return_state=True)


def at_precision(precision: str, x: Inputs) -> Any:
    with linattn.config(precision=precision):
        return linattn.linear_attention(*x.qkv, FAVOR, is_causal=True, return_state=True)


CALLS |= {f"precision_{name}": partial(at_precision, name) for name in ("float64", "tf32")}


@call
def attention(x):
    return (
        linattn.attention(*x.qkv, rng=0),
        linattn.attention(*x.qkv, tolerance=0.5, rng=0, return_report=True),
        linattn.attention(*x.qkv, is_causal=True, key_mask=x.mask, rng=0),
    )


@call
def attention_of_a_long_sequence(x):
    long = [x.array(1, 1024, 16) for _ in range(3)]
    with uncomputed(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of errors that are any number
        return (
            linattn.attention(*long, tolerance=None, rng=0),
            linattn.attention(*long, is_causal=True, tolerance=None, rng=0, return_report=True),
        )


def pulled(function, x, *args, **options):
    output, pullback = function(*x.qkv, *args, **options)
    return output, pullback(output)


@call
def linear_attention_vjp(x):
    full = pulled(linattn.linear_attention_vjp, x, FAVOR, key_mask=x.mask)
    causal = pulled(linattn.linear_attention_vjp, x, FAVOR, is_causal=True)
    return full, causal, pulled(linattn.linear_attention_vjp, x, ELU, is_causal=True)


@call
def decoder(x):
    stream = linattn.Decoder(FAVOR, x.state())
    outputs = [stream.step(*x.token) for _ in range(3)]
    other = copy.deepcopy(stream)
    with linattn.without_backends():
        generic = linattn.Decoder(FAVOR, x.state())
        rest = generic.step(*x.token), generic.step(*x.token), generic.state
    return outputs, stream.state, other.step(*x.token), other.state, rest


@call
def saved_state(x):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.npz"
        linattn.save_state(path, x.state(), FAVOR)
        state = linattn.load_state(path, FAVOR, like=x.token[0])
    return state, linattn.read_state(x.qkv[0], state, FAVOR)


@call
def coreset(x):
    stream = linattn.CoresetAttention(16, block_size=16, rng=0)
    outputs = stream.extend(*x.qkv, key_mask=x.mask), stream.step(*x.token)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "coreset.npz"
        stream.save(path)
        loaded = linattn.CoresetAttention.load(path, like=x.token[0])
    return outputs, loaded.step(*x.token)


@call
def landmarks(x):
    query, key, value = (array[..., :16] for array in x.qkv)
    results = []
    for corrected in (False, True):
        phi = LandmarkFeatures.fit(
            query, key, num_features=16, key_mask=x.mask, corrected=corrected, rng=0
        )
        results.append(linattn.linear_attention(query, key, value, phi, key_mask=x.mask))
    window = LandmarkFeatures.fit(query, key, num_features=16, rng=0)
    results.append(linattn.linear_attention(query, key, value, window, exact_window=32))
    drawn = LandmarkFeatures.sample(query, key, num_features=16, rng=0)
    return results, linattn.linear_attention(query, key, value, drawn)


@call
def calibrated(x):
    query, key, value = (array[..., :16] for array in x.qkv)
    maps = [
        CalibratedFeatures.calibrate([(query, key)], num_features=16, rng=0),
        CalibratedFeatures.calibrate(
            [(query, key, value)], num_features=16, learn=True, num_steps=2, rng=0
        ),
        DenseExponentialFeatures.calibrate([(query, key)], num_features=16, rng=0),
        DenseExponentialFeatures.fit(query, key, num_features=16, rng=0),
        GeneralizedExponentialFeatures.fit(query, key, num_features=16, rng=0),
    ]
    return [linattn.linear_attention(query, key, value, phi) for phi in maps]


@call
def redrawn(x):
    outputs = []
    for seed in range(2):
        phi = FAVOR.redraw(seed)
        outputs.append(linattn.linear_attention(*x.qkv, phi))
    return outputs, linattn.linear_attention(*x.qkv, pickle.loads(pickle.dumps(FAVOR)))


@call
def diagnostics_of_a_map(x):
    query, key, _ = x.qkv
    return (
        diagnostics.relative_variance(query, key, FAVOR, key_mask=x.mask),
        diagnostics.recommend_num_features(query, key, FAVOR, tolerance=0.1),
        diagnostics.attended_norms(query, key, is_causal=True),
        diagnostics.denominators(query, key, FAVOR, is_causal=True),
        diagnostics.attention_weights(query, key, FAVOR, rows=[3], is_causal=True),
        diagnostics.attention_weights(query, key, rows=slice(0, 2)),
    )


@call
def diagnostics_of_an_output(x):
    query, key, value = x.qkv
    return (
        diagnostics.held_out_error(value, query=query, key=key, value=value, is_causal=True, rng=0),
        diagnostics.output_error(query, x.state(), FAVOR),
        diagnostics.effective_features(query, x.state(), FAVOR),
    )


def of_a_map(phi: Any, x: Inputs) -> Any:
    query, key, value = (array[..., :DIM_OF_MAPS] for array in x.qkv)
    results = [linattn.linear_attention(query, key, value, phi, return_state=True)]
    results.append(linattn.read_state(query, results[0][1], phi))
    if getattr(phi, "causal", True):
        results.append(linattn.linear_attention(query, key, value, phi, is_causal=True))
        token = (query[..., 3, :], key[..., 3, :], value[..., 3, :])
        results.append(linattn.decode_step(*token, results[0][1], phi))
    for name in ("query_features", "key_features"):
        results.append(getattr(phi, name)(query))
    for name in ("kernel", "estimate", "mean", "variance"):
        try:
            results.append(getattr(phi, name)(query, key))
        except NotImplementedError:  # no closed form is known
            results.append(name)
    return results


CORE = [name for name in CALLS if name.startswith(("linear_attention", "decoder", "precision"))]
"""Calls that are tried in all dtypes: what kernels do."""

MAPS = EVERY | {"cosformer": CosformerFeatures(DIM_OF_MAPS, max_length=2 * LENGTH)}
CALLS |= {f"map: {name}": partial(of_a_map, phi) for name, phi in MAPS.items()}


def tree(result: Any) -> Any:
    """Structure of a result: shapes and dtypes of arrays; reports on numbers may hold None."""
    if isinstance(result, cupy.ndarray | np.ndarray):
        return tuple(result.shape), str(result.dtype)
    if isinstance(result, tuple | list):
        return type(result).__name__, [tree(one) for one in result]
    return None


def arrays_of(result: Any) -> Iterator[Any]:
    if isinstance(result, cupy.ndarray):
        yield result
    elif isinstance(result, tuple | list):
        for one in result:
            yield from arrays_of(one)


def on_host(dtype: str) -> Inputs:
    return Inputs(np.asarray, dtype)


def on_device(number: int, dtype: str) -> Inputs:
    def make(host: Any) -> Any:
        with cupy.cuda.Device(number):
            return cupy.asarray(host)

    return Inputs(make, dtype)


def test_a_place_can_be_hashed_and_is_of_one_stream():
    array = cupy.zeros(3)
    xp = _arrays.namespace(array)
    place = _arrays.place(xp, array.device)
    assert {place} == {_arrays.place(xp, array.device)}
    with cupy.cuda.Stream():
        assert _arrays.place(xp, array.device) != place


BOUNDS = {"float16": 2e-2, "bfloat16": 5e-2, "float32": 2e-4, "float64": 1e-9}
"""Of the norm of the difference over the norm; NumPy's own results are rounded too."""

CHOSEN = {"attention", "attention_of_a_long_sequence", "coreset", "diagnostics_of_an_output"}
"""Calls that choose by comparing numbers, which rounding may decide."""


def agree(found: Any, wanted: Any, bound: float) -> None:
    if isinstance(found, State):  # a state's scale is its own affair
        pair = [(cupy.asnumpy(x.kvz), cupy.asnumpy(x.log_scale)) for x in (found, wanted)]
        top = max(log_scale.max(initial=-1e3) for _, log_scale in pair)
        found, wanted = (kvz * np.exp(log_scale - top)[..., None] for kvz, log_scale in pair)
    if isinstance(found, cupy.ndarray | np.ndarray):
        found, wanted = (np.asarray(cupy.asnumpy(x)).astype(np.float64) for x in (found, wanted))
        seen = np.isfinite(wanted)
        np.testing.assert_array_equal(found[~seen], wanted[~seen])
        error = np.linalg.norm(found[seen] - wanted[seen])
        assert error <= bound * max(np.linalg.norm(wanted[seen]), 1e-2)
    elif isinstance(found, tuple | list):
        for x, y in zip(found, wanted, strict=True):
            agree(x, y, bound)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in CALLS),
        *((name, dtype) for name in CORE for dtype in ("bfloat16", "float16", "float64")),
    ],
)
def test_every_public_function(recorded, name, dtype):
    """All its work, memory and results are on the device of the arrays, and it is right."""
    device = int(dtype == "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = CALLS[name](on_host(dtype))
    assert cupy.cuda.Device().id == 0
    with recorded() as log, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = CALLS[name](on_device(device, dtype))
    assert tree(found) == tree(wanted)
    if name not in CHOSEN:
        bound = BOUNDS[dtype]
        agree(found, wanted, max(bound, 2e-3) if name == "precision_tf32" else bound)
    assert {array.device.id for array in arrays_of(found)} <= {device}
    assert log.of("ERROR", "NOTE") == []
    assert log.devices == {device}
    assert cupy.cuda.Device().id == 0


class WithBfloat16:
    """The namespace of CuPy, with a dtype more."""

    bfloat16 = BF16

    def __getattr__(self, name: str) -> Any:
        return getattr(_arrays.namespace(cupy.zeros(1)), name)


DRAWN = {"linear": 24, "long": 8, "gradient": 16, "unseen": 12, "recurrence": 8}
DRAWN |= {"softmax": 12, "unseen_exact": 6}


@pytest.mark.parametrize(("kind", "seed"), [(k, i) for k, n in DRAWN.items() for i in range(n)])
def test_options_that_are_drawn(recorded, monkeypatch, kind, seed):
    """All options of attention together, against the dense formula of float64."""
    draw, check = test_fuzz_options.KINDS[kind]
    monkeypatch.setattr(test_fuzz_options, "library", lambda case: WithBfloat16())
    monkeypatch.setattr(test_fuzz_options, "host", lambda x: cupy.asnumpy(x).astype(np.float64))
    case = draw(seed)
    case.library = "cupy"
    with cupy.cuda.Device(1), recorded() as log, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(case)
    assert log.of("ERROR", "NOTE") == []
    assert log.devices <= {1}


# Streams, waits, graphs, threads -----------------------------------------------------------------


FUSED = [name for name in CALLS if name.startswith("linear_attention ")]
"""Calls that kernels do whole in 16 bits."""


class Held:
    """Inputs that are made once, so that a call of them makes nothing but its results."""

    def __init__(self, x: Inputs) -> None:
        self.qkv, self.token, self.mask = x.qkv, x.token, x.mask


def held(dtype: str, work: Callable[[Any], Any]) -> Callable[[], Any]:
    return partial(work, Held(on_device(0, dtype)))


def stepper(dtype: str) -> Callable[[], Any]:
    x = on_device(0, dtype)
    decoder = linattn.Decoder(FAVOR, x.state())
    token = x.token
    return lambda: decoder.step(*token)


def single_step(dtype: str) -> Callable[[], Any]:
    x = on_device(0, dtype)
    state, token = x.state(), x.token
    return lambda: linattn.decode_step(*token, state, FAVOR)


QUIET = [
    *(pytest.param(partial(held, d, CALLS[n]), id=f"{n}-{d}") for n in FUSED for d in HALVES),
    *(
        pytest.param(partial(f, d), id=f"{f.__name__}-{d}")
        for f in (stepper, single_step)
        for d in (*HALVES, "float32")
    ),
]
FLOAT32 = ["linear_attention full", "linear_attention causal"]
"""float32 that goes by kernels and cuBLAS."""


@pytest.mark.parametrize(
    "make",
    [
        *QUIET,
        *(pytest.param(partial(held, "float32", CALLS[n]), id=f"{n}-float32") for n in FLOAT32),
    ],
)
def test_a_warm_call_never_waits(recorded, make):
    """All its work is in the current stream, and nothing comes from the host but arguments."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        work = make()
        work()
        with recorded() as log:
            work()
    assert log.of("ERROR", "NOTE") == []
    assert log.waits == log.pageable == []
    launches = log.of("LAUNCH", "GEMM", "FILL")
    assert launches
    assert all(f" stream {stream.ptr:#x}" in line for line in launches)


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_wait_once_for_their_flag(recorded, dtype):
    with cupy.cuda.Stream(non_blocking=True):
        query, key, value = on_device(0, dtype).qkv
        output, pullback = linattn.linear_attention_vjp(query, key, value, FAVOR, is_causal=True)
        pullback(output)
        with recorded() as log:
            pullback(output)
    assert len(log.waits) == 1
    assert log.pageable == []


@pytest.mark.parametrize("make", QUIET)
def test_a_captured_call(recorded, make):
    with cupy.cuda.Stream(non_blocking=True) as stream:
        work = make()
        with recorded() as log:
            call = linattn_cupy.capture(work)
        assert tree(call.output) == tree(work())
        assert len([line for line in log.of("LAUNCH") if " captured" in line]) > 0
        assert log.of("ERROR", "NOTE") == []
        for array in arrays_of(call.output):
            array[...] = 0
        with recorded() as log:
            call.launch()
        if make.func is not stepper:  # a decoder has gone on
            agree(call.output, work(), 0.0)
    assert log.lines == [f"GRAPH launched in stream {stream.ptr:#x}"]


def test_what_a_graph_writes_is_nobody_elses(recorded):
    """Arrays that are made later lie elsewhere, of whatever size."""
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc), cupy.cuda.Stream():
        query, key, value = on_device(0, "bfloat16").qkv
        arguments = {array.data.ptr for array in (query, key, value)}
        with recorded() as log:
            call = linattn_cupy.capture(
                linattn.linear_attention, query, key, value, FAVOR, is_causal=True
            )
        assert call.output.data.ptr in log.written - arguments
        sizes = (2**p for p in range(9, 22))
        later = [cupy.empty(size, np.uint8) for size in sizes for _ in range(20)]
        own = log.written - arguments
    shared = [a for a in later if any(a.data.ptr <= p < a.data.ptr + a.nbytes for p in own)]
    assert len(own) > 3
    assert shared == []


@pytest.mark.parametrize(
    ("dtype", "work", "said"),
    [
        ("float32", "linear_attention full", "cuBLAS"),
        ("float32", "linear_attention causal", "cuBLAS"),
        ("float64", "linear_attention full", "cuBLAS|waits"),
        ("bfloat16", "linear_attention_vjp", "transfers"),
    ],
)
def test_what_cannot_be_captured_says_so(dtype, work, said):
    with cupy.cuda.Stream() as stream:
        with pytest.raises(RuntimeError, match=rf"function must be a call that .*got '.*({said})"):
            linattn_cupy.capture(held(dtype, CALLS[work]))
        # The stream is as before.
        assert not stream.is_capturing()
        assert linattn_cupy.capture(stepper("float32")).output is not None


def test_errors_of_a_captured_call_are_its_own():
    results = iter([1, 0])
    with cupy.cuda.Stream() as stream:
        with pytest.raises(ZeroDivisionError):
            linattn_cupy.capture(lambda: 1 // next(results))
        assert not stream.is_capturing()


def test_the_default_stream_is_not_captured():
    with pytest.raises(RuntimeError, match="current stream must be one that can be captured"):
        linattn_cupy.capture(held("bfloat16", CALLS["linear_attention causal"]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_with_streams_of_their_own(recorded, dtype):
    """Each thread has its own current device and stream."""
    names = ["linear_attention causal", "decoder", "linear_attention_vjp", "map: elu"]

    def work(i: int) -> list[Any]:
        with cupy.cuda.using_allocator(None), cupy.cuda.Stream(non_blocking=True):
            return [tree(CALLS[names[(i + j) % 4]](on_device(i % 2, dtype))) for j in range(4)]

    with recorded() as log, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    assert log.of("ERROR", "NOTE") == []
    for i in range(1, 4):
        assert found[i] == found[0][i:] + found[0][:i]
