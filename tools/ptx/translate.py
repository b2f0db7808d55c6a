# SPDX-License-Identifier: Apache-2.0
"""One instruction to a line of Python, for those that need no scheduler: arithmetic, moves, loads and stores, shuffles.

A line names registers through views (`F[3]` is register 3 as float32, all lanes of all warps that run it) and calls numpy, or
what `operations.py` offers. `translate` returns None for what waits, branches or works asynchronously.

There is one rule for each opcode, in the table `RULES` at the end. A rule takes

    R         a function of an operand and a view, which returns the operand's source: R("%r3", "F") is "F[3]"
    program   for what R does not give: constants, addresses, numbers of registers
    i         the instruction; `i.parts` are the words of its opcode, `i.args` its operands

and returns the source. What a rule does not know it must refuse (`raise unsupported(i)`): modifiers that it overlooks would
give wrong numbers without a word.
"""

from tools.ptx.instruction import VIEW_OF_TYPE, WIDTH, Vector
from tools.ptx.proxies import covered_spaces
from tools.ptx.values import PARAM_BASE, SMEM_WINDOW, Unsupported

BITS = {1: "H", 2: "H", 4: "U", 8: "D"}  # the view of bits, by width
IGNORED = ("prefetch", "setmaxnreg", "griddepcontrol", "nanosleep", "wgmma.fence", "tcgen05.fence")
IGNORED += ("discard", "applypriority")


def translate(program, i):
    """Python source, or None where the scheduler must act."""
    if i.starts(*IGNORED):
        return "pass"
    rule = RULES.get(i.parts[0])
    return rule(program.reference, program, i) if rule else None


def unsupported(i):
    """The error to raise for a form of an instruction that a rule does not know."""
    return Unsupported(i.text[:120])


def mov(R, program, i):
    """A move, also of the parts of a wide register."""
    to, source, type_ = i.args[0], i.args[1], i.parts[-1]
    if isinstance(to, Vector):
        return ";".join(f"copy({R(r, k)},{part})" for r, (k, part) in zip(to.items, pieces(R, i, source, to)) if r != "_")
    if isinstance(source, Vector):
        return ";".join(f"copy({part},{R(r, k)})" for r, (k, part) in zip(source.items, pieces(R, i, to, source)))
    view = VIEW_OF_TYPE.get(type_, "U") if type_ != "f32" else "U"
    return f"copy({R(to, view)},{R(source, view)})"


def pieces(R, i, whole, parts):
    """(view, source) of each part of a register that is taken apart or put together."""
    width, n = WIDTH[i.parts[-1]], len(parts.items)
    file = BITS[width]
    row = R(whole, file)
    if not row.startswith(file + "["):
        raise unsupported(i)
    if (width, n) == (8, 4):
        return [("H", f"{row}.view(U16)[{j}::4]") for j in range(4)]
    if n != 2:
        raise unsupported(i)
    return [("U" if width == 8 else "H", f"{file}{j}{row[1:]}") for j in range(2)]


def cvta(R, program, i):
    return f"copy({R(i.args[0], 'D')},{R(i.args[1], 'D')})"


PACKED = ("f16x2", "bf16x2")
FLOAT_BINARY = {"add": "add", "sub": "sub", "mul": "mul", "div": "np.divide", "max": "np.fmax", "min": "np.fmin"}
FLOAT_UNARY = {
    "neg": "np.negative", "abs": "np.abs", "ex2": "np.exp2", "rsqrt": "rsqrt", "rcp": "np.reciprocal", "sqrt": "np.sqrt",
    "lg2": "np.log2", "tanh": "np.tanh", "sin": "np.sin", "cos": "np.cos",
}  # fmt: skip
INTEGER_BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "min": "np.minimum", "max": "np.maximum", "div": "divide", "rem": "np.fmod",
}  # fmt: skip


