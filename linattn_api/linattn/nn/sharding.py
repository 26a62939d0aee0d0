# pyright: basic
"""Operators on distributed tensors: each device computes its sequences, or its heads, and nothing is sent in between.

The rule comes from the shapes that a family declares: an axis called ``B`` or ``N`` is of the batch, one called ``H`` or ``HV``
(or ``D`` of a convolution) is of the heads. Along each axis of the mesh a call is split as its first array is.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..errors import OptionError, ShapeError
from ..feature_maps import FeatureMap
from ..gate_maps import Gate
from ..plugin import MixedState
from ..spec import Arg, OpSpec, spec_of

__all__ = ["run", "shard_by_heads"]

PLAIN = (Tensor, nn.Parameter)
BATCH, HEADS = ("B", "N", "P"), ("H", "HV", "G")
OTHERS = {
    "rotated": OpSpec(
        name="rotated",
        recurrence="pairs of channels turn with the position",
        args=(Arg("x", "B T H K"), Arg("positions", "B T", "index")),
        options=(),
        state=lambda options: (),
        index=None,
        mapped=(),
        like="x",
    )
}
"""What layers split besides the operators."""
FORMS = ("chunk", "recurrent", "parallel", "decode")


def run(function: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """``function(*arrays, **options)``, on what each device holds where the first array is distributed."""
    if type(arrays[0]) in PLAIN:
        return function(*arrays, **options)
    from torch.distributed.tensor import DTensor

    if not isinstance(arrays[0], DTensor):
        return function(*arrays, **options)
    return Split(function, arrays, options).run()


class Split:
    """One call on distributed tensors.

    Attributes:
        settings: Its static options, defaults included.
        roles: For each axis of the mesh, ``"batch"``, ``"heads"``, the symbol of a leading axis where the operator takes any
            number of them, or ``None`` where every device computes the same.
    """

    def __init__(self, function: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.function, self.arrays, self.options = function, arrays, options
        form, _, op = function.__name__.partition("_")
        self.op, self.form = (op, form) if form in FORMS else (function.__name__, None)
        self.spec = OTHERS[self.op] if self.op in OTHERS else spec_of(self.op, self.form)
        gate = options.get("gate")
        static = {name: x for name, x in options.items() if name in self.spec.defaults}
        self.settings = {**self.spec.defaults, **static, "gate": gate and gate.kind}
        self.heads = ("D",) if self.op == "short_conv" else HEADS
        self.mesh = arrays[0].device_mesh
        self.roles = [self._role(placement) for placement in arrays[0].placements]

    def _role(self, placement: Any) -> str | None:
        if not placement.is_shard() or self.arrays[0].shape[placement.dim] == 1:
            return None
        symbols = self._symbols(self.spec.args[0], self.arrays[0])
        symbol = symbols[placement.dim]
        if symbol.startswith("..."):
            return symbol
        if symbol in BATCH:
            return "batch" if self.options.get("cu_seqlens") is None else None
        return "heads" if symbol in self.heads else None

    def run(self) -> Any:
        """The result, split as the call is."""
        names = [arg.name for arg in self.spec.args]
        arrays = [self.local(name, x) for name, x in zip(names, self.arrays, strict=False)]
        options = {name: self.local(name, x) for name, x in self.options.items()}
        return self.wrapped(self.function(*arrays, **options))

    def local(self, name: str, x: Any) -> Any:
        """What this device needs of an argument."""
        if isinstance(x, (Gate, FeatureMap)) and is_dataclass(x):
            of: Any = self._field_of_gate if isinstance(x, Gate) else self._field_of_map
            return replace(x, **{f.name: of(x, f.name) for f in fields(x)})
        if isinstance(x, MixedState):
            return MixedState(*(self.local(f"{name}.{part}", y) for part, y in zip(x._fields, x, strict=True)))
        return self._local(self._symbols_of(name, x), x) if isinstance(x, Tensor) else x

    def _field_of_gate(self, gate: Any, name: str) -> Any:
        return self.local(f"gate.{name}", getattr(gate, name))

    def _field_of_map(self, phi: FeatureMap, name: str) -> Any:
        """Parameters are one set a head; a map says what axes its other arrays have."""
        x = getattr(phi, name)
        if not isinstance(x, Tensor):
            return x
        return self._local(tuple(phi.axes[name].split())[: x.ndim] if name in phi.axes else ("H", *[""] * (x.ndim - 1)), x)

    def _local(self, symbols: tuple[str, ...], x: Any) -> Any:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        placements = self.placements(symbols, tuple(x.shape))
        shared = [
            Partial() if role and not placement.is_shard() else placement
            for role, placement in zip(self.roles, placements, strict=True)
        ]
        return x.redistribute(self.mesh, placements).to_local(grad_placements=shared)

    def placements(self, symbols: tuple[str, ...], shape: tuple[int, ...]) -> list[Any]:
        """How an array with these axes is split over the mesh."""
        from torch.distributed.tensor import Replicate, Shard

        found: list[Any] = []
        for axis, role in enumerate(self.roles):
            place = self._place(role, symbols)
            devices = self.mesh.size(axis)
            if place is None or shape[place] == 1:  # one head, or one row of positions, serves all
                found.append(Replicate())
            elif shape[place] % devices:
                what = {"batch": "sequences", "heads": "heads"}.get(str(role), "rows")
                raise ShapeError(f"{self.op}: {shape[place]} {what} cannot be split over {devices} devices")
            else:
                found.append(Shard(place))
        return found

    def wrapped(self, result: Any) -> Any:
        """Distributed tensors of what the devices computed."""
        if not isinstance(result, tuple):
            return self._wrapped(self._output(), result)
        o, state = result
        parts = self.spec.state(self.settings)
        if isinstance(state, tuple):
            state = type(state)(*(self._wrapped(arg.shapes[0], x) for arg, x in zip(parts, state, strict=True)))
        elif state is not None:
            state = self._wrapped(parts[0].shapes[0], state)
        return self._wrapped(self._output(), o), state

    def _output(self) -> tuple[str, ...]:
        like = next(arg for arg in self.spec.args if arg.name == self.spec.like)
        return self._symbols(like, self.arrays[self.spec.args.index(like)])

    def _wrapped(self, symbols: tuple[str, ...], x: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements: list[Any] = []
        for role in self.roles:
            place = self._place(role, symbols)
            placements.append(Replicate() if place is None else Shard(place))
        return DTensor.from_local(x, self.mesh, placements, run_check=False)

    def _place(self, role: str | None, symbols: tuple[str, ...]) -> int | None:
        """The axis of an array that a role splits."""
        wanted = {"batch": BATCH, "heads": self.heads, None: ()}.get(role, (role,))
        return next((i for i, symbol in enumerate(symbols) if symbol in wanted), None)

    def _symbols_of(self, name: str, x: Tensor) -> tuple[str, ...]:
        arg = next(arg for arg in self.spec.arrays(self.settings) if arg.name == name)
        return self._symbols(arg, x)

    @staticmethod
    def _symbols(arg: Arg, x: Any) -> tuple[str, ...]:
        """The axes of an argument, of the alternatives that fit its number of axes the one whose heads fit."""
        for symbols in arg.shapes:
            if symbols and symbols[0] == "...":
                return (*(f"...{i}" for i in range(x.ndim - len(symbols) + 1)), *symbols[1:])
        return next(tuple(symbols) for symbols in arg.shapes if len(symbols) == x.ndim)


COLUMNS = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "f_proj", "i_proj", "gk_proj")
"""Projections whose outputs are heads; of a chain it is the last matrix."""
CONVOLUTIONS = tuple(f"{name}_conv1d" for name in ("q", "k", "v", "f", "i"))
VECTORS = ("A_log", "dt_bias")
SPLIT_BY_HEADS = (
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LinearAttention",
    "RetNet",
)


def shard_by_heads(layer: nn.Module, mesh: Any) -> nn.Module:
    """Split a layer over a mesh of one axis, each device with its heads (tensor parallelism).

    Its parameters become distributed tensors: projections into heads are split by rows, the last projection by columns, norms
    are on every device. Called with ``x [B, T, D]`` that every device has, it gives ``y`` likewise: one sum over the devices a
    layer. The batch may be split over another axis of a larger mesh.

    Args:
        layer: A ``DeltaNet``, ``GatedDeltaNet``, ``GatedLinearAttention``, ``KimiDeltaAttention``, ``LinearAttention`` or
            ``RetNet``, whose parameters are the same on every device.
        mesh: A ``torch.distributed.DeviceMesh`` of one axis; its size divides the numbers of heads.

    Returns:
        ``layer``.

    Raises:
        OptionError: The layer is none of these.
        ShapeError: The heads cannot be split.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    name = type(layer).__name__
    if name not in SPLIT_BY_HEADS:
        raise OptionError(f"shard_by_heads: expected one of {', '.join(SPLIT_BY_HEADS)}, got {name}")
    sizes = {kind: getattr(layer, kind) for kind in ("num_heads", "num_kv_heads", "num_v_heads") if hasattr(layer, kind)}
    for kind, heads in sizes.items():
        if heads % mesh.size():
            raise ShapeError(f"shard_by_heads: {kind} = {heads} cannot be split over {mesh.size()} devices")

    def placement(path: str) -> Any:
        first, *rest = path.split(".")
        chained = first in COLUMNS and rest[0] == "0"
        if first in VECTORS or (first in (*COLUMNS, *CONVOLUTIONS) and not chained):
            return Shard(0)
        return Shard(1) if first == "o_proj" else Replicate()

    for path, parameter in list(layer.named_parameters()):
        owner, _, leaf = path.rpartition(".")
        split = distribute_tensor(parameter.data, mesh, [placement(path)])
        setattr(layer.get_submodule(owner), leaf, nn.Parameter(split, requires_grad=parameter.requires_grad))
    return layer
