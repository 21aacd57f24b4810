"""Whether two revisions give the same bits: a refactoring must.

    python -m benchmarks.same_bits [BEFORE] [AFTER] [--quick] [--only TEXT]

BEFORE and AFTER are checkouts (folders) or git revisions, which are checked out into temporary
worktrees; by default the merge base with ``main`` (on ``main`` itself: its parent) and this
checkout. Each runs the same list of problems, by public names only, in a process of its own. Names
of the problems that differ are printed with their largest relative difference, and the exit code
is then 1. ``--quick`` runs every tenth problem, ``--only`` those with a text in their names.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn import feature_maps as maps
from linattn import sampling

HERE = Path(__file__).resolve().parent.parent
DTYPES = ("float16", "float32", "float64")
DIM, VALUE_DIM = 16, 12
STRICT = importlib.util.find_spec("array_api_strict") is not None

Thunk = Callable[[], Any]

api: Any = linattn
"""Overloads take no starred arguments."""


def feature_maps() -> dict[str, Any]:
    """Every shipped map, and the branches within one."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((DIM, DIM)) / DIM
    sample = 0.7 * rng.standard_normal((2, 96, DIM))
    positive = maps.PositiveFeatures(DIM, 64, rng=0)
    return {
        "positive": positive,
        "positive300": maps.PositiveFeatures(DIM, 300, rng=0),
        "hyperbolic": maps.HyperbolicFeatures(DIM, 64, rng=0),
        "generalized": maps.GeneralizedExponentialFeatures(DIM, 64, A=-0.05, rng=0),
        "dense": maps.DenseExponentialFeatures(
            DIM, 64, A=-0.1 * rng.random(DIM), transform=np.eye(DIM) + matrix / 4, rng=0
        ),
        "trigonometric": maps.TrigonometricFeatures(DIM, 64, rng=0),
        "fourier": maps.RandomFourierFeatures(DIM, 64, bandwidth=3.0, rng=0),
        "fourier-normalized": maps.RandomFourierFeatures(DIM, 64, normalize=True, rng=0),
        "relu": maps.ActivationFeatures(DIM, 48, activation="relu", rng=0),
        "heaviside": maps.ActivationFeatures(DIM, 48, activation="heaviside", rng=0),
        "squared_relu": maps.ActivationFeatures(DIM, 48, activation="squared_relu", rng=0),
        "elu": maps.EluFeatures(scale=0.5),
        "relu-plain": maps.ReluFeatures(),
        "softmax-features": maps.SoftmaxFeatures(),
        "taylor": maps.TaylorFeatures(DIM),
        "polynomial": maps.PolynomialFeatures(DIM),
        "cosformer": maps.CosformerFeatures(DIM, max_length=4096),
        "hedgehog": maps.HedgehogFeatures(matrix[:8] * 4),
        "calibrated": maps.CalibratedFeatures.calibrate(
            [(sample[0], sample[1])], num_features=24, rng=0
        ),
        "landmarks": maps.LandmarkFeatures.fit(sample[0], sample[1], num_features=24, rng=0),
        "corrected": maps.LandmarkFeatures.fit(
            sample[0], sample[1], num_features=24, num_probes=64, corrected=True, rng=0
        ),
        "reparametrized": maps.Reparametrized(
            positive, rng.standard_normal(DIM) / 8, rng.standard_normal(DIM) / 8
        ),
    }


def inputs(
    length: int = 200,
    lead: tuple[int, ...] = (2,),
    key_lead: tuple[int, ...] | None = None,
    keys: int | None = None,
    scale: float = 1.0,
    dtype: str = "float32",
) -> Any:
    """Query, key and value; a scale that changes along the sequence."""
    rng = np.random.default_rng(1)
    key_lead = lead if key_lead is None else key_lead
    keys = length if keys is None else keys
    shapes = (*lead, length, DIM), (*key_lead, keys, DIM), (*key_lead, keys, VALUE_DIM)
    query, key, value = (rng.standard_normal(shape) for shape in shapes)
    slope = np.linspace(0.5, 1, keys)[:, None]
    return (
        (scale * query).astype(dtype),
        (scale * slope * key).astype(dtype),
        value.astype(dtype),
    )


def gradients(result: tuple[Any, Callable[..., Any]], with_state: bool = False) -> Any:
    """Output and gradients of something like its square."""
    output, pullback = result
    if with_state:
        output, state = output
        return output, state, pullback(output, state.kvz + 1)
    return output, pullback(output)


