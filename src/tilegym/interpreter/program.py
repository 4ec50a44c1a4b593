"""A kernel's typed IR, resolved once into Python closures that run for every block.

Every variable of the IR gets a slot in a list, the *registers*; every operation becomes one *step*, a function of the
registers. Types, attributes and slots are looked up while the program is built, so that running a step costs little
more than the torch call inside it. Slot 0 holds the ``BlockState``.

Rank-0 integer and bool tiles (indices, sizes, loop counters, conditions) are kept as Python numbers, other tiles as
torch tensors. Inside the body of a reduction or scan ("lifted" code) every value is a tensor with the extra dimensions
of the operand, and the rank-0 types of the IR are ignored.
"""

from __future__ import annotations

from . import _cutile
from .dtypes import is_whole
from .dtypes import scalar_tensor
from .dtypes import tensor_scalar

# How operations become steps; filled by the modules of operations.
TENSOR_FUNCTIONS = {}  # class -> build(op) -> function of the operand tensors
SCALAR_FUNCTIONS = {}  # class -> build(op) -> function of the operand numbers, or None
STEP_BUILDERS = {}  # class -> build(builder, op) -> step, or None where there is nothing to do


def evaluates(*classes):
    """Registers how a pure operation on tiles is evaluated."""

    def register(build):
        TENSOR_FUNCTIONS.update(dict.fromkeys(classes, build))
        return build

    return register


def evaluates_scalars(*classes):
    """Registers how a pure operation is evaluated when operands and result are Python numbers."""

    def register(build):
        SCALAR_FUNCTIONS.update(dict.fromkeys(classes, build))
        return build

    return register


def builds_step(*classes):
    """Registers an operation that needs more than its operands: memory, control flow, the block's state."""

    def register(build):
        STEP_BUILDERS.update(dict.fromkeys(classes, build))
        return build

    return register


class Code:
    """Steps that run one after the other. A step returns None, or a jump that ends the enclosing blocks."""

    __slots__ = ("steps", "locations")

    def __init__(self):
        self.steps = []
        self.locations = []

    def add(self, step, location) -> None:
        self.steps.append(step)
        self.locations.append(location)

    def run(self, registers):
        for step in self.steps:
            jump = step(registers)
            if jump is not None:
                return jump
        return None


def failing_location(error: BaseException):
    """The source location of the innermost step that ``error`` came through, or None."""
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is Code.run.__code__:
            code, step = (traceback.tb_frame.f_locals.get(name) for name in ("self", "step"))
            if step in code.steps:
                found = code.locations[code.steps.index(step)]
        traceback = traceback.tb_next
    return found


def describe(loc) -> str:
    """A source location as ``file:line``, with the call sites of helper functions."""
    text = f"{loc.filename}:{loc.line}"
    while loc.call_site is not None:
        loc = loc.call_site
        text += f", called from {loc.filename}:{loc.line}"
    return text


class Program:
    """What a launch runs: ``prologue`` once, for what no block changes, and ``body`` for every block."""

    def __init__(self, block):
        builder = ProgramBuilder()
        self.parameters = [builder.define(param) for param in block.params]
        builder.uniform.update(self.parameters)
        self.parameter_is_number = [slot in builder.numbers for slot in self.parameters]
        self.body = builder.block(block)
        self.prologue = builder.prologue
        self.num_registers = builder.num_registers


