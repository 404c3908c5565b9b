"""Global, shared and tensor memory: bytes, bounds, and which bytes were ever written.

Global memory is the caller's own numpy buffers, found by address. Shared memory is one byte array per CTA; tensor memory is 128
lanes by 512 columns of 32 bits. Every access names bytes; hazards.py sees the same accesses.
"""

from bisect import bisect_right

import numpy as np

from fp4mega.testing.ptx.errors import OutOfBoundsError, ProtocolError
from fp4mega.testing.ptx.types import POISON32, SHARED_BASE, Array

SHARED_LIMIT = 232_448
TMEM_LANES, TMEM_COLUMNS = 128, 512


class GlobalMemory:
    """Registered buffers; an access must lie within one of them."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[tuple[int, int, Array, str, bool]] = []

    def register(
        self, buffer: Array, name: str, base: int | None = None, read_only: bool = False
    ) -> int:
        """Make a C-contiguous array addressable, at its own address unless `base` is given; returns the address."""
        if not buffer.flags.c_contiguous:
            raise ValueError(f"{name}: a registered buffer must be C-contiguous")
        view = buffer.reshape(-1).view(np.uint8)
        start = int(view.ctypes.data) if base is None else base
        index = bisect_right(self._starts, start)
        self._starts.insert(index, start)
        self._regions.insert(index, (start, start + view.size, view, name, read_only))
        return start

    def locate(self, address: int, size: int, write: bool = False) -> tuple[Array, int]:
        """The buffer that holds `size` bytes at `address`, and the offset in it. Raises OutOfBoundsError."""
        index = bisect_right(self._starts, address) - 1
        while index >= 0:
            start, end, view, name, read_only = self._regions[index]
            if address + size <= end:
                if write and read_only:
                    raise OutOfBoundsError(
                        f"write of {size} bytes to read-only {name} at {address:#x}"
                    )
                return view, address - start
            if index == 0 or self._regions[index - 1][1] <= address:
                break
            index -= 1
        near = ""
        if index >= 0:
            start, end, _, name, _ = self._regions[index]
            near = f"; nearest below is {name}, {end - start} bytes from {start:#x} ({address + size - end} past its end)"
        raise OutOfBoundsError(
            f"global access of {size} bytes at {address:#x} is in no registered buffer{near}"
        )

    def gather(self, addresses: Array, size: int, lanes: Array) -> Array:
        """uint8 [len(lanes), size] at addresses[lanes]."""
        wanted = addresses[lanes].astype(np.int64)
        if len(wanted) == 0:
            return np.zeros((0, size), np.uint8)
        low, high = int(wanted.min()), int(wanted.max())
        try:
            view, offset = self.locate(low, high - low + size)
        except OutOfBoundsError:
            out = np.empty((len(wanted), size), np.uint8)
            for i, address in enumerate(wanted):
                view, offset = self.locate(int(address), size)
                out[i] = view[offset : offset + size]
            return out
        return np.asarray(view[(wanted - low + offset)[:, None] + np.arange(size)])

    def scatter(
        self, addresses: Array, data: Array, lanes: Array, add: type[np.generic] | None = None
    ) -> None:
        """Write data [len(lanes), size] to addresses[lanes], or add it as `add`; the highest lane wins where two write the same."""
        wanted = addresses[lanes].astype(np.int64)
        if len(wanted) == 0:
            return
        size = data.shape[1]
        low, high = int(wanted.min()), int(wanted.max())
        if add is None:
            try:
                view, offset = self.locate(low, high - low + size, write=True)
            except OutOfBoundsError:
                pass
            else:
                view[(wanted - low + offset)[:, None] + np.arange(size)] = data
                return
        for address, row in zip(wanted.tolist(), data, strict=True):
            view, offset = self.locate(address, size, write=True)
            if add is None:
                view[offset : offset + size] = row
            else:
                target = view[offset : offset + size].view(add)
                target += np.ascontiguousarray(row).view(add)


class SharedMemory:
    """One CTA's shared memory: addresses from SHARED_BASE up to the size the kernel was launched with."""

    def __init__(self, size: int) -> None:
        if size > SHARED_LIMIT:
            raise ProtocolError(f"{size} bytes of shared memory: the limit is {SHARED_LIMIT}")
        self.end = SHARED_BASE + size
        # Bytes never written are 0xFF: NaN in every float format but E2M1.
        self.data = np.full(self.end, 0xFF, np.uint8)
        self.written = np.zeros(self.end, np.bool_)

    def check(self, addresses: Array, what: str) -> None:
        """Raise OutOfBoundsError unless every byte address (any shape) is the kernel's."""
        if addresses.size == 0:
            return
        low, high = int(addresses.min()), int(addresses.max())
        if low < SHARED_BASE or high >= self.end:
            raise OutOfBoundsError(
                f"{what}: shared memory bytes {low:#x}..{high:#x}, allocated are {SHARED_BASE:#x}..{self.end - 1:#x}"
            )

    def store(self, addresses: Array, data: Array) -> None:
        """Write bytes at byte addresses (same shape); checked by the caller."""
        self.data[addresses] = data
        self.written[addresses] = True


class TensorMemory:
    """One CTA's tensor memory with the columns that are allocated."""

    def __init__(self) -> None:
        self.data = np.full((TMEM_LANES, TMEM_COLUMNS), POISON32, np.uint32)
        self.written = np.zeros((TMEM_LANES, TMEM_COLUMNS), np.bool_)
        self.owner = np.zeros(TMEM_COLUMNS, np.int32)
        self.allocations: dict[int, int] = {}
        self.permit = True

    def allocate(self, columns: int) -> int | None:
        """First column of a new allocation, None when it has to wait. Raises ProtocolError for an illegal size."""
        if columns & (columns - 1) or not 32 <= columns <= TMEM_COLUMNS:
            raise ProtocolError(
                f"tcgen05.alloc of {columns} columns: allowed are 32, 64, 128, 256, 512"
            )
        if not self.permit:
            raise ProtocolError("tcgen05.alloc after relinquish_alloc_permit")
        for start in range(0, TMEM_COLUMNS, columns):
            if not self.owner[start : start + columns].any():
                self.owner[start : start + columns] = 1
                self.allocations[start] = columns
                return start
        return None

    def free(self, start: int, columns: int) -> bool:
        """Give columns back; False when they were not allocated. Raises ProtocolError when another number of columns was."""
        held = self.allocations.get(start)
        if held is None:
            return False
        if held != columns:
            raise ProtocolError(
                f"tcgen05.dealloc of {columns} columns from {start}: {held} were allocated there"
            )
        del self.allocations[start]
        self.owner[start : start + columns] = 0
        self.data[:, start : start + columns] = POISON32
        self.written[:, start : start + columns] = False
        return True

    def check(self, start: int, columns: int, what: str) -> None:
        """Raise OutOfBoundsError unless the columns are allocated."""
        if start < 0 or start + columns > TMEM_COLUMNS:
            raise OutOfBoundsError(
                f"{what}: tensor memory columns {start}..{start + columns - 1} of {TMEM_COLUMNS}"
            )
        if not self.owner[start : start + columns].all():
            free = np.flatnonzero(self.owner[start : start + columns] == 0) + start
            raise OutOfBoundsError(f"{what}: tensor memory column {int(free[0])} is not allocated")
