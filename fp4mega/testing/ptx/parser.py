"""PTX text to instructions: kernels, parameters, shared symbols, registers with their widths, resolved branch targets.

Source: PTX ISA, chapters "Syntax", "Directives". Only what a code generator emits is read: one statement ends at `;`, scopes are
braces, a register declared inside of a scope hides an outer one. Semantics are not looked at here.
"""

import re
from dataclasses import dataclass

from fp4mega.testing.ptx.errors import UnsupportedInstructionError

_WIDTHS = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4}
_WIDTHS |= {"u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}
_WIDTHS |= {"b128": 16, "pred": 0}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LABEL = re.compile(r"([$%\w]+):(?!:)")
_GUARD = re.compile(r"@(!?)(%?[\w$.]+)\s+(.*)", re.S)
_NAME = re.compile(r"(?<![\w.$%:])[%A-Za-z_$][\w$]*(?![\w$:])")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr[\w\s.]*?)?\s+([\w$]+)(?:\[(\d+)\])?\s*$"
)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*$")
_DATA = re.compile(
    r"\.(?:global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*(?:=\s*(.*))?$",
    re.S,
)


@dataclass(slots=True)
class Instruction:
    """One instruction; `args` are operand texts with scoped register names made unique, `target` an instruction index."""

    index: int
    text: str
    op: str
    parts: tuple[str, ...]
    args: tuple[str, ...]
    guard: str | None
    guard_negated: bool
    target: int | None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter: byte offset in the parameter block, size and alignment in bytes."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable in shared, global or constant memory; `size` 0 is the launch's dynamic shared memory."""

    name: str
    size: int
    align: int
    data: bytes = b""


@dataclass(slots=True)
class Kernel:
    """An `.entry`: its code and what it needs to be launched. `registers` maps a name to its width (0 is a predicate)."""

    name: str
    instructions: list[Instruction]
    parameters: list[Parameter]
    registers: dict[str, int]
    shared: list[Symbol]
    cluster: tuple[int, int, int] | None

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter block."""
        return max((p.offset + p.size for p in self.parameters), default=0)


@dataclass(slots=True)
class Module:
    """A PTX file: its target, its kernels by name, and its module-scope data."""

    target: str
    kernels: dict[str, Kernel]
    data: list[Symbol]
    text: str


def split_operands(text: str) -> list[str]:
    """Split at commas outside of brackets and braces."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    tail = text[start:].strip()
    return parts + [tail] if tail else parts


def _parameters(text: str) -> list[Parameter]:
    parameters: list[Parameter] = []
    offset = 0
    for line in filter(None, (piece.strip() for piece in text.split(",\n"))):
        match = _PARAM.match(re.sub(r"\s+", " ", line))
        if match is None:
            raise UnsupportedInstructionError(f"parameter declaration {line!r}")
        align_text, kind, name, count = match.groups()
        width = _WIDTHS[kind]
        size = width * int(count) if count else width
        align = int(align_text) if align_text else width
        offset = (offset + align - 1) // align * align
        parameters.append(Parameter(name, offset, size, align))
        offset += size
    return parameters


def _symbol(match: re.Match[str]) -> Symbol:
    align, kind, name, count = match.groups()[:4]
    width = _WIDTHS[kind]
    size = width if count is None else width * int(count or 0)
    return Symbol(name, size, int(align or width))