class ProgramBuilder:
    def __init__(self):
        self.num_registers = 1
        self.slots = {}
        self.numbers = set()  # slots that hold Python numbers
        self.uniform = set()  # slots that hold the same value in every block of a launch
        self.prologue = Code()
        self.code = None
        self.lifted = False
        self.depth = 0
        self.loops = []  # (slots carried, slots of the results) of the loops around
        self.branches = []  # slots of the results of the branches around, within the innermost loop
        self.lifted_results = None

    # Variables

    def define(self, var) -> int:
        slot = self.slots[var.name] = self.num_registers
        self.num_registers += 1
        ty = var.get_type()
        if not self.lifted and isinstance(ty, _cutile.TileTy) and ty.shape == () and is_whole(ty.dtype):
            self.numbers.add(slot)
        return slot

    def slot(self, var) -> int:
        return self.slots[var.name]

    def has_slot(self, var) -> bool:
        """Tokens order memory operations on the GPU; here the program's order does, so they have no slot."""
        return not isinstance(var.get_type(), _cutile.TokenTy)

    def tensor_slot(self, var) -> int:
        """The slot of ``var`` as a tensor, converting a number first."""
        slot = self.slot(var)
        if slot not in self.numbers:
            return slot
        dtype, result = var.get_type().dtype, self.num_registers
        self.num_registers += 1

        def to_tensor(r):
            r[result] = scalar_tensor(r[slot], dtype)

        self.emit(to_tensor, var.loc, (slot,), (result,))
        return result

    def numbered(self, step, var):
        """``step``, which sets ``var`` to a tensor, followed by conversion to a number where one is wanted."""
        slot = self.slot(var)
        if slot not in self.numbers:
            return step
        dtype = var.get_type().tensor_dtype()

        def step_to_number(r):
            step(r)
            r[slot] = tensor_scalar(r[slot], dtype)

        return step_to_number

    # Code

    def block(self, block) -> Code:
        """The steps of an IR block, whose parameters are already defined."""
        outer, self.code = self.code, Code()
        self.depth += 1
        for op in block:
            self.operation(op)
        self.depth -= 1
        code, self.code = self.code, outer
        return code

    def emit(self, step, loc, reads=None, writes=()) -> None:
        """Adds a step; one that reads (``reads`` given) only uniform slots moves to the prologue."""
        if reads is not None and all(slot in self.uniform for slot in reads):
            self.uniform.update(writes)
            self.prologue.add(step, loc)
        else:
            self.code.add(step, loc)

    def operation(self, op) -> None:
        build = STEP_BUILDERS.get(type(op))
        if build is not None:
            step = build(self, op)
            if step is not None:
                self.code.add(step, op.loc)
            return
        build = TENSOR_FUNCTIONS.get(type(op))
        if build is None:
            raise NotImplementedError(f"the interpreter does not know the operation {op.op} ({describe(op.loc)})")
        self._pure(op, build)

    def _pure(self, op, build) -> None:
        operands = [var for var in op.all_inputs() if self.has_slot(var)]
        out = self.define(op.result_var)
        reads = [self.slot(var) for var in operands]
        if all(slot in self.numbers for slot in (*reads, out)):
            scalar_build = SCALAR_FUNCTIONS.get(type(op))
            function = scalar_build(op) if scalar_build is not None else None
            if function is not None:
                self.emit(_call(function, reads, out), op.loc, reads, (out,))
                return
        reads = [self.tensor_slot(var) for var in operands]
        step = self.numbered(_call(build(op), reads, out), op.result_var)
        self.emit(step, op.loc, reads, (out,))


def _call(function, reads, out):
    """The step ``out = function(*reads)``, by number of operands since it runs for every operation."""
    if len(reads) == 0:

        def step(r):
            r[out] = function()
    elif len(reads) == 1:
        (a,) = reads

        def step(r):
            r[out] = function(r[a])
    elif len(reads) == 2:
        a, b = reads

        def step(r):
            r[out] = function(r[a], r[b])
    elif len(reads) == 3:
        a, b, c = reads

        def step(r):
            r[out] = function(r[a], r[b], r[c])
    else:

        def step(r):
            r[out] = function(*[r[read] for read in reads])

    return step


def result_type(op):
    return op.result_vars[0].get_type()


def result_shape(op) -> tuple:
    return tuple(result_type(op).tensor_shape())


def result_dtype(op):
    return result_type(op).tensor_dtype()


def dtype_of(var):
    return var.get_type().tensor_dtype()
