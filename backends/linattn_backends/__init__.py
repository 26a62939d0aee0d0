"""The backends that ship with linattn: what each of them is, in the order in which auto tries them.

Their methods are elsewhere, so that this page imports no framework.
"""

from __future__ import annotations

from linattn.plugin import Backend

__all__ = [  # noqa: RUF022 - this is the order
    "Triton", "Torch", "Fla", "FlashQla",
    "Pallas", "JaxTriton", "Jax", "Jla",
    "Mlx", "MlxFast", "MlxLm",
    "Numpy",
]  # fmt: skip

API = ">=1,<2"


class Triton(Backend):
    """Triton kernels on NVIDIA GPUs."""

    name = "triton"
    api = API
    frameworks = ("torch",)
    forward_mode = False
    maps = ("Hedgehog",)
    implementation = "linattn_backends.triton:TritonBackend"


class Torch(Backend):
    """Pure PyTorch: every family, form and flag, on any device."""

    name = "torch"
    api = API
    frameworks = ("torch",)
    implementation = "linattn_backends.torch:TorchBackend"


class Fla(Backend):
    """The chunk and recurrent operators of flash-linear-attention, on NVIDIA GPUs."""

    name = "fla"
    api = API
    frameworks = ("torch",)
    requires = "fla"
    implementation = "linattn_backends.fla:FlaBackend"


class FlashQla(Backend):
    """FlashQLA's TileLang kernels for the gated delta rule, on Hopper and Blackwell GPUs."""

    name = "flash_qla"
    api = API
    frameworks = ("torch",)
    requires = "flash_qla"
    families = ("delta_rule", "gated_delta_rule")
    implementation = "linattn_backends.flash_qla:FlashQlaBackend"


class Pallas(Backend):
    """Pallas kernels for TPUs: the families with a diagonal gate and the delta families, by chunks and for one token."""

    name = "pallas"
    api = API
    frameworks = ("jax",)
    forward_mode = False
    implementation = "linattn_backends.pallas:PallasBackend"


class JaxTriton(Backend):
    """The Triton kernels on JAX arrays, through jax-triton, on NVIDIA GPUs."""

    name = "jax_triton"
    api = API
    frameworks = ("jax",)
    forward_mode = False
    implementation = "linattn_backends.jax_triton:JaxTritonBackend"


class Jax(Backend):
    """Plain JAX: every family, form and flag, on any device, under every transform."""

    name = "jax"
    api = API
    frameworks = ("jax",)
    implementation = "linattn_backends.jax:JaxBackend"


class Jla(Backend):
    """The chunked and token-by-token operators of jax-linear-attention, on any device."""

    name = "jla"
    api = API
    frameworks = ("jax",)
    requires = "jla"
    implementation = "linattn_backends.jla:JlaBackend"


class Mlx(Backend):
    """MLX: every family, form and flag, on any device."""

    name = "mlx"
    api = API
    frameworks = ("mlx",)
    implementation = "linattn_backends.mlx:MlxBackend"


class MlxFast(Backend):
    """The gated delta rule that MLX ships, on any of its devices."""

    name = "mlx_fast"
    api = API
    frameworks = ("mlx",)
    requires = "mlx"
    families = ("delta_rule", "gated_delta_rule")
    implementation = "linattn_backends.mlx_fast:MlxFastBackend"


class MlxLm(Backend):
    """The recurrence that mlx-lm's Qwen3-Next and Kimi Linear models run, on any device of MLX."""

    name = "mlx_lm"
    api = API
    frameworks = ("mlx",)
    requires = "mlx_lm"
    families = ("delta_rule", "gated_delta_rule", "kda")
    implementation = "linattn_backends.mlx_lm:MlxLmBackend"


class Numpy(Backend):
    """Every form of every family by its definition, in float64: slow, exact, and the measure of the other backends."""

    name = "numpy"
    api = API
    frameworks = ("numpy",)
    implementation = "linattn_backends.numpy:NumpyBackend"
