# pyright: basic
"""A decoder block and a small causal language model of them, written once for all frameworks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..context import Context
from ..errors import OptionError
from ..frameworks import framework_of
from ..suggestions import closest
from . import layers, parts
from .cache import Cache
from .definition import Definition

__all__ = ["Block", "Decoder", "LanguageModel", "definitions"]


class Block(Definition):
    """A decoder block: ``x + attn(norm(x))``, then ``x + mlp(norm(x))`` with a SwiGLU.

    Args:
        hidden_size: ``D``.
        mixer: Name of the layer that mixes tokens, e.g. ``"GatedDeltaNet"``.
        mixer_options: Its arguments.
        intermediate_size: Width of the MLP; 0 for a block without one.
        norm_eps: ``ε`` of both norms. Default 1e-6.
    """

    def __init__(
        self,
        hidden_size: int,
        mixer: str,
        mixer_options: dict[str, Any],
        intermediate_size: int,
        norm_eps: float = 1e-6,
        **framework: Any,
    ) -> None:
        make = self.begin(**framework)
        self.attn_norm = make.part("RMSNorm", hidden_size, norm_eps)
        self.attn = make.part(mixer, hidden_size, **mixer_options)
        self.has_mlp = intermediate_size > 0
        if self.has_mlp:
            self.mlp_norm = make.part("RMSNorm", hidden_size, norm_eps)
            self.mlp = make.part("SwiGLU", hidden_size, intermediate_size)

    def forward(self, x: Any, **call: Any) -> Any:
        """``[B, T, D]`` of ``x [B, T, D]``; keywords as those of a layer."""
        x = x + self.attn(self.attn_norm(x), **call)
        return x + self.mlp(self.mlp_norm(x)) if self.has_mlp else x


class Decoder(Definition):
    """The blocks of a language model between its embedding and its last norm."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        blocks: list[dict[str, Any]],
        norm_eps: float,
        deviation: float,
        **framework: Any,
    ) -> None:
        make = self.begin(**framework)
        self.embeddings = make.part("Embedding", vocab_size, hidden_size, deviation)
        self.layers = make.chain(
            {str(i): make.part("Block", hidden_size, **given, norm_eps=norm_eps) for i, given in enumerate(blocks)}
        )
        self.norm = make.part("RMSNorm", hidden_size, norm_eps)
        self.depth = len(blocks)

    def forward(self, ids: Any, call_block: Callable[..., Any], **call: Any) -> Any:
        """Hidden states ``[B, T, D]`` of ``ids [B, T]``."""
        x = self.embeddings(ids)
        for i in range(self.depth):
            x = call_block(self.layers[str(i)], x, **call)
        return self.norm(x)