def problems() -> Iterator[tuple[str, Thunk]]:
    """Names, and what is called; the order of a name's parts is that of a search."""
    for name, feature_map in feature_maps().items():
        yield from _of_map(name, feature_map)
    yield from _of_softmax()
    yield from _of_streams()
    yield from _of_other_callers()


def _of_map(name: str, phi: Any) -> Iterator[tuple[str, Thunk]]:
    attend, vjp = api.linear_attention, api.linear_attention_vjp
    for dtype in DTYPES:
        x = inputs(dtype=dtype)
        for mode, causal in (("full", False), ("causal", True)):
            tag = f"{name} {dtype} {mode}"

            def forward(x: Any = x, causal: bool = causal) -> Any:
                return attend(
                    *x, phi, is_causal=causal, return_state=True, return_log_normalizer=True
                )

            def backward(x: Any = x, causal: bool = causal) -> Any:
                return gradients(vjp(*x, phi, is_causal=causal))

            yield tag, forward
            yield f"{tag} vjp", backward
            if dtype != "float16":
                yield f"{tag} generic", generic(forward)
                yield f"{tag} generic vjp", generic(backward)
            if dtype == "float64" and STRICT:
                yield f"{tag} strict", partial(forward, strict(x))
        yield f"{name} {dtype} decode", partial(decode, x, phi)
        yield f"{name} {dtype} stream", partial(stream, x, phi)
        yield f"{name} {dtype} stream generic", generic(partial(stream, x, phi))
    yield from _of_shapes(name, phi)


def _of_shapes(name: str, phi: Any) -> Iterator[tuple[str, Thunk]]:
    """Give one map masks, shapes, scales and options, in float32."""
    attend, vjp = api.linear_attention, api.linear_attention_vjp
    single = inputs()
    mask = np.random.default_rng(2).random((2, 200)) > 0.3
    for mode, causal in (("full", False), ("causal", True)):
        for tag, arrays, options in (
            ("masked", single, {"key_mask": mask}),
            ("chunk33", single, {"chunk_size": 33}),
            ("chunk1000", single, {"chunk_size": 1000}),
            ("gqa", inputs(lead=(2, 4), key_lead=(2, 1)), {}),
            ("large", inputs(scale=12.0), {}),
            ("small", inputs(scale=1e-3), {}),
            ("one-token", inputs(length=1), {}),
            ("few-heads", inputs(length=24, lead=(2, 3)), {}),
            ("several", inputs(length=700, lead=(4,)), {}),
            ("long", inputs(length=2100, lead=()), {}),
        ):

            def forward_to(
                arrays: Any = arrays, options: Any = options, causal: bool = causal
            ) -> Any:
                return attend(*arrays, phi, is_causal=causal, **options)

            def backward_to(
                arrays: Any = arrays, options: Any = options, causal: bool = causal
            ) -> Any:
                return gradients(vjp(*arrays, phi, is_causal=causal, **options))

            yield f"{name} float32 {mode} {tag}", forward_to
            yield f"{name} float32 {mode} {tag} vjp", backward_to
            if tag in ("several", "long"):
                yield f"{name} float32 {mode} {tag} threads1", threads(1, forward_to)
                yield f"{name} float32 {mode} {tag} threads2 vjp", threads(2, backward_to)
            if tag in ("gqa", "masked", "large"):
                yield f"{name} float32 {mode} {tag} generic", generic(forward_to)
                yield f"{name} float32 {mode} {tag} generic vjp", generic(backward_to)
        yield (
            f"{name} float32 {mode} state vjp",
            partial(with_state, single, phi, causal),
        )
        yield (
            f"{name} float32 {mode} window",
            partial(attend, *single, phi, is_causal=causal, exact_window=32),
        )
        yield (
            f"{name} float32 {mode} precise",
            precise(partial(attend, *single, phi, is_causal=causal)),
        )


def part(x: Any, *index: Any) -> Any:
    """Take some tokens of query, key and value."""
    return tuple(array[(..., *index, slice(None))] for array in x)


def with_state(x: Any, phi: Any, causal: bool) -> Any:
    """Attend to a second part of a sequence, and pull back into the state before it."""
    _, state = api.linear_attention(*part(x, slice(60)), phi, is_causal=causal, return_state=True)
    return gradients(
        api.linear_attention_vjp(
            *part(x, slice(60, None)),
            phi,
            is_causal=causal,
            initial_state=state,
            return_state=True,
        ),
        with_state=True,
    )