def _initializer(text: str | None, kind: str) -> bytes:
    if not text:
        return b""
    width = _WIDTHS[kind]
    items = text.strip().strip("{}").split(",")
    out = b""
    for item in filter(None, (i.strip() for i in items)):
        if item[:2] in ("0f", "0F", "0d", "0D"):
            value = int(item[2:], 16)
        else:
            try:
                value = int(item, 0)
            except ValueError:
                raise UnsupportedInstructionError(f"initializer {item!r} of module data") from None
        out += (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    return out


class _Body:
    """Reads one kernel's body: scopes, register declarations, labels, statements."""

    def __init__(self, text: str, start: int) -> None:
        self.text, self.pos = text, start
        self.parents: list[int | None] = [None]
        self.scopes = [0]
        self.local: list[dict[str, str]] = [{}]
        self.registers: dict[str, int] = {}
        self.shared: list[Symbol] = []
        self.labels: dict[tuple[int, str], int] = {}
        self.statements: list[tuple[str, int]] = []

    def read(self) -> None:
        """Fill the tables; stops behind the closing brace."""
        text = self.text
        while self.scopes:
            while text[self.pos].isspace():
                self.pos += 1
            char = text[self.pos]
            if char == "{":
                self.parents.append(self.scopes[-1])
                self.scopes.append(len(self.parents) - 1)
                self.local.append({})
                self.pos += 1
            elif char == "}":
                self.scopes.pop()
                self.pos += 1
            elif label := _LABEL.match(text, self.pos):
                self.labels[(self.scopes[-1], label.group(1))] = len(self.statements)
                self.pos = label.end()
            else:
                end = text.index(";", self.pos)
                statement = re.sub(r"\s+", " ", text[self.pos : end].strip())
                self.pos = end + 1
                if statement.startswith("."):
                    self._declare(statement)
                elif statement:
                    self.statements.append((self._scoped(statement), self.scopes[-1]))

    def _declare(self, statement: str) -> None:
        scope = self.scopes[-1]
        if match := _SHARED.match(statement):
            self.shared.append(_symbol(match))
            return
        if not statement.startswith(".reg"):
            if statement.split(" ", 1)[0] in (".loc", ".pragma", ".maxnreg", ".branchtargets"):
                return
            raise UnsupportedInstructionError(f"declaration {statement!r}")
        kind, names = statement[len(".reg") :].strip().split(" ", 1)
        if kind.startswith(".v"):
            raise UnsupportedInstructionError(f"vector register declaration {statement!r}")
        width = _WIDTHS[kind[1:]]
        for name in names.split(","):
            name = name.strip()
            ranged = re.match(r"(.*)<(\d+)>$", name)
            for one in [f"{ranged[1]}{i}" for i in range(int(ranged[2]))] if ranged else [name]:
                unique = (
                    one if scope == 0 and one.startswith("%") else f"%{scope}_{one.lstrip('%')}"
                )
                self.local[scope][one] = unique
                self.registers[unique] = width

    def _scoped(self, statement: str) -> str:
        def rename(match: re.Match[str]) -> str:
            scope: int | None = self.scopes[-1]
            while scope is not None:
                if match.group(0) in self.local[scope]:
                    return self.local[scope][match.group(0)]
                scope = self.parents[scope]
            return match.group(0)

        return _NAME.sub(rename, statement)

    def target(self, name: str, scope: int | None) -> int:
        """Index of the instruction behind label `name`, searched from `scope` outwards."""
        while scope is not None:
            if (scope, name) in self.labels:
                return self.labels[(scope, name)]
            scope = self.parents[scope]
        raise UnsupportedInstructionError(f"branch to unknown label {name!r}")


def _instruction(index: int, statement: str, scope: int, body: _Body) -> Instruction:
    guard, negated, rest = None, False, statement
    if match := _GUARD.match(statement):
        negated, guard, rest = bool(match.group(1)), match.group(2), match.group(3)
    op, _, operands = rest.partition(" ")
    args = tuple(split_operands(operands))
    parts = tuple(op.split("."))
    target = body.target(args[0], scope) if parts[0] == "bra" else None
    return Instruction(index, statement, op, parts, args, guard, negated, target)


def parse(text: str) -> Module:
    """Parse a PTX module. Raises UnsupportedInstructionError for declarations outside of the subset."""
    source = text
    text = _COMMENT.sub("", text)
    target = re.search(r"\.target\s+(\w+)", text)
    first_entry = re.search(r"\.entry\s", text)
    header = text[: first_entry.start()] if first_entry else text
    shared, data = [], []
    for statement in header.split(";"):
        line = re.sub(
            r"^\s*(?:\.(?:extern|visible|weak)\s+)*", "", statement.split("\n\n")[-1]
        ).strip()
        line = re.sub(r"\s+", " ", line[line.rfind(".shared") :] if ".shared" in line else line)
        if match := _SHARED.match(line):
            shared.append(_symbol(match))
        elif (start := re.search(r"\.(?:global|const)\s", line)) and (
            match := _DATA.match(line[start.start() :])
        ):
            symbol = _symbol(match)
            values = _initializer(match.group(5), match.group(2))
            size = max(symbol.size, len(values))
            data.append(Symbol(symbol.name, size, symbol.align, values.ljust(size, b"\0")))
    kernels = {}
    for match in re.finditer(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", text, re.S):
        name, parameters, directives = match.groups()
        body = _Body(text, match.end())
        body.read()
        instructions = [
            _instruction(i, statement, scope, body)
            for i, (statement, scope) in enumerate(body.statements)
        ]
        wanted = re.search(r"\.reqnctapercluster\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", directives)
        cluster = (int(wanted[1]), int(wanted[2] or 1), int(wanted[3] or 1)) if wanted else None
        kernels[name] = Kernel(
            name,
            instructions,
            _parameters(parameters),
            body.registers,
            shared + body.shared,
            cluster,
        )
    return Module(target.group(1) if target else "", kernels, data, source)