def arithmetic(R, program, i):
    """Of floats, by their format: packed pairs, one 16-bit number, or float32. Integers go on to the next rule."""
    name, type_, A = i.parts[0], i.parts[-1], i.args
    if "sat" in i.parts or "cc" in i.parts:
        raise unsupported(i)
    if type_ in PACKED:
        return f"packed({name!r},{type_[:-2]!r},{R(A[0], 'U')},{','.join(R(a, 'U') for a in A[1:])})"
    if type_ == "f32x2":  # two floats in a 64-bit register
        x = [R(a, "D") for a in A]
        if not all(row.startswith("D[") for row in x):
            raise unsupported(i)
        to, *x = ("DF" + row[1:] for row in x)
        return f"fma({','.join(x)},{to})" if name == "fma" else f"{FLOAT_BINARY[name]}({','.join(x)},{to})"
    if i.parts[-2:] in (["f32", "bf16"], ["f32", "f16"]):  # sm_100: 16-bit operands, widened first
        wide = [f"widen({R(a, 'H')},{type_!r})" for a in A[1:-1]]
        return f"{'fma' if name == 'fma' else FLOAT_BINARY[name]}({','.join(wide)},{R(A[-1], 'F')},{R(A[0], 'F')})"
    if type_ in ("f16", "bf16"):
        wide = [f"widen({R(a, 'H')},{type_!r})" for a in A[1:]]
        if name == "fma":
            value = f"{wide[0]}*{wide[1]}+{wide[2]}"
        else:
            value = f"{(FLOAT_UNARY if len(wide) == 1 else FLOAT_BINARY)[name]}({','.join(wide)})"
        return f"copy({R(A[0], 'H')},narrow({value},{type_!r}))"
    if type_ == "f32":
        if name != "fma" and name not in (FLOAT_UNARY if len(A) == 2 else FLOAT_BINARY if len(A) == 3 else ()):
            raise unsupported(i)
        f = "fma" if name == "fma" else FLOAT_UNARY[name] if len(A) == 2 else FLOAT_BINARY[name]
        if "NaN" in i.parts and name in ("max", "min"):  # np.fmax passes NaN by, np.maximum does not
            return f"np.{name}imum({','.join(R(a, 'F') for a in A[1:])},out={R(A[0], 'F')})"
        return f"{f}({','.join(R(a, 'F') for a in A[1:])},{R(A[0], 'F')})"
    return integer(R, program, i)


def integer(R, program, i):
    """Arithmetic of integers; the whole of a product (`wide`), its lower half (`lo`), or its upper one (`hi`)."""
    name, type_, A = i.parts[0], i.parts[-1], i.args
    if type_ not in VIEW_OF_TYPE or type_ == "pred":
        raise unsupported(i)
    view = VIEW_OF_TYPE[type_]
    if "wide" in i.parts:
        to = {"S": "L", "U": "D", "G": "S", "H": "U"}[view]
        dtype = {"L": "S64", "D": "U64", "S": "S32", "U": "U32"}[to]
        product = f"mul({R(A[1], view)},{R(A[2], view)},dtype={dtype})"
        return f"copy({R(A[0], to)},{product})" if name == "mul" else f"copy({R(A[0], to)},{product}+{R(A[3], to)})"
    if "hi" in i.parts:
        if name != "mul" or WIDTH[type_] != 4:
            raise unsupported(i)
        return f"multiply_high({R(A[1], view)},{R(A[2], view)},{R(A[0], view)})"
    if name in ("neg", "abs"):
        return f"np.{'negative' if name == 'neg' else 'abs'}({R(A[1], view)},{R(A[0], view)})"
    if name == "mad":
        return f"copy({R(A[0], view)},mul({R(A[1], view)},{R(A[2], view)})+{R(A[3], view)})"
    if name not in INTEGER_BINARY or len(A) != 3:
        raise unsupported(i)
    return f"{INTEGER_BINARY[name]}({R(A[1], view)},{R(A[2], view)},out={R(A[0], view)})"


