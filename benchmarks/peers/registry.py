"""Every peer by name: where its code is, what it can do, what it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.peers.problem import Sizes

__all__ = ["ATTENTION", "DECODE", "GRADIENT", "LOOPS", "PEERS", "RATES", "TEXT", "Peer"]

ATTENTION = ("full", "causal")
DECODE = ("decode",)
GRADIENT = ("full gradient", "causal gradient")
TEXT = ("text",)
RATES = ("project", "sum", "read", "small", "exp")

LOOPS = ("numpy-loop", "numpy-loop-hyperbolic", "numpy-loop-elu")
"""Peers that linattn must never fall behind."""


class Peer(NamedTuple):
    """A peer.

    Attributes
    ----------
    label : str
        As tables show it.
    module : str
        The module of this package with ``prepare(name, kind, inputs)``.
    kinds : tuple of str
        What it can do.
    beside : str
        The peer of linattn that its time is divided by.
    feature_map : str, optional
        What :mod:`benchmarks.peers.limits` calls the map, for the peers that a limit is known of.
    is_quadratic : bool
        Whether its time grows with the square of the length.
    on_one_thread : bool
        Whether it is timed on one thread only.
    tolerance : float
        Relative error on the small input above which it is not timed.
    numbers_a_token : callable
        Numbers of workspace for each token and head: an estimate that decides what may run in the
        memory given, not a figure that is shown.
    """

    label: str
    module: str
    kinds: tuple[str, ...]
    beside: str
    feature_map: str | None = None
    is_quadratic: bool = False
    on_one_thread: bool = False
    tolerance: float = 1e-4
    numbers_a_token: Callable[[Sizes], float] = lambda sizes: 0.0


def _features(sizes: Sizes) -> float:
    """Features of queries and keys with their temporaries, all tokens at once."""
    return 8.0 * sizes.features


def _gradient_numbers(sizes: Sizes) -> float:
    """Features and states of all chunks, and as much again for their gradients."""
    return 2 * _features(sizes)


def _gradient_and_state_numbers(sizes: Sizes) -> float:
    """Add the states of all chunks of 128 tokens, as sums and as gradients."""
    return _gradient_numbers(sizes) + 4.0 * sizes.features * sizes.dim / 128


def _gradient_and_sum_numbers(sizes: Sizes) -> float:
    """Add the running sums after each token, which a scan keeps to be differentiated."""
    return _gradient_numbers(sizes) + 2.0 * sizes.features * sizes.dim


def _features_and_states(sizes: Sizes) -> float:
    # performer-pytorch cuts any sequence into 128 parts and keeps a state for each token of one.
    return _features(sizes) + 4.0 * sizes.features * sizes.dim / 128


PEERS = {
    "linattn-favor": Peer("linattn FAVOR+", "ours", ATTENTION + GRADIENT, "linattn-favor", "favor"),
    "linattn-pullback": Peer("linattn FAVOR+, pullback alone", "ours", GRADIENT, "linattn-favor"),
    "linattn-hyperbolic": Peer(
        "linattn hyperbolic", "ours", ATTENTION, "linattn-favor", "hyperbolic"
    ),
    "numpy-loop": Peer(
        "NumPy loop, FAVOR+", "loops", ATTENTION, "linattn-favor", on_one_thread=True
    ),
    "numpy-loop-hyperbolic": Peer(
        "NumPy loop, hyperbolic", "loops", ATTENTION, "linattn-hyperbolic", on_one_thread=True
    ),
    # Here, so that rates are measured near the times that they are compared with.
    "numpy-rates": Peer(
        "NumPy products and exp", "in_numpy", RATES, "numpy-rates", on_one_thread=True
    ),
    "torch-exact": Peer(
        "torch SDPA, exact", "in_torch", ATTENTION + GRADIENT, "linattn-favor", is_quadratic=True
    ),
    "performer": Peer(
        "performer-pytorch",
        "performer",
        ATTENTION,
        "linattn-favor",
        on_one_thread=True,
        numbers_a_token=_features_and_states,
    ),
    "jax-favor": Peer(
        "Google's formula, JAX jit",
        "in_jax",
        (*ATTENTION, "full gradient"),
        "linattn-favor",
        numbers_a_token=_gradient_numbers,
    ),
    "jax-backward": Peer(
        "Google's formula, backward by hand",
        "in_jax",
        ("causal gradient",),
        "linattn-favor",
        numbers_a_token=_gradient_numbers,
    ),
    "jax-vjp": Peer(
        "Google's formula, JAX's own vjp",
        "in_jax",
        ("causal gradient",),
        "linattn-favor",
        on_one_thread=True,
        numbers_a_token=_gradient_and_sum_numbers,
    ),
    "torch-favor": Peer("same recipe, torch ops", "in_torch", ATTENTION, "linattn-favor"),
    "torch-chunks": Peer(
        "torch autograd, chunk by chunk",
        "in_torch",
        GRADIENT,
        "linattn-favor",
        numbers_a_token=_gradient_numbers,
    ),
    "torch-backward": Peer(
        "torch, backward by hand",
        "torch_by_hand",
        GRADIENT,
        "linattn-favor",
        numbers_a_token=_gradient_and_state_numbers,
    ),
    "torch-whole": Peer(
        "torch autograd, chunks at once",
        "in_torch",
        ("causal gradient",),
        "linattn-favor",
        numbers_a_token=_gradient_and_state_numbers,
    ),
    "linattn-elu": Peer("linattn elu+1", "ours", ATTENTION, "linattn-elu", "elu"),
    "numpy-loop-elu": Peer(
        "NumPy loop, elu+1", "loops", ATTENTION, "linattn-elu", on_one_thread=True
    ),
    "torch-elu": Peer(
        "elu+1, torch ops",
        "in_torch",
        ATTENTION,
        "linattn-elu",
        numbers_a_token=lambda sizes: 16.0 * sizes.dim,
    ),
    "linattn-decoder": Peer("linattn Decoder.step", "ours", DECODE, "linattn-decoder"),
    "linattn-decode-step": Peer("linattn decode_step", "ours", DECODE, "linattn-decoder"),
    "numpy-cache": Peer("softmax, KV cache, NumPy", "in_numpy", DECODE, "linattn-decoder"),
    "torch-cache": Peer("softmax, KV cache, torch", "in_torch", DECODE, "linattn-decoder"),
    "torch-text": Peer(
        "torch SDPA, exact", "in_torch", TEXT, "linattn-attention", is_quadratic=True
    ),
    "linattn-landmarks": Peer(
        "linattn landmarks", "ours", TEXT, "linattn-attention", tolerance=0.5
    ),
    "linattn-attention": Peer(
        "linattn.attention", "ours", TEXT, "linattn-attention", tolerance=0.1
    ),
    "torch-rates": Peer(
        "torch products and exp", "in_torch", RATES, "numpy-rates", on_one_thread=True
    ),
}
