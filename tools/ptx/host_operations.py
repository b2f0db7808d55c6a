# SPDX-License-Identifier: Apache-2.0
"""One line of LLVM's dialect to a function of (host, values by name).

It returns None, or where the block ends the next one with its arguments: (name, values); at a return (None, value).
"""

import operator
import re
import struct

import numpy as np

from tools.ptx.host_types import parse_type, signed, unescape
from tools.ptx.values import HostError, Unsupported


def decode(line):
    """The function that carries out a line."""
    line = re.sub(r" \{(?:alignment|nontemporal|isVolatile|inbounds)[^}]*\}", "", line)
    result, text = line.split(" = ", 1) if re.match(r"%\w+ = ", line) else (None, line)
    op, _, rest = text.partition(" ")
    op = op.split("(")[0].removeprefix("llvm.")
    if op in ENDINGS:
        return ENDINGS[op](rest)
    if op in EFFECTS:
        return EFFECTS[op](rest)
    if op == "call":
        return call(result, rest)
    if op == "intr.assume":
        return assume(rest)
    if op.startswith("intr."):
        value = intrinsic(op.removeprefix("intr."), text)
    elif op in VALUES:
        value = VALUES[op](op, rest if op != "mlir.constant" else text)
    else:
        raise Unsupported(f"host operation: {line[:120]}")

    def assign(host, env):
        env[result] = value(host, env)

    return assign


def fields(pattern, rest):
    """The groups of a pattern that the rest of a line must match."""
    m = re.match(pattern, rest)
    if m is None:
        raise Unsupported(f"host operation: {rest[:120]}")
    return m.groups()


# Values.


def constant(op, text):
    value = constant_value(text[text.index("(") + 1 :])
    return lambda host, env: value


def constant_value(body):
    if body.startswith(("true", "false")):
        return int(body.startswith("true"))
    if m := re.match(r'"((?:[^"\\]|\\.)*)"', body):
        return list(unescape(m[1]))
    if m := re.match(r"dense<(-?\d+)> : vector<(\d+)xi(\d+)>", body):
        return [int(m[1]) & (2 ** int(m[3]) - 1)] * int(m[2])
    if m := re.match(r"(-?\d+) : (?:i(\d+)|index)\)", body):
        return int(m[1]) & (2 ** int(m[2] or 64) - 1)
    if m := re.match(r"(-?[\d.]+(?:[eE][+-]?\d+)?|0x[0-9A-Fa-f]+) : f(32|64)", body):
        if not m[1].startswith("0x"):
            return float(m[1])
        return struct.unpack("<f" if m[2] == "32" else "<d", struct.pack("<I" if m[2] == "32" else "<Q", int(m[1], 16)))[0]
    raise Unsupported(f"host constant {body[:100]}")


def undefined(op, rest):
    zero = parse_type(rest.split(":", 1)[1]).zero
    return lambda host, env: zero()


def address_of(op, rest):
    (name,) = fields(r'@("(?:[^"\\]|\\.)*"|[\w.$]+)', rest)
    return lambda host, env: host.globals.get(name, 0)


def extract(op, rest):
    value, path = fields(r"(%\w+)\[([\d, ]*)\]", rest)
    path = [int(k) for k in path.split(",")]

    def get(host, env):
        x = env[value]
        for k in path:
            x = x[k]
        return x

    return get


def insert(op, rest):
    value, whole, path = fields(r"(%\w+), (%\w+)\[([\d, ]*)\]", rest)
    path = [int(k) for k in path.split(",")]

    def changed(aggregate, x, path):
        aggregate = list(aggregate)
        aggregate[path[0]] = x if len(path) == 1 else changed(aggregate[path[0]], x, path[1:])
        return aggregate

    return lambda host, env: changed(env[whole], env[value], path)


def alloca(op, rest):
    n, type_ = fields(r"(%\w+) x (.*?) : \(", rest)
    size = parse_type(type_).size

    def get(host, env):
        address = host.allocate(max(1, env[n] * size))
        host.sizes[address] = env[n] * size
        return address

    return get


def element_pointer(op, rest):
    base, indices, type_ = fields(r"(?:inbounds\S* )?(?:\w+ )?(%\w+)\[(.*?)\] : \(.*?\) -> !llvm\.ptr(?:<\d+>)?, (.*)", rest)
    indices, type_ = [k.strip() for k in indices.split(",")], parse_type(type_)

    def get(host, env):
        first, *others = (signed(env[k], 64) if k.startswith("%") else int(k) for k in indices)
        t, address = type_, env[base] + first * (type_.size + -type_.size % type_.align)
        for k in others:
            if t.kind == "struct":
                address, t = address + t.offsets[k], t.elements[k]
            else:
                t = t.elements[0]
                address += k * t.size
        return address

    return get


def load(op, rest):
    pointer, type_ = fields(r"(%\w+) : !llvm\.ptr(?:<\d+>)? -> (.*)", rest)
    type_ = parse_type(type_)
    return lambda host, env: type_.unpack(host.memory, host.offset(env[pointer], type_.size))


def same_bits(op, rest):
    value = rest.split()[0]
    return lambda host, env: env[value]


def resize(op, rest):
    value, before, after = fields(r"(?:nneg )?(%\w+)(?: overflow<[^>]*>)? : i(\d+) to i(\d+)", rest)
    before, mask = int(before), 2 ** int(after) - 1
    if op == "sext":
        return lambda host, env: signed(env[value], before) & mask
    return lambda host, env: env[value] & mask


def to_float(op, rest):
    value, bits = fields(r"(%\w+) : i(\d+)", rest)
    bits = int(bits)
    return lambda host, env: float(signed(env[value], bits) if op == "sitofp" else env[value])


