"""What the tests share: every array library (`xp`) and hypothesis strategies (`draws`).

`calls` counts the branches that the NumPy backend takes.

For CUDA kernels, without a GPU: `gpu` and `recorded` say what the real CuPy launches on the fake
GPU, which interprets them; `nvrtc` and `compile_kernel` compile them.

A test that takes `xp` runs once per array library: NumPy's arrays are read-only where its backend
is on, array-api-strict's are on a device that is not the default one. A test that draws its shapes
takes `xp_any_shape` instead: NumPy with its backend and without, and array-api-strict; the others
would compile or build a graph anew for each shape::

    @given(data=st.data())
    def test_something(xp_any_shape, draws, data):
        xp = xp_any_shape
        case = data.draw(draws.cases())
        query = xp.array(case.query, "float32")
        ...
        xp.assert_like(out, query, shape=case.output_shape)
        numpy.testing.assert_allclose(xp.numpy(out), expected)
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes

# Assertions in modules that tests import say as much as those of the tests.
pytest.register_assert_rewrite("tests.attentions", "tests.command", "tests.dask_arrays")

# The libraries of `xp` hold nothing that one example could change for the next.
_shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.register_profile("ci", _shared, derandomize=True, max_examples=10)
settings.register_profile("fresh", _shared, max_examples=200, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)

# JAX compiles for every shape what then runs once, in these processes and those that tests start.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Half of that time goes into fused kernels. XLA ends a process for a flag that it does not know.
with suppress(importlib.metadata.PackageNotFoundError):
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

# What JAX alone can show: tracing, states as pytrees, its dtypes, attention against the oracle.
JAX_FILES = {
    "test_attention.py",
    "test_benchmarks.py",
    "test_dispatch.py",
    "test_home.py",
    "test_interop.py",
    "test_layers_hybrids.py",
    "test_readme.py",
    "test_reparametrized.py",
    "test_state.py",
    "test_support.py",
    "test_window.py",
}

# Cases of those that JAX would compile anew, for what others show.
JAX_REPEATS = {"float64", "unprojected"}

# The subset `pytest -m quick`: what most changes break first, in half a minute on two cores.
QUICK_FILES = {
    "test_decoding.py",
    "test_files.py",
    "test_landmarks.py",
    "test_public_api.py",
    "test_reference.py",
    "test_robustness.py",
    "test_state.py",
}


# Subsets that are whole files: `-m` with one of these reads no other.
SUBSETS = {
    "quick": {*QUICK_FILES, "test_fuzz_options.py"},
    "fuzz": {"test_fuzz_options.py"},
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave other test files unread where only a subset is wanted."""
    wanted, name = config.option.markexpr, collection_path.name
    if not name.startswith("test_") or not name.endswith(".py"):
        return None
    for subset in wanted.split(" or "):
        if subset == "frameworks":
            text = collection_path.read_text(encoding="utf-8")
            is_in = re.search(r"\b(xp|frameworks)\b", text) is not None
        else:
            is_in = subset not in SUBSETS or name in SUBSETS[subset]
        if is_in:
            return None
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the subsets, and leave the fuzz to `-m fuzz` and JAX elsewhere to the profile `fresh`.

    JAX compiles each operation for each shape, seconds a test; Dask, which takes the same path
    without branches on data, is in all of them.
    """
    for item in items:
        if item.path.name in QUICK_FILES and not {"torch", "jax", "dask"} & _libraries(item):
            item.add_marker("quick")
    fuzz = {item for item in items if item.get_closest_marker("fuzz")}
    unread = {item.path.name for item in fuzz} - SUBSETS["fuzz"]
    assert not unread, f"SUBSETS must have each file with a fuzz mark, got none of {unread}"
    slow = {item for item in items if _on_jax(item) and _is_left_out(item)}
    left_out = (set() if "fuzz" in config.option.markexpr else fuzz) | (
        set() if PROFILE == "fresh" else slow
    )
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _on_jax(item: pytest.Item) -> bool:
    return "jax" in _libraries(item)


def _is_left_out(item: pytest.Item) -> bool:
    return item.path.name not in JAX_FILES or bool(JAX_REPEATS & _libraries(item))


def _libraries(item: pytest.Item) -> set[str]:
    """Parts of the name of a test's case, among them that of its array library."""
    callspec = getattr(item, "callspec", None)
    return set() if callspec is None else set(callspec.id.split("-"))


