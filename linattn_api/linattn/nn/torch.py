# ruff: noqa: D101 - a layer has the docstring of its definition
# pyright: basic
"""Layers for PyTorch: modules of the layers of :mod:`linattn.nn.layers`, with what PyTorch has around them."""

from __future__ import annotations

import inspect
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import layers, mixer, model, parts, sharding
from .cache import Cache
from .expressions import Expressions

__all__ = ["Block", "Cache", "LanguageModel", "Module", "Sampling", "TokenMixer"]
__all__ += layers.__all__


class Functions(Expressions):
    """Activations, and what PyTorch has in one operation: called eagerly, each reads and writes memory."""

    silu = staticmethod(nn.functional.silu)
    sigmoid = staticmethod(torch.sigmoid)
    tanh = staticmethod(torch.tanh)
    relu = staticmethod(torch.relu)

    @staticmethod
    def multiply_add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """One operation."""
        return torch.addcmul(x, y, z)

    @staticmethod
    def convolves(x: Tensor) -> bool:
        """On a GPU and not compiled, where sums and products are kernels of their own."""
        return x.is_cuda and type(x) is Tensor and not torch.compiler.is_compiling()

    @staticmethod
    def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """PyTorch's own, unless it would refuse weights of another dtype than ``x``, or tensors of many devices."""
        if type(x) is not Tensor or (weight is not None and weight.dtype != x.dtype):
            return Expressions.group_norm(x, weight, bias, eps)
        rows = x.flatten(0, 1).flatten(1)
        return torch.group_norm(rows, x.shape[2], weight, bias, eps).view(*x.shape[:2], x.shape[2] * x.shape[3]).to(x.dtype)

    @staticmethod
    def unit(x: Tensor, eps: float) -> Tensor:
        """Rows of length one; their lengths are one operation, squares and all."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * (length * length + eps) ** -0.5


class Tools:
    """What makes the parameters and the parts of a module, on one device and in one dtype."""

    def __init__(self, device: Any, dtype: torch.dtype | None) -> None:
        self.device = torch.get_default_device() if device is None else device
        self.dtype = torch.get_default_dtype() if dtype is None else dtype

    def parameter(self, values: Any, wide: bool = False) -> nn.Parameter:
        """A parameter with these values; a ``wide`` one has no fewer bits than float32."""
        dtype = torch.promote_types(self.dtype, torch.float32) if wide else self.dtype
        return nn.Parameter(torch.as_tensor(values, device="cpu").to(self.device, dtype, copy=True))

    def given(self, values: Any) -> nn.Parameter:
        """A parameter with the values of the caller's array, which has none on the meta device."""
        if not isinstance(values, Tensor):
            return self.parameter(values)
        if values.is_meta:
            made = nn.Parameter(torch.empty_like(values, device=self.device, dtype=self.dtype))
        else:
            made = self.parameter(values.detach())
        made.requires_grad_(values.requires_grad or not isinstance(values, nn.Parameter))
        return made

    def assign(self, parameter: nn.Parameter, values: Any) -> None:
        """Give a parameter other values."""
        with torch.no_grad():
            parameter.copy_(torch.as_tensor(values, device="cpu"))

    def full(self, shape: tuple[int, ...], value: float) -> Tensor:
        """A constant."""
        return torch.full(shape, value, device="cpu")

    def uniform(self, shape: tuple[int, ...], least: float, most: float) -> Tensor:
        """Numbers between two."""
        return torch.empty(shape, device="cpu").uniform_(least, most)

    def normal(self, shape: tuple[int, ...], deviation: float) -> Tensor:
        """Numbers around zero."""
        return torch.empty(shape, device="cpu").normal_(std=deviation)

    def orthogonal(self, shape: tuple[int, int], gain: float = 1.0) -> Tensor:
        """A matrix of orthogonal rows or columns."""
        return nn.init.orthogonal_(torch.empty(shape, device="cpu"), gain)

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
        """``x Wᵀ + b``."""
        return nn.Linear(inputs, outputs, bias, device=self.device, dtype=self.dtype)

    def part(self, name: str, *args: Any, **options: Any) -> nn.Module:
        """A part of :mod:`linattn.nn.parts`."""
        return PARTS[name](*args, **options, device=self.device, dtype=self.dtype)

    def chain(self, modules: dict[str, nn.Module]) -> nn.ModuleDict:
        """Modules by the names of their places."""
        return nn.ModuleDict(modules)


