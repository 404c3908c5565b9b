"""From a kernel compiled by the CuTe DSL to its launches: the AOT host code runs against a fake CUDA runtime.

`export_to_c` gives an object file whose host function computes grids, parameters and tensor maps from its arguments. It is linked with
fake_cudart.c (needs g++), called, and each launch is caught before it would reach a device.
"""

import ctypes
import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fp4mega.testing.ptx.parser import Kernel
from fp4mega.testing.ptx.types import Array

_CLUSTER_ATTRIBUTE = 4


class _Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", _Dim3),
        ("block", _Dim3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


_Callback = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.POINTER(_Config), ctypes.POINTER(ctypes.c_void_p)
)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as the host code asked for it; `parameters` is the parameter block in the kernel's layout."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameters: bytes


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor argument: its memory (or its address on a device), and the dynamic sizes and strides (elements) that the compiled
    function asks for, in order."""

    data: Array | int
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None

    @property
    def address(self) -> int:
        """Where the tensor begins."""
        return self.data if isinstance(self.data, int) else int(self.data.ctypes.data)


def as_bytes(value: Any) -> Array:
    """The memory of a numpy array or of a CPU torch tensor, as uint8 without a copy. Raises TypeError or ValueError."""
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise ValueError(
                "a tensor argument must be C-contiguous; pass its base and strides with ptx.tensor"
            )
        return value.reshape(-1).view(np.uint8)
    if hasattr(value, "data_ptr") and hasattr(value, "untyped_storage"):
        if value.device.type != "cpu":
            raise ValueError(f"a tensor argument must be on the CPU, got {value.device}")
        storage = value.untyped_storage()
        memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        whole = np.frombuffer(memory, np.uint8)
        return whole[value.storage_offset() * value.element_size() :]
    raise TypeError(
        f"tensor argument of type {type(value).__name__}: expected a numpy array or a CPU torch tensor"
    )


def tensor(
    data: Any, shape: tuple[int, ...] | None = None, strides: tuple[int, ...] | None = None
) -> TensorArgument:
    """A tensor argument with explicit dynamic sizes and strides in elements, as the compiled signature counts them.

    data: numpy array or CPU torch tensor, which must stay alive until the launch is over, or an address (then the memory is not
    registered: for launches that are captured only, or with `buffers`).
    """
    return TensorArgument(data if isinstance(data, int) else as_bytes(data), shape, strides)


@dataclass(frozen=True, slots=True)
class _Field:
    ctype: type[Any]
    count: int


@dataclass(frozen=True, slots=True)
class _Argument:
    """One argument of the host function: a scalar ctype, or a tensor's fields (data, sizes, strides)."""

    name: str
    scalar: type[Any] | None
    shape: _Field
    strides: _Field


_SCALARS: dict[str, type[Any]] = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int8_t": ctypes.c_int8,
    "uint8_t": ctypes.c_uint8,
    "int16_t": ctypes.c_int16,
    "uint16_t": ctypes.c_uint16,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "bool": ctypes.c_bool,
    "cudaStream_t": ctypes.c_void_p,
    "void *": ctypes.c_void_p,
}


def _header_arguments(header: str) -> tuple[str, list[_Argument]]:
    """(name of the host function, its arguments) out of the generated C header."""
    structs: dict[str, tuple[_Field, _Field]] = {}
    for body, name in re.findall(r"typedef struct \{([^{}]*)\}\s*(\w+);", header):
        fields = {
            "dynamic_shapes": _Field(ctypes.c_int32, 0),
            "dynamic_strides": _Field(ctypes.c_int64, 0),
        }
        for kind, field, count in re.findall(r"(int32_t|int64_t)\s+(dynamic_\w+)\[(\d+)\]", body):
            fields[field] = _Field(_SCALARS[kind], int(count))
        structs[name] = (fields["dynamic_shapes"], fields["dynamic_strides"])
    function = re.search(r"void (_mlir_\w*ciface\w+)\(void \*\*args", header)
    wrapper = re.search(r"static inline int32_t \w+_wrapper\((.*?)\)\s*\{", header, re.S)
    if function is None or wrapper is None:
        raise ValueError("the generated header has no host function")
    arguments = []
    empty = _Field(ctypes.c_int32, 0)
    for declaration in wrapper.group(1).split(",")[1:]:
        kind, name = re.match(r"\s*(.*?[\s*])(\w+)\s*$", declaration, re.S).groups()  # type: ignore[union-attr]
        kind = kind.strip()
        if kind.rstrip("* ") in structs:
            shape, strides = structs[kind.rstrip("* ")]
            arguments.append(_Argument(name, None, shape, strides))
        elif kind in _SCALARS:
            arguments.append(_Argument(name, _SCALARS[kind], empty, empty))
        elif kind.endswith("*"):
            arguments.append(_Argument(name, ctypes.c_void_p, empty, empty))
        else:
            raise NotImplementedError(f"argument {name} of type {kind!r} in the generated header")
    return function.group(1), arguments