def decode(x: Any, phi: Any) -> Any:
    """Take a prompt, and steps in both ways."""
    output, state = api.linear_attention(
        *part(x, slice(40)), phi, is_causal=True, return_state=True
    )
    decoder = api.Decoder(phi, state)
    found = [output]
    for i in range(40, 46):
        output, state = api.decode_step(*part(x, i), state, phi)
        found += [output, decoder.step(*part(x, i))]
    return found, state


def stream(x: Any, phi: Any) -> Any:
    """Update two states, merge and read them."""
    query, key, value = x
    empty = api.init_state(phi, VALUE_DIM, batch_shape=key.shape[:-2], like=key)
    first = api.update_state(empty, key[..., :90, :], value[..., :90, :], phi)
    second = api.update_state(empty, key[..., 90:, :], value[..., 90:, :], phi)
    merged = api.merge_states(first, second)
    return first, second, merged, api.read_state(query, merged, phi)


def _of_softmax() -> Iterator[tuple[str, Thunk]]:
    attend, vjp = api.softmax_attention, api.softmax_attention_vjp
    mask = np.random.default_rng(2).random((2, 200)) > 0.3
    for dtype in DTYPES:
        for mode, causal in (("full", False), ("causal", True)):
            for tag, x, options in (
                ("", inputs(dtype=dtype), {}),
                ("masked", inputs(dtype=dtype), {"key_mask": mask}),
                ("gqa", inputs(lead=(2, 4), key_lead=(2, 1), dtype=dtype), {}),
                ("large", inputs(scale=12.0, dtype=dtype), {}),
                ("long", inputs(length=1500, lead=(), dtype=dtype), {"scale": 0.3}),
            ):

                def forward(x: Any = x, options: Any = options, causal: bool = causal) -> Any:
                    return attend(*x, is_causal=causal, **options)

                def backward(x: Any = x, options: Any = options, causal: bool = causal) -> Any:
                    return gradients(vjp(*x, is_causal=causal, **options))

                name = f"softmax {dtype} {mode} {tag}".rstrip()
                yield name, forward
                yield f"{name} vjp", backward
                yield f"{name} generic", generic(forward)
                yield f"{name} generic vjp", generic(backward)
                yield f"{name} threads2", threads(2, forward)
                if dtype == "float64" and STRICT:
                    yield f"{name} strict", partial(forward, strict(x))


def _of_streams() -> Iterator[tuple[str, Thunk]]:
    def through_coreset(x: Any, seed: int) -> Any:
        coreset = api.CoresetAttention(16, block_size=8, rng=seed)
        prompt = coreset.extend(*part(x, slice(100)))
        return [prompt, *(coreset.step(*part(x, i)) for i in range(100, 120))]

    for dtype in DTYPES:
        yield f"coreset {dtype}", partial(through_coreset, inputs(dtype=dtype), 0)
        yield f"coreset {dtype} generic", generic(partial(through_coreset, inputs(dtype=dtype), 1))


def _of_other_callers() -> Iterator[tuple[str, Thunk]]:
    for dtype in ("float32", "float64"):
        for tolerance in (None, 0.05, 0.5):
            yield (
                f"automatic {dtype} tolerance {tolerance}",
                partial(
                    api.attention, *inputs(length=600, dtype=dtype), tolerance=tolerance, rng=0
                ),
            )
    for name, sampler in sorted(sampling.SAMPLERS.items()):
        yield f"sampler {name}", partial(sampler.draw, 40, DIM, np.random.default_rng(0))


# How a problem is run -----------------------------------------------------------------------------


def within(context: Callable[[], Any], thunk: Thunk) -> Thunk:
    """Put a call inside a context."""

    def run() -> Any:
        with context():
            return thunk()

    return run


def generic(thunk: Thunk) -> Thunk:
    """Without a backend."""
    return within(linattn.without_backends, thunk)


def threads(number: int, thunk: Thunk) -> Thunk:
    """On so many threads."""
    return within(lambda: linattn.config(num_threads=number), thunk)


def precise(thunk: Thunk) -> Thunk:
    """Accumulated in float64."""
    return within(lambda: linattn.config(precision="float64"), thunk)


def strict(arrays: Any) -> Any:
    """As arrays of array-api-strict."""
    import array_api_strict

    return tuple(array_api_strict.asarray(array) for array in arrays)