def bitwise(R, program, i):
    """and, or, xor, not; also of predicates."""
    view = "P" if i.parts[-1] == "pred" else BITS[WIDTH[i.parts[-1]]]
    f = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "invert"}[i.parts[0]]
    return f"np.{f}({','.join(R(a, view) for a in i.args[1:])},{R(i.args[0], view)})"


def shift(R, program, i):
    """shl, shr. By as many bits as there are or more: nothing is left but, to the right, the sign."""
    to, x, n = i.args
    view, is_left = VIEW_OF_TYPE[i.parts[-1]], i.parts[0] == "shl"
    if n.startswith("%"):
        return f"shift({R(x, view)},{R(n, 'U')},{R(to, view)},{is_left})"
    by, bits = int(n, 0), 8 * WIDTH[i.parts[-1]]
    if by >= bits:
        if is_left or view not in "SLG":
            return f"{R(to, view)}[...]=0"
        by = bits - 1
    return f"np.{'left' if is_left else 'right'}_shift({R(x, view)},{program.constant(view, by)},{R(to, view)})"


def funnel(R, program, i):
    """shf: a shift of two registers as one."""
    if "wrap" not in i.parts:
        raise unsupported(i)
    to, low, high, n = i.args
    return f"funnel_shift({R(low, 'U')},{R(high, 'U')},{R(n, 'U')},{R(to, 'U')},{i.parts[1] == 'l'})"


def lop3(R, program, i):
    to, a, b, c, table = i.args
    return f"lop3({R(a, 'U')},{R(b, 'U')},{R(c, 'U')},{R(to, 'U')},{int(table, 0)})"


def prmt(R, program, i):
    if i.op != "prmt.b32":
        raise unsupported(i)
    to, a, b, selector = i.args
    return f"permute_bytes({R(a, 'U')},{R(b, 'U')},{R(selector, 'U')},{R(to, 'U')})"


def popc(R, program, i):
    view = VIEW_OF_TYPE[i.parts[-1]]
    return f"population({R(i.args[1], view)},{R(i.args[0], 'U')})"


def selp(R, program, i):
    to, x, y, predicate = i.args
    view = BITS[{"f16": 2, "bf16": 2}.get(i.parts[-1]) or WIDTH[i.parts[-1]]]
    return f"copy({R(to, view)},np.where({R(predicate, 'P')},{R(x, view)},{R(y, view)}))"


COMPARE = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
NUMPY_COMPARE = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}
# True as well where an operand is NaN: not the opposite of the ordered comparison.
UNORDERED = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}


def setp(R, program, i):
    """A comparison, combined with another predicate if `and`, `or` or `xor` is among the modifiers."""
    type_, comparison = i.parts[-1], i.parts[1]
    combine = next((word for word in i.parts[2:-1] if word in ("and", "or", "xor")), None)
    if "|" in i.args[0] or type_ not in VIEW_OF_TYPE:
        raise unsupported(i)
    view, to = VIEW_OF_TYPE[type_], R(i.args[0], "P")
    x, y = R(i.args[1], view), R(i.args[2], view)
    if view != "F" or comparison in ("eq", "lt", "le", "gt", "ge"):
        sign = COMPARE[comparison]
        if combine is None:
            return f"np.{NUMPY_COMPARE[sign]}({x},{y},{to})"
        value = f"({x}{sign}{y})"
    else:
        value = {
            "neu": f"({x}!={y})",
            "ne": f"(({x}<{y})|({x}>{y}))",
            "equ": f"~(({x}<{y})|({x}>{y}))",
            "num": f"~(np.isnan({x})|np.isnan({y}))",
            "nan": f"(np.isnan({x})|np.isnan({y}))",
        }.get(comparison) or f"~({x}{UNORDERED[comparison]}{y})"
    if combine is None:
        return f"copy({to},{value})"
    other = i.args[3]
    other = f"~{R(other[1:], 'P')}" if other.startswith("!") else R(other, "P")
    return f"copy({to},{value}{ {'and': '&', 'or': '|', 'xor': '^'}[combine] }({other}))"