def _struct(argument: _Argument, value: TensorArgument) -> ctypes.Structure:
    fields: list[tuple[str, Any]] = [("data", ctypes.c_void_p)]
    if argument.shape.count:
        fields.append(("shape", argument.shape.ctype * argument.shape.count))
    if argument.strides.count:
        fields.append(("strides", argument.strides.ctype * argument.strides.count))
    made = type("TensorStruct", (ctypes.Structure,), {"_fields_": fields})()
    made.data = value.address
    for name, field, given in (
        ("shape", argument.shape, value.shape),
        ("strides", argument.strides, value.strides),
    ):
        given = given or ()
        if len(given) != field.count:
            raise ValueError(
                f"argument {argument.name}: {len(given)} dynamic {name} given, the compiled function takes {field.count}"
            )
        if field.count:
            setattr(made, name, (field.ctype * field.count)(*given))
    return made


def _inferred(argument: _Argument, value: Any) -> TensorArgument:
    """An array given without sizes: only where they leave no choice."""
    if isinstance(value, TensorArgument):
        return value
    data = as_bytes(value)
    dims = tuple(int(n) for n in value.shape)
    size = value.itemsize if isinstance(value, np.ndarray) else 1
    steps = (
        tuple(int(s) // size for s in value.strides)
        if isinstance(value, np.ndarray)
        else tuple(value.stride())
    )
    shape = () if argument.shape.count == 0 else dims
    strides = steps
    if argument.strides.count == 0:
        strides = ()
    elif argument.strides.count == len(steps) - 1 and 1 in steps:
        unit = len(steps) - 1 - steps[::-1].index(1)
        strides = steps[:unit] + steps[unit + 1 :]
    if len(shape) != argument.shape.count or len(strides) != argument.strides.count:
        raise ValueError(
            f"argument {argument.name}: {argument.shape.count} dynamic sizes and {argument.strides.count} dynamic strides are "
            f"wanted and cannot be told from an array of shape {dims}; pass ptx.tensor(data, shape=..., strides=...)"
        )
    return TensorArgument(data, shape, strides)


class HostFunction:
    """The host code of one compiled kernel; call it to get its launches.

    sms and capability are what the fake device says of itself.
    """

    def __init__(
        self,
        compiled: Any,
        kernels: dict[str, Kernel],
        sms: int = 148,
        capability: tuple[int, int] = (10, 0),
    ) -> None:
        self._kernels = kernels
        self._folder = tempfile.TemporaryDirectory(prefix="fp4mega_ptx_")
        folder = Path(self._folder.name)
        compiled.export_to_c(file_path=str(folder), file_name="kernel", function_prefix="kernel")
        self.name, self.arguments = _header_arguments((folder / "kernel.h").read_text())
        self._library = ctypes.CDLL(str(_link(folder)), mode=ctypes.RTLD_LOCAL)
        self._launches: list[Launch] = []
        self._callback = _Callback(self._caught)
        self._library.fp4mega_fake_refused.restype = ctypes.c_char_p
        self._library.fp4mega_fake_setup(self._callback, sms, *capability)
        self._load_module()

    def _load_module(self) -> None:
        """What the header's inline loader does: the module's initializer stores a library handle."""
        self._module = ctypes.c_void_p()
        result, device = ctypes.c_int(0), ctypes.c_int(0)
        library = ctypes.pointer(self._module)
        slots: list[Any] = [
            ctypes.pointer(library),
            ctypes.pointer(ctypes.pointer(device)),
            ctypes.pointer(ctypes.pointer(result)),
        ]
        self._keep = (library, result, device, slots)
        call = ctypes.c_void_p * 2
        self._library._mlir_kernel_cuda_init(
            call(ctypes.addressof(slots[0]), ctypes.addressof(slots[2]))
        )
        load = ctypes.c_void_p * 3
        self._library._mlir_kernel_cuda_load_to_device(load(*(ctypes.addressof(s) for s in slots)))

    def _caught(self, name: bytes, config: Any, arguments: Any) -> None:
        c = config.contents
        kernel = self._kernels[name.decode()]
        block = bytearray(kernel.parameter_bytes)
        for i, parameter in enumerate(kernel.parameters):
            block[parameter.offset : parameter.offset + parameter.size] = ctypes.string_at(
                arguments[i], parameter.size
            )
        cluster = (1, 1, 1)
        for i in range(c.num_attributes):
            if c.attributes[i].id == _CLUSTER_ATTRIBUTE:
                x, y, z = c.attributes[i].value[:3]
                cluster = (x, y, z)
        self._launches.append(
            Launch(
                kernel.name,
                (c.grid.x, c.grid.y, c.grid.z),
                (c.block.x, c.block.y, c.block.z),
                cluster,
                int(c.shared_bytes),
                bytes(block),
            )
        )

    def __call__(self, *values: Any) -> tuple[list[Launch], dict[str, Array]]:
        """(launches, tensor memory by argument name). Tensors as numpy, torch or ptx.tensor; scalars as numbers; a stream as None.

        Raises ValueError or TypeError for arguments that do not fit the compiled signature, RuntimeError when the host code fails.
        """
        if len(values) != len(self.arguments):
            names = ", ".join(a.name for a in self.arguments)
            raise ValueError(
                f"{len(values)} arguments given, the compiled function takes {len(self.arguments)}: {names}"
            )
        memory: dict[str, Array] = {}
        prepared: list[Any] = []
        for argument, value in zip(self.arguments, values, strict=True):
            if argument.scalar is None:
                given = _inferred(argument, value)
                if not isinstance(given.data, int):
                    memory[argument.name] = given.data
                prepared.append(_struct(argument, given))
            elif isinstance(value, TensorArgument | np.ndarray) or hasattr(value, "data_ptr"):
                given = (
                    value if isinstance(value, TensorArgument) else TensorArgument(as_bytes(value))
                )
                if not isinstance(given.data, int):
                    memory[argument.name] = given.data
                prepared.append(ctypes.c_void_p(given.address))
            else:
                prepared.append(argument.scalar(value if value is not None else 0))
        result = ctypes.c_int(0)
        pointers = (ctypes.c_void_p * (len(prepared) + 1))(
            *(ctypes.addressof(p) for p in [*prepared, result])
        )
        self._launches = []
        getattr(self._library, self.name)(pointers, len(prepared) + 1)
        if result.value:
            refused = self._library.fp4mega_fake_refused()
            why = f": the fake runtime has no {refused.decode()}" if refused else ""
            raise RuntimeError(f"the host function returned error {result.value}{why}")
        return self._launches, memory


def _runtime_archive() -> Path:
    import nvidia_cutlass_dsl  # type: ignore[import-untyped]

    for root in nvidia_cutlass_dsl.__path__:
        for version in ("cu13", "cu12"):
            found = Path(root) / version / "lib" / "libcuda_dialect_runtime_static.a"
            if found.exists():
                return found
    raise FileNotFoundError(
        "libcuda_dialect_runtime_static.a: install nvidia-cutlass-dsl-libs-cu13 (or -cu12)"
    )


@functools.cache
def _fake_runtime() -> tuple[Path, ...]:
    """The dialect runtime's archive, fake_cudart.c compiled, and a stub for every CUDA call that it lacks; once per process."""
    archive = _runtime_archive()
    folder = Path(tempfile.mkdtemp(prefix="fp4mega_cudart_"))
    source = resources.files("fp4mega.testing.ptx").joinpath("fake_cudart.c").read_text()
    (folder / "fake_cudart.c").write_text(source)
    fake = _compile(folder / "fake_cudart.c")
    # A call without a stand-in is refused with cudaErrorNotSupported; fake_cudart.c remembers its name.
    missing = sorted(_symbols(archive, "U") - _symbols(fake, "T"))
    stubs = [
        f'int {name}(void) {{ return fp4mega_fake_refuse("{name}"); }}'
        for name in missing
        if name.startswith("cu")
    ]
    (folder / "stubs.c").write_text(
        "\n".join(["int fp4mega_fake_refuse(const char *);", *stubs, ""])
    )
    return archive, fake, _compile(folder / "stubs.c")


def _compile(source: Path) -> Path:
    target = source.with_suffix(".o")
    subprocess.run(["gcc", "-O1", "-w", "-fPIC", "-c", "-o", str(target), str(source)], check=True)
    return target


def _symbols(binary: Path, kind: str) -> set[str]:
    """Names of undefined ("U") or defined ("T") functions."""
    listing = subprocess.run(["nm", str(binary)], check=True, capture_output=True, text=True).stdout
    return {m.group(1) for m in re.finditer(rf"(?m)^[0-9a-f ]*\s{kind} (\w+)$", listing)}


def _link(folder: Path) -> Path:
    target = folder / "kernel.so"
    archive, *objects = _fake_runtime()
    subprocess.run(
        [
            *(
                "g++",
                "-shared",
                "-fPIC",
                "-o",
                str(target),
                str(folder / "kernel.o"),
                *map(str, objects),
            ),
            *("-Wl,--whole-archive", str(archive), "-Wl,--no-whole-archive", "-Wl,-Bsymbolic"),
        ],
        check=True,
        capture_output=True,
    )
    return target
