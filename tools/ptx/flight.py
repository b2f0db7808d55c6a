# SPDX-License-Identifier: Apache-2.0
"""Reads of shared memory that may not have happened yet where a warp arrives at a barrier or sets a copy going.

A warp goes on while ld or ldmatrix reads, and waits for the read only where an instruction uses one of the registers that it
fills. A barrier does not wait for it. For each release: the reads that on some way to it nothing has used.

All registers of a read are filled at once, so a use of any of them is enough. A move is no use, as the assembler may leave it
out: it passes the read on to another register. A read whose registers have all been overwritten is done. An instruction with a
predicate counts as if it ran. Where two ways meet, a use of what either of them left counts for both. That the assembler
may move a use across a barrier, if that does not touch memory, is not looked at: PTX says what is used before.
"""

from tools.ptx.instruction import BRANCHES

RELEASES = ("bar", "barrier", "mbarrier.arrive", "mbarrier.expect_tx", "cp.async.bulk", "st.async", "tcgen05.commit")


def is_read(i):
    """Of shared memory, or of an address that may be there."""
    return i.parts[0] == "ldmatrix" or (i.parts[0] == "ld" and {"global", "param", "const", "local"}.isdisjoint(i.parts))


def reads_in_flight(program):
    """For the place of each release, the places of reads that may be in flight there; those that have none are left out."""
    code, found = program.code, {}
    entered, work = {0: {}}, [0]  # at starts of straight-line code: what registers wait for, on any way there
    while work:
        place = work.pop()
        state, following = entered[place], []
        while not following and place < len(code):
            i = code[place]
            if state and i.starts(*RELEASES):
                found.setdefault(place, set()).update(*state.values())
            state, place = after(i, state), place + 1
            if i.parts[0] == "bra":
                following.append(program.labels[i.args[0]])
            if i.parts[0] in BRANCHES and not i.predicate:
                break
            if following or place in program.joins:
                following.append(place)
        for at in following:
            both = dict(entered.get(at, {}))
            for register, reads in state.items():
                both[register] = both.get(register, frozenset()) | reads
            if both != entered.get(at):
                entered[at] = both
                work.append(at)
    return found


def after(i, state):
    """What registers wait for behind an instruction: for each that does, the places of the reads."""
    waited = [state[register] for register in i.reads if register in state] if state else []
    reads = frozenset().union(*waited)
    if reads and not i.is_move:
        state = {register: left for register, old in state.items() if (left := old - reads)}
    if is_read(i):
        reads = frozenset([i.place])
    elif not i.is_move:
        reads = frozenset()
    if not reads and state.keys().isdisjoint(i.writes):
        return state
    state = {register: old for register, old in state.items() if register not in i.writes}
    return {**state, **dict.fromkeys(i.writes, reads)} if reads else state