def truncate_float(op, rest):
    value = rest.split()[0]
    return lambda host, env: float(np.float32(env[value]))


def compare(op, rest):
    comparison, a, b, type_ = fields(r'"(\w+)" (%\w+), (%\w+) : (.*)', rest)
    bits = parse_type(type_).count
    name = comparison if comparison in ("eq", "ne") else comparison[1:]
    f, is_signed = getattr(operator, name), comparison[0] == "s"

    def get(host, env):
        x, y = env[a], env[b]
        return int(f(signed(x, bits), signed(y, bits)) if is_signed else f(x, y))

    return get


def select(op, rest):
    condition, a, b = fields(r"(%\w+), (%\w+), (%\w+)", rest)
    return lambda host, env: env[a] if env[condition] else env[b]


def divide(x, y):
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


UNSIGNED = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "shl": operator.lshift, "lshr": operator.rshift, "udiv": operator.floordiv, "urem": operator.mod,
}  # fmt: skip
SIGNED = {"ashr": operator.rshift, "sdiv": divide, "srem": lambda x, y: x - y * divide(x, y)}


def arithmetic(op, rest):
    a, b, bits = fields(r"(?:disjoint |exact )?(%\w+), (%\w+)(?: overflow<[^>]*>)? : i(\d+)", rest)
    bits, mask = int(bits), 2 ** int(bits) - 1
    if op in SIGNED:
        f = SIGNED[op]
        return lambda host, env: f(signed(env[a], bits), signed(env[b], bits)) & mask
    f = UNSIGNED[op]
    return lambda host, env: f(env[a], env[b]) & mask


FLOAT = {"fadd": operator.add, "fsub": operator.sub, "fmul": operator.mul, "fdiv": operator.truediv}


def float_arithmetic(op, rest):
    a, b, type_ = fields(r"(%\w+), (%\w+)(?: \{.*\})? : (\w+)", rest)
    f, kind = FLOAT[op], np.float32 if type_ == "f32" else np.float64
    return lambda host, env: float(kind(f(kind(env[a]), kind(env[b]))))


def intrinsic(name, text):
    name = name.split(".")[0]
    arguments = re.findall(r"%\w+", text)
    if name == "trap":
        return lambda host, env: stop("the host code trapped")
    width = re.search(r"-> i(\d+)", text) or re.search(r"i(\d+)", text.split(":", 1)[-1])
    bits = int(width[1]) if width else 64
    if name not in ("umax", "umin", "smax", "smin"):
        raise Unsupported(f"host operation: {text[:120]}")
    pick, key = (max if name.endswith("max") else min), (lambda x: signed(x, bits)) if name[0] == "s" else None
    return lambda host, env: pick((env[x] for x in arguments), key=key)


def assume(rest):
    """What the compiler took for granted must hold: a condition, or the alignment of a pointer."""
    condition, pointer, align = fields(r"(%\w+)(?: \[\"align\"\((%\w+), (%\w+) :)?", rest)

    def act(host, env):
        if not env[condition] or (pointer and env[pointer] % env[align]):
            stop(f"the host code assumes what is not so: {rest[:100]}")

    return act


def call(result, rest):
    callee, indirect, arguments = fields(r"(?:@([\w.$]+)|(%\w+))\((.*?)\)", rest)
    if indirect:
        raise Unsupported(f"indirect host call: {rest[:100]}")
    names = [x.strip() for x in arguments.split(",") if x.strip()]

    def act(host, env):
        value = host.run(callee, [env[x] for x in names])
        if result:
            env[result] = value

    return act


# What changes memory.


def store(rest):
    value, pointer, type_ = fields(r"(%\w+), (%\w+) : (.*), !llvm\.ptr", rest)
    type_ = parse_type(type_)

    def act(host, env):
        type_.pack(env[value], host.memory, host.offset(env[pointer], type_.size))

    return act


# What ends a block.


def target(text):
    name, arguments = fields(r"(\^bb\d+)(?:\((.*?) : .*\))?$", text.strip())
    names = [x.strip() for x in arguments.split(",")] if arguments else []
    return lambda env: (name, [env[x] for x in names])


def branch(rest):
    to = target(rest)
    return lambda host, env: to(env)


def conditional_branch(rest):
    condition, yes, no = fields(r"(%\w+)(?: weights\([^)]*\))?, (\^bb\d+(?:\([^)]*\))?), (\^bb\d+(?:\([^)]*\))?)", rest)
    yes, no = target(yes), target(no)
    return lambda host, env: (yes if env[condition] else no)(env)


def return_(rest):
    value = rest.split()[0] if rest else None
    return lambda host, env: (None, env[value] if value else 0)


def unreachable(rest):
    return lambda host, env: stop("the host code reached what it calls unreachable")


def stop(why):
    raise HostError(why)


VALUES = {
    "mlir.constant": constant, "mlir.poison": undefined, "mlir.undef": undefined, "mlir.zero": undefined,
    "mlir.addressof": address_of, "extractvalue": extract, "insertvalue": insert, "alloca": alloca,
    "getelementptr": element_pointer, "load": load, "sitofp": to_float, "uitofp": to_float, "fptrunc": truncate_float,
    "fpext": same_bits, "icmp": compare, "select": select,
    **dict.fromkeys(("ptrtoint", "inttoptr", "addrspacecast", "bitcast"), same_bits),
    **dict.fromkeys(("sext", "zext", "trunc"), resize),
    **dict.fromkeys({**UNSIGNED, **SIGNED}, arithmetic),
    **dict.fromkeys(FLOAT, float_arithmetic),
}  # fmt: skip
EFFECTS = {"store": store}
ENDINGS = {"br": branch, "cond_br": conditional_branch, "return": return_, "unreachable": unreachable}