def cvt(R, program, i):
    """A conversion: between float formats, to and from integers, or of integers' widths."""
    A, (to, source) = i.args, i.parts[-2:]
    if "relu" in i.parts:
        raise unsupported(i)
    if to in PACKED and source == "f32" and len(A) == 3:
        return f"pack({R(A[1], 'F')},{R(A[2], 'F')},{R(A[0], 'U')},{to[:-2]!r})"
    if i.op == "cvt.rna.tf32.f32":
        return f"round_tf32({R(A[1], 'U')},{R(A[0], 'U')})"
    if to in ("bf16", "f16") and source == "f32":
        return f"copy({R(A[0], 'H')},narrow({R(A[1], 'F')},{to!r}))"
    if to == "f32" and source == "bf16":
        row = R(A[0], "U")
        return f"copy({row},{R(A[1], 'H')});np.left_shift({row},{program.constant('U', 16)},{row})"
    if to == "f32" and source == "f16":
        return f"copy({R(A[0], 'F')},widen({R(A[1], 'H')},{source!r}))"
    if "sat" in i.parts:
        raise unsupported(i)
    if to == "f32" and source in ("s32", "u32", "s64", "u64"):
        return f"copy({R(A[0], 'F')},{R(A[1], VIEW_OF_TYPE[source])},casting='unsafe')"
    rounding = next((word for word in i.parts if word in ("rzi", "rni", "rmi", "rpi")), None)
    if source == "f32" and rounding and to in VIEW_OF_TYPE and to != "f32":
        return f"to_integer({R(A[1], 'F')},{R(A[0], VIEW_OF_TYPE[to])},{rounding!r})"
    if to == source == "f32" and rounding:
        f = {"rzi": "trunc", "rni": "rint", "rmi": "floor", "rpi": "ceil"}[rounding]
        return f"np.{f}({R(A[1], 'F')},{R(A[0], 'F')})"
    if len(i.parts) == 3 and to in VIEW_OF_TYPE and source in VIEW_OF_TYPE and "f32" not in i.parts:
        return f"copy({R(A[0], VIEW_OF_TYPE[to])},{R(A[1], VIEW_OF_TYPE[source])},casting='unsafe')"
    raise unsupported(i)


def space_of(i):
    """The memory that an instruction accesses."""
    words = {word.split("::")[0] for word in i.parts[1:-1]}
    if words & {"local", "const"}:
        raise unsupported(i)
    if "shared::cluster" in i.parts:
        return "shared::cluster"
    return next((space for space in ("shared", "global", "param") if space in words), "generic")


def memory(R, program, i):
    """ld and st; a parameter is the same for all lanes."""
    if "async" in i.parts:  # st.async
        return None
    name, width, space = i.parts[0], WIDTH[i.parts[-1]], space_of(i)
    registers, address = i.args if name == "ld" else (i.args[1], i.args[0])
    registers = registers.items if isinstance(registers, Vector) else (registers,)
    rows = ["None" if r == "_" else program.bits(r, width) for r in registers]
    base, offset = program.address(address)
    if space == "param":
        at = offset - PARAM_BASE
        return ";".join(f"{row}[...]=v.parameter({at + j * width},{width})" for j, row in enumerate(rows))
    if base is None:
        base, offset = program.constant("D", offset), 0
    signed = ",True" if name == "ld" and i.parts[-1].startswith("s") else ""
    return f"{'load' if name == 'ld' else 'store'}(v,m,{i.place},{space!r},{base},{offset},{width},({','.join(rows)},){signed})"


def fence(R, program, i):
    """Of proxies (see `proxies.py`); all others are ignored."""
    spaces = covered_spaces(i)
    if spaces is None:
        raise unsupported(i)
    return f"fence(v,m,{spaces!r})" if spaces else "pass"


def bar(R, program, i):
    """bar.warp.sync, at which the lanes of a warp meet; the others wait."""
    return "meet(v,m)" if i.starts("bar.warp") else None