@dataclass(frozen=True)
class ArrayLibrary:
    """One array library on one device, as the tests see it.

    Attributes
    ----------
    name : str
        The fixture's parameter, for instance "array-api-strict".
    xp : module
        The library's array-api-compat namespace.
    compiled : callable
        JAX's jit, and nothing elsewhere. For a second test of what another runs eagerly: JAX
        compiles each operation of an eager call, which takes several times as long.
    """

    name: str
    xp: ModuleType
    _make: Callable[[npt.NDArray[Any]], Any]
    _fetch: Callable[[Any], npt.NDArray[Any]]
    _evaluate: Callable[[Iterable[Any]], Iterable[Any]] = iter
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function

    def array(self, array: npt.ArrayLike, dtype: str | None = None) -> Any:
        """Return a copy of a NumPy array in this library, with the dtype of that name."""
        host = np.array(array)
        name = host.dtype.name if dtype is None else dtype
        wanted = self.dtype(name)
        if name == "bfloat16":
            return self.xp.astype(self._make(host.astype(np.float32)), wanted)
        return self._make(host.astype(name, copy=False))

    def numpy(self, array: Any) -> npt.NDArray[Any]:
        """Return a NumPy copy; bfloat16, which NumPy lacks, becomes float32."""
        if str(array.dtype).endswith("bfloat16"):
            array = self.xp.astype(array, self.xp.float32)
        return np.array(self._fetch(array))

    def numpy_each(self, arrays: Iterable[Any]) -> list[npt.NDArray[Any]]:
        """Return NumPy copies of several results; a lazy library computes once what they share."""
        return [self.numpy(array) for array in self._evaluate(arrays)]

    def dtype(self, name: str) -> Any:
        """Return this library's dtype of that name; skip the test where it has none."""
        if name != "bfloat16":
            np.dtype(name)
        if name in {"float16", "bfloat16"} and not hasattr(self.xp, name):
            pytest.skip(f"{self.name}: the library has no {name}")
        return getattr(self.xp, name)

    def assert_like(
        self, array: Any, reference: Any, *, shape: tuple[int, ...] | None = None
    ) -> None:
        """Assert the namespace, type, dtype, device and shape of `reference`, or another shape."""
        assert array_api_compat.array_namespace(array) is self.xp
        assert array_api_compat.array_namespace(reference) is self.xp
        assert type(array) is type(reference)
        assert array.dtype == reference.dtype
        assert array_api_compat.device(array) == array_api_compat.device(reference)
        assert tuple(array.shape) == tuple(reference.shape if shape is None else shape)


