"""A module with the weights of `torch.nn.MultiheadAttention`, on any feature map."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from linattn import _checks
from linattn._driver.problem import check_feature_map
from linattn.interop.torch._packing import pack, unpack
from linattn.interop.torch.functions import linear_attention, softmax_attention
from linattn.typing import Array, FeatureMap, State


class Attention(nn.Module):  # type: ignore[misc]
    r"""Multi-head attention with the weights of ``torch.nn.MultiheadAttention``.

    .. math::
        y = W_o \, \mathrm{concat}_h \, A(W_q x, W_k x', W_v x'')_h + b_o

    ``A`` is softmax attention, or linear attention of a feature map. Letters: ``L`` queries, ``S``
    keys, ``E`` embedding dim.

    Parameters
    ----------
    embed_dim : int
        E, a multiple of ``num_heads``.
    num_heads : int
        Each head has dim ``E / num_heads``.
    attention : FeatureMap or "softmax", optional
        Default ``"softmax"``. The parameters of a map are not trained.
    bias : bool, optional
        As for ``torch.nn.MultiheadAttention``. Default True.
    device, dtype : optional
        Of the weights.

    Raises
    ------
    TypeError, ValueError
        ``embed_dim`` is no multiple of ``num_heads``, or ``attention`` is neither ``"softmax"`` nor
        a map of this dim; in a call as :func:`linear_attention` and :func:`softmax_attention`; a
        state with softmax attention.

    Notes
    -----
    ``load_state_dict`` takes the weights of a ``torch.nn.MultiheadAttention`` without ``kdim``,
    ``vdim`` and ``add_bias_kv``. A map is saved under ``feature_map._extra_state`` as a tensor of
    bytes, and loading puts it in the place of the module's map.

    Unlike ``torch.nn.MultiheadAttention``, the batch is the first axis, a call returns the output
    alone, and there is no dropout: for code that calls torch's module use :meth:`from_multihead`.

    Examples
    --------
    >>> import torch
    >>> from linattn.feature_maps import PositiveFeatures
    >>> from linattn.interop.torch import Attention
    >>> attention = Attention(64, 4, PositiveFeatures(16, 64, rng=0))
    >>> attention(torch.randn(2, 100, 64), is_causal=True).shape
    torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: FeatureMap | Literal["softmax"] = "softmax",
        *,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.embed_dim = _checks.check_positive_int("embed_dim", embed_dim)
        self.num_heads = _checks.check_positive_int("num_heads", num_heads)
        head_dim, rest = divmod(embed_dim, num_heads)
        if rest:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}"
            )
        self.feature_map = None if attention == "softmax" else _Map(attention, head_dim)
        bias = _checks.check_flag("bias", bias)
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **like))
        in_bias = nn.Parameter(torch.zeros(3 * embed_dim, **like)) if bias else None
        self.register_parameter("in_proj_bias", in_bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **like)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    @staticmethod
    def from_multihead(
        module: Any, attention: FeatureMap | Literal["softmax"] = "softmax"
    ) -> Attention:
        """Return a module with the parameters of a ``torch.nn.MultiheadAttention``, called as it.

        Parameters
        ----------
        module : torch.nn.MultiheadAttention
            Its parameters are shared, not copied.
        attention : FeatureMap or "softmax", optional
            As for the class. Default ``"softmax"``, which gives the numbers of `module`.

        Returns
        -------
        Attention
            A call takes the arguments of ``torch.nn.MultiheadAttention``, in its order and with its
            defaults, and returns the pair ``(output, weights)``. So it may take the module's place
            in ``torch.nn.TransformerEncoderLayer`` and others; torch's fast path is not taken.

        Raises
        ------
        TypeError, ValueError
            Not a ``torch.nn.MultiheadAttention``; as the class; shapes that do not fit, in a call.
        NotImplementedError
            `module` has ``kdim``, ``vdim``, ``add_bias_kv``, ``add_zero_attn`` or hooks; a map
            with dropout in training; a map with an ``attn_mask`` that no option of
            :func:`linear_attention` says, such as one that is learned.

        Notes
        -----
        Weights (``need_weights=True``, torch's default) cost O(L S) memory, for a map too: they
        are the attention to unit vectors. So do an ``attn_mask`` and dropout with ``"softmax"``.
        A query that sees no key gets zeros. Values of an ``attn_mask`` count, not ``is_causal``
        beside it, but for a map under ``torch.compile``, which trusts ``is_causal=True``.

        Examples
        --------
        >>> import torch
        >>> from linattn.feature_maps import EluFeatures
        >>> from linattn.interop.torch import Attention
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True)
        >>> layer.self_attn = Attention.from_multihead(layer.self_attn, EluFeatures())
        >>> layer(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
        """
        from linattn.interop.torch._multihead import MultiheadAttention

        return MultiheadAttention(module, attention)

    def forward(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        key_padding_mask: Array | None = None,
        is_causal: bool = False,
        state: State | None = None,
        return_state: bool = False,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        query : Tensor, (..., L, E)
            Tokens.
        key, value : Tensor, (..., S, E), optional
            Default ``query``, and ``key``.
        key_padding_mask : Tensor, (..., S), optional
            As for ``torch.nn.MultiheadAttention``: True for keys to ignore, or floating numbers
            that are added to the scores of the key.
        is_causal : bool, optional
            Query i sees no key after i.
        state : State, optional
            What an earlier call returned; feature maps only. These tokens come after its tokens.
        return_state : bool, optional
            Also return the state after these tokens.

        Returns
        -------
        Tensor, (..., L, E), or the tuple ``(output, state)``
        """
        return_state = _checks.check_flag("return_state", return_state)
        key = query if key is None else key
        value = key if value is None else value
        options: dict[str, Any] = {"is_causal": is_causal, **padding_options(key_padding_mask)}
        if self.feature_map is not None:
            options["initial_state"] = state
        elif state is not None or return_state:
            raise ValueError(
                "state must be None and return_state False with softmax attention, which has no "
                "state of a fixed size, got others; give the module a feature map"
            )
        output, after = self._function(*self._heads(query, key, value), **options)
        output = self._joined(output)
        return (output, after) if return_state else output

    def _heads(self, *tokens: Array) -> list[Array]:
        """Project queries, keys and values; return them with an axis of heads."""
        weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        rows = map(nn.functional.linear, tokens, weights, biases)
        return [x.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3) for x in rows]

    def _function(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, State | None]:
        """Attend in each head; the state is None for softmax attention."""
        if self.feature_map is None:
            return softmax_attention(q, k, v, **options), None
        output, state = linear_attention(
            q, k, v, self.feature_map.map, return_state=True, **options
        )
        return output, state

    def _joined(self, output: Array) -> Array:
        """Project the outputs of all heads."""
        return self.out_proj(output.transpose(-2, -3).flatten(-2))


def padding_options(ignored: Array | None) -> dict[str, Any]:
    """Return a ``key_padding_mask`` as an option of attention: True ignores, numbers are added."""
    if ignored is None:
        return {}
    mask = ignored[..., None, :]
    return {"key_mask": ~mask} if mask.dtype == torch.bool else {"key_bias": mask}


class _Map(nn.Module):  # type: ignore[misc]
    """A feature map as part of a module, in its state dict."""

    def __init__(self, feature_map: Any, head_dim: int) -> None:
        super().__init__()
        check_feature_map(feature_map)
        dim = getattr(feature_map, "dim", head_dim)
        if dim not in (None, head_dim):
            raise ValueError(
                f"attention must have the dim of a head, {head_dim}, got {feature_map!r}"
            )
        self.map = feature_map
        self.register_load_state_dict_pre_hook(_keep_own_map)

    def extra_repr(self) -> str:
        return repr(self.map)

    def get_extra_state(self) -> Array:
        return torch.frombuffer(bytearray(pack(self.map).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Array) -> None:
        found = unpack(bytes(state.tolist()).decode(), self.map)
        if type(found) is not type(self.map):
            raise ValueError(
                f"the state dict must be of a module with a {type(self.map).__qualname__}, got "
                f"{type(found).__qualname__}; make the module with a map of this class"
            )
        self.map = found


def _keep_own_map(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
    """Allow loading weights without a map, such as the weights of torch's module."""
    state_dict.setdefault(f"{prefix}_extra_state", module.get_extra_state())
