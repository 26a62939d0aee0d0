"""JAX arrays on any device. Gradients come from ``jax.vjp`` of the eager call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .base import Adapter, Arrays, Global, changed

if TYPE_CHECKING:
    from ..cases import Case

__all__ = ["JaxAdapter"]


def _set_configuration(before: dict[str, Any]) -> None:
    for name in changed(before, jax.config.values):
        if name in before:  # not an option that a library which was imported meanwhile has brought
            jax.config.update(name, before[name])


class JaxAdapter(Adapter):
    """Values travel through NumPy's float64, which holds those of every narrower dtype exactly.

    64-bit types are switched on for the cases that have them, and off for the others, as most users of JAX have them.
    Arrays of JAX have no strides and are never written to, and freed memory is out of reach: there is nothing to poison.
    """

    name = "jax"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        kind, _, number = device.partition(":")
        places = jax.devices(kind)
        if not (number or "0").isdecimal() or int(number or 0) >= len(places):
            raise ValueError(f"JAX has no device {device!r} here: expected {kind}:0 to {kind}:{len(places) - 1}")
        self.place = places[int(number or 0)]

    def set_up(self, case: Case) -> None:
        jax.config.update("jax_enable_x64", case.has_64_bits or case.check == "bad-input")

    def from_float64(self, x: Any, dtype: str) -> Any:
        with np.errstate(over="ignore"):
            return jax.device_put(np.array(x).astype(jnp.dtype(dtype)), self.place)

    def to_float64(self, x: Any) -> Any:
        x = np.array(x)
        return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def is_array(self, x: Any) -> bool:
        return isinstance(x, jax.Array)

    def dtype(self, x: Any) -> str:
        return str(x.dtype)

    def is_same_device(self, x: Any) -> bool:
        return x.devices() == {self.place}

    def gradients(self, call: Any, arrays: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        others = {name: x for name, x in arrays.items() if name not in floats}

        def wanted(floats: Arrays) -> tuple[Arrays, Arrays]:
            outputs = call({name: floats.get(name, others.get(name)) for name in arrays})
            return {name: outputs[name] for name in cotangents if self.is_array(outputs.get(name))}, outputs

        used, pull, outputs = jax.vjp(wanted, floats, has_aux=True)
        if not used:
            return outputs, {}
        (found,) = pull({name: cotangents[name] for name in used})
        return outputs, found

    def globals(self) -> tuple[Global, ...]:
        return (*super().globals(), Global("configuration of JAX", lambda: dict(jax.config.values), _set_configuration))

    def transforms(self) -> Any:
        from .jax_transforms import TRANSFORMS

        return TRANSFORMS

    def wait(self) -> None:
        if self.place.platform != "cpu":  # a device that a kernel has faulted on takes nothing from this process any more
            (jax.device_put(np.zeros(1, np.float32), self.place) + 1).block_until_ready()  # a program, behind all others

    def repeated(self, x: Any, axis: int, times: int, rest: int) -> Any:
        return jnp.concatenate([*[x] * times, jax.lax.slice_in_dim(x, 0, rest, axis=axis)], axis)

    def lengthened(self, x: Any, axis: int, length: int) -> Any:
        shape = tuple(length if i == axis else n for i, n in enumerate(x.shape))
        return jnp.zeros(shape, x.dtype, device=self.place)

    def held(self) -> int:
        return (self.place.memory_stats() or {}).get("bytes_in_use", 0) if self.place.platform != "cpu" else 0

    def memory(self) -> float:
        return (self.place.memory_stats() or {}).get("bytes_limit", 0) / 2**30 if self.place.platform != "cpu" else 0.0

    def versions(self) -> dict[str, str]:
        found = {"jax": jax.__version__, "jaxlib": jax.lib.__version__}
        return found if self.place.platform == "cpu" else {**found, "device": self.place.device_kind}