def red(R, program, i):
    """A reduction in memory."""
    operation = next((word for word in i.parts if word in ("add", "min", "max")), None)
    if operation is None or "async" in i.parts or i.parts[-1] not in VIEW_OF_TYPE or isinstance(i.args[1], Vector):
        raise unsupported(i)
    base, offset = program.address(i.args[0])
    if base is None:
        base, offset = program.constant("D", offset), 0
    value = R(i.args[1], VIEW_OF_TYPE[i.parts[-1]])
    return f"reduce(v,m,{i.place},{space_of(i)!r},{base},{offset},{operation!r},{value})"


def elect(R, program, i):
    row, predicate = i.args[0].split("|")
    return f"elect(v,m,{'None' if row == '_' else R(row, 'U')},{R(predicate, 'P')})"


def mapa(R, program, i):
    """An address of another block's shared memory: a window further for each rank (see `Cluster.owner`)."""
    if i.op != "mapa.shared::cluster.u32":
        raise unsupported(i)
    to, address, rank = (R(a, "U") for a in i.args)
    return f"copy({to},{address}+({rank}+{program.constant('U', 1)})*{program.constant('U', SMEM_WINDOW)})"


def shfl(R, program, i):
    row, _, predicate = i.args[0].partition("|")
    clamp = int(i.args[3], 0)
    predicate = R(predicate, "P") if predicate not in ("", "_") else "None"
    return f"shuffle(v,m,{i.parts[2]!r},{R(i.args[1], 'U')},{R(i.args[2], 'U')},{R(row, 'U')},{predicate},{clamp})"


def vote(R, program, i):
    mode, x = i.parts[2], i.args[1]
    source = f"~{R(x[1:], 'P')}" if x.startswith("!") else R(x, "P")
    return f"vote(v,m,{mode!r},{source},{R(i.args[0], 'U' if mode == 'ballot' else 'P')})"


def redux(R, program, i):
    view = VIEW_OF_TYPE[i.parts[-1]]
    return f"reduce_warp(v,m,{i.parts[2]!r},{R(i.args[1], view)},{R(i.args[0], view)})"


def matrix(R, program, i):
    """ldmatrix and stmatrix."""
    registers, address = i.args if i.parts[0] == "ldmatrix" else (i.args[1], i.args[0])
    base, offset = program.address(address)
    if "b8" in i.parts or base is None:
        raise unsupported(i)
    rows = ",".join(R(r, "U") for r in registers.items)
    return f"{i.parts[0]}(v,m,{i.place},{base},{offset},{'trans' in i.parts},({rows},))"


def mma(R, program, i):
    form, k = i.parts[-2], {"m16n8k16": 16, "m16n8k8": 8}.get(i.parts[3])
    if form not in ("bf16", "f16", "tf32") or k is None or (form == "tf32" and k != 8):
        raise unsupported(i)
    if i.parts[-1] != "f32" or i.parts[-4] != "f32":
        raise unsupported(i)
    if any(not r.startswith("%") for x in i.args for r in x.items):
        raise unsupported(i)
    rows = ",".join(str([program.registers[r][1] for r in x.items]) for x in i.args)
    return f"mma(v,m,{form!r},{k},{rows})"


RULES = {
    "mov": mov, "cvta": cvta, "shl": shift, "shr": shift, "shf": funnel, "lop3": lop3, "prmt": prmt, "popc": popc,
    "selp": selp, "setp": setp, "cvt": cvt, "ld": memory, "st": memory, "red": red, "elect": elect, "mapa": mapa,
    "fence": fence, "membar": fence, "bar": bar,
    "shfl": shfl, "vote": vote, "redux": redux, "ldmatrix": matrix, "stmatrix": matrix, "mma": mma,
    **dict.fromkeys(("and", "or", "xor", "not"), bitwise),
    **dict.fromkeys({"mad", "fma", *FLOAT_BINARY, *FLOAT_UNARY, *INTEGER_BINARY}, arithmetic),
}  # fmt: skip