def _library(
    name: str,
    make: Callable[[npt.NDArray[Any]], Any],
    fetch: Callable[[Any], npt.NDArray[Any]],
    evaluate: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> ArrayLibrary:
    xp = array_api_compat.array_namespace(make(np.zeros(1)))
    return ArrayLibrary(name, xp, make, fetch, evaluate)


def _numpy(name: str) -> ArrayLibrary:
    return _library(name, np.array, np.asarray)


def _numpy_read_only(name: str) -> ArrayLibrary:
    def make(host: npt.NDArray[Any]) -> npt.NDArray[Any]:
        array = np.array(host)
        array.flags.writeable = False
        return array

    return _library(name, make, np.asarray)


def _strict(name: str) -> ArrayLibrary:
    strict = _need("array_api_strict", name)
    device, host_device = strict.Device("device1"), strict.Device("CPU_DEVICE")
    return _library(
        name,
        lambda host: strict.asarray(host, device=device, copy=True),
        lambda array: np.asarray(array_api_compat.to_device(array, host_device)),
    )


def _torch(name: str) -> ArrayLibrary:
    torch = _need("torch", name)
    return _library(
        name, lambda host: torch.asarray(host, copy=True), lambda array: array.detach().numpy()
    )


def _jax(name: str) -> ArrayLibrary:
    jax = _need("jax", name)
    # Without it JAX makes float32 of every float64.
    jax.config.update("jax_enable_x64", True)
    library = _library(name, lambda host: jax.numpy.array(host), np.asarray)
    return replace(library, compiled=jax.jit)


def _cupy(name: str) -> ArrayLibrary:
    cupy = _need("cupy", name)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # without a driver CuPy raises errors of its own
        pytest.skip(f"{name}: no GPU: {error}")
    if not count:
        pytest.skip(f"{name}: no GPU")
    return _library(name, cupy.array, lambda array: np.asarray(array.get()))


def _dask(name: str) -> ArrayLibrary:
    dask, dask_array = _need("dask", name), _need("dask.array", name)

    def make(host: npt.NDArray[Any]) -> Any:
        # One chunk: test_dask.py cuts in every way what is done block by block.
        return dask_array.from_array(np.array(host), chunks=-1)

    def fetch(array: Any) -> npt.NDArray[Any]:
        # Dask computes only here, outside of the call in which linattn silences NumPy.
        with np.errstate(all="ignore"):
            return np.asarray(array.compute(scheduler="synchronous"))

    def evaluate(arrays: Iterable[Any]) -> Iterable[Any]:
        with np.errstate(all="ignore"):
            return tuple(dask.persist(*arrays, scheduler="synchronous"))

    return _library(name, make, fetch, evaluate)


def _need(module: str, name: str) -> Any:
    return pytest.importorskip(module, reason=f"{name}: {module} is not installed")


# The strictest of each: what may be written to, or lies on the default device, can do no less.
_LIBRARIES: dict[str, Callable[[str], ArrayLibrary]] = {
    "numpy": _numpy_read_only,
    "numpy-without-backends": _numpy,
    "array-api-strict": _strict,
    "dask": _dask,
}
_FRAMEWORKS: dict[str, Callable[[str], ArrayLibrary]] = {"torch": _torch, "jax": _jax}
_GPUS: dict[str, Callable[[str], ArrayLibrary]] = {"cupy": _cupy}


def _each(name: str, make: Callable[[str], ArrayLibrary] | None = None) -> Iterator[ArrayLibrary]:
    import linattn

    library = (make or (_LIBRARIES | _FRAMEWORKS | _GPUS)[name])(name)
    with linattn.without_backends() if name == "numpy-without-backends" else nullcontext():
        yield library


@pytest.fixture(
    params=[
        *_LIBRARIES,
        *(pytest.param(name, marks=pytest.mark.frameworks) for name in _FRAMEWORKS),
        *(pytest.param(name, marks=pytest.mark.gpu) for name in _GPUS),
    ]
)
def xp(request: pytest.FixtureRequest) -> Iterator[ArrayLibrary]:
    """Every array library that is installed, as an `ArrayLibrary`."""
    yield from _each(request.param)


@pytest.fixture(params=["numpy", "numpy-without-backends", "array-api-strict"])
def xp_any_shape(request: pytest.FixtureRequest) -> Iterator[ArrayLibrary]:
    """The array libraries that do not mind a new shape at each call; arrays may be written to."""
    yield from _each(request.param, _numpy if request.param == "numpy" else None)


@pytest.fixture(params=[True, False], ids=["backends", "generic"])
def numpy_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """NumPy with its backend, and on the generic path."""
    import linattn

    with nullcontext() if request.param else linattn.without_backends():
        yield


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs of attention, float64 NumPy, and how to call it."""

    query: npt.NDArray[np.float64]
    key: npt.NDArray[np.float64]
    value: npt.NDArray[np.float64]
    key_mask: npt.NDArray[np.bool_] | None
    is_causal: bool
    chunk_size: int | None
    scale: float
    seed: int

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Leading axes broadcast, then (L, e)."""
        leading = np.broadcast_shapes(*(a.shape[:-2] for a in (self.query, self.key, self.value)))
        return (*leading, self.query.shape[-2], self.value.shape[-1])

    def __repr__(self) -> str:
        mask = None if self.key_mask is None else self.key_mask.shape
        return (
            f"Case(query={self.query.shape}, key={self.key.shape}, value={self.value.shape}, "
            f"key_mask={mask}, is_causal={self.is_causal}, chunk_size={self.chunk_size}, "
            f"scale={self.scale}, seed={self.seed})"
        )


class Draws:
    """Strategies: they draw shapes, scales and an integer seed, never noise."""

    seeds = st.integers(0, 2**32 - 1)
    scales = st.sampled_from([1.0, 0.0, 0.01, 0.3, 3.0, 10.0])
    dims = st.integers(1, 9)

    @staticmethod
    def lengths(max_length: int = 70) -> st.SearchStrategy[int]:
        """Draw the length of a sequence: one in three is 0, 1 or 2."""
        longer = st.integers(3, max_length)
        return st.sampled_from([0, 1, 2]) | longer | longer

    @staticmethod
    def leading(number: int = 3) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
        """Draw the leading axes of so many arrays, at most two each, which broadcast."""
        shapes = mutually_broadcastable_shapes(num_shapes=number, max_dims=2, max_side=3)
        return shapes.map(lambda drawn: drawn.input_shapes)

    @staticmethod
    def chunks(length: int) -> st.SearchStrategy[int | None]:
        """Draw a chunk length: None, 1, or anything up to more than the whole."""
        return st.none() | st.just(1) | st.integers(1, length + 2)

    @staticmethod
    @st.composite
    def mask_shapes(draw: st.DrawFn, key_shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Draw None or a shape that `key_mask` may have beside a key of that shape."""
        kind = draw(st.sampled_from(["none", "one for all", "broadcast"]))
        if kind == "none":
            return None
        if kind == "one for all":
            return key_shape[-2:-1]
        return tuple(draw(st.sampled_from([n, 1])) for n in key_shape[:-1])

    @staticmethod
    @st.composite
    def cases(
        draw: st.DrawFn,
        is_causal: bool | None = None,
        masked: bool | None = None,
        dim: int | None = None,
        max_length: int = 70,
    ) -> Case:
        """Draw a whole `Case`; what is not None is given, not drawn."""
        if is_causal is None:
            is_causal = draw(st.booleans())
        leading = draw(Draws.leading())
        num_keys = draw(Draws.lengths(max_length))
        num_queries = num_keys if is_causal else draw(Draws.lengths(max_length))
        dim = draw(Draws.dims) if dim is None else dim
        scale, seed = draw(Draws.scales), draw(Draws.seeds)
        rng = np.random.default_rng(seed)
        query = scale * rng.standard_normal((*leading[0], num_queries, dim))
        key = scale * rng.standard_normal((*leading[1], num_keys, dim))
        value = rng.standard_normal((*leading[2], num_keys, draw(Draws.dims)))
        mask_shape = None if masked is False else draw(Draws.mask_shapes(key.shape))
        if masked and mask_shape is None:
            mask_shape = (num_keys,)
        key_mask = None
        if mask_shape is not None:
            key_mask = rng.random(mask_shape) < draw(st.sampled_from([0.5, 0.9, 0.0]))
        chunk_size = draw(Draws.chunks(max(num_queries, num_keys)))
        return Case(query, key, value, key_mask, is_causal, chunk_size, scale, seed)


@pytest.fixture(scope="session")
def draws() -> type[Draws]:
    """The strategies; a fixture because test files cannot import this one."""
    return Draws


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count how often the branches of the NumPy backend finish a block."""
    from linattn.typing import Declined
    from linattn_numpy import causal, states

    counts = {"unshifted": 0, "stabilized": 0, "generic": 0}

    def counted(module: ModuleType, name: str, branch: str) -> None:
        inner = getattr(module, name)

        def outer(*args: Any) -> Any:
            answer = inner(*args)
            declined = isinstance(answer, Declined)
            if not (declined and branch == "unshifted"):
                counts["generic" if declined else branch] += 1
            return answer

        monkeypatch.setattr(module, name, outer)

    counted(causal, "_scan_unshifted", "unshifted")
    counted(causal, "_scan_stabilized", "stabilized")
    counted(states, "_add_stabilized", "stabilized")
    counted(states, "_read_stabilized", "stabilized")
    return counts


TESTS = Path(__file__).resolve().parent
KERNELS = TESTS.parent / "backends" / "linattn_cupy" / "kernels"


def _load(path: Path) -> ModuleType:
    """Load a module that is no test; importlib mode puts none of them on the path."""
    spec = importlib.util.spec_from_file_location(f"linattn_tests_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def recorded() -> Callable[..., Any]:
    """`with recorded() as log:` is what the fake GPU was asked to do meanwhile."""
    recorder: Callable[..., Any] = _load(TESTS / "fake_gpu" / "log.py").recorded
    return recorder


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `Device`: the launches of linattn_cupy on the fake GPU, and limits to set."""
    from linattn_cupy import device
    from tests.fake_gpu.device import Device

    made = Device()
    made.install(monkeypatch)
    yield made
    device._kernel.cache_clear()  # what a launch may have depends on the limits


@pytest.fixture
def tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens a tile of float32, so that a block walks several."""
    from linattn_cupy import planning

    monkeypatch.setattr(planning, "TILE", 16)
    monkeypatch.setattr(planning, "CAUSAL_TILE", 16)


@pytest.fixture(autouse=True)
def nothing_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """On the fake GPU: each array has memory of its own, and the interpreter finds no fault."""
    if request.node.get_closest_marker("fake_gpu") is None:
        yield
        return
    import cupy

    findings = _load(TESTS / "fake_gpu" / "log.py").findings
    findings()
    with cupy.cuda.using_allocator(None):
        yield
    assert findings() == []


@pytest.fixture(scope="session")
def nvrtc() -> ModuleType:
    """The module `tests/nvrtc.py`: compile_kernel, Resources and CompilationError."""
    module = _load(TESTS / "nvrtc.py")
    try:
        importlib.metadata.version(module.DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{module.DISTRIBUTION} (extra test-kernels) is not installed")
    return module


@pytest.fixture(scope="session")
def compile_kernel(nvrtc: ModuleType) -> Callable[..., Any]:
    """`compile_kernel(source_path, options, arch)`, with the headers of linattn_cupy."""
    return partial(nvrtc.compile_kernel, include=KERNELS)
