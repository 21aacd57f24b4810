"""One layer of a transformer, and stacks of them: sublayers with residual connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

from linattn.layers import _heads
from linattn.layers._cache import check_state
from linattn.layers._heads import AttentionState, Heads, Positions
from linattn.layers._params import Params, Part, Result, join, split, split_layers
from linattn.layers.attentions import Attention, Scope, SoftmaxAttention
from linattn.layers.dense import Activation, feed_forward_vjp, layer_norm_vjp, rms_norm_vjp
from linattn.typing import Array
from linattn.typing.records import one_line

Norm: TypeAlias = Literal["layer_norm", "rms_norm"]
NORMS: dict[str, Any] = {"layer_norm": layer_norm_vjp, "rms_norm": rms_norm_vjp}

EXACT = SoftmaxAttention()


class _Needed(TypedDict):
    num_heads: int


class _Options(_Needed, total=False):
    attention: Attention | Sequence[Attention]
    activation: Activation
    norm_first: bool
    norm_output: bool
    parallel: bool
    norm: Norm
    eps: float


class LayerOptions(_Options, total=False):
    """Keyword arguments of an encoder layer or a stack of them, for type checkers."""

    positions: Positions | Sequence[Positions]


class DecoderOptions(LayerOptions, total=False):
    """Keyword arguments of a decoder layer or a stack of them, for type checkers."""

    cross_attention: Attention | Sequence[Attention] | None


class ModelOptions(_Options, total=False):
    """Keyword arguments of a language model, for type checkers."""

    positions: Positions | Sequence[Positions] | Literal["sinusoidal"]
    embedding_scale: float
    cross_attention: Attention | Sequence[Attention] | None


class InitOptions(TypedDict, total=False):
    """Keyword arguments of the functions that draw parameters, for type checkers."""

    hidden_dim: int | None
    num_key_heads: int | None
    activation: Activation
    norm: Norm
    norm_output: bool
    qk_norm: bool
    bias: bool
    dtype: Any


class LayerState(NamedTuple):
    """State of one layer in a stream: the cache of its tokens, and of the memory if any."""

    tokens: AttentionState
    memory: Any

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class DecoderState(NamedTuple):
    """State of a decoder in a stream: the states of its layers."""

    layers: tuple[LayerState, ...]
    length: int
    """Tokens seen."""

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class Masks(NamedTuple):
    """Which keys queries see: among the tokens, and in the memory."""

    is_causal: bool
    key_mask: Array | None = None
    memory_mask: Array | None = None


class Options(NamedTuple):
    """Options of one layer, with all defaults filled in."""

    heads: Heads
    cross: Heads
    norm: Callable[..., Result]
    activation: Activation = "relu"
    norm_first: bool = False
    norm_output: bool = False
    parallel: bool = False


Sublayer: TypeAlias = Callable[[Params, Array], Result]


def check_norm(norm: Norm) -> Norm:
    """Check the kind of a norm."""
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    return norm


def options_of(
    *,
    num_heads: int,
    attention: Any = EXACT,
    cross_attention: Any = None,
    positions: Any = None,
    norm: Norm = "layer_norm",
    eps: float = 1e-5,
    **more: Any,
) -> Options:
    """Return the options of a layer, with defaults for the missing ones."""
    check_norm(norm)
    cross = attention if cross_attention is None else cross_attention
    heads = Heads(num_heads, attention, positions, eps), Heads(num_heads, cross, eps=eps)
    options = Options(*heads, partial(NORMS[norm], eps=eps), **more)
    if options.parallel and not options.norm_first:
        raise ValueError(
            f"norm_first must be True with parallel=True, got {options.norm_first!r}: sublayers "
            f"see the same tokens"
        )
    return options


def layer(
    params: Params,
    x: Array,
    memory: Array | None,
    options: Options,
    masks: Masks,
    *,
    differentiate: bool,
) -> Result:
    """Apply one layer to all tokens; the pullback works only with ``differentiate=True``."""

    def attend(part: Params, x: Array) -> Result:
        scope = Scope(masks.is_causal, masks.key_mask)
        return _heads.attend(part, x, None, options.heads, scope, differentiate=differentiate)

    def attend_memory(part: Params, x: Array) -> Result:
        scope = Scope(False, masks.memory_mask)
        return _heads.attend(part, x, memory, options.cross, scope, differentiate=differentiate)

    return _sublayers(params, x, options, attend, None if memory is None else attend_memory)


def stream_layer(
    params: Params,
    x: Array,
    memory: Array | None,
    options: Options,
    masks: Masks,
    state: LayerState | None,
) -> tuple[Array, LayerState]:
    """Apply one layer to the next tokens of a stream; return the new state too."""
    if not masks.is_causal or masks.key_mask is not None:
        raise ValueError(
            "initial_state and return_state must come with is_causal=True and without key_mask: "
            "they are of a causal stream of tokens"
        )
    check_state(state, LayerState)
    tokens, of_memory = (None, None) if state is None else state
    start = 0 if tokens is None else tokens.length

    def attend(part: Params, x: Array) -> Result:
        nonlocal tokens
        y, tokens = _heads.stream(part, x, options.heads, tokens)
        return y, _no_pullback

    def attend_memory(part: Params, x: Array) -> Result:
        nonlocal of_memory
        if of_memory is None:
            of_memory = _heads.remember(part, memory, options.cross, masks.memory_mask)
        return _heads.read(part, x, options.cross, of_memory, start), _no_pullback

    has_memory = memory is not None or of_memory is not None
    y, _ = _sublayers(params, x, options, attend, attend_memory if has_memory else None)
    assert tokens is not None
    return y, LayerState(tokens, of_memory)


def _no_pullback(grad: Array) -> tuple[Any, ...]:
    raise AssertionError


def _sublayers(
    params: Params, x: Array, options: Options, attend: Sublayer, attend_memory: Sublayer | None
) -> Result:
    """Apply self-attention, attention to a memory if any, and feed-forward, with their norms."""
    sublayers = {"self_attn.": attend}
    if attend_memory is not None:
        sublayers["multihead_attn."] = attend_memory
    norms = _norms(options, len(sublayers) + 1)
    prefixes = [*sublayers, *dict.fromkeys(name for names in norms for name in names if name), ""]
    # What is left has no name of its own: the products of the feed-forward layer.
    parts = dict(zip(prefixes, split(params, *prefixes), strict=True))
    sublayers[""] = partial(feed_forward_vjp, activation=options.activation)
    branches, out = [], x
    for (name, sublayer), (before, inside, after) in zip(sublayers.items(), norms, strict=True):
        if options.parallel and not parts[before]:
            before = "norm1."
        steps = [(n, partial(options.norm, parts[n])) for n in (before, inside) if n]
        steps.insert(bool(before), (name, partial(sublayer, parts[name])))
        y, pulls = _in_turn(x if options.parallel else out, steps)
        out = out + y
        pull_after = None
        if after:
            out, pull_after = options.norm(parts[after], out)
        branches.append((pulls, after, pull_after))

    def pullback(grad: Array) -> tuple[Any, ...]:
        grads: dict[str, Params] = {}
        by_memory: list[Array] = []
        total = grad
        for pulls, after, pull_after in reversed(branches):
            if pull_after is not None:
                grads[after], total = pull_after(total)
            by_branch = grad if options.parallel else total
            for name, pull in reversed(pulls):
                found, by_branch, *more = pull(by_branch)
                grads[name] = _added(grads[name], found) if name in grads else found
                by_memory += more
            total = total + by_branch
        return join(grads), total, *by_memory

    return out, pullback


def _norms(options: Options, number: int) -> list[tuple[str, str, str]]:
    """Return the names of the norms before, inside and after each residual sum; "" for none."""
    names = []
    for i in range(1, number + 1):
        before = f"norm{i}." if options.norm_first else ""
        inside = f"norm{i}_output." if options.norm_first else f"norm{i}."
        inside = inside if options.norm_output else ""
        names.append((before, inside, "" if before or inside else f"norm{i}."))
    return names


def _in_turn(x: Array, steps: Sequence[tuple[str, Callable[..., Any]]]) -> tuple[Array, Any]:
    """Apply steps one after the other; return the result and the named pullbacks."""
    pulls = []
    for name, step in steps:
        x, pull = step(x)
        pulls.append((name, pull))
    return x, pulls


def _added(first: Params, second: Params) -> Params:
    return {name: first[name] + second[name] for name in first}


def stack(
    params: Params,
    x: Array,
    memory: Array | None,
    options: Options,
    masks: Masks,
    *,
    differentiate: bool,
) -> Result:
    """Apply layers one after the other, and the last norm if there is one."""
    layers, final = _layers_and_norm(params)
    pulls = []
    for part, chosen in zip(layers, _by_layer(options, len(layers)), strict=True):
        x, pull = layer(part, x, memory, chosen, masks, differentiate=differentiate)
        if differentiate:
            pulls.append(pull)
    x, pull_final = options.norm(final, x) if final else (x, None)

    def pullback(grad: Array) -> tuple[Any, ...]:
        grads: dict[str, Params] = {}
        if pull_final is not None:
            grads["norm."], grad = pull_final(grad)
        by_memory: list[Array] = []
        for number, pull in reversed(list(enumerate(pulls))):
            grads[f"layers.{number}."], grad, *more = pull(grad)
            by_memory += more
        return join(grads), grad, *([sum(by_memory[1:], by_memory[0])] if by_memory else [])

    return x, pullback


def stream_stack(
    params: Params,
    x: Array,
    memory: Array | None,
    options: Options,
    masks: Masks,
    state: DecoderState | None,
) -> tuple[Array, DecoderState]:
    """Apply layers and the last norm to the next tokens of a stream; return the new state too."""
    check_state(state, DecoderState)
    layers, final = _layers_and_norm(params)
    before: Sequence[LayerState | None] = [None] * len(layers) if state is None else state.layers
    if len(before) != len(layers):
        raise ValueError(
            f"initial_state must be of a decoder with {len(layers)} layers, got {len(before)}"
        )
    length = x.shape[-2] + (0 if state is None else state.length)
    after = []
    for part, cache, chosen in zip(layers, before, _by_layer(options, len(layers)), strict=True):
        x, new = stream_layer(part, x, memory, chosen, masks, cache)
        after.append(new)
    if final:
        x = options.norm(final, x)[0]
    return x, DecoderState(tuple(after), length)


def for_steps(state: DecoderState, options: Options) -> DecoderState:
    """Return a state for one stream of single tokens, which the stream may change in place."""
    chosen = _by_layer(options, len(state.layers))
    layers = []
    for layer, of_layer in zip(state.layers, chosen, strict=True):
        cache = of_layer.heads.attention.for_steps(layer.tokens.cache)
        layers.append(layer._replace(tokens=layer.tokens._replace(cache=cache)))
    return state._replace(layers=tuple(layers))


def _layers_and_norm(params: Params) -> tuple[list[Part], Part]:
    layers, final = split(params, "layers.", "norm.")
    return split_layers(layers), final


def _by_layer(options: Options, number: int) -> list[Options]:
    """Return the options of each layer: attention and positions may be lists."""
    heads, cross = options.heads, options.cross
    attention = _one_each("attention", heads.attention, number)
    positions = _one_each("positions", heads.positions, number)
    of_memory = _one_each("cross_attention", cross.attention, number)
    return [
        options._replace(
            heads=heads._replace(attention=attends, positions=stands),
            cross=cross._replace(attention=reads),
        )
        for attends, stands, reads in zip(attention, positions, of_memory, strict=True)
    ]


def _one_each(name: str, given: Any, number: int) -> list[Any]:
    if not isinstance(given, list | tuple):
        return [given] * number
    if len(given) != number:
        raise ValueError(
            f"{name} must be one, or one for each of the {number} layers, got {len(given)}"
        )
    return list(given)