class LanguageModel(Definition):
    """A causal language model: embedding, blocks, norm, and a head.

    Embeddings are drawn normally around zero; layers as each of them says.

    Args:
        vocab_size: Number of tokens that there are.
        hidden_size: ``D``.
        num_hidden_layers: Blocks.
        mixer: Name of the layer of every block, e.g. ``"GatedDeltaNet"``, or one name a block. Default ``"GatedDeltaNet"``.
        mixer_options: Arguments of the layers, or one dictionary a block. ``layer_idx`` and ``num_hidden_layers`` are filled
            in. Default none.
        hidden_ratio: Width of the MLP: ``2/3`` of this times ``D``, rounded up to a multiple of 256; 0 for none. Default 4.
        intermediate_size: Width of the MLP, where it is to be another.
        tie_word_embeddings: Whether the head has the embedding's weight. Default False.
        norm_eps: ``ε`` of the norms. Default 1e-6.
        initializer_range: Deviation of the embedding, and of the head. Default 0.02.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_hidden_layers: int,
        *,
        mixer: str | Sequence[str] = "GatedDeltaNet",
        mixer_options: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        hidden_ratio: float = 4,
        intermediate_size: int | None = None,
        tie_word_embeddings: bool = False,
        norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        **framework: Any,
    ) -> None:
        make = self.begin(**framework)
        names = each("mixer", mixer, num_hidden_layers, str)
        options = each("mixer_options", mixer_options or {}, num_hidden_layers, dict)
        if intermediate_size is None:
            intermediate_size = 256 * -(-int(hidden_size * hidden_ratio * 2 / 3) // 256)
        blocks = [
            {
                "mixer": known(name),
                "mixer_options": placed(name, given, i, num_hidden_layers),
                "intermediate_size": intermediate_size,
            }
            for i, (name, given) in enumerate(zip(names, options, strict=True))
        ]
        self.vocab_size, self.tied = vocab_size, tie_word_embeddings
        self.gradient_checkpointing = False
        self.model = make.part("Decoder", vocab_size, hidden_size, blocks, norm_eps, initializer_range)
        if not tie_word_embeddings:
            self.lm_head = make.linear(hidden_size, vocab_size)
            make.assign(self.lm_head.weight, make.normal((vocab_size, hidden_size), initializer_range))

    def forward(
        self,
        ids: Any,
        *,
        cache: Cache | None = None,
        mask: Any = None,
        cu_seqlens: Any = None,
        context: Context | None = None,
    ) -> Any:
        """Logits of what follows each token.

        Args:
            ids: Tokens ``[B, T]``, integers.
            cache: As for a layer: goes on from what it holds, and holds what was read afterwards.
            mask: ``[B, T]``, nonzero where a token is one: padding may stand on either side.
            cu_seqlens: Offsets ``[N+1]`` of sequences packed end to end; ``B`` must be 1.
            context: How the tokens are spread over devices, from :mod:`linattn.distributed`: ``ids`` has this one's own.

        Returns:
            ``[B, T, vocab_size]``.
        """
        call = {"cache": cache, "mask": mask, "cu_seqlens": cu_seqlens, "context": context, "shared": {}}
        x = self.model(ids, self.call_block, **call)
        return x @ self.value(self.model.embeddings.weight).T if self.tied else self.lm_head(x)

    def call_block(self, block: Any, x: Any, **call: Any) -> Any:
        """Call one block, as the framework has it called."""
        return block(x, **call)

    def generate(
        self,
        ids: Any,
        max_new_tokens: int,
        *,
        mask: Any = None,
        eos_token_id: int | None = None,
        cache: Cache | None = None,
        choose: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Continue each row of ``ids``: the prompt in one call, the rest token by token from the states.

        Args:
            ids: Tokens ``[B, T]``, ``T ≥ 1``.
            max_new_tokens: How many to add.
            mask: ``[B, T]``, nonzero where a token is one. Padding on the left keeps prompt and continuation together.
            eos_token_id: What ends a sequence; after it, it is repeated.
            cache: Goes on from what it holds; afterwards it holds all but the last token. Default a new one.
            choose: From logits ``[B, vocab_size]``, the next tokens ``[B]``. Default the likeliest.

        Returns:
            ``[B, T + max_new_tokens]``.
        """
        cache, choose = Cache() if cache is None else cache, choose or greedy
        xp = framework_of(ids, "ids")
        logits, found, ended = last(self(ids, cache=cache, mask=mask), mask), [ids], None
        for remaining in range(max_new_tokens, 0, -1):
            token = xp.astype(choose(logits), xp.dtype(ids))
            if eos_token_id is not None:
                token = token if ended is None else xp.where(ended, eos_token_id, token)
                ended = token == eos_token_id
            found.append(token[:, None])
            if remaining > 1:
                logits = self(token[:, None], cache=cache)[:, -1]
        return xp.concat(found, axis=1)


def greedy(logits: Any) -> Any:
    """The likeliest token of each row, ``[B]`` of ``[B, vocab_size]``."""
    return logits.argmax(-1)


def last(logits: Any, mask: Any) -> Any:
    """Logits ``[B, vocab_size]`` at the last token of each row."""
    if mask is None:
        return logits[:, -1]
    xp = framework_of(logits)
    T = logits.shape[1]
    live = xp.astype(mask != 0, "int32")
    place = (live * (xp.arange(T, like=live[0]) + 1)).argmax(1)
    return logits[xp.arange(logits.shape[0], like=place), place]


def each(name: str, given: Any, blocks: int, kind: type) -> list[Any]:
    """What each block gets: the same for all, or one of a sequence."""
    found = [given] * blocks if isinstance(given, kind) else list(given)
    if len(found) != blocks:
        raise OptionError(f"LanguageModel: {name} must be one for each of num_hidden_layers = {blocks}, got {len(found)}")
    return found


def known(name: str) -> str:
    """The name of a layer that there is."""
    if name in layers.__all__:
        return name
    close = closest(name, layers.__all__)
    hint = f"did you mean {close!r}? " if close else ""
    raise OptionError(f"LanguageModel: unknown mixer {name!r}: {hint}known are {', '.join(layers.__all__)}")


def placed(name: str, options: dict[str, Any], layer: int, depth: int) -> dict[str, Any]:
    """The arguments of a layer, and its place in the model where it asks for that."""
    parameters = inspect.signature(getattr(layers, name)).parameters
    place = {"layer_idx": layer, "num_hidden_layers": depth}
    return {**{key: value for key, value in place.items() if key in parameters}, **options}


def definitions() -> list[type]:
    """Everything that is written once, for a framework to make modules of."""
    found = [getattr(parts, name) for name in parts.__all__] + [getattr(layers, name) for name in layers.__all__]
    return [*found, Block, Decoder, LanguageModel]
