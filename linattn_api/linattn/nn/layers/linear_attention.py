# pyright: basic
"""Linear attention with any feature map (Katharopoulos et al. 2020)."""

from __future__ import annotations

from typing import Any

from ...feature_maps.names import MAPS
from ..grouped import SharedByQueries
from ..mixer import choice
from ..span import Span

LEARNED = {"hedgehog": "HedgehogMap", "t2r": "T2rMap", "elementwise_product": "ProductMap"}
"""Maps with a matrix that all heads share, by the name and the part."""
BY_HEAD = ("rebased",)
"""Maps of :mod:`linattn.feature_maps` with parameters for each head."""


class LinearAttention(SharedByQueries):
    """Linear attention: ``S = S⁻ + φ(k)ᵀ v``, ``o = φ(q) S / φ(q)·z`` with ``z = Σ φ(k)``
    (Katharopoulos et al. 2020, eqs. 9 and 18-20).

    The output of each head is normed and projected. Matrices are drawn uniformly from ``±1/√in``.

    Args:
        hidden_size: ``D``. Default 1024.
        expand_k: Width of all keys over ``D``. Default 1.
        expand_v: Width of all values over ``D``. Default 1.
        num_heads: Heads of queries. Default 8.
        num_kv_heads: Heads of keys and values, each shared by a group of queries. Default ``num_heads``.
        feature_map: ``φ``: a name or an object of :mod:`linattn.feature_maps`, whose arrays are the first values of parameters;
            or the name of a map that learns for queries and for keys. Of ``"hedgehog"`` (Zhang et al. 2024), ``"t2r"`` (Kasai
            et al. 2021) and ``"elementwise_product"``, the product of two projections, all heads share the matrices; of
            ``"rebased"`` (Aksenov et al. 2024) each has its vectors. Default ``"elu1"``.
        tie_feature_map_qk: Whether these four have the parameters of ``feature_map_q`` for both. Default False.
        normalize: Whether to divide by ``φ(q)·z``; without it outputs are scaled by ``K^{-1/2}``. Default True.
        norm_q: Whether the features of a query are divided by their sum. Default False.
        norm_k: Likewise of a key. Default False.
        output_norm: ``"rmsnorm"`` or ``"identity"``. Default ``"rmsnorm"``.
        elementwise_affine: Whether that norm has a weight. Default True.
        norm_eps: Its ``ε``. Default 1e-5.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "linear_attn", "Katharopoulos et al. 2020, eqs. 18-20"

    def __init__(
        self,
        hidden_size: int = 1024,
        *,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: Any = "elu1",
        tie_feature_map_qk: bool = False,
        normalize: bool = True,
        norm_q: bool = False,
        norm_k: bool = False,
        output_norm: str = "rmsnorm",
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        self.project(make, expand_k, expand_v, num_heads, num_kv_heads)
        self.normalize, self.norm_q, self.norm_k = normalize, norm_q, norm_k
        self.output_norm = choice("LinearAttention", "output_norm", output_norm, ("rmsnorm", "identity"))
        self.learned = isinstance(feature_map, str) and feature_map in (*LEARNED, *BY_HEAD)
        self.ties = tie_feature_map_qk
        if self.learned:
            self.feature_map_q = self.learned_map(make, feature_map)
            if not self.ties:
                self.feature_map_k = self.learned_map(make, feature_map)
        self.make_map(make, None if self.learned else feature_map)

        if output_norm == "rmsnorm":
            self.norm = make.part("RMSNorm", self.head_v_dim, norm_eps, elementwise_affine)

    def learned_map(self, make: Any, name: str) -> Any:
        """A map of queries, of keys, or of both, with parameters of its own."""
        if name in LEARNED:
            return make.part(LEARNED[name], self.head_k_dim)
        kind: Any = MAPS[name]
        return make.part("LearnedMap", kind(**kind.init(self.num_heads, self.head_k_dim)))

    def mix(self, x: Any, span: Span) -> Any:
        q, k = (self.heads(y, self.head_k_dim) for y in (self.q_proj(x), self.k_proj(x)))
        v = self.heads(self.v_proj(x), self.head_v_dim)
        k, v = self.grouped(k, q.shape[2]), self.grouped(v, q.shape[2])
        normed = self.norm_q or self.norm_k
        feature_map = self.phi(span, by_operator=not normed)
        if self.learned:
            q, k = self.feature_map_q(q), (self.feature_map_q if self.ties else self.feature_map_k)(k)
        elif normed:
            q, k, feature_map = feature_map(q), feature_map(k), None
        q, k = q / (q.sum(-1)[..., None] + 1e-4) if self.norm_q else q, k / (k.sum(-1)[..., None] + 1e-4) if self.norm_k else k
        o = span.attend("linear_attn", q, k, v, feature_map=feature_map, normalize=self.normalize)
        return self.o_proj(self.flat(self.norm(o) if self.output_norm == "rmsnorm" else o))