class Module(nn.Module):
    """What joins a layer or a part to PyTorch."""

    functions = Functions

    def begin(self, device: Any = None, dtype: torch.dtype | None = None) -> Tools:
        """Begin a module: what makes its parameters."""
        nn.Module.__init__(self)
        return Tools(device, dtype)

    @staticmethod
    def value(parameter: Any) -> Any:
        """The array of a parameter."""
        return parameter

    @staticmethod
    def constant(x: Tensor) -> Tensor:
        """``x``, through which no gradient flows."""
        return x.detach()

    @staticmethod
    def run(function: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call an operator; on distributed tensors, each device on what it holds of the batch and of the heads."""
        return sharding.run(function, arrays, options)


class Configured(Module):
    """A module that knows what it was made with."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        self = super().__new__(cls)
        object.__setattr__(self, "_given", (args, options))
        return self

    _given: Any

    @property
    def arguments(self) -> dict[str, Any]:
        """What another one like this is made with, defaults included; device and dtype aside."""
        args, options = self._given
        bound = inspect.signature(type(self)).bind(*args, **options)
        bound.apply_defaults()
        bound.arguments.pop("framework", None)
        return dict(bound.arguments)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, where they are: after ``to_empty`` of a module that was made on the meta device."""
        with torch.device("cpu"):
            fresh = type(self)(**self.arguments).state_dict()
        with torch.no_grad():
            for name, x in self.state_dict().items():
                x.copy_(fresh[name])

    def extra_repr(self) -> str:
        """What it was made with, where that differs from the default."""
        defaults = inspect.signature(type(self)).parameters
        given = {name: x for name, x in self.arguments.items() if x != defaults[name].default}
        return ", ".join(f"{name}={x!r}" for name, x in given.items())


class TokenMixer(Configured):
    """Base class of the layers: ``[B, T, D]`` to ``[B, T, D]``."""

    @staticmethod
    def decodes_in_place() -> bool:
        """Whether states may be overwritten where they lie: where no gradient is to come."""
        return not torch.is_grad_enabled()


PARTS: dict[str, Any] = {name: mixer.joined(getattr(parts, name), Module, __name__) for name in parts.__all__}
globals().update(PARTS)  # where they are found again when a model is unpickled


class DeltaNet(layers.DeltaNet, TokenMixer):
    __doc__ = layers.DeltaNet.__doc__


class FLASH(layers.FLASH, TokenMixer):
    __doc__ = layers.FLASH.__doc__


class GatedDeltaNet(layers.GatedDeltaNet, TokenMixer):
    __doc__ = layers.GatedDeltaNet.__doc__


class GatedLinearAttention(layers.GatedLinearAttention, TokenMixer):
    __doc__ = layers.GatedLinearAttention.__doc__


class GAU(layers.GAU, TokenMixer):
    __doc__ = layers.GAU.__doc__


class Hedgehog(layers.Hedgehog, TokenMixer):
    __doc__ = layers.Hedgehog.__doc__


class HGRN2(layers.HGRN2, TokenMixer):
    __doc__ = layers.HGRN2.__doc__


class KimiDeltaAttention(layers.KimiDeltaAttention, TokenMixer):
    __doc__ = layers.KimiDeltaAttention.__doc__


class Lightning(layers.Lightning, TokenMixer):
    __doc__ = layers.Lightning.__doc__


class LinearAttention(layers.LinearAttention, TokenMixer):
    __doc__ = layers.LinearAttention.__doc__


class Mamba2(layers.Mamba2, TokenMixer):
    __doc__ = layers.Mamba2.__doc__


class RetNet(layers.RetNet, TokenMixer):
    __doc__ = layers.RetNet.__doc__


class RWKV6(layers.RWKV6, TokenMixer):
    __doc__ = layers.RWKV6.__doc__


class RWKV7(layers.RWKV7, TokenMixer):
    __doc__ = layers.RWKV7.__doc__


class Block(model.Block, Module):
    __doc__ = model.Block.__doc__


class Decoder(model.Decoder, Module):
    __doc__ = model.Decoder.__doc__


class LanguageModel(model.LanguageModel, Configured):
    __doc__ = model.LanguageModel.__doc__

    gradient_checkpointing: bool
    """Whether what blocks compute is forgotten and computed again for the backward pass. Default False."""

    def call_block(self, block: Any, x: Tensor, **call: Any) -> Tensor:
        """Call one block, and let it forget what it computed where that is asked for."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, x, use_reentrant=False, **call)
        return block(x, **call)

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | None = None,
        generator: torch.Generator | None = None,
        cache: Cache | None = None,
        choose: Any = None,
    ) -> Tensor:
        """Continue each row of ``ids``: the prompt in one call, the rest token by token from the states.

        Args:
            ids: Tokens ``[B, T]``, ``T ≥ 1``.
            max_new_tokens: How many to add.
            mask: ``[B, T]``, nonzero where a token is one. Padding on the left keeps prompt and continuation together.
            temperature: Logits are divided by it before a token is drawn; 0 takes the likeliest. Default 0.
            top_k: Draw from the ``k`` likeliest alone.
            top_p: Draw from the likeliest that together have this probability.
            eos_token_id: What ends a sequence; after it, it is repeated.
            generator: Of the random numbers.
            cache: Goes on from what it holds; afterwards it holds all but the last token. Default a new one.
            choose: From logits ``[B, vocab_size]``, the next tokens ``[B]``, in the place of all of these.

        Returns:
            ``[B, T + max_new_tokens]``.
        """
        draw = Sampling(temperature, top_k, top_p, generator) if temperature > 0 and choose is None else choose
        return super().generate(ids, max_new_tokens, mask=mask, eos_token_id=eos_token_id, cache=cache, choose=draw)


class Sampling:
    """Draws tokens ``[B]`` from logits ``[B, vocab_size]``; arguments as those of :meth:`LanguageModel.generate`."""

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None = None
    ) -> None:
        self.temperature, self.top_k, self.top_p, self.generator = temperature, top_k, top_p, generator

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits.float() / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(-1)
        if self.top_p is not None:  # the likeliest, until what came before them has that probability
            ordered, order = probabilities.sort(-1, descending=True)
            ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]


LAYERS: dict[str, Any] = {name: globals()[name] for name in layers.__all__}
PARTS.update(LAYERS, Block=Block, Decoder=Decoder)