def arrays_of(result: Any) -> Iterator[NDArray[Any]]:
    """Yield all arrays and numbers of a result in order."""
    if isinstance(result, tuple | list):
        for part in result:
            yield from arrays_of(part)
    elif result is not None:
        yield np.asarray(result)


def run_problems(out: str, step: int, only: str) -> None:
    """Run the problems on the ``linattn`` that is imported, and save what they return."""
    print(f"{linattn.__file__}", flush=True)
    found: dict[str, NDArray[Any]] = {}
    raised = 0
    chosen = [item for item in problems() if only in item[0]][::step]
    for name, thunk in chosen:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results = list(arrays_of(thunk()))
        except (
            Exception
        ) as error:  # what a map refuses (a causal mode, gradients) it must refuse on
            results, raised = [np.asarray(type(error).__name__)], raised + 1
        for index, array in enumerate(results):
            found[f"{name}#{index}"] = array
    print(f"{len(chosen)} problems, of which {raised} raise", flush=True)
    np.savez(out, **found)  # type: ignore[arg-type]


# Two checkouts ------------------------------------------------------------------------------------


@contextmanager
def checkout(source: str) -> Iterator[Path]:
    """Give the folder that is named, or a worktree of the revision for a while."""
    if (Path(source) / "linattn").is_dir():
        yield Path(source).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        place = str(Path(folder) / "checkout")
        git("worktree", "add", "--detach", place, source)
        try:
            yield Path(place)
        finally:
            git("worktree", "remove", "--force", place)


def git(*arguments: str) -> str:
    """Run git in this checkout."""
    done = subprocess.run(["git", *arguments], cwd=HERE, check=True, capture_output=True)
    return done.stdout.decode().strip()


def default_before() -> str:
    """Return the merge base with ``main``, or the parent where that is this commit."""
    base, head = git("merge-base", "main", "HEAD"), git("rev-parse", "HEAD")
    return "HEAD~1" if base == head else base


def results_of(place: Path, out: Path, options: argparse.Namespace) -> dict[str, NDArray[Any]]:
    """Run the problems in a process that imports the checkout's packages, and load the results."""
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join([str(place), str(place / "backends")])
    )
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--run", str(out)]
    command += ["--quick"] * options.quick + ["--only", options.only]
    done = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, encoding="utf-8", cwd=place
    )
    print(done.stdout, end="", flush=True)
    if not done.stdout.startswith(str(place)):
        raise RuntimeError(f"{place} must be what is imported, got {done.stdout.splitlines()[0]}")
    with np.load(out) as saved:
        return dict(saved)


def difference(before: NDArray[Any], after: NDArray[Any]) -> str | None:
    """Say what differs between two arrays; None where every bit is the same."""
    if "U" in (before.dtype.kind, after.dtype.kind):
        return None if str(before) == str(after) else f"{before} became {after}"
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return f"{before.dtype} {before.shape} became {after.dtype} {after.shape}"
    if before.tobytes() == after.tobytes():
        return None
    with np.errstate(all="ignore"):
        first, second = before.astype(float), after.astype(float)
        largest = np.max(np.abs(first[np.isfinite(first)]), initial=0)
        apart = np.nanmax(np.abs(first - second), initial=0) / largest
    return f"largest relative difference {apart:.1e}"


def compare(before: dict[str, NDArray[Any]], after: dict[str, NDArray[Any]]) -> list[str]:
    """Return one line for each problem that differs."""
    found: dict[str, str] = {}
    for name in dict.fromkeys([*before, *after]):
        if name not in before or name not in after:
            what: str | None = f"result {name.partition('#')[2]} in one of them only"
        else:
            what = difference(before[name], after[name])
        if what is not None:
            found.setdefault(name.partition("#")[0], what)
    return [f"{name}: {what}" for name, what in found.items()]


def main() -> int:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("before", nargs="?", help="folder or git revision")
    parser.add_argument("after", nargs="?", default=str(HERE), help="folder or git revision")
    parser.add_argument("--quick", action="store_true", help="a tenth of the problems")
    parser.add_argument("--only", default="", help="problems with this text in their names")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_problems(options.run, 10 if options.quick else 1, options.only)
        return 0
    sides = (options.before or default_before(), options.after)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for index, source in enumerate(sides):
            with checkout(source) as place:
                results.append(results_of(place, Path(folder) / f"{index}.npz", options))
    lines = compare(*results)
    print("\n".join(lines) if lines else f"the same bits: {len(results[0])} arrays")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
